"""Whisper's weights in the formats of others, as tensors of edge's GGUF files: folders of CTranslate2 and Hugging
Face, and whisper.cpp's .bin.

A tensor keeps its type where GGUF has it for its kind: matrices float16 or float32, vectors float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge.devices.regular import open_regular
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.ctranslate2 import read_model_bin
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.formats.gguf_writer import Field, fields_of
from edge.formats.json_file import read_object
from edge.formats.safetensors import Stored, read_header
from edge.formats.whisper_bin import WhisperBin, is_whisper_bin, read_whisper_bin
from edge.model.whisper import (
    ALIGNMENT,
    ARCHITECTURE,
    FRAMES,
    MANY_LANGUAGES,
    MELS,
    MULTILINGUAL,
    is_whisper,
    read_whisper,
)
from edge.model.whisper.vocabulary import fields_of_ranks, fields_of_tokenizer
from edge.records import dataclass
from edge.types import AnyArray

CONFIG, MODEL_BIN, SAFETENSORS = "config.json", "model.bin", "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Tensor(Protocol):
    """A tensor of a checkpoint. shape: outermost first."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> AnyArray: ...


@dataclass(frozen=True)
class Part:
    """A tensor to write: some rows of a checkpoint's. name: without `.weight` or `.bias`."""

    name: str
    kind: str  # weight or bias
    source: Tensor
    first: int = 0
    rows: int = 0  # 0: all
    scale: Tensor | None = None  # of rows of int8

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first; convolutions [hidden, inputs, taps] become matrices."""
        rows, *rest = self.source.shape
        if len(rest) == 2:
            rest = [rest[0] * rest[1]]
        elif self.kind == "bias" or self.name.endswith("_norm"):
            return (self.rows or int(np.prod(self.source.shape)),)
        return (self.rows or rows, *rest)

    def read(self) -> AnyArray:
        """The values, float16 or float32; the inputs of one tap of a convolution lie side by side."""
        array = self.source.read()
        if self.source.dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        if self.scale is not None:
            array = array.astype(np.float32) / self.scale.read().astype(np.float32)[:, None]
        if array.ndim == 3:
            array = array.swapaxes(1, 2)
        array = array.reshape(self.source.shape[0] if len(self.shape) > 1 else -1, *(-1,) * (len(self.shape) - 1))
        return array[self.first : self.first + self.rows] if self.rows else array


@dataclass(frozen=True)
class Checkpoint:
    """An opened model. fields: of the GGUF header."""

    path: Path
    fields: dict[str, Field]
    parts: list[Part]


def is_checkpoint(path: Path) -> bool:
    """Whether it is a Whisper model in one of the formats that `read_checkpoint` opens."""
    if not path.is_dir():
        return path.is_file() and is_whisper_bin(path)
    try:
        kind = json.loads((path / CONFIG).read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        kind = None
    return kind == ARCHITECTURE or (kind is None and (path / MODEL_BIN).is_file())


def hears(path: Path) -> bool:
    """Whether `read_checkpoint` opens it: one of those formats, or edge's own."""
    return is_checkpoint(path) or (path.is_file() and path.suffix == ".gguf" and is_whisper(read_gguf(path, part=True)))


def read_checkpoint(path: Path, weights: Path | None = None, name: str = "") -> Checkpoint:
    """Open a model; only headers are read. weights: of a CTranslate2 folder, where its model.bin lies elsewhere. name:
    for its GGUF header, instead of the path's. Raises InputError, ModelFormatError, UnsupportedError."""
    if not path.is_dir():
        return _of_bin(path, read_whisper_bin(path)) if is_whisper_bin(path) else _of_gguf(read_gguf(path))
    if weights is not None or ((path / MODEL_BIN).is_file() and not (path / SAFETENSORS).is_file()):
        return _of_ctranslate2(path, weights or path / MODEL_BIN, name or path.absolute().name)
    return _of_folder(path)


