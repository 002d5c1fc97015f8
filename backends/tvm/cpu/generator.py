"""The whole pass of a model, tokens to logits: one TVM function that every thread runs, with barriers between phases.

A step runs one token (decode), a chunk several (prefill). Both are this generator.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.compiler.design import Design
from edge.backends.tvm.cpu.kernels import clock
from edge.backends.tvm.cpu.kernels.codes import memory_types
from edge.backends.tvm.cpu.kernels.lanes import Register, Value, i64, let, loop, when
from edge.backends.tvm.cpu.kernels.move import move_rows
from edge.backends.tvm.cpu.kernels.threads import arrive, imports, wait
from edge.backends.tvm.cpu.phases.attend import attend_chunk, attend_step, merge_parts, observe_last
from edge.backends.tvm.cpu.phases.embed import embed
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.cpu.phases.head import head
from edge.backends.tvm.cpu.phases.project import add, add_normed, widen
from edge.backends.tvm.cpu.phases.qkv import qkv
from edge.backends.tvm.cpu.phases.stream import let_go
from edge.backends.tvm.packing.layout import Job

POINTERS = {  # arguments of `run`, and what they point to
    "job": "int64", "lines": "int32",
    "weights": "uint8", "table": "int64", "floats": "float32", "integers": "int32",
    "keys": "", "values": "", "key_scales": "", "value_scales": "",  # the KV dtype says
    "lengths": "int32",  # rows in use, [layers, KV heads]: heads may keep different numbers
    "positions": "int32",  # of every row, for sliding windows
    "tokens": "int32", "logits": "float32", "rope": "float32",
    "attention": "float32",  # what rows got from observed queries
    "starts": "int32",  # the first row of each head, [layers, KV heads]
}  # fmt: skip
TIMES = {"times": "int64"}  # one more, of a timed pass: `marks.py`


def build(design: Design) -> Any:
    """The module with `run` and `move`, ready for TVM's compiler."""
    return tvm.IRModule({"run": run(design), "move": move_rows(design.shape, design.kv_dtype)})


def run(design: Design) -> Any:
    """What every thread calls: thread 0 for one job, at whose start it wakes the others; these for all jobs to come."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("run")
        T.func_attr({"global_symbol": "run", "tirx.noalias": True})
        types = POINTERS | memory_types(design.kv_dtype) | (TIMES if design.timed else {})
        pointers = {name: T.arg(name, T.ptr(dtype)) for name, dtype in types.items()}
        thread = T.arg("thread", T.int64())
        # Raw pointers carry no device; TVM's lowering wants to know it.
        functions = imports(design.target.machine, design.target.spins) + (clock.IMPORTS if design.timed else "")
        with T.attr(0, "device_id", 0), T.attr(0, "device_type", 1), T.attr(0, "pragma_import_llvm", functions):
            _work(design, pointers, thread)
    return builder.get()


def run_job(design: Design, threads: int) -> Any:
    """The same for one job that is there, with arrays instead of pointers and TVM's own threads: what measures a
    device elsewhere. TVM must have `threads` threads, as they wait for each other.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("run_job")
        T.func_attr({"global_symbol": "run_job", "tirx.noalias": True})
        types = POINTERS | memory_types(design.kv_dtype)
        arguments = {name: T.arg(name, T.handle()) for name in types}
        pointers = {
            name: T.match_buffer(argument, (T.int64(),), types[name]).data for name, argument in arguments.items()
        }
        functions = imports(design.target.machine, design.target.spins)
        with T.attr(0, "pragma_import_llvm", functions), T.parallel(0, threads) as thread:
            job = T.decl_buffer((1 << 48,), POINTERS["job"], data=pointers["job"])
            _job(design, pointers, T.cast(thread, "int64"), let(job[Job.slot("kind")]))
    return builder.get()


def _work(design: Design, pointers: dict[str, Any], thread: Value) -> None:
    job, lines = (T.decl_buffer((1 << 48,), POINTERS[name], data=pointers[name]) for name in ("job", "lines"))
    threads = let(job[Job.slot("threads")])
    seen, busy = Register("int32", lanes=1), Register("int32", lanes=1)
    seen.value, busy.value = T.int32(0), T.int32(1)
    with T.While(busy.value == 1):
        with when(thread == 0):
            T.evaluate(arrive(lines, threads))
            busy.value = T.int32(0)
        with when(thread > 0):
            seen.value = seen.value + 1
            wait(lines, threads, seen.value)
        kind = let(job[Job.slot("kind")])
        with when(kind == Job.QUIT):
            busy.value = T.int32(0)
        _job(design, pointers, thread, kind)


def _job(design: Design, pointers: dict[str, Any], thread: Value, kind: Value) -> None:
    for number, single in ((Job.STEP, True), (Job.CHUNK, False)):
        with when(kind == number):
            _emit(Frame(design, single, pointers, thread))


def _emit(f: Frame) -> None:
    """The phases of a pass."""
    f.mark("idle")
    with f.phase("embed"):
        embed(f)
    with loop(i64(0), i64(f.shape.layers)) as layer:
        _layer(f, layer)
    head(f)


def _layer(f: Frame, layer: Value) -> None:
    shape = f.shape
    f.normalise("attn_norm", layer, "qkv")
    with f.phase("qkv", layer):
        inputs = f.normalised("attn_norm", layer, "qkv")
        f.per_variant("qkv", layer, lambda matrices: qkv(f, layer, matrices, inputs))
    with f.phase("attend", layer):
        (attend_step if f.single else attend_chunk)(f, layer)
    with when(f.observed > 0):
        observe_last(f, layer)  # it changes nothing that the next phase reads
    f.share_out("mixed", shape.padded_mixed, layer, "output")
    with f.phase("output", layer):
        if f.single:
            merge_parts(f)
            f.mark("merge", layer)
        inputs = f.ready("mixed", shape.padded_mixed, layer, "output", private=True)
        add(f, "output", layer, inputs, "post_attention_norm")
    add_normed(f, layer, "post_attention_norm")
    f.normalise("ffn_norm", layer, "gate_up")
    with f.phase("gate_up", layer):
        inputs = f.normalised("ffn_norm", layer, "gate_up")
        f.per_variant("gate_up", layer, lambda matrices: widen(f, layer, matrices, inputs))
    f.share_out("ffn", shape.padded_ffn, layer, "down")
    with f.phase("down", layer):
        inputs = f.ready("ffn", shape.padded_ffn, layer, "down", private=False)
        add(f, "down", layer, inputs, "post_ffw_norm")
    add_normed(f, layer, "post_ffw_norm")
    let_go(f, layer)
