"""Convert a unigram `tokenizer.json`, SentencePiece's for XLM-R, into GGUF fields."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import items
from edge.model.tokens.unigram import SPACE
from edge.values import brief

_RUNS = ({"Regex": " {2,}"}, {"Regex": "▁{2,}"})  # of blanks, which the pre-tokenizer splits at anyway
_MOST = 1e30  # of scores, which are logarithms


def unigram_pieces(path: Path, said: Mapping[str, Any]) -> dict[str, float]:
    """The pieces with their scores, in the order of ids. Raises ModelFormatError."""
    found: dict[str, float] = {}
    for each in items(path, said["model"], "vocab"):
        text, score = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if not isinstance(text, str) or text in found or not isinstance(score, int | float) or not abs(score) < _MOST:
            raise ModelFormatError(f"{path}: the piece {brief(each)} is no text with a score, or is there twice")
        found[text] = float(score)
    return found


def unigram_fields(path: Path, said: Mapping[str, Any]) -> dict[str, Field]:
    """The kind of tokenizer and its normalizer. Raises UnsupportedError for settings that `Unigram` does not have."""
    if said["model"].get("byte_fallback"):
        raise UnsupportedError(f"{path}: a unigram tokenizer with byte_fallback is not supported")
    if not _splits_words(path, said.get("pre_tokenizer")):
        raise UnsupportedError(
            f"{path}: its pre_tokenizer is {brief(said.get('pre_tokenizer'))}: Metaspace is supported"
        )
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    for step in _steps(path, said.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled":
            fields["tokenizer.ggml.precompiled_charsmap"] = _characters(path, step.get("precompiled_charsmap"))
        elif step.get("type") != "Strip" and not (step.get("type") == "Replace" and step.get("pattern") in _RUNS):
            raise UnsupportedError(f"{path}: its normalizer {brief(step)} is not supported")
    return fields


def _characters(path: Path, said: Any) -> Field:
    try:
        return np.frombuffer(base64.b64decode(said, validate=True), np.uint8)
    except (binascii.Error, TypeError, ValueError):
        raise ModelFormatError(f"{path}: precompiled_charsmap is no base64") from None


def _steps(path: Path, part: Any, key: str) -> list[dict[str, Any]]:
    steps = items(path, part, key) if isinstance(part, dict) and part.get("type") == "Sequence" else [part]
    return [step for step in steps if isinstance(step, dict)]


def _splits_words(path: Path, part: Any) -> bool:
    steps = _steps(path, part, "pretokenizers")
    kinds = [step.get("type") for step in steps]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return False
    prefix = steps[-1].get("prepend_scheme") in (None, "always") and steps[-1].get("add_prefix_space", True)
    return steps[-1].get("replacement", SPACE) == SPACE and bool(prefix)
