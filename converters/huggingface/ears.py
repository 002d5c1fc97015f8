"""The encoder of sounds of a Hugging Face folder as an mmproj file, with llama.cpp's names, beside the text model's.

Whisper's encoder and a projector: Qwen2-Audio's, Voxtral's, and Ultravox's, whose folders have no text model. And
Qwen3-ASR's, in transformers' layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor, read_checkpoint
from edge.converters.huggingface.config import Config, read_config
from edge.converters.huggingface.layout import to_float32
from edge.converters.quantizers.rtn import quantize
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import FILE_TYPES, block_size
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.model.towers import read_ears
from edge.model.towers.qwen3a import CHUNKS, FRAMES, ROWS
from edge.model.towers.spectrogram import sinusoids
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, Progress

_ROOT = re.compile(r"(?:model\.)?(audio_tower|multi_modal_projector)\.(.+)\.(weight|bias)")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_IN_LAYERS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out", "self_attn_layer_norm": "ln1", "final_layer_norm": "ln2", "fc1": "ffn_up",
    "fc2": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "conv1": "a.conv1d.1", "conv2": "a.conv1d.2", "embed_positions": "a.position_embd", "layer_norm": "a.post_ln",
    "conv2d1": "a.conv2d.1", "conv2d2": "a.conv2d.2", "conv2d3": "a.conv2d.3", "ln_post": "a.post_ln",
    "linear": "mm.a.fc", "linear_1": "mm.a.mlp.1", "linear_2": "mm.a.mlp.2", "ln_pre": "mm.a.norm_pre",
    "ln_mid": "mm.a.norm_mid",
}  # fmt: skip
_WHISPER = {
    "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
}  # fmt: skip
_ALSO = {  # names of the same settings in some configurations
    "d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_ffn_dim": "intermediate_size",
    "encoder_attention_heads": "num_attention_heads",
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """kind: of the projector, in mmproj files. fixed: settings that may have these values alone; audio: those of the
    encoder's part. made: tensors that checkpoints lack, of the encoder's width."""

    kind: str
    fixed: Mapping[str, Any]
    audio: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Callable[[int], FloatArray]] = field(default_factory=dict)


_GELU = {"activation_function": "gelu", "scale_embedding": False}
_FAMILIES = {  # by model_type
    "qwen2_audio": _Family("qwen2a", {}),
    "voxtral": _Family("voxtral", {"projector_hidden_act": "gelu"}),
    "ultravox": _Family("ultravox", {"projector_act": "swiglu", "projector_ln_mid": True}),
    "qwen3_asr": _Family(
        "qwen3a",
        {},
        {"n_window": FRAMES // 2, "n_window_infer": FRAMES * CHUNKS},
        {"a.position_embd.weight": partial(sinusoids, ROWS)},
    ),
}


def hears(config: Config) -> bool:
    """Whether a folder's model has an encoder of sounds that edge converts."""
    return isinstance(kind := config.get("model_type"), str) and kind in _FAMILIES


def is_alone(config: Config) -> bool:
    """Whether the folder has no text model beside the encoder."""
    return bool(config.get("model_type") == "ultravox")


def plan_ears(folder: Path, kind: str) -> list[Planned]:
    """The tensors of the file, whose matrices are of a block type. Reads headers only. Raises ModelFormatError,
    UnsupportedError."""
    config = read_config(folder)
    family, audio = _FAMILIES[str(config.get("model_type"))], _audio(config)
    for part, fixed in ((config, family.fixed), (audio, _GELU), (audio, family.audio)):
        for key, value in fixed.items():
            part.must_be(key, value)
    found = [Planned(name, shape, type_of_ears(name, shape, kind)) for _, name, shape in _named(folder)]
    return found + [Planned(name, each.shape[::-1], "F32") for name, each in _made(config)]


def _made(config: Config) -> Iterator[tuple[str, FloatArray]]:
    width = _audio(config).count("d_model", "hidden", default=_WHISPER["d_model"])
    for name, make in _FAMILIES[str(config.get("model_type"))].made.items():
        yield name, make(width)


