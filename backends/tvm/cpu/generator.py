"""The whole pass of a model, tokens to logits: one TVM function that every thread runs, with barriers between phases.

A step runs one token (decode), a chunk several (prefill), a batch one token each of several sequences; an app's pass
over drafts is a chunk whose tokens are computed as in steps. All are this generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import (
    CROSS,
    LINE,
    LORA,
    PAGES,
    POINTERS,
    RINGS,
    STATES,
    TIMES,
    Job,
    Table,
    cross_dtype,
)
from edge.backends.tvm.cpu.kernels import team, timing
from edge.backends.tvm.cpu.kernels.cache import move_rows
from edge.backends.tvm.cpu.kernels.isas import ISAS
from edge.backends.tvm.cpu.kernels.row_formats import memory_types
from edge.backends.tvm.cpu.kernels.systems import notices
from edge.backends.tvm.cpu.kernels.threads import arrive, imports, wait
from edge.backends.tvm.cpu.kernels.vectors import Register, Value, i64, let, loop, when
from edge.backends.tvm.cpu.phases import dense, experts, features, next_token, per_layer_input
from edge.backends.tvm.cpu.phases.attention import attention
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.embed import add_given, embed, keep_input
from edge.backends.tvm.cpu.phases.estimate import estimate
from edge.backends.tvm.cpu.phases.head import head, rescore
from edge.backends.tvm.cpu.phases.kinds import PassKind, pass_kinds
from edge.backends.tvm.cpu.phases.recurrent import delta_net, kimi_delta, mamba, selective_scan, short_convolution
from edge.backends.tvm.cpu.phases.streaming import evict_piece
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.cores import LANES
from edge.backends.tvm.packing.shape import Shape
from edge.model.cores import (
    Attention,
    Core,
    DeltaNet,
    Dense,
    Experts,
    Features,
    KimiDelta,
    Mamba,
    NextToken,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)


@dataclass(frozen=True)
class Program:
    """The functions of a design, ready for TVM's compiler: `run` and `move`, which the engine calls, and
    the functions that `run` calls: one for every unit of each kind of pass, by the names of the units.

    `run` of an exported design is a unit, since the C runtime calls it by C's convention.
    """

    entries: dict[str, Any]
    units: dict[str, dict[str, Any]]

    @property
    def functions(self) -> dict[str, Any]:
        return {name: function for unit in self.units.values() for name, function in unit.items()}

    def parts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Entries and functions to be compiled together; the parts that take longest come first."""
        order = {name: number for number, name in enumerate(_BY_SIZE)}
        names = sorted(self.units, key=lambda name: order.get(_operation(name), len(order)))
        return [({}, self.units[name]) for name in names] + [(self.entries, {})]


def build(design: Design) -> Program:
    """Build a design's functions. Units are separate: LLVM takes more than twice the time for twice the size."""
    units: dict[str, dict[str, Any]] = {}
    for name, (unit, number) in _units(design).items():
        of_some = _OF_SOME.get(_operation(name))
        passes = [kind for kind in pass_kinds(design) if of_some is None or of_some(kind)]
        kinds = {_unit_name(kind, name): kind for kind in reversed(passes)}  # the first of equal names
        units[name] = {
            design.symbol(function): _unit(design, kind, name, unit, number)
            for function, kind in reversed(kinds.items()) if design.owns(function)
        }  # fmt: skip
    if design.exported:  # the runtime moves rows itself
        return Program({}, units | {"run": {design.symbol("run"): run(design)}})
    heads = {"move": design.shape.attention} | ({"move_ring": design.shape.ringed} if design.shape.apart else {})
    moves = {name: move_rows(name, core.row.padded(LANES), design.kv_dtype) for name, core in heads.items()}
    return Program({"run": run(design), **moves}, units)


def run(design: Design) -> Any:
    """The function that every thread calls. Thread 0 calls it once per job and wakes the others. These call it once for
    all jobs, or once per job if the target `returns`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        types = exported_pointers(design) if design.exported else pointers_of(design)
        pointers, thread, _ = _declare(design.symbol("run") if design.exported else "run", types)
        with _environment(design):
            _work(design, pointers, thread)
    return builder.get()


def _units(design: Design) -> dict[str, tuple[Unit, int | None]]:
    """All units by their names, those of layers with the number of their block."""
    found: dict[str, tuple[Unit, int | None]] = {"embed": (_embed, None)}
    if design.shape.layer_inputs:
        found["layer_inputs"] = (per_layer_input.make_inputs, None)
    if design.taps:
        found["tap"] = keep_input, None
    if design.shape.deepstack:
        found["deepstack"] = (add_given, None)
    for number, block in enumerate(design.shape.blocks):
        units = CORES[type(block.core)]
        last = list(units)[-1]
        ends = any(form[-1] == number for form in design.shape.forms)
        for name, unit in units.items():
            found[design.shape.code(number, name)] = (_then_evict(unit) if ends and name == last else unit), number
        if _is_across(block.core):
            found[design.shape.code(number, "crossing")] = attention.crossing_unit, number
    if design.estimates:
        found["estimate"] = lambda b, _layer: estimate(b), None
        if design.batches:
            found["rescore"] = lambda b, _layer: rescore(b), None
    return found if design.shape.encoder or not design.head else found | {"head": (lambda b, _layer: head(b), None)}


def _then_evict(unit: Unit) -> Unit:
    """Follow a layer's last unit by the eviction of its weights."""

    def run(b: PassBuilder, layer: Value) -> None:
        unit(b, layer)
        evict_piece(b, layer)

    return run


