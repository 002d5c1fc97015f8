"""ONNX Runtime as an engine: a model in ONNX, with its KV cache in our memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge.backends.base import (
    Capabilities,
    EngineConfig,
    FixedSizes,
    Footprint,
    MostRows,
    Operator,
    Tuned,
    all_positions,
)
from edge.backends.checks import usual_cores
from edge.backends.efficiency import FLOATS, Efficiency, Kind, Rows, Weights
from edge.errors import MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.layers import Core
from edge.model.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.onnx.engine import OnnxEngine

NAME = "onnx"
KV_DTYPES = ("f32", "f16", "int8", "int4")
CAPABILITIES = Capabilities(
    "head", uneven="token", kv_dtypes=KV_DTYPES, attention=True, keys=True, providers=True, folders=True
)
EFFICIENCY = Efficiency(
    {"integers": Weights(0.30, 1.5, 0.2), "floats": Weights(0.30, 1.0)}, {"f32": Rows(0.15, 0.50)}, step_s=300e-6
)


def check_installed() -> None:
    from importlib.util import find_spec

    if find_spec("onnxruntime") is None:
        raise MissingExtraError("onnxruntime", "onnx")


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """Raises UnsupportedError for models without a graph, ModelFormatError for a folder whose weights do not fit."""
    from edge.backends.onnx.folders import check_folder
    from edge.backends.onnx.graph.layout import make_layout

    if file.folder is None:
        make_layout(file, spec)
    else:
        check_folder(file, spec)


def check_elsewhere(file: GGUFFile, spec: ModelSpec, system: str) -> None:
    check_supported(file, spec)


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


def fixed_sizes(spec: ModelSpec, provider: str | None, kv_dtype: str | None, *, elsewhere: bool) -> FixedSizes | None:
    from edge.backends.onnx.npu.form import find_sizes

    return find_sizes(spec, provider, kv_dtype, elsewhere=elsewhere)


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    from edge.backends.onnx.memory import count_footprint

    return count_footprint(spec, config)


def first_run(file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
    return 0


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    return None


def load(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> OnnxEngine:
    """Convert a GGUF file unless the cache folder has it, open the session, allocate the KV cache.

    Raises CacheError if the cache folder cannot be written, InputError for an unknown `config.provider`, EngineError
    if ONNX Runtime cannot load the model.
    """
    from edge.backends.onnx.engine import OnnxEngine

    return OnnxEngine(file, spec, config, progress)


def operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    raise UnsupportedError("the onnx engine does not tell where its time goes: choose another --backend")


def versions() -> dict[str, str]:
    from importlib import metadata

    return {"onnxruntime": metadata.version("onnxruntime")}
