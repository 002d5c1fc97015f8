"""GPUs as targets of the native engine: TVM's kernels in WGSL, CUDA, OpenCL or Metal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge.backends.base import (
    Capabilities,
    EngineConfig,
    Footprint,
    GPUMemory,
    LoadProgress,
    MostRows,
    Operator,
    Tuned,
    all_positions,
)
from edge.backends.checks import usual_cores
from edge.backends.efficiency import FLOATS, Efficiency, Kind, Rows, Weights
from edge.errors import MissingExtraError
from edge.formats.gguf import GGUFFile
from edge.model.layers import Core
from edge.model.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.tvm.gpu.engine import GPUEngine

NAME = "gpu"
KV_DTYPES = ("f16", "int8", "f32")
CAPABILITIES = Capabilities(
    "head",
    uneven="head",
    kv_dtypes=KV_DTYPES,
    attention=True,
    keys=True,
    tunable=True,
    picks=True,
    gpu=True,
)
EFFICIENCY = Efficiency({"integers": Weights(0.5, 1.0), "floats": Weights(0.5, 1.0)}, {"f16": Rows(0.5, 1.0)}, 1e-4)

# Python modules, the driver's library, and what its compiler takes in the first run of all; measured with lavapipe.
_RUNTIME_BYTES = DRIVER_BYTES = 106 << 20

# Bytes on the host for each row of a head: its physical row and position, and scratch of the policy.
_BOOKKEEPING = 12 + 36
_LOOKED_AT = 24  # bytes for each value of keys that are read or rotated at once


def check_installed() -> None:
    """The package of one host is enough; `check_supported` looks for a GPU."""
    from importlib.util import find_spec

    from edge.backends.tvm.compiler.compiled import is_installed

    if not any(find_spec(name) for name in ("wgpu", "pyopencl", "cuda")):
        raise MissingExtraError("wgpu", "gpu")
    if not is_installed():
        raise MissingExtraError("apache-tvm", "tvm")


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """The engine needs an architecture with a network, block types with kernels, and a GPU."""
    from edge.backends.tvm.gpu.hosts import choose_adapter
    from edge.backends.tvm.gpu.weights import make_weights

    make_weights(file, spec, choose_adapter().limits.binding)


def check_elsewhere(file: GGUFFile, spec: ModelSpec, system: str) -> None:
    """Which GPU the other device has is not known."""
    from edge.backends.tvm.gpu.hosts import PORTABLE
    from edge.backends.tvm.gpu.weights import make_weights

    make_weights(file, spec, PORTABLE.binding)


def supports(core: Core) -> str | None:
    return usual_cores(core)


def weight_kind(weight_type: str, config: EngineConfig) -> Kind:
    return "floats" if weight_type in FLOATS else "integers"


def most_rows(spec: ModelSpec, expected: int | None) -> MostRows:
    return all_positions(spec)


def keeps_all(spec: ModelSpec) -> str | None:
    return None


def can_repack(spec: ModelSpec) -> bool:
    return False


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Computed from the buffers that the engine allocates."""
    from edge.backends.ring import LayerKinds
    from edge.backends.row_lists import pinned_bytes
    from edge.backends.tvm.gpu.design import Tables, scratch_sizes
    from edge.backends.tvm.gpu.kv import arena_bytes
    from edge.backends.tvm.gpu.weights import packed_bytes
    from edge.backends.tvm.kv.regions import make_regions
    from edge.backends.tvm.kv.row_formats import row_bytes
    from edge.backends.tvm.packing.shape import Shape
    from edge.model.tensors import find_network

    shape, network = Shape.of(spec), find_network(spec)
    layers = LayerKinds.of(network.windows)
    regions, rings = make_regions(layers, shape.kv_heads, config, spec.context)
    per_row = row_bytes(shape.attention, config.kv_dtype) // shape.kv_heads + 4 * config.observes
    windowed = rings.size + (regions.size if shape.windowed and not layers.ringed else 0)
    heads = len(layers.whole) * shape.kv_heads
    tables = Tables.of(shape.layers, shape.kv_heads, max(1, len(network.ropes)), config.chunk, shape.head // 2)
    scratch = scratch_sizes(shape, tables, config.chunk, config.logits_rows, windowed)
    by_head = 0
    if config.per_head:
        at_once = 2 if config.observes else max(2, shape.kv_heads)
        by_head = regions.longest * (heads * _BOOKKEEPING + at_once * shape.padded_head * _LOOKED_AT)
    rows = regions.size + rings.size
    on_host = 4 * config.logits_rows * shape.vocab + 4 * config.observes * rows  # logits and attention, once more
    weights, kv = packed_bytes(spec), rows * per_row
    staging = sum(arena_bytes(0, shape.padded_head, config.kv_dtype, observes=config.observes).values())
    on_device = sum(scratch.values()) + staging
    return Footprint(
        weights=weights,
        kv=kv,
        scratch=on_device + on_host + by_head + pinned_bytes(heads, shape.padded_head, config.pinned),
        runtime=_RUNTIME_BYTES,
        fixed_kv=rings.size * per_row,
        gpu=weights + kv + on_device,
    )


def most_first() -> int:
    from edge.backends.tvm.gpu.compiled import COMPILER_BYTES

    return DRIVER_BYTES + COMPILER_BYTES


def first_run(file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
    """Of the compiler, beside the driver that lists GPUs."""
    from edge.backends.tvm.gpu.compiled import COMPILER_BYTES, is_made
    from edge.backends.tvm.gpu.design import Design
    from edge.backends.tvm.gpu.hosts import choose_adapter

    design = Design.of(file, spec, config, choose_adapter(config.adapter or None))
    return 0 if is_made(design) else COMPILER_BYTES


def gpu_memory() -> GPUMemory:
    """Of the GPU that `load` takes. Raises UnsupportedError if there is none."""
    from edge.backends.tvm.gpu.hosts import choose_adapter, free_memory

    adapter = choose_adapter()
    return GPUMemory(adapter.key, adapter.unified, None if adapter.unified else free_memory(adapter))


def used_memory(adapter: str) -> int | None:
    from edge.backends.tvm.gpu.hosts import choose_adapter
    from edge.backends.tvm.gpu.hosts import used_memory as used

    return used(choose_adapter(adapter))


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    from edge.backends.tvm.gpu.tuning import find_tuned

    return find_tuned(spec, kv_dtype)


def load(file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None) -> GPUEngine:
    """Make the kernels unless the cache folder has them, compile them by the driver, upload the weights.

    Raises EngineError if the driver fails or the device's memory is too small, CacheError if the cache folder cannot be
    written.
    """
    from edge.backends.tvm.gpu.engine import GPUEngine

    return GPUEngine(file, spec, config, progress)


def operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """The dispatches of a pass, by the device's timestamps where it has them; see `timing.py`."""
    from edge.backends.tvm.gpu.timing import time_operators

    return time_operators(file, spec, config, tokens, context, passes, progress)


def versions() -> dict[str, str]:
    """The versions of TVM and of the hosts' packages that are installed."""
    from importlib import metadata

    found = {}
    for name in ("apache-tvm", "wgpu", "pyopencl", "cuda-bindings"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