def _unit(design: Design, kind: PassKind, name: str, unit: Unit, number: int | None) -> Any:
    """A unit as a function of its own, which `run` calls."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        symbol = design.symbol(_unit_name(kind, name))
        pointers, thread, (layer, wave) = _declare(symbol, pointers_of(design), "layer", "wave")
        with _environment(design):
            unit(PassBuilder(design, kind, pointers, thread, number, wave), layer)
    return builder.get()


def _unit_name(kind: PassKind, unit: str) -> str:
    """The name of a unit's function. Batches share one for units without products, and the chunk's for equal code."""
    operation = _operation(unit)
    if kind.apart and operation in _ALIKE:
        return f"batch_{unit}"
    if kind.attends_like and operation == "attend":
        return f"{kind.attends_like}_{unit}"
    own = _OF_ROWS if kind.apart else ("attend",)
    return f"chunk_{unit}" if kind.like_chunk and operation not in own else f"{kind.name}_{unit}"


def _operation(unit: str) -> str:
    """A unit's name without the number of its block."""
    return unit.rstrip("_0123456789")


def _declare(symbol: str, types: dict[str, str], *of_units: str) -> tuple[dict[str, Any], Value, list[Value]]:
    """Declare the name and the arguments of the function being built; units have some more arguments."""
    T.func_name(symbol)
    T.func_attr({"global_symbol": symbol, "tirx.noalias": bool(of_units)})  # the job changes while `run` waits
    pointers = {name: T.arg(name, T.ptr(dtype)) for name, dtype in types.items()}
    thread = T.arg("thread", T.int64())
    return pointers, thread, [T.arg(name, T.int64()) for name in of_units]


def pointers_of(design: Design) -> dict[str, str]:
    """The pointers that a design's functions take, in their order."""
    found = POINTERS | memory_types(design.kv_dtype)
    found |= {f"ring_{name}": found[name] for name in RINGS} if design.shape.apart else {}
    cross = _cross_types(design)
    optional = (
        (design.shape.states, STATES), (design.timed, TIMES), (design.lora, LORA), (design.pages, PAGES),
        (design.shape.crosses, cross),
    )  # fmt: skip
    for wanted, more in optional:
        found |= more if wanted else {}
    return found


def exported_pointers(design: Design) -> dict[str, str]:
    """The pointers of `run` in exported designs: the same for all, because the C runtime calls all alike."""
    found = POINTERS | memory_types(design.kv_dtype)
    return found | {f"ring_{name}": found[name] for name in RINGS} | STATES | LORA | _cross_types(design)


def _cross_types(design: Design) -> dict[str, str]:
    types = memory_types(cross_dtype(design.kv_dtype))
    return {name: types[name.removeprefix("cross_")] for name in CROSS}


@contextmanager
def _environment(design: Design) -> Iterator[None]:
    """Attributes that TVM's lowering needs: the device of raw pointers, and the functions that are LLVM IR."""
    functions = imports(design.target, exported=design.exported)
    functions += timing.FUNCTIONS if design.timed else ""
    functions += experts.FUNCTIONS if design.streams else ""
    functions += ISAS[design.target.name].pins
    with T.attr(0, "device_id", 0), T.attr(0, "device_type", 1), T.attr(0, "pragma_import_llvm", functions):
        yield


