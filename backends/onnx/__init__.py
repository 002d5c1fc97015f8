"""ONNX Runtime as an engine: a model in ONNX, with its KV cache in our memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from edge.backends.base import Backend, Capabilities, Engine, EngineConfig
from edge.backends.counts import FixedSizes, Footprint
from edge.backends.efficiency import Efficiency, RowEfficiency, WeightEfficiency
from edge.formats.gguf import GGUFFile
from edge.model.cores import Core
from edge.model.structure.spec import ModelSpec

KV_DTYPES = ("f32", "f16", "int8", "int4")


class Onnx(Backend):
    """ONNX Runtime, on CPUs and NPUs."""

    NAME = "onnx"
    CAPABILITIES = Capabilities(
        "head",
        uneven="token",
        kv_dtypes=KV_DTYPES,
        attention=True,
        keys=True,
        providers=True,
        folders=True,
        encodes=True,
    )
    EFFICIENCY = Efficiency(
        {"integers": WeightEfficiency(0.30, 1.5, 0.2), "floats": WeightEfficiency(0.30, 1.0)},
        {"f32": RowEfficiency(0.15, 0.50)},
        step_s=300e-6,
    )
    PACKAGES = ("onnxruntime",)

    def check_installed(self) -> None:
        from edge.backends.onnx.providers import check_installed

        check_installed()

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """Raises UnsupportedError for models without a graph, ModelFormatError if a folder's weights do not fit."""
        from edge.backends.onnx.folders import check_folder
        from edge.backends.onnx.graph.layout import make_layout

        if file.folder is None:
            make_layout(file, spec)
        else:
            check_folder(file, spec)

    def supports(self, core: Core) -> str | None:
        from edge.backends.onnx.graph.layout import supports

        return supports(core)

    def sees(self, spec: ModelSpec, *, whole: bool, provider: str | None = None) -> str | None:
        """Graphs have masks for such pictures: static ones, and those of networks that say so."""
        from edge.backends.onnx.providers import is_static

        masked = is_static(provider) or (spec.network is not None and spec.network.whole_pictures)
        return None if masked or not whole else "runs no pictures that see all of themselves"

    def fixed_sizes(self, spec: ModelSpec, provider: str | None, *, elsewhere: bool) -> FixedSizes | None:
        from edge.backends.onnx.npu.form import find_sizes

        return find_sizes(spec, provider, elsewhere=elsewhere)

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        if spec.encoder:
            from edge.backends.onnx.encoder import count_encoder

            return count_encoder(spec, config)
        from edge.backends.onnx.memory import count_footprint

        return count_footprint(spec, config)

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> Engine:
        """Convert a GGUF file unless the cache folder has it, open the session, allocate the KV cache.

        Raises CacheError if the cache folder cannot be written, InputError for an unknown `config.provider`,
        EngineError if ONNX Runtime cannot load the model.
        """
        if spec.encoder:
            from edge.backends.onnx.encoder import OnnxEncoder

            return cast(Engine, OnnxEncoder(file, spec, config, progress))  # of `HiddenEngine.hidden` alone
        from edge.backends.onnx.engine import OnnxEngine

        return OnnxEngine(file, spec, config, progress)


ENGINE = Onnx()
