"""The efficiency of engines: the shares of a device's ceilings that they reach with its instruction set."""

from __future__ import annotations

from dataclasses import replace

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.efficiency import Efficiency, Kind, Shares
from edge.model.structure.spec import ModelSpec

# Instruction sets without a dot product of bytes need more instructions: an assumption, from the number of instructions
# (2 to 4) that replace one. Not used where the int8 rate is known, which was measured with these instructions.
_SLOWER = {"avx2": 0.5, "neon": 0.35, "generic": 0.25}


def efficiency_of(backend: str, isa: str | None = None) -> Efficiency:
    """The efficiency of an engine on a target. isa: None: a target with int8 dot products, where it was measured."""
    found, slower = engine_named(backend).EFFICIENCY, _SLOWER.get(isa or "", 1.0)
    weights = {
        kind: replace(each, float32=each.float32 * slower) if kind == "integers" else each
        for kind, each in found.weights.items()
    }
    return replace(found, weights=weights)


def weight_shares(spec: ModelSpec, backend: str, config: EngineConfig) -> Shares:
    """The share of each kind of weights in this model's bytes, by the kind to which the engine assigns block types."""
    engine, shares = engine_named(backend), dict[Kind, float]()
    total = sum(size for _, size in spec.type_bytes)
    for name, size in spec.type_bytes:
        kind = engine.weight_kind(name, config)
        shares[kind] = shares.get(kind, 0.0) + size / total
    return shares
