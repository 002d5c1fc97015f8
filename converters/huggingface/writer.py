"""Convert a GGUF model into a Hugging Face folder: config.json, model.safetensors, tokenizer and chat template.

The inverse of reader.py: float matrices keep their type, quantized ones become floats, vectors take the matrices' type
where that is lossless. A folder read and written again holds the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures import of_gguf
from edge.converters.huggingface.architectures.common import Architecture, Layout
from edge.converters.huggingface.architectures.rope import described_rope
from edge.converters.huggingface.architectures.settings import described
from edge.converters.huggingface.layout import to_float32, to_gguf, to_hf, to_kind
from edge.converters.huggingface.reader import open_folder
from edge.converters.onnx.tokenizer_file import tokenizer_json
from edge.devices.output import check_folder, new_folder
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import FLOATS, dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header
from edge.formats.safetensors import Planned, write_safetensors
from edge.model.structure.mtp import without_mtp
from edge.model.structure.spec import ModelSpec
from edge.model.tokens.tokenizer import Tokenizer
from edge.types import AnyArray

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_SLICE = 1 << 20  # values converted to floats at a time


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the folder and its source."""

    planned: Planned
    info: TensorInfo
    layout: Layout
    heads: int


def is_ours(folder: Path) -> bool:
    """Whether the folder holds only files that this module writes."""
    return {path.name for path in folder.iterdir()} <= set(FILES)


def write_folder(
    file: GGUFFile,
    spec: ModelSpec,
    folder: Path,
    *,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
    type: str = "F32",
) -> None:
    """Write the folder atomically, after reading it back. type: the float type for matrices quantized in the file.

    Raises InputError if the folder is in the way or cannot be written, UnsupportedError for models that Hugging Face's
    configurations cannot describe.
    """
    if type not in FLOATS:
        raise InputError(f"quantized weights become {', '.join(FLOATS)}, not {type}")
    check_folder(folder, is_ours, force=force)
    architecture = of_gguf(spec.architecture)
    if file.folder is not None:
        raise UnsupportedError(f"{file.folder}: an ONNX folder cannot be written as another one: convert its source")
    if f"{spec.architecture}.pooling_type" in file.metadata:
        raise UnsupportedError(f"{file.path}: a model that embeds by its own pooling is not written as such a folder")
    file = without_mtp(file)
    parts = _parts(file, spec, architecture, type)
    tokenizer = Tokenizer(file)
    with new_folder(folder) as temporary:
        main = _main_type(parts)
        _write_json(temporary / "config.json", _config(file, spec, architecture, tokenizer, main))
        _write_json(temporary / "generation_config.json", _generation(tokenizer))
        _write_json(temporary / "tokenizer.json", _tokenizer(tokenizer))
        _write_json(temporary / "tokenizer_config.json", _settings(file, spec, tokenizer))
        data = (_data(file, part) for part in parts)
        write_safetensors(temporary / "model.safetensors", [part.planned for part in parts], data, progress)
        _check(file, temporary, folder)


def _parts(file: GGUFFile, spec: ModelSpec, architecture: Architecture, type: str) -> list[ExportedTensor]:
    """Every tensor under Hugging Face's name. Raises UnsupportedError if it has none."""
    found = []
    for name, info in file.tensors.items():
        if name.startswith("rope_"):
            continue  # config.json has their parameters
        theirs = architecture.theirs(name)
        if theirs is None:
            raise UnsupportedError(f"{file.path}: Hugging Face's {architecture.name} models have no tensor like {name}")
        theirs = theirs if theirs.startswith("lm_head.") else architecture.root + theirs
        short = name.split(".")[-2]
        layout = architecture.layout(name)
        shape = info.shape if layout == "transposed" and len(info.shape) == 2 else info.shape[::-1]
        heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads}.get(short, 1)
        kind = info.type if info.type in FLOATS else type
        found.append(ExportedTensor(Planned(theirs, kind, shape), info, layout, heads))
    main = _main_type(found)
    return [_narrowed(file, part, main) for part in found]


def _main_type(parts: list[ExportedTensor]) -> str:
    return max(FLOATS, key=lambda kind: sum(part.planned.nbytes for part in parts if part.planned.dtype == kind))


