"""The whole pass of a model, tokens to logits: one TVM function that every thread runs, with barriers between phases.

A step runs one token (decode), a chunk several (prefill). Both are this generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

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
from edge.backends.tvm.design import Design
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


@dataclass(frozen=True)
class Program:
    """The functions of a design, ready for TVM's compiler: `run` and `move`, which others call, and what `run` calls:
    a function for every unit of a step and of a chunk, by the names of the units.
    """

    entries: dict[str, Any]
    units: dict[str, dict[str, Any]]

    @property
    def functions(self) -> dict[str, Any]:
        return {name: function for unit in self.units.values() for name, function in unit.items()}

    def parts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Entries and functions to be compiled together, those first that take longest."""
        return [({}, self.units[name]) for name in _BY_SIZE] + [(self.entries, {})]


def build(design: Design) -> Program:
    """Functions of their own, since LLVM takes more than twice the time for one of twice the size."""
    entries = {"run": run(design), "move": move_rows(design.shape, design.kv_dtype)}
    units = {
        name: {_symbol(single, name): _unit(design, single, name) for single in (True, False)} for name in UNITS
    }  # fmt: skip
    return Program(entries, units)


def run(design: Design) -> Any:
    """What every thread calls: thread 0 for one job, at whose start it wakes the others; these for all jobs to come."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        pointers, thread, _ = _declare(design, "run", layered=False)
        with _environment(design):
            _work(design, pointers, thread)
    return builder.get()


def _unit(design: Design, single: bool, name: str) -> Any:
    """A unit as a function of its own, which `run` calls."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        pointers, thread, layer = _declare(design, _symbol(single, name), layered=True)
        with _environment(design):
            UNITS[name](Frame(design, single, pointers, thread), layer)
    return builder.get()


def _symbol(single: bool, unit: str) -> str:
    return f"edge_{'step' if single else 'chunk'}_{unit}"


def _declare(design: Design, symbol: str, *, layered: bool) -> tuple[dict[str, Any], Value, Value]:
    """The function being built: its name and its arguments. The last one, of units only, is the layer."""
    T.func_name(symbol)
    T.func_attr({"global_symbol": symbol, "tirx.noalias": True})
    types = POINTERS | memory_types(design.kv_dtype) | (TIMES if design.timed else {})
    pointers = {name: T.arg(name, T.ptr(dtype)) for name, dtype in types.items()}
    thread = T.arg("thread", T.int64())
    return pointers, thread, T.arg("layer", T.int64()) if layered else None


@contextmanager
def _environment(design: Design) -> Iterator[None]:
    """Raw pointers carry no device, which TVM's lowering wants to know. And the functions that are LLVM IR."""
    functions = imports(design.target.machine, design.target.spins) + (clock.IMPORTS if design.timed else "")
    with T.attr(0, "device_id", 0), T.attr(0, "device_type", 1), T.attr(0, "pragma_import_llvm", functions):
        yield


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
            frames = {single: Frame(design, single, pointers, T.cast(thread, "int64")) for single in (True, False)}
            _job(design, let(job[Job.slot("kind")]), lambda single, name, layer: UNITS[name](frames[single], layer))
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

        def call(single: bool, name: str, layer: Value) -> None:
            T.evaluate(T.call_extern("int32", _symbol(single, name), *pointers.values(), thread, layer))

        _job(design, kind, call)


def _job(design: Design, kind: Value, emit: Callable[[bool, str, Value], None]) -> None:
    """The units of a pass in their order."""
    for number, single in ((Job.STEP, True), (Job.CHUNK, False)):
        with when(kind == number):
            emit(single, "embed", i64(0))
            with loop(i64(0), i64(design.shape.layers)) as layer:
                for name in ("qkv", "attend", "output", "gate_up", "down"):
                    emit(single, name, layer)
            emit(single, "head", i64(0))


def _embed(f: Frame, _layer: Value) -> None:
    f.mark("idle")
    with f.phase("embed"):
        embed(f)


def _qkv(f: Frame, layer: Value) -> None:
    f.normalise("attn_norm", layer, "qkv")
    with f.phase("qkv", layer):
        inputs = f.normalised("attn_norm", layer, "qkv")
        qkv(f, layer, inputs)


def _attend(f: Frame, layer: Value) -> None:
    with f.phase("attend", layer):
        (attend_step if f.single else attend_chunk)(f, layer)
    with when(f.observed > 0):
        observe_last(f, layer)  # it changes nothing that the next phase reads


def _output(f: Frame, layer: Value) -> None:
    width = f.shape.padded_mixed
    f.share_out("mixed", width, layer, "output")
    with f.phase("output", layer):
        if f.single:
            merge_parts(f)
            f.mark("merge", layer)
        inputs = f.ready("mixed", width, layer, "output", private=True)
        add(f, "output", layer, inputs, "post_attention_norm")
    add_normed(f, layer, "post_attention_norm")


def _gate_up(f: Frame, layer: Value) -> None:
    f.normalise("ffn_norm", layer, "gate_up")
    with f.phase("gate_up", layer):
        inputs = f.normalised("ffn_norm", layer, "gate_up")
        widen(f, layer, inputs)


def _down(f: Frame, layer: Value) -> None:
    width = f.shape.padded_ffn
    f.share_out("ffn", width, layer, "down")
    with f.phase("down", layer):
        inputs = f.ready("ffn", width, layer, "down", private=False)
        add(f, "down", layer, inputs, "post_ffw_norm")
    add_normed(f, layer, "post_ffw_norm")
    let_go(f, layer)


UNITS: dict[str, Callable[[Frame, Value], None]] = {
    "embed": _embed, "qkv": _qkv, "attend": _attend, "output": _output, "gate_up": _gate_up, "down": _down,
    "head": lambda f, _layer: head(f),
}  # fmt: skip
_BY_SIZE = ("qkv", "attend", "gate_up", "down", "head", "output", "embed")
