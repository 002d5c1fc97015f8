"""What the ONNX engine takes: counted where it can be, measured where ONNX Runtime does not say."""

from __future__ import annotations

from edge.backends.base import EngineConfig, Footprint
from edge.backends.onnx.kv import row_bytes
from edge.spec import ModelSpec


def count_footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    return Footprint(
        weights=spec.weight_bytes * 2, kv=row_bytes(spec, config.kv_dtype) * config.capacity, scratch=64 << 20, runtime=64 << 20
    )