def _narrowed(file: GGUFFile, part: ExportedTensor, kind: str) -> ExportedTensor:
    """Give a vector the matrices' type if that is lossless."""
    if len(part.info.shape) > 1 or kind == "F32":
        return part
    values = file.tensor_bytes(part.info).view(np.float32)
    try:
        narrow = to_kind(to_hf(values, part.layout, part.heads), "F32", kind, part.info.name)
    except ModelFormatError:
        return part
    again = to_gguf(to_float32(narrow, kind), part.layout, part.heads)
    if not np.array_equal(again, values):
        return part
    return ExportedTensor(Planned(part.planned.name, kind, part.planned.shape), part.info, part.layout, part.heads)


def _data(file: GGUFFile, part: ExportedTensor) -> AnyArray:
    """The tensor in Hugging Face's layout."""
    info, kind, shape = part.info, part.planned.dtype, part.info.shape[::-1]
    data = file.tensor_bytes(info)
    if info.type in FLOATS:
        array = data.view(_DTYPES[info.type]).reshape(shape)
        return to_kind(to_hf(array, part.layout, part.heads), info.type, kind, info.name)
    rows = data.reshape(shape[0], -1)
    step = max(1, _SLICE // info.shape[0])
    array = np.empty(shape, _DTYPES[kind])
    for first in range(0, len(rows), step):
        values = dequantize(rows[first : first + step], info.type)
        array[first : first + step] = to_kind(values, "F32", kind, info.name)
    return to_hf(array, part.layout, part.heads)


def _config(
    file: GGUFFile, spec: ModelSpec, architecture: Architecture, tokenizer: Tokenizer, main: str
) -> dict[str, Any]:
    header = Header(file, spec.architecture)
    said = described(architecture.settings, header, {"vocab_size": spec.vocab})
    said |= described_rope(file, spec) if architecture.rope else {}
    said |= dict(zip(("model_type", "architectures"), (architecture.model[0], [architecture.model[1]]), strict=True))
    said |= {key: any(f"blk.0.{stem}.bias" in file.tensors for stem in group)
             for key, group in architecture.maybe_biases.items()}  # fmt: skip
    said |= architecture.described(file, spec, said)
    said |= {"tie_word_embeddings": spec.tied_head, "torch_dtype": _WORDS[main]}
    pad = file.metadata.get("tokenizer.ggml.padding_token_id")
    said["pad_token_id"] = pad if isinstance(pad, int) and pad < spec.vocab else None  # null, never absent
    return said | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens that start and end a text: EOS first, then other end-of-turn tokens."""
    ends = sorted(tokenizer.end_ids, key=lambda index: (index != tokenizer.eos_id, index))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends}


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json with the BOS that prompts start with, and without names for embeddings that have no token."""
    said = tokenizer_json(tokenizer)
    vocab = said["model"]["vocab"]
    said["model"]["vocab"] = {text: index for text, index in vocab.items() if text != f"[PAD{index}]"}
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        text = tokenizer.text(tokenizer.bos_id)
        first = {"SpecialToken": {"id": text, "type_id": 0}}
        one, two = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
        said["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, one],
            "pair": [first, one, first, two],
            "special_tokens": {text: {"id": text, "ids": [tokenizer.bos_id], "tokens": [text]}},
        }
    return said


def _settings(file: GGUFFile, spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
    }
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and index < tokenizer.size:
            said[f"{role}_token"] = tokenizer.text(index)
    template = file.metadata.get("tokenizer.chat_template")
    return said | ({"chat_template": template} if isinstance(template, str) else {})


def _write_json(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(file: GGUFFile, written: Path, folder: Path) -> None:
    """Check that `written`, the future `folder`, reads as a model with the same tensors."""
    try:
        again = {each.name: each.shape for each in open_folder(written).planned}
    except EdgeError as error:
        message = str(error).replace(str(written), str(folder))
        raise UnsupportedError(f"{file.path}: as a Hugging Face folder, it would not be readable: {message}") from None
    if again != {name: info.shape for name, info in file.tensors.items()}:
        raise ModelFormatError(f"{file.path}: the written folder does not read back as the same model")
