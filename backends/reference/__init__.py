"""The oracle: a decoder in NumPy float32, written to be read.

Every weight is dequantized to float32 at load, every formula stands as in the paper. It is slow and large on
purpose; it is what the other engines are compared with.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.backends.base import EngineConfig, Footprint, MostRows, Operator, Tuned, all_positions
from edge.backends.efficiency import Efficiency, Kind, Rows, Weights
from edge.backends.reference.engine import CAPABILITIES, NAME, ReferenceEngine
from edge.backends.reference.kv import ReferenceKV
from edge.backends.reference.weights import read_weights
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.layers import Core
from edge.model.lora import adapted_values
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors

__all__ = ["CAPABILITIES", "NAME", "ReferenceEngine", "ReferenceKV", "load", "read_weights"]

EFFICIENCY = Efficiency({"floats": Weights(0.02, 0.3)}, {"f32": Rows(0.02, 0.20)}, step_s=5e-3)


def check_installed() -> None:
    """NumPy and gguf are part of the base install."""


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """All cores are supported."""
    find_tensors(file, spec)


def check_elsewhere(file: GGUFFile, spec: ModelSpec, system: str) -> None:
    check_supported(file, spec)


def supports(core: Core) -> str | None:
    return None


def weight_kind(weight_type: str, config: EngineConfig) -> Kind:
    return "floats"


def most_rows(spec: ModelSpec, expected: int | None) -> MostRows:
    return all_positions(spec)


def keeps_all(spec: ModelSpec) -> str | None:
    return None


def can_repack(spec: ModelSpec) -> bool:
    return False


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Weights in float32, fused ones while they are parted; the widest intermediate results of one chunk."""
    network = find_network(spec)
    attention = spec.heads * (config.capacity + 3 * spec.head_dim)
    widest = 3 * max(core.width for core in network.cores) + 4 * spec.hidden + 2 * attention
    widest += 3 * network.layer_inputs * spec.layers
    fixed = 4 * sum(network.fixed_values)
    return Footprint(
        weights=4 * spec.parameters,
        kv=4 * spec.kv_values_per_row * config.capacity + fixed,
        scratch=4 * (config.chunk * widest + 2 * config.logits_rows * spec.vocab) + 2 * spec.largest_tensor,
        runtime=8 << 20,
        fixed_kv=fixed,
        lora=4 * config.lora_rank * adapted_values(spec),
    )


def first_run(file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
    return 0


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    return None


def load(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> ReferenceEngine:
    """Dequantize every tensor and allocate the cache."""
    sources = find_tensors(file, spec)
    return ReferenceEngine(file, spec, config, read_weights(file, sources, progress), sources)


def operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    raise UnsupportedError("the reference engine does not tell where its time goes: choose another --backend")


def versions() -> dict[str, str]:
    return {"numpy": np.__version__}
