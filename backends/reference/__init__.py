"""The oracle: a decoder in NumPy float32, written to be read.

Every weight is dequantized to float32 at load, every formula stands as in the paper. It is slow and large on
purpose: the other engines are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.backends.efficiency import Efficiency, Kind, RowEfficiency, WeightEfficiency
from edge.backends.reference import engine
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.kv import ReferenceKV
from edge.backends.reference.weights import read_weights
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import adapted_values
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors

__all__ = ["ENGINE", "ReferenceEngine", "ReferenceKV", "read_weights"]


class Reference(Backend):
    """NumPy in float32, the oracle of the others."""

    NAME, CAPABILITIES = engine.NAME, engine.CAPABILITIES
    EFFICIENCY = Efficiency({"floats": WeightEfficiency(0.02, 0.3)}, {"f32": RowEfficiency(0.02, 0.20)}, step_s=5e-3)
    PACKAGES = ("numpy",)

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        find_tensors(file, spec)

    def weight_kind(self, weight_type: str, config: EngineConfig) -> Kind:
        return "floats"

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Count weights in float32, a fused tensor while it is split, and a chunk's widest intermediate results."""
        network = find_network(spec)
        attention = spec.heads * (config.capacity + 3 * spec.head_dim)
        widest = 3 * max(core.width for core in network.cores) + 4 * spec.hidden + 2 * attention
        widest += 3 * network.layer_inputs * spec.layers
        fixed = 4 * sum(network.fixed_values)
        fixed += 4 * config.crossed * sum(network.cross_values)
        return Footprint(
            weights=4 * spec.parameters,
            kv=4 * spec.kv_values_per_row * config.capacity + fixed,
            scratch=4 * (config.chunk * widest + 2 * config.logits_rows * spec.vocab) + 2 * spec.largest_tensor,
            runtime=(8 << 20) + network.tail_bytes,
            fixed_kv=fixed,
            lora=4 * config.lora_rank * adapted_values(spec),
        )

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> ReferenceEngine:
        """Dequantize every tensor and allocate the cache."""
        sources = find_tensors(file, spec)
        return ReferenceEngine(file, spec, config, read_weights(file, sources, progress), sources)


ENGINE = Reference()
