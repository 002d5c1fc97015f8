"""Conversion of architectures between Hugging Face and GGUF: one file per family, and a line here."""

from __future__ import annotations

from edge.converters.huggingface.architectures import (
    bert,
    cohere,
    deepseek,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mamba,
    minicpm3,
    ministral,
    nemotron,
    phi3,
    qwen,
    qwen35,
    seed_oss,
    smollm3,
    starcoder2,
)
from edge.converters.huggingface.architectures.common import Architecture
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError, UnsupportedError
from edge.values import brief

_BY_MODEL_TYPE: dict[str, Architecture] = {
    "llama": llama.LLAMA,
    "mistral": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "qwen3_5_text": qwen35.QWEN35,
    "qwen3_5_moe_text": qwen35.QWEN35_MOE,
    "lfm2": lfm2.LFM2,
    "lfm2_moe": lfm2.LFM2_MOE,
    "gpt_oss": gpt_oss.GPT_OSS,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "gemma4_text": gemma4.GEMMA4,
    "phi3": phi3.PHI3,
    "gpt2": gpt2.GPT2,
    "granitemoehybrid": granite.GRANITE_HYBRID,
    "falcon_mamba": mamba.MAMBA,
    "jamba": mamba.JAMBA,
    "mamba": mamba.MAMBA,
    "nemotron_h": mamba.NEMOTRON_H,
    "granite": granite.GRANITE,  # the type under which GGUF's models are written
    "minicpm3": minicpm3.MINICPM3,
    "ministral3": ministral.MINISTRAL3,
    "smollm3": smollm3.SMOLLM3,
    "arcee": llama.ARCEE,
    "cohere2": cohere.COHERE2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "glm4_moe_lite": deepseek.GLM4_MOE_LITE,
    "exaone4": exaone.EXAONE4,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "nemotron": nemotron.NEMOTRON,
    "seed_oss": seed_oss.SEED_OSS,
    "starcoder2": starcoder2.STARCODER2,
    "youtu": deepseek.YOUTU,
    "bert": bert.BERT,
    "xlm-roberta": bert.XLM_ROBERTA,
    "modernbert": bert.MODERN_BERT,
}
_WITH_TOWERS = {  # models with vision or sound beside the text model
    "gemma3": gemma.GEMMA3, "gemma4": gemma4.GEMMA4, "gemma4_unified": gemma4.GEMMA4, "qwen3_5": qwen35.QWEN35,
    "qwen3_5_moe": qwen35.QWEN35_MOE, "qwen2_vl": qwen.QWEN2_VL, "qwen2_5_vl": qwen.QWEN2_VL,
    "qwen3_vl": qwen.QWEN3_VL, "smolvlm": llama.LLAMA, "idefics3": llama.LLAMA, "lfm2_vl": lfm2.LFM2,
    "qwen2_audio": qwen.QWEN2, "voxtral": llama.LLAMA,
    "qwen3_asr": qwen.QWEN3,
}  # fmt: skip

_FLAT = ("qwen2_vl", "qwen2_5_vl")  # whose first files have the text model's settings beside the tower's
_OF_LLAMA = ("smolvlm", "idefics3")
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def of_config(config: Config) -> tuple[Architecture, Config]:
    """The architecture of a `config.json`, and its part for the text model. Raises UnsupportedError."""
    if is_head(config):
        raise UnsupportedError(f"{config.path}: an EAGLE-3 head: convert it with --base and the GGUF file of its model")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _WITH_TOWERS:
        text = config.part("text_config")
        if text is None and kind in _FLAT:
            text = config
        if text is None:
            raise ModelFormatError(f"{config.path}: text_config is missing")
        if kind in _OF_LLAMA and text.get("model_type", "llama") != "llama":
            raise UnsupportedError(f"{config.path}: the text model of {kind} must be llama")
        if kind == "gemma3":
            text.must_be("final_logit_softcapping")  # which transformers leaves out beside a vision tower
        tied = config.get("tie_word_embeddings")
        usual = {} if tied is None or text.get("tie_word_embeddings") is not None else {"tie_word_embeddings": tied}
        vision = config.part("vision_config")
        deep = (vision.get("deepstack_visual_indexes") if vision else None) if kind == "qwen3_vl" else None
        usual |= {} if deep is None else {"deepstack_visual_indexes": deep}
        return _WITH_TOWERS[kind], Config(config.path, {**text.values, **usual})
    if kind in _ASSISTANTS:
        return _of_assistant(config)
    if kind == "granitemoehybrid" and (config.get("num_local_experts", 8) or mamba.has_mamba(config)):
        return mamba.GRANITE_MAMBA, config
    if kind == "gemma3_text" and config.get("use_bidirectional_attention"):
        return gemma.EMBEDDING_GEMMA, config
    if not isinstance(kind, str) or kind not in _BY_MODEL_TYPE:
        known = ", ".join([*_BY_MODEL_TYPE, *_WITH_TOWERS, *_ASSISTANTS])
        raise UnsupportedError(f"{config.path}: model_type {brief(kind)} is not supported (these are: {known})")
    return _BY_MODEL_TYPE[kind], config


def is_head(config: Config) -> bool:
    """Whether a `config.json` describes an EAGLE-3 head (`huggingface/eagle.py`)."""
    said = config.get("architectures")
    names = [config.get("speculators_model_type"), *(said if isinstance(said, list) else [])]
    one_layer = config.get("draft_vocab_size") is not None and config.get("num_hidden_layers") == 1
    return one_layer or any("eagle3" in str(name).lower() for name in names)


def _of_assistant(config: Config) -> tuple[Architecture, Config]:
    """The settings of the text model, which has no rows of its own, and those of the drafter around it."""
    text = config.part("text_config")
    if text is None:
        raise ModelFormatError(f"{config.path}: text_config is missing")
    own = {key: value for key, value in config.values.items() if key not in ("text_config", "model_type")}
    return gemma4.ASSISTANT, Config(config.path, {**text.values, **own})


def of_gguf(name: str) -> Architecture:
    """The architecture with this GGUF name, which edge writes, too. Raises UnsupportedError."""
    written = {each.name: each for each in _BY_MODEL_TYPE.values() if each.model[0]}
    if name not in written:
        raise UnsupportedError(f"{name} models cannot be written as a Hugging Face folder ({', '.join(written)})")
    return written[name]


def adapted(name: str) -> Architecture:
    """The architecture with this GGUF name, whose matrices are those of adapters. Raises UnsupportedError."""
    known = {each.name: each for each in _BY_MODEL_TYPE.values() if each.model[0] or each.adapts}
    if name not in known:
        raise UnsupportedError(f"PEFT adapters of {name} models are not read yet ({', '.join(known)})")
    return known[name]