def run_job(design: Design, threads: int) -> Any:
    """As `run`, for a single job, with arrays instead of pointers and TVM's own threads, to measure a remote device.

    TVM must have `threads` threads, because they wait for each other.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("run_job")
        T.func_attr({"global_symbol": "run_job", "tirx.noalias": True})
        types = POINTERS | memory_types(design.kv_dtype)
        arguments = {name: T.arg(name, T.handle()) for name in types}
        pointers = {
            name: T.match_buffer(argument, (T.int64(),), types[name]).data for name, argument in arguments.items()
        }
        functions = imports(design.target) + experts.FUNCTIONS + ISAS[design.target.name].pins
        with T.attr(0, "pragma_import_llvm", functions), T.parallel(0, threads) as thread:
            job, lines = (T.decl_buffer((1 << 48,), POINTERS[name], data=pointers[name]) for name in ("job", "lines"))
            units = _units(design)
            team.forget_stalls(job, lines, T.cast(thread, "int64"))

            def emit(kind: PassKind, name: str, layer: Value, wave: Value) -> None:
                unit, number = units[name]
                unit(PassBuilder(design, kind, pointers, T.cast(thread, "int64"), number, wave), layer)

            _job(design, pointers, let(job[Job.slot("kind")]), emit)
    return builder.get()


def _work(design: Design, pointers: dict[str, Any], thread: Value) -> None:
    job, lines = (T.decl_buffer((1 << 48,), POINTERS[name], data=pointers[name]) for name in ("job", "lines"))
    seen, busy = Register("int32", lanes=1), Register("int32", lanes=1)
    counted = thread * LINE + 2  # after the words of `threads.py`
    seen.value, busy.value = lines[counted] if design.target.returns else T.int32(0), T.int32(1)
    if notices(design.target, exported=design.exported):
        with when(thread > 0):
            T.evaluate(T.call_extern("int32", "edge_enter", T.address_of(lines[thread * LINE])))
    with T.While(busy.value == 1):
        with when(thread == 0):
            team.begin_job(job, lines)
            with loop(i64(1), job[Job.slot("threads")]) as other:
                T.evaluate(arrive(lines, team.given(job, other)))
            busy.value = T.int32(0)
        with when(thread > 0):
            seen.value = seen.value + 1
            wait(lines, team.given(job, thread), seen.value, team.notes(job, thread))
            T.buffer_store(lines, T.cast(job[Job.slot("first")], "int32"), [thread * LINE])
            team.forget_stalls(job, lines, thread)
            if design.target.returns:
                T.buffer_store(lines, seen.value, [counted])
                busy.value = T.int32(0)
        kind = let(job[Job.slot("kind")])
        with when(kind == Job.QUIT):
            busy.value = T.int32(0)

        def call(kind: PassKind, name: str, *numbers: Value) -> None:
            given = [pointers[each] for each in pointers_of(design)]
            T.evaluate(T.call_extern("int32", design.symbol(_unit_name(kind, name)), *given, thread, *numbers))

        _job(design, pointers, kind, call)
        with when(thread == 0):
            team.end_job(job, lines, design.target.spins)
            if notices(design.target, exported=design.exported):
                with loop(i64(1), job[Job.slot("threads")]) as other, when(lines[other * LINE + 3] > 0):
                    T.buffer_store(job, i64(1), [Job.slot("failed")])


Emit = Callable[[PassKind, str, Value, Value], None]
"""Emits a unit of a pass, for a layer and a wave of experts."""


def _job(design: Design, pointers: dict[str, Any], number: Value, emit: Emit) -> None:
    """Emit the units of a job in order, layer by layer and block by block."""
    shape, slots = design.shape, Table.of(design.shape)
    table, integers, job = (
        T.decl_buffer((1 << 48,), POINTERS[name], data=pointers[name]) for name in ("table", "integers", "job")
    )
    wanted = let(job[Job.slot("wanted")])

    def waves(kind: PassKind, layer: Value, names: Sequence[str]) -> None:
        """Emit units of experts for several tokens, in waves of some of the experts."""
        with loop(i64(0), T.cast(integers[table[slots.slot("waves")]], "int64")) as wave:
            for name in names:
                emit(kind, name, layer, wave)

    for kind in pass_kinds(design):
        with when(number == kind.job):
            emit(kind, "embed", i64(0), i64(0))
            if shape.layer_inputs:
                emit(kind, "layer_inputs", i64(0), i64(0))
            with loop(*_layers(design, job)) as layer:
                if design.taps:
                    emit(kind, "tap", layer, i64(0))
                for index, form in enumerate(shape.forms):
                    if len(shape.forms) == 1:
                        _layer(shape, form, kind, layer, emit, waves)
                        continue
                    with when(table[slots.place(layer, "form")] == index):
                        _layer(shape, form, kind, layer, emit, waves)
                if shape.deepstack and _OF_SOME["deepstack"](kind):
                    with when(layer < shape.deepstack):
                        emit(kind, "deepstack", layer, i64(0))
            if shape.encoder or not design.head:
                continue
            if not (_OF_SOME["estimate"](kind) and design.estimates):
                emit(kind, "head", i64(0), i64(0))
                continue
            with when(wanted == Job.ESTIMATED):
                emit(kind, "estimate", i64(0), i64(0))
            with when(wanted > Job.ESTIMATED):
                emit(kind, "head", i64(0), i64(0))
    if design.estimates:
        step, *batches = filter(_OF_SOME["estimate"], pass_kinds(design))
        with when(T.And(number == Job.RESCORE, wanted == 1)):
            emit(step, "head", i64(0), i64(0))
        for kind in batches[-1:]:
            with when(T.And(number == Job.RESCORE, wanted > 1)):
                emit(kind, "rescore", i64(0), i64(0))
    if shape.crosses:
        chunk = next(kind for kind in pass_kinds(design) if kind.job == Job.CHUNK)
        with when(number == Job.CROSS), loop(i64(0), i64(shape.layers)) as layer:
            for index, form in enumerate(shape.forms):
                across = [block for block in form if _is_across(shape.blocks[block].core)]
                with when(table[slots.place(layer, "form")] == index):
                    for block in across:
                        emit(chunk, shape.code(block, "crossing"), layer, i64(0))
    if design.exported and design.head:
        with when(number == Job.EMBED):
            emit(next(kind for kind in pass_kinds(design) if kind.job == Job.CHUNK), "embed", i64(0), i64(0))
    of_drafts = [kind for kind in pass_kinds(design) if kind.drafts]
    if shape.states and of_drafts:
        with when(number == Job.APPLY), loop(i64(0), i64(shape.layers)) as layer:
            for index, form in enumerate(shape.forms):
                with when(table[slots.place(layer, "form")] == index):
                    for block in form:
                        if unit := _RECURRENT.get(type(shape.blocks[block].core)):
                            emit(of_drafts[0], shape.code(block, unit), layer, i64(0))


def _layer(
    shape: Shape, form: tuple[int, ...], kind: PassKind, layer: Value, emit: Emit,
    waves: Callable[[PassKind, Value, Sequence[str]], None],
) -> None:  # fmt: skip
    for beside in shape.side_by_side(form):
        units = []
        for number in beside:
            core = shape.blocks[number].core
            names = list(map(functools.partial(shape.code, number), CORES[type(core)]))
            units.append((names, isinstance(core, Experts) and not kind.single))
        for names, _ in units:
            emit(kind, names[0], layer, i64(0))
        for names, in_waves in units:
            if in_waves:
                waves(kind, layer, names[1:])
                continue
            for name in names[1:]:
                emit(kind, name, layer, i64(0))


def _is_across(core: Core) -> bool:
    return isinstance(core, Attention) and core.across


def _layers(design: Design, job: Any) -> tuple[Value, Value]:
    """The first layer of a job and the one behind its last: all, but of encoders and models that hear, for apps."""
    layers = i64(design.shape.layers)
    if not (design.exported and (design.shape.encoder or design.shape.crosses)):
        return i64(0), layers
    return let(job[Job.slot("before")]), let(layers - job[Job.slot("behind")])


def _embed(b: PassBuilder, _layer: Value) -> None:
    b.mark("idle")
    with b.phase("embed"):
        embed(b)


CORES: dict[type, dict[str, Unit]] = {
    Attention: attention.UNITS, Dense: dense.UNITS, Experts: experts.UNITS, DeltaNet: delta_net.UNITS,
    KimiDelta: kimi_delta.UNITS,
    Mamba: mamba.UNITS, SelectiveScan: selective_scan.UNITS, ShortConvolution: short_convolution.UNITS,
    PerLayerInput: per_layer_input.UNITS, NextToken: next_token.UNITS, Features: features.UNITS,
}  # fmt: skip
# Units that some passes lack: heads in two stages (a step rescores by the code of its whole head), parts of given rows,
# rows of an encoder's states.
_OF_SOME: dict[str, Callable[[PassKind], bool]] = {
    "estimate": lambda kind: kind.single or kind.apart, "rescore": lambda kind: kind.apart,
    "deepstack": lambda kind: kind.job == Job.CHUNK, "crossing": lambda kind: kind.job == Job.CHUNK,
}  # fmt: skip
_BY_SIZE = ("qkv", "attend", "gate_up", "experts_in", "experts_out", "delta_in", "down", "head")  # then the others
_RECURRENT: dict[type, str] = {
    DeltaNet: "delta_net", KimiDelta: "kimi_delta", Mamba: "mamba_scan", SelectiveScan: "selective_scan",
    ShortConvolution: "convolve",
}  # fmt: skip
_ALIKE = ("embed", "tap", "attend", "scan_convolve", *_RECURRENT.values())  # units without products
_OF_ROWS = (
    "qkv",
    "output",
    "delta_out",
    "kimi_out",
    "mamba_out",
    "scan_out",
)  # units whose tokens have rows or states of their own in a batch
