"""EAGLE-3 heads: files of a small drafter that reads hidden states of the model that it drafts for (arXiv:2503.01840).

The names are llama.cpp's (`eagle3`). A head has an output of its own, which may lack tokens of the model: `d2t` has the
model's token for each of its rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge.errors import InputError, ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.model.architectures import find_network
from edge.model.cores import Features
from edge.model.structure.fallback import read_fallback
from edge.model.structure.mtp import EAGLE
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import FloatArray, IntArray

TOKENS = "d2t"  # the model's token for each row of the head, int [rows]
FEATURE_NORM = "enc.output_norm.weight"  # of features before `fc`, in some heads
EMBEDDING, _HEAD, _FC = "token_embd.weight", "output.weight", "fc.weight"
_BESIDE = (TOKENS, "t2d", FEATURE_NORM, EMBEDDING)  # what no network describes
_INTEGERS = {"I32": np.int32, "I64": np.int64}


def is_eagle(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") == EAGLE


def plain_file(file: GGUFFile) -> GGUFFile:
    """The header as that of a model whose embedding is its head, since embeddings are given to it."""
    if _HEAD not in file.tensors:
        raise ModelFormatError(f"{file.path}: has no {_HEAD}: heads without an output of their own are not supported")
    renamed = {_HEAD: EMBEDDING, _FC: f"blk.0.{_FC}"}
    tensors = {renamed.get(name, name): info for name, info in file.tensors.items() if name not in _BESIDE}
    metadata = {key: value for key, value in file.metadata.items() if key != f"{EAGLE}.vocab_size"}
    return replace(file, metadata=metadata, tensors=tensors)


def read_eagle(file: GGUFFile) -> ModelSpec:
    """The spec of a head's header, with every shape checked. Raises ModelFormatError, UnsupportedError."""
    plain = plain_file(file)
    header = Header(plain, EAGLE)
    spec = read_fallback(header)
    spec = replace(spec, network=find_network(header, spec))
    find_tensors(plain, spec)
    for name, shape in ((TOKENS, (spec.vocab,)), (FEATURE_NORM, (_features(spec).size,))):
        info = file.tensors.get(name)
        if info is not None and (
            info.shape != shape or (info.type not in _INTEGERS if name == TOKENS else info.type != "F32")
        ):
            raise ModelFormatError(f"{file.path}: {name} is {info.type} of shape {info.shape} instead of {shape}")
    if (own := file.tensors.get(EMBEDDING)) is not None and (len(own.shape) != 2 or own.shape[0] != spec.hidden):
        raise ModelFormatError(f"{file.path}: {EMBEDDING} has shape {own.shape} instead of rows of {spec.hidden}")
    return spec


def check_eagle(file: GGUFFile, spec: ModelSpec, model: ModelSpec) -> None:
    """Raise InputError unless a head can read the states of a model, and its embedding."""
    core, own = _features(spec), file.tensors.get(EMBEDDING)
    rows, hidden = (model.vocab, model.hidden) if own is None else (own.shape[1], spec.hidden)
    fits = core.size == len(core.layers) * model.hidden and max(core.layers) < model.layers and model.network
    all_tokens = TOKENS in file.tensors or spec.vocab == model.vocab
    if not fits or (rows, hidden) != (model.vocab, spec.hidden) or not all_tokens:
        raise InputError(f"--draft {file.path}: an EAGLE-3 head of another model than {model.name}: choose its own")


def tokens_of(file: GGUFFile, vocab: int) -> IntArray | None:
    """The model's token for each row of the head, int32 [rows]; None: they are the same. vocab: the model's. Raises
    ModelFormatError for tokens that the model does not have, or that are there twice."""
    if (info := file.tensors.get(TOKENS)) is None:
        return None
    found = file.tensor_bytes(info).view(_INTEGERS[info.type])
    if found.min() < 0 or found.max() >= vocab or np.unique(found).size < found.size:
        raise ModelFormatError(f"{file.path}: {TOKENS} has tokens twice, or others than the {vocab} of the model")
    return found.astype(np.int32)


def norm_of_features(file: GGUFFile) -> FloatArray | None:
    """The weight of the norm before `fc`, float32 [size]; None: there is none."""
    info = file.tensors.get(FEATURE_NORM)
    return None if info is None else file.tensor_bytes(info).view(np.float32)


def _features(spec: ModelSpec) -> Features:
    assert spec.features is not None
    return spec.features
