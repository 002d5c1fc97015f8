"""Conversion of architectures between Hugging Face and GGUF: one file per family, and a line here."""

from __future__ import annotations

from reprlib import repr as brief

from edge.converters.huggingface.architectures import gemma, gpt2, granite, llama, ministral, phi3, qwen, smollm3
from edge.converters.huggingface.architectures.common import Architecture
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError, UnsupportedError

_BY_MODEL_TYPE: dict[str, Architecture] = {
    "llama": llama.LLAMA,
    "mistral": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "phi3": phi3.PHI3,
    "gpt2": gpt2.GPT2,
    "granitemoehybrid": granite.GRANITE_HYBRID,
    "granite": granite.GRANITE,  # as which models of GGUF are written
    "ministral3": ministral.MINISTRAL3,
    "smollm3": smollm3.SMOLLM3,
}
_BY_GGUF_NAME = {architecture.name: architecture for architecture in _BY_MODEL_TYPE.values()}


def of_config(config: Config) -> tuple[Architecture, Config]:
    """The architecture of a `config.json`, and its part for the text model. Raises UnsupportedError."""
    kind = config.get("model_type")
    if kind == "gemma3":  # with a vision tower beside the text model
        text = config.part("text_config")
        if text is None:
            raise ModelFormatError(f"{config.path}: text_config is missing")
        text.must_be("final_logit_softcapping")  # which transformers leaves out beside a vision tower
        return gemma.GEMMA3, text
    if not isinstance(kind, str) or kind not in _BY_MODEL_TYPE:
        known = ", ".join([*_BY_MODEL_TYPE, "gemma3"])
        raise UnsupportedError(f"{config.path}: model_type {brief(kind)} is not supported (these are: {known})")
    return _BY_MODEL_TYPE[kind], config


def of_gguf(name: str) -> Architecture:
    """The architecture with this GGUF name. Raises UnsupportedError."""
    if name not in _BY_GGUF_NAME:
        raise UnsupportedError(f"{name} models cannot be written as a Hugging Face folder ({', '.join(_BY_GGUF_NAME)})")
    return _BY_GGUF_NAME[name]
