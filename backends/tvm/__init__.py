"""The native engine: a model's whole pass, compiled by TVM for this CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from edge.backends.base import Backend, Capabilities, EngineConfig, LoadProgress, Operator
from edge.backends.checks import app_cores, check_cores
from edge.backends.counts import ExpertForecast, Footprint, Tuned
from edge.backends.efficiency import Efficiency, RowEfficiency, WeightEfficiency
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Core, Experts
from edge.model.structure.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.tvm.cpu.memory import PassMemory
    from edge.backends.tvm.engine import NativeEngine

KV_DTYPES = ("f16", "int8", "int4", "f32")  # f32 is the exact mode: float32 activations too, for tests

# Measured: the engine's Python modules, its threads and the compiled code.
_RUNTIME_BYTES = 6 << 20

_TABLE_BYTES = 10 << 20  # to read rows of a table in the file: gguf's functions, and a few rows at a time

_PACKING_BYTES = 64 << 20  # of packing, besides the mapped weights

_LOADING = 0.5  # of the progress of `operators`


class CPU(Backend):
    """The native engine, on CPUs."""

    NAME = "cpu"
    CAPABILITIES = Capabilities(
        "head",
        uneven="head",
        kv_dtypes=KV_DTYPES,
        attention=True,
        keys=True,
        tunable=True,
        lora=True,
        appends=True,
        hidden=True,
        encodes=True,
        rests=sys.platform == "linux",
        rounds=True,
        sequences=True,
        verifies=True,
        pages=True,
        tops=True,
    )
    EFFICIENCY = Efficiency(
        {"integers": WeightEfficiency(0.93, 4.6, 0.57), "floats": WeightEfficiency(0.93, 1.4)},
        {"f16": RowEfficiency(0.60, 1.8), "int8": RowEfficiency(0.55, 1.8), "int4": RowEfficiency(0.27, 1.6)},
        step_s=20e-6,
    )
    PACKAGES = ("apache-tvm", "apache-tvm-ffi")

    def check_installed(self) -> None:
        """A device without TVM runs passes that were compiled elsewhere; `check_supported` looks for the model's."""
        from edge.backends.tvm.compiler.compiled import has_passes, is_installed, nothing_to_run
        from edge.backends.tvm.targets import choose_target

        choose_target()
        if not is_installed() and not has_passes():
            raise nothing_to_run()

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """The engine needs an architecture with a network, block types with kernels, and a CPU among its targets."""
        from edge.backends.tvm.compiler.compiled import is_compiled, is_installed, missing
        from edge.backends.tvm.design import Design
        from edge.backends.tvm.packing.layout import make_layout
        from edge.backends.tvm.targets import choose_target, with_tuning
        from edge.backends.tvm.tuning.lookup import find_tuned

        layout, target = make_layout(file, spec, halve=True), choose_target()

        def design(kv_dtype: str) -> Design:
            found = find_tuned(spec, kv_dtype)
            return Design.of(layout, kv_dtype, with_tuning(target, found.values if found else {}))

        if not is_installed() and not any(is_compiled(design(each)) for each in KV_DTYPES):
            raise missing(design(KV_DTYPES[0]))

    def check_elsewhere(self, file: GGUFFile, spec: ModelSpec, system: str) -> None:
        """The engine needs block types with kernels; `export.py` checks the device's CPU."""
        from edge.backends.tvm.packing.layout import make_layout

        if system not in ("linux", "android", "ios", "web"):
            in_apps = system in ("macos", "windows")
            how = f"on {system} is planned there, or for exported apps" if in_apps else f"does not run on {system} yet"
            raise UnsupportedError(f"the cpu engine {how}: use --backend=llamacpp")
        make_layout(file, spec)

    def supports(self, core: Core) -> str | None:
        from edge.backends.tvm.packing.cores import supports

        return supports(core)

    def most_drafts(self, spec: ModelSpec, tuning: Mapping[str, int]) -> int:
        """One fewer than the tokens that share one read of the weights."""
        from edge.backends.tuning import model_shape
        from edge.backends.tvm.compiler.compiled import is_installed
        from edge.backends.tvm.targets import planning_target, with_tuning

        target = with_tuning(planning_target(), tuning)
        if not is_installed():
            from edge.backends.tvm.compiler.package import has_shape  # here: with a compiler, few runs need it

            if not has_shape(model_shape(spec), target.name):
                return 0
        return target.gemm_tokens - 1 if not spec.encoder else 0

    def runs_mtp(self, spec: ModelSpec) -> bool:
        """True if there are kernels for the layer's cores and for the block types of its weights, and a compiler."""
        from edge.backends.tvm.compiler.compiled import is_installed
        from edge.backends.tvm.packing.blocks import BLOCKS
        from edge.backends.tvm.packing.shape import Shape

        if spec.mtp is None or not is_installed() or not dict(spec.mtp.type_bytes).keys() <= BLOCKS.keys():
            return False
        with suppress(UnsupportedError):
            Shape.of(spec.mtp)
            return True
        return False

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Of the arrays that the engine allocates; the weights are those of the packed file."""
        from edge.backends.tvm.cpu.streaming import packed_bytes, streaming_need
        from edge.backends.tvm.kv.householder import REFLECTION_BYTES
        from edge.backends.tvm.kv.row_formats import FORMATS
        from edge.backends.tvm.targets import planning_target

        if config.lora_rank:
            check_cores("cpu engine with adapters", spec, _adapted_cores)
        memory, system = self.memory(spec, config), planning_target().system
        tail = spec.network.tail_bytes if spec.network else 0
        table, streaming = spec.network is not None and spec.network.layer_inputs > 0, streaming_need(spec, config)
        return Footprint(
            weights=packed_bytes(spec),
            kv=memory.bytes("kv") + memory.bytes("fixed"),
            scratch=memory.bytes("scratch") + sum(memory.temporaries.values()),
            runtime=_RUNTIME_BYTES
            + REFLECTION_BYTES * FORMATS[config.kv_dtype].transformed
            + _TABLE_BYTES * table
            + tail,
            streamed=streaming.streamed,
            fixed_kv=memory.bytes("fixed"),
            least_weights=None if spec.encoder or system != "linux" else streaming.least,
            lora=memory.bytes("lora"),
            on_disk=spec.table_bytes if table else 0,
        )

    def memory(self, spec: ModelSpec, config: EngineConfig) -> PassMemory:
        """The arrays of a pass, for plans."""
        from edge.backends.tvm.cpu.memory import PassMemory
        from edge.backends.tvm.targets import planning_target, with_tuning

        target = with_tuning(planning_target(), config.tuning)
        halves = not spec.encoder and "Q8_0" in dict(spec.type_bytes)  # the head, which may be of another type
        return PassMemory.of(spec, config, target, estimates=halves * (1 + config.drafts))

    def expert_forecast(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> ExpertForecast | None:
        """From recorded choices, if an engine with slots has run this model here; else for uniform routing."""
        from edge.backends.tvm.cpu.expert_trace import read_trace
        from edge.backends.tvm.cpu.slots import count_hits, slots_within
        from edge.backends.tvm.cpu.streaming import streaming_need
        from edge.backends.tvm.packing.layout import make_layout

        need = streaming_need(spec, config)
        if not need.slots:
            return None
        layout = make_layout(file, spec, halve=True)
        slots, total = slots_within(layout, need.slots), sum(each.number for each in layout.experts.values())
        hits, source = slots / total, "if the router chooses all equally often"
        if (trace := read_trace(file, layout)) is not None:
            hits = count_hits(trace, spec.experts, slots)
            source = f"by the choices of {len(trace):,} tokens that ran here"
        chosen = sum(layout.experts_used * each.stride for each in layout.experts.values())
        return ExpertForecast(slots, total, hits, need.streamed - need.of_experts + int((1 - hits) * chosen), source)

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes of the compiler, and of packing in this process meanwhile."""
        from edge.backends.tvm.compiler.compiled import compiler_bytes, is_compiled, is_installed
        from edge.backends.tvm.cpu.streaming import packed_bytes
        from edge.backends.tvm.design import Design
        from edge.backends.tvm.packing.layout import make_layout

        if not is_installed():
            return 0
        design = Design.here(make_layout(file, spec, halve=True), config)
        if is_compiled(design):
            return 0
        meanwhile = 0 if config.frugal else packed_bytes(spec) + _PACKING_BYTES
        return _RUNTIME_BYTES + meanwhile + compiler_bytes(design, frugal=config.frugal)

    def tuned(self, spec: ModelSpec, kv_dtype: str) -> Tuned | None:
        from edge.backends.tvm.tuning.lookup import find_tuned

        return find_tuned(spec, kv_dtype)

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> NativeEngine:
        """Compile and pack unless the cache folder has the results, map the weights, allocate the KV cache.

        Raises EngineError if compiling fails, CacheError if the cache folder cannot be written.
        """
        from edge.backends.tvm.engine import NativeEngine

        return NativeEngine(file, spec, config, progress)

    def operators(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
        progress: Callable[[float], None] | None = None,
    ) -> list[Operator]:  # fmt: skip
        """The phases of a pass that is compiled with timestamps; see `cpu/timing.py`.

        Raises MissingExtraError where TVM is not installed, EngineError if compiling fails.
        """
        from edge.backends.operators import check_pass
        from edge.backends.tvm.cpu.timing import time_operators
        from edge.backends.tvm.engine import NativeEngine
        from edge.backends.tvm.packing.layout import make_layout

        check_pass(config, tokens, context, passes)

        def on_load(part: float, _doing: str = "") -> None:
            if progress:
                progress(_LOADING * part)

        rest = progress and (lambda part: progress(_LOADING + (1 - _LOADING) * part))
        engine = NativeEngine(file, spec, config, on_load, timed=True)
        try:
            return time_operators(engine, make_layout(file, spec, halve=True), tokens, context, passes, rest)
        finally:
            engine.close()


def _adapted_cores(core: Core) -> str | None:
    return core.kind if isinstance(core, Experts) else app_cores(core)


ENGINE = CPU()