# Names below a layer, and of the encoder or the decoder: ours, Hugging Face's, openai's (whisper.cpp's).
LAYER = (
    ("attn_norm", "self_attn_layer_norm", "attn_ln"),
    ("attn_q", "self_attn.q_proj", "attn.query"),
    ("attn_k", "self_attn.k_proj", "attn.key"),
    ("attn_v", "self_attn.v_proj", "attn.value"),
    ("attn_output", "self_attn.out_proj", "attn.out"),
    ("cross_attn_norm", "encoder_attn_layer_norm", "cross_attn_ln"),
    ("cross_attn_q", "encoder_attn.q_proj", "cross_attn.query"),
    ("cross_attn_k", "encoder_attn.k_proj", "cross_attn.key"),
    ("cross_attn_v", "encoder_attn.v_proj", "cross_attn.value"),
    ("cross_attn_output", "encoder_attn.out_proj", "cross_attn.out"),
    ("ffn_norm", "final_layer_norm", "mlp_ln"),
    ("ffn_up", "fc1", "mlp.0"),
    ("ffn_down", "fc2", "mlp.2"),
)
ENCODER = (
    ("conv1", "conv1", "conv1"),
    ("conv2", "conv2", "conv2"),
    ("position_embd", "embed_positions", "positional_embedding"),
    ("output_norm", "layer_norm", "ln_post"),
)
DECODER = (
    ("token_embd", "embed_tokens", "token_embedding"),
    ("position_embd", "embed_positions", "positional_embedding"),
    ("output_norm", "layer_norm", "ln"),
)
_BARE = "positional_embedding"  # which openai stores without `.weight`

# CTranslate2's modules of a layer: each matrix, or matrices in one, by our names.
_NORMS = {"self_attention": "attn_norm", "attention": "cross_attn_norm", "ffn": "ffn_norm"}
_LINEAR = {
    "self_attention/linear_0": ("attn_q", "attn_k", "attn_v"), "self_attention/linear_1": ("attn_output",),
    "attention/linear_0": ("cross_attn_q",), "attention/linear_1": ("cross_attn_k", "cross_attn_v"),
    "attention/linear_2": ("cross_attn_output",), "ffn/linear_0": ("ffn_up",), "ffn/linear_1": ("ffn_down",),
}  # fmt: skip


