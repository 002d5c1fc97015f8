"""The header of a draft model, which must have the same vocabulary as the model it drafts for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edge.errors import InputError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.catalog import find_model
from edge.model.reader import read_spec
from edge.model.spec import ModelSpec
from edge.records import dataclass

_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class DraftFile:
    """A model file with its header checked."""

    file: GGUFFile
    spec: ModelSpec


@lru_cache(maxsize=2)
def open_draft(model: str | Path) -> DraftFile:
    """Open MODEL without its tokenizer. Raises what `open_model` raises."""
    file = read_gguf(find_model(model))
    return DraftFile(file, read_spec(file))


def check_draft(draft: DraftFile, file: GGUFFile) -> None:
    """Raise InputError unless the draft model and a model's file have the same vocabulary."""
    if not _same_tokens(draft.file, file):
        raise InputError(
            f"--draft {draft.file.path}: its tokens are not those of {file.path.name}: choose another model"
        )


def _same_tokens(one: GGUFFile, other: GGUFFile) -> bool:
    """Whether the bytes of both token lists are equal."""
    return one.spans.keys() & other.spans.keys() >= {_TOKENS} and one.field_bytes(_TOKENS) == other.field_bytes(_TOKENS)