def write_ears(folder: Path, target: Path, kind: str, progress: Progress | None = None) -> list[Planned]:
    """Write the encoder atomically, and read it back. Raises InputError, ModelFormatError, UnsupportedError."""
    config, planned = read_config(folder), plan_ears(folder, kind)
    types = {each.name: each.type for each in planned}

    def data() -> Iterator[AnyArray]:
        for tensor, name, _ in _named(folder):
            values = to_float32(tensor.read(), tensor.dtype)
            if not np.isfinite(values).all():
                raise ModelFormatError(f"{tensor.path}: {tensor.name} has values that are no numbers, or infinite")
            rows = values.reshape(-1, values.shape[-1]).astype(np.float32)
            yield quantize(rows, types[name]) if types[name] != "F32" else rows
        yield from (values for _, values in _made(config))

    write_gguf(target, _fields(folder, config, kind), planned, data(), progress)
    read_back(target, read_ears, config)
    return planned


def read_back(target: Path, read: Callable[[GGUFFile], object], config: Config) -> None:
    """Check a file that was made of a folder, and remove it if it is refused: the error names the folder's settings,
    since the file is gone. Raises ModelFormatError, UnsupportedError."""
    try:
        read(read_gguf(target))
    except (ModelFormatError, UnsupportedError) as error:
        target.unlink()
        raise type(error)(str(error).replace(str(target), str(config.path))) from None


def _audio(config: Config) -> Config:
    part = config.part("audio_config")
    if part is None:
        raise ModelFormatError(f"{config.path}: audio_config is missing")
    return part


def _fields(folder: Path, config: Config, kind: str) -> dict[str, Field]:
    audio, text = _audio(config), config.part("text_config") or config
    said = {key: audio.get(key, audio.get(_ALSO.get(key, key), usual)) for key, usual in _WHISPER.items()}
    found = Config(audio.path, said)
    hidden, family = found.count("d_model", "hidden"), _FAMILIES[str(config.get("model_type"))]
    numbers = {
        "projection_dim": text.count("hidden_size", "hidden"), "embedding_length": hidden,
        "feed_forward_length": found.count("encoder_ffn_dim", "ffn"),
        "block_count": found.count("encoder_layers", "layers"),
        "attention.head_count": found.count("encoder_attention_heads", "heads"),
        "num_mel_bins": found.count("num_mel_bins", "heads"),
    }  # fmt: skip
    if family.kind == "ultravox":
        numbers["projector.stack_factor"] = config.count("stack_factor", "heads", default=8)
    if family.kind == "voxtral":  # which reads states as rows of this width
        numbers["projector.stack_factor"] = max(1, numbers["feed_forward_length"] // hidden)
    return {
        "general.architecture": "clip", "general.type": "mmproj", "general.name": folder.resolve().name,
        "general.file_type": np.uint32(FILE_TYPES[kind]), "general.quantization_version": np.uint32(2),
        "clip.has_audio_encoder": True, "clip.projector_type": family.kind,
        "clip.audio.attention.layer_norm_epsilon": np.float32(1e-5),
        **{f"clip.audio.{name}": np.uint32(value) for name, value in numbers.items()},
    }  # fmt: skip


def _named(folder: Path) -> Iterator[tuple[CheckpointTensor, str, tuple[int, ...]]]:
    """The encoder's tensors with their names and shapes, innermost dimension first."""
    for tensor in read_checkpoint(folder).values():
        if not (found := _ROOT.fullmatch(tensor.name)):
            continue
        stem, suffix = found[2], found[3]
        layer = _LAYER.fullmatch(stem)
        name = f"a.blk.{layer[1]}.{_IN_LAYERS.get(layer[2], layer[2])}" if layer else _OUTSIDE.get(stem, f"a.{stem}")
        ones = stem.startswith("conv") * stem.count("2d") + stem.startswith("conv") if suffix == "bias" else 0
        yield tensor, f"{name}.{suffix}", (1,) * ones + tensor.shape[::-1]  # ones: as llama.cpp adds it


def type_of_ears(name: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor: a convolution's in float16."""
    if len(shape) == 1 or name.endswith(".bias") or name.startswith("a.position_embd"):
        return "F32"
    return kind if len(shape) == 2 and shape[0] % block_size(kind) == 0 else "F16"