def _of_folder(path: Path) -> Checkpoint:
    """A Hugging Face folder."""
    said, tensors = read_object(path / CONFIG), _safetensors(path)
    parts = list(_parts(path, tensors, lambda side: f"model.{side}.", "layers", 1))
    keys = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    figures = _Figures(*(_figure(path, said, key) for key in keys))
    if said.get("activation_function", "gelu") != "gelu" or said.get("scale_embedding"):
        raise UnsupportedError(f"{path / CONFIG}: Whisper models have gelu, and no scaled embeddings")
    settings = read_object(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    fields = _fields(path, path.absolute().name, parts, figures, settings.get(ALIGNMENT))
    fields |= {f"{ARCHITECTURE}.{MULTILINGUAL}": True} if settings.get("is_multilingual") is True else {}
    return Checkpoint(path, fields | fields_of_tokenizer(path, _rows(parts, "token_embd")), parts)


def _of_ctranslate2(path: Path, weights: Path, model: str) -> Checkpoint:
    kind, tensors = read_model_bin(weights)
    if kind != "WhisperSpec":
        raise UnsupportedError(f"{path}: CTranslate2's {kind[:40]}: of its models edge reads Whisper's alone")
    said, parts = read_object(path / CONFIG) if (path / CONFIG).is_file() else {}, list[Part]()

    def take(name: str, theirs: str, kind: str, first: int = 0, rows: int = 0) -> None:
        if theirs not in tensors:
            raise ModelFormatError(f"{weights}: the tensor {theirs} is missing")
        if tensors[theirs].dtype == "I8" and f"{theirs}_scale" not in tensors:
            raise ModelFormatError(f"{weights}: the tensor {theirs}_scale is missing")
        scale = tensors.get(f"{theirs}_scale") if tensors[theirs].dtype == "I8" else None
        parts.append(Part(name, kind, tensors[theirs], first, rows, scale))

    def take_norm(name: str, theirs: str) -> None:
        take(name, f"{theirs}/gamma", "weight")
        take(name, f"{theirs}/beta", "bias")

    counts = []
    for side, ours in (("encoder", "enc."), ("decoder", "")):
        layer = 0
        while any(name.startswith(f"{side}/layer_{layer}/") for name in tensors):
            for module, name in _NORMS.items():
                if module != "attention" or side == "decoder":
                    take_norm(f"{ours}blk.{layer}.{name}", f"{side}/layer_{layer}/{module}/layer_norm")
            for module, names in _LINEAR.items():
                if module.startswith("attention") and side == "encoder":
                    continue
                theirs = f"{side}/layer_{layer}/{module}"
                rows = tensors[f"{theirs}/bias"].shape[0] // len(names) if f"{theirs}/bias" in tensors else 0
                for number, name in enumerate(names):
                    for kind in ("weight", "bias")[: 2 - name.endswith("_k")]:
                        take(f"{ours}blk.{layer}.{name}", f"{theirs}/{kind}", kind, number * rows, rows)
            layer += 1
        counts.append(layer)
        take_norm(f"{ours}output_norm", f"{side}/layer_norm")
        take(f"{ours}position_embd", f"{side}/position_encodings/encodings", "weight")
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            take(f"enc.{name}", f"encoder/{name}/{kind}", kind)
    take("token_embd", "decoder/embeddings/weight", "weight")
    heads = [
        int(tensors[name].read().reshape(-1)[0]) if (name := f"{side}/num_heads") in tensors else 0
        for side in ("encoder", "decoder")
    ]
    fields = _fields(path, model, parts, _Figures(*counts, *heads), said.get(ALIGNMENT))
    return Checkpoint(path, fields | fields_of_tokenizer(path, _rows(parts, "token_embd")), parts)


def parts_of_bin(path: Path, found: WhisperBin) -> list[Part]:
    """The tensors of whisper.cpp's file."""
    return list(_parts(path, found.tensors, lambda side: f"{side}.", "blocks", 2))


def _of_bin(path: Path, found: WhisperBin) -> Checkpoint:
    parts = parts_of_bin(path, found)
    figures = (found.figures[name] for name in ("layers", "text_layers", "heads", "text_heads"))
    fields = _fields(path, path.stem, parts, _Figures(*figures), None)
    return Checkpoint(path, fields | fields_of_ranks(path, found.tokens, _rows(parts, "token_embd")), parts)


@dataclass(frozen=True)
class _Own:
    """A tensor of a GGUF file."""

    file: GGUFFile
    info: TensorInfo

    @property
    def dtype(self) -> str:
        return self.info.type

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(reversed(self.info.shape))

    def read(self) -> AnyArray:
        data = self.file.tensor_bytes(self.info)
        if self.dtype == "F16":
            return data.view(np.float16).reshape(self.shape)
        return dequantize(data.reshape(self.info.elements // self.info.shape[0], -1), self.dtype).reshape(self.shape)


def _of_gguf(file: GGUFFile) -> Checkpoint:
    read_whisper(file)
    parts = []
    for name, info in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        parts.append(Part(stem, kind, _Own(file, info)))
    return Checkpoint(file.path, fields_of(file), parts)


@dataclass(frozen=True)
class _Figures:
    layers: int  # of the encoder
    text_layers: int
    heads: int
    text_heads: int


def _parts(
    path: Path, tensors: Mapping[str, Tensor], root: Callable[[str], str], layers: str, names: int
) -> Iterator[Part]:
    """The parts of a checkpoint. root: before the names of the encoder or the decoder. layers: their common name.
    names: the index of the checkpoint's names in the table."""

    def take(ours: str, theirs: str) -> Iterator[Part]:
        for kind in ("weight", "bias"):
            stored = theirs if theirs.endswith(_BARE) else f"{theirs}.{kind}"
            plain = ours.endswith(("_embd", "_k"))
            if kind == "bias" and plain:
                continue
            if stored not in tensors:
                raise ModelFormatError(f"{path}: the tensor {stored} is missing")
            yield Part(ours, kind, tensors[stored])

    for side, own, outside in (("encoder", "enc.", ENCODER), ("decoder", "", DECODER)):
        for each in outside:
            yield from take(own + each[0], root(side) + str(each[names]))
        layer = 0
        while any(name.startswith(f"{root(side)}{layers}.{layer}.") for name in tensors):
            for each in LAYER:
                if not each[0].startswith("cross") or side == "decoder":
                    yield from take(f"{own}blk.{layer}.{each[0]}", f"{root(side)}{layers}.{layer}.{each[names]}")
            layer += 1


def _fields(path: Path, name: str, parts: list[Part], figures: _Figures, alignment: Any) -> dict[str, Field]:
    """The architecture's fields, by the shapes of tensors."""
    shapes = {part.name: part.shape for part in parts if part.kind == "weight"}
    hidden = shapes["token_embd"][-1]
    sides = {"": ("", figures.text_layers, figures.text_heads), "encoder.": ("enc.", figures.layers, figures.heads)}
    fields: dict[str, Field] = {"general.architecture": ARCHITECTURE, "general.name": name}
    for key, (own, layers, heads) in sides.items():
        numbers = {
            "context_length": shapes[f"{own}position_embd"][0], "embedding_length": hidden, "block_count": layers,
            "feed_forward_length": shapes.get(f"{own}blk.0.ffn_up", (4 * hidden,))[0],
            "attention.head_count": heads or hidden // 64,
        }  # fmt: skip
        fields |= {f"{ARCHITECTURE}.{key}{each}": np.uint32(number) for each, number in numbers.items()}
        fields[f"{ARCHITECTURE}.{key}attention.layer_norm_epsilon"] = np.float32(1e-5)
    fields[f"{ARCHITECTURE}.vocab_size"] = np.uint32(shapes["token_embd"][0])
    fields[f"{ARCHITECTURE}.{MULTILINGUAL}"] = shapes["token_embd"][0] >= MANY_LANGUAGES
    fields[f"{ARCHITECTURE}.{MELS}"] = np.uint32(shapes["enc.conv1"][-1] // 3)
    if alignment is not None:
        try:
            fields[f"{ARCHITECTURE}.{ALIGNMENT}"] = np.array(alignment, np.int32).reshape(-1, 2).ravel()
        except (ValueError, TypeError, OverflowError):
            raise ModelFormatError(f"{path}: its {ALIGNMENT} are no pairs of a layer and a head") from None
    return fields


def _rows(parts: list[Part], name: str) -> int:
    return next(part.shape[0] for part in parts if part.name == name)


def _figure(path: Path, said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < FRAMES:
        raise ModelFormatError(f"{path / CONFIG}: {key} is {str(value)[:40]}")
    return value


def _safetensors(path: Path) -> dict[str, Stored]:
    names = [SAFETENSORS]
    if (path / _INDEX).is_file():
        places = read_object(path / _INDEX).get("weight_map")
        names = sorted({Path(str(name)).name for name in places.values()}) if isinstance(places, dict) else []
    elif not (path / SAFETENSORS).is_file():
        raise InputError(f"{path}: there is no {SAFETENSORS} in it, and no {MODEL_BIN}")
    found: dict[str, Stored] = {}
    for name in names:
        with open_regular(path / name):
            found |= read_header(path / name)
    return found
