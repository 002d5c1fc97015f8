"""GPUs as targets of the native engine: TVM's kernels in WGSL, CUDA, OpenCL or Metal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from edge.backends.base import Backend, Capabilities, Engine, EngineConfig, LoadProgress, Operator
from edge.backends.checks import CROSS, ENCODERS, UNEQUAL
from edge.backends.counts import Footprint, GPUMemory, Tuned
from edge.backends.efficiency import Efficiency, RowEfficiency, WeightEfficiency
from edge.errors import MissingExtraError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention, Core, Dense, Experts
from edge.model.structure.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.tvm.packing.shape import Shape

MOST_TOGETHER = 8  # tokens of a pass that share one read of the weights
KV_DTYPES = ("f16", "int8", "int4", "f32")
SHOWN_BYTES = 78 << 20  # of drivers, to list their GPUs; measured with lavapipe and pocl
# A driver's memory besides `SHOWN_BYTES` and our buffers, by the kinds of blocks and so of kernels. Every run with
# lavapipe counts as a first one, since Mesa's cache is not ours: measured, 92 to 104 MiB with two kinds of blocks, 83
# to 123 with three, 160 with seven (Gemma 4). With pocl up to 76 once we have its binaries.
_DRIVER_BYTES = 96 << 20
_BLOCK_BYTES = 16 << 20
# More for each token of passes of several, whose products are longer. Measured: SmolLM2, which has two kinds of blocks,
# with four sequences 403 MiB, with seven drafts 441.
_TOKEN_BYTES = 6 << 20
# More for int4, whose attention kernels are three times as long. Measured: a first run of SmolLM2 takes 392 MiB, with
# f16 337.
_TRANSFORM_BYTES = 48 << 20


def kernels_bytes(kinds: int, kv_dtype: str, together: int = 1) -> int:
    """Bytes of a driver, for the kernels of `kinds` kinds of blocks. together: `EngineConfig.together`."""
    from edge.backends.tvm.kv.row_formats import FORMATS

    each = _BLOCK_BYTES + _TOKEN_BYTES * min(together, MOST_TOGETHER) * (together > 1)
    return _DRIVER_BYTES + each * kinds + _TRANSFORM_BYTES * FORMATS[kv_dtype].transformed


def _encoder_cores(core: Core) -> str | None:
    """Why the kernels cannot run a core of an encoder of pictures or sounds."""
    from edge.backends.tvm.packing.cores import supports

    if isinstance(core, Attention):
        own = "windows" if core.window else CROSS if core.across else UNEQUAL if core.row.value != core.row.key else ""
        return f"{ENCODERS} with {own}" if own else supports(core)
    return supports(core) if isinstance(core, Dense) else core.kind


class GPU(Backend):
    """The native engine, on GPUs."""

    NAME = "gpu"
    CAPABILITIES = Capabilities(
        "head",
        uneven="head",
        kv_dtypes=KV_DTYPES,
        attention=True,
        keys=True,
        tunable=True,
        tops=True,
        picks=True,
        gpu=True,
        lora=True,
        appends=True,
        encodes=True,
        sequences=True,
        verifies=True,
    )
    DRAFTS_ASKED = True
    EFFICIENCY = Efficiency(
        {"integers": WeightEfficiency(0.5, 1.0), "floats": WeightEfficiency(0.5, 1.0)},
        {"f16": RowEfficiency(0.5, 1.0)},
        1e-4,
    )
    DRIVER_BYTES = SHOWN_BYTES + (28 << 20)  # with Python modules
    PACKAGES = ("apache-tvm", "wgpu", "pyopencl", "cuda-bindings")

    def check_installed(self) -> None:
        """The package of one host is enough; `check_supported` looks for a GPU."""
        from importlib.util import find_spec

        from edge.backends.tvm.compiler.compiled import is_installed

        if not any(find_spec(name) for name in ("wgpu", "pyopencl", "cuda")):
            raise MissingExtraError("wgpu", "gpu")
        if not is_installed():
            raise MissingExtraError("apache-tvm", "tvm")

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """The engine needs an architecture with a network, block types with kernels, and a GPU."""
        from edge.backends.tvm.gpu.hosts import choose_adapter
        from edge.backends.tvm.gpu.weights import make_weights

        make_weights(file, spec, choose_adapter().limits.binding)

    def check_elsewhere(self, file: GGUFFile, spec: ModelSpec, system: str) -> None:
        """Checks against WebGPU's limits, since the other device's GPU is unknown."""
        from edge.backends.tvm.gpu.hosts import PORTABLE
        from edge.backends.tvm.gpu.weights import make_weights

        make_weights(file, spec, PORTABLE.binding)

    def supports(self, core: Core) -> str | None:
        from edge.backends.tvm.packing.cores import supports

        if isinstance(core, Attention) and not core.causal:
            return ENCODERS
        if isinstance(core, Attention) and core.row.value != core.row.key and not core.latent:
            return f"attention with {UNEQUAL}"
        if isinstance(core, Experts) and core.shared and core.clamp:
            return "clamped shared experts"
        return supports(core)

    def shape_of(self, spec: ModelSpec) -> Shape:
        """The sizes of a model's pass. Raises UnsupportedError."""
        from edge.backends.tvm.packing.shape import Shape

        encodes = spec.encoder and not spec.vocab  # pictures; texts: not yet
        return Shape.of(spec, self.NAME, _encoder_cores if encodes else self.supports)

    def most_drafts(self, spec: ModelSpec, tuning: Mapping[str, int]) -> int:
        """One fewer than the tokens that share one read of the weights."""
        return 0 if spec.encoder or self.one_sequence(spec) is not None else MOST_TOGETHER - 1

    def one_sequence(self, spec: ModelSpec, *, observes: bool = False, lora: bool = False) -> str | None:
        """Kernels of several tokens know one fixed state and one set of adapters, and observe no attention."""
        from edge.model.tensors import find_network

        network = find_network(spec)
        kinds = {
            " of models with recurrent layers": any(network.fixed_values),
            " of models with cross attention": bool(network.crossings),
            " with LoRA adapters": lora,
            " under policies that observe attention": observes,
        }
        return next((kind for kind, has_it in kinds.items() if has_it), None)

    def encodes_elsewhere(self) -> str | None:
        from edge.backends.tvm.gpu.hosts import choose_adapter

        adapter = choose_adapter()
        return f"{adapter.name} is a software adapter, which is slower" if adapter.kind == "cpu" else None

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Of the buffers that the engine creates (`DeviceMemory`)."""
        if spec.encoder:
            from edge.backends.tvm.gpu.encoder import count_encoder

            return count_encoder(spec, config)
        from edge.backends.tvm.gpu.adapters import adapter_bytes
        from edge.backends.tvm.gpu.memory import DeviceMemory
        from edge.backends.tvm.gpu.weights import packed_bytes
        from edge.backends.tvm.kv.householder import REFLECTION_BYTES
        from edge.backends.tvm.kv.row_formats import FORMATS
        from edge.model.tensors import find_network

        memory = DeviceMemory.of(spec, config)
        weights, kv = packed_bytes(spec), memory.bytes("kv") + memory.bytes("fixed")
        lora = adapter_bytes(find_network(spec), config.lora_rank, config.kv_dtype)
        on_device, shape = memory.bytes("scratch"), memory.kv.shape
        kinds = len(shape.blocks) + (config.lora_rank > 0)
        reflected = REFLECTION_BYTES * FORMATS[config.kv_dtype].transformed
        return Footprint(
            weights=weights,
            kv=kv,
            scratch=on_device + memory.on_host,
            runtime=kernels_bytes(kinds, config.kv_dtype, config.together) + reflected,
            fixed_kv=memory.bytes("fixed"),
            lora=lora,
            gpu=weights + kv + lora + on_device,
            on_disk=spec.table_bytes if shape.layer_inputs else 0,
        )

    def most_first(self) -> int:
        from edge.backends.tvm.gpu.compiled import COMPILER_BYTES

        return self.DRIVER_BYTES + COMPILER_BYTES

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """The larger of two: TVM's compiler in its child, beside the driver that lists GPUs; and the driver's compiler,
        which runs in this process, with all that the engine allocates."""
        from edge.backends.tvm.gpu.compiled import compiler_bytes, find_program
        from edge.backends.tvm.gpu.design import Design
        from edge.backends.tvm.gpu.hosts import choose_adapter, host_named

        adapter = choose_adapter(config.adapter or None)
        if spec.encoder:
            from edge.backends.tvm.gpu.encoder import for_program

            config = for_program(config)
        program = find_program(Design.of(file, spec, config, adapter))
        child = 0 if program else compiler_bytes(adapters=config.lora_rank > 0)
        kernels = program.kernels.values() if program else None
        driver = host_named(adapter.host).compiling_bytes(adapter, kernels)
        if not driver:
            return child
        need = self.footprint(spec, config)
        counted = need.runtime + need.weights + need.kv + need.scratch + need.lora - need.gpu * (not adapter.unified)
        return max(child, counted + driver)

    def bounded(self) -> bool:
        from edge.backends.tvm.gpu.hosts import choose_adapter, host_named

        adapter = choose_adapter()
        return host_named(adapter.host).compiling_bytes(adapter, None) is not None

    def gpu_memory(self) -> GPUMemory:
        """The memory of the GPU that `load` uses by default. Raises UnsupportedError if there is none."""
        from edge.backends.tvm.gpu.hosts import choose_adapter, free_memory

        adapter = choose_adapter()
        return GPUMemory(adapter.key, adapter.unified, None if adapter.unified else free_memory(adapter))

    def used_memory(self, adapter: str) -> int | None:
        from edge.backends.tvm.gpu.hosts import choose_adapter
        from edge.backends.tvm.gpu.hosts import used_memory as used

        return used(choose_adapter(adapter))

    def tuned(self, spec: ModelSpec, kv_dtype: str) -> Tuned | None:
        from edge.backends.tvm.gpu.tuning import find_tuned

        return find_tuned(spec, kv_dtype)

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> Engine:
        """Generate the kernels unless the cache folder has them, let the driver compile them, upload the weights.

        Raises EngineError if the driver fails or the device's memory is too small, CacheError if the cache folder
        cannot be written.
        """
        if spec.encoder:
            from edge.backends.tvm.gpu.encoder import GPUEncoder

            return cast(Engine, GPUEncoder(file, spec, config, progress))  # of `HiddenEngine.hidden` alone
        from edge.backends.tvm.gpu.engine import GPUEngine

        return GPUEngine(file, spec, config, progress)

    def operators(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
        progress: Callable[[float], None] | None = None,
    ) -> list[Operator]:  # fmt: skip
        """The dispatches of a pass, by the device's timestamps where it has them; see `timing.py`."""
        from edge.backends.tvm.gpu.timing import time_operators

        return time_operators(file, spec, config, tokens, context, passes, progress)


ENGINE = GPU()
