"""The encoder of sounds of Gemma 4's folders, with llama.cpp's names: in the file with the encoder of pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor, read_checkpoint
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.ears import type_of_ears
from edge.converters.huggingface.layout import to_float32
from edge.errors import ModelFormatError
from edge.formats.gguf_writer import Field, Planned
from edge.formats.json_file import read_object
from edge.model.towers.gemma4a import CAP, CONTEXT, MELS, TAPS
from edge.types import FloatArray

_NAME = re.compile(
    r"(?:model\.)?(?:audio_tower\.|(?=embed_audio))(.+?)(?:\.linear)?(?:\.(weight|bias|(?:in|out)put_(?:min|max)))?"
)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_IN_LAYERS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.post": "attn_out", "self_attn.relative_k_proj": "attn_k_rel", "self_attn.per_dim_scale": "per_dim_scale",
    "norm_pre_attn": "attn_pre_norm", "norm_post_attn": "attn_post_norm", "norm_out": "ln2",
    "lconv1d.pre_layer_norm": "conv_norm", "lconv1d.conv_norm": "norm_conv", "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2", "lconv1d.depthwise_conv1d": "conv_dw",
} | {
    f"feed_forward{number}.{theirs}": f"{ours}{'_1' if number == 2 else ''}"
    for number in (1, 2) for theirs, ours in (
        ("pre_layer_norm", "ffn_norm"), ("post_layer_norm", "ffn_post_norm"), ("ffw_layer_1", "ffn_up"),
        ("ffw_layer_2", "ffn_down"),
    )
}  # fmt: skip
_OUTSIDE = {
    "subsample_conv_projection.layer0.conv": "a.conv1d.0", "subsample_conv_projection.layer0.norm": "a.conv1d.0.norm",
    "subsample_conv_projection.layer1.conv": "a.conv1d.1", "subsample_conv_projection.layer1.norm": "a.conv1d.1.norm",
    "subsample_conv_projection.input_proj_linear": "a.input_projection", "output_proj": "a.pre_encode.out",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}  # fmt: skip
_FIXED = {
    "hidden_act": "silu", "conv_kernel_size": TAPS, "residual_weight": 0.5, "attention_context_left": CONTEXT + 1,
    "attention_context_right": 0, "attention_logit_cap": CAP, "rms_norm_eps": 1e-6,
}  # fmt: skip
_HEARD = {  # of the feature extractor
    "feature_size": MELS, "sampling_rate": 16000, "min_frequency": 0.0, "max_frequency": 8000.0, "preemphasis": 0.0,
    "fft_overdrive": False, "dither": 0.0, "input_scale_factor": 1.0, "mel_floor": 1e-3, "frame_length": 320,
    "hop_length": 160, "fft_length": 512, "per_bin_mean": None, "per_bin_stddev": None,
}  # fmt: skip


def has_conformer(config: Config) -> bool:
    return config.get("model_type") == "gemma4" and config.part("audio_config") is not None


def plan_conformer(folder: Path, config: Config, kind: str) -> list[Planned]:
    """Its tensors, whose matrices are of a block type. Raises UnsupportedError, ModelFormatError."""
    audio, said = _audio(config), Config(folder, _extractor(folder))
    for part, fixed in ((audio, _FIXED), (said, _HEARD)):
        for key, value in fixed.items():
            part.must_be(key, value)
    return [Planned(name, shape, type_of_ears(name, shape, kind)) for _, name, shape in _named(folder)]


def conformer_data(folder: Path) -> Iterator[tuple[str, FloatArray]]:
    """The tensors' values, float32, in the order of the plan."""
    for tensor, name, shape in _named(folder):
        values = to_float32(tensor.read(), tensor.dtype)
        if not np.isfinite(values).all() and not name.endswith(("_min", "_max")):
            raise ModelFormatError(f"{tensor.path}: {tensor.name} has values that are no numbers, or infinite")
        if name.endswith("per_dim_scale.weight"):
            values = np.logaddexp(0, values)  # softplus
        yield name, values.astype(np.float32).reshape(-1, shape[0])


def conformer_fields(config: Config) -> dict[str, Field]:
    audio, text = _audio(config), config.part("text_config") or config
    hidden = audio.count("hidden_size", "hidden", default=1024)
    numbers = {
        "projection_dim": text.count("hidden_size", "hidden"), "embedding_length": hidden,
        "feed_forward_length": 4 * hidden, "block_count": audio.count("num_hidden_layers", "layers", default=12),
        "attention.head_count": audio.count("num_attention_heads", "heads", default=8), "num_mel_bins": MELS,
    }  # fmt: skip
    return {
        "clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a",
        "clip.audio.attention.layer_norm_epsilon": np.float32(1e-5),
        **{f"clip.audio.{name}": np.uint32(value) for name, value in numbers.items()},
    }  # fmt: skip


def _audio(config: Config) -> Config:
    part = config.part("audio_config")
    assert part is not None
    return part


def _extractor(folder: Path) -> dict[str, object]:
    """The settings of the feature extractor, in a file of its own or in the processor's."""
    path, key = folder / "processor_config.json", "feature_extractor"
    found = read_object(path).get(key) if path.is_file() else None
    if found is None and (path := folder / "preprocessor_config.json").is_file():
        read = read_object(path)
        found = read if "mel_floor" in read else None  # else of pictures
    return dict(found) if isinstance(found, dict) else {}


def _named(folder: Path) -> Iterator[tuple[CheckpointTensor, str, tuple[int, ...]]]:
    """The encoder's tensors with their names and shapes, innermost dimension first."""
    for tensor in read_checkpoint(folder).values():
        if not (found := _NAME.fullmatch(tensor.name)):
            continue
        stem, kind, shape = found[1], found[2] or "weight", tensor.shape[::-1] or (1,)
        layer = _LAYER.fullmatch(stem)
        name = f"a.blk.{layer[1]}.{_IN_LAYERS.get(layer[2], layer[2])}" if layer else _OUTSIDE.get(stem, f"a.{stem}")
        if name.endswith(".conv_dw"):
            shape = (shape[0], *shape[2:])
        yield tensor, f"{name}.{kind}", shape
