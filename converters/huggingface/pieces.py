"""SentencePiece vocabularies: pieces with scores, from a `tokenizer.model` or from the merges of a `tokenizer.json`.

SentencePiece joins the neighbours whose union has the best score; a tokenizer.json lists the pairs instead, best
first. They are equivalent if every way to split a piece is a merge, which is checked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.devices.regular import read_bounded
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.json_file import items
from edge.types import AnyArray

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # types of pieces, the same numbers in both formats
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_MOST_BYTES = 64 << 20  # the largest tokenizer.model have 5 MB
_BPE = 2  # trainer_spec.model_type


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary."""

    texts: list[str]
    scores: AnyArray
    types: AnyArray
    space_prefix: bool  # a text gets a leading space
    spaces: str | None = None  # see SPACES in edge/model/tokens/tokenizer.py


def pieces_of_json(
    path: Path, said: Mapping[str, Any], texts: list[str], merges: list[tuple[str, str]], added: set[int]
) -> Pieces:
    """Convert a tokenizer.json. Raises UnsupportedError if its merges or normalization are not SentencePiece's."""
    prefix, spaces = _space_prefix(path, said)
    ids = {text: index for index, text in enumerate(texts)}
    types = np.array([_BYTE if _BYTE_PIECE.fullmatch(text) else _NORMAL for text in texts], np.int32)
    unknown = said["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in ids:
        types[ids[unknown]] = _UNKNOWN
    scores, made = np.zeros(len(texts), np.float32), set[str]()
    for left, right in merges:
        whole = left + right
        if not {left, right, whole} <= ids.keys():
            raise ModelFormatError(f"{path}: the merge {left!r} {right!r} names tokens that are not in the vocabulary")
        if whole not in made:
            made.add(whole)
            scores[ids[whole]] = -len(made)
    matched = {texts[index] for index in added} - made  # as a whole, before any merging
    plain = {text: index for text, index in ids.items() if types[index] == _NORMAL and text not in matched}
    _check_merges(path, plain, ids, set(merges), made)
    return Pieces(texts, scores, types, prefix, spaces)


def _check_merges(
    path: Path, plain: dict[str, int], ids: dict[str, int], merges: set[tuple[str, str]], made: set[str]
) -> None:
    """Check that every way to split a plain piece is a merge.

    The exception is the first piece that training made: its score is 0, which the usual converter takes for a missing
    score. Here it keeps this score, the best of all, as in the original vocabulary.
    """
    first = min((ids[text] for text in made), default=0)
    for text, index in plain.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids and (left, right) not in merges and (text in made or index != first - 1):
                raise UnsupportedError(
                    f"{path}: {text!r} is not merged of {left!r} and {right!r}, though SentencePiece would do it"
                )


def _space_prefix(path: Path, said: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Check that normalization only replaces spaces by ▁; return how. Raises UnsupportedError."""
    prefix, spaces, replaced = False, None, False
    for step in _steps(path, said.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == "▁":
            prefix = True
        elif step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁":
            replaced = True
        else:
            raise UnsupportedError(f"{path}: the normalizer {step.get('type')} is not supported with byte fallback")
    for step in _steps(path, said.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == "▁" and step.get("split") is False:
            scheme = step.get("prepend_scheme", "always")
            prefix, spaces, replaced = (True, scheme, True) if scheme in ("first", "always") else (prefix, None, True)
        elif not (replaced and step.get("type") == "Split" and step.get("pattern") == {"String": " "}):
            raise UnsupportedError(f"{path}: the pre-tokenizer {step.get('type')} is not supported with byte fallback")
    if not replaced:
        raise UnsupportedError(f"{path}: it does not write spaces as ▁, unlike SentencePiece")
    return prefix, spaces


def _steps(path: Path, said: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(said, dict) and said.get("type") == "Sequence":
        for each in items(path, said, key):
            yield from _steps(path, each, key)
    elif isinstance(said, dict):
        yield said


# SentencePiece's own file is a protocol buffer:
# https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto


def pieces_of_model(path: Path) -> Pieces:
    """Read a `tokenizer.model`. Raises ModelFormatError, UnsupportedError for vocabularies that are not BPE."""
    data = read_bounded(path, _MOST_BYTES, "SentencePiece's pieces", ModelFormatError)
    try:
        return _read_model(path, data)
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError, struct.error):
        raise ModelFormatError(f"{path}: not SentencePiece's format, or damaged") from None


def _read_model(path: Path, data: bytes) -> Pieces:
    texts, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            texts.append(piece[1].decode("utf-8") if 1 in piece else "")
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            types.append(int(piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedError(f"{path}: a SentencePiece model that is not BPE is not supported")
    if normalizer.get(2) or normalizer.get(1, b"identity") != b"identity":
        raise UnsupportedError(f"{path}: SentencePiece's normalization of characters is not supported")
    if normalizer.get(4, 1):
        raise UnsupportedError(f"{path}: a SentencePiece model that removes spaces is not supported")
    if not texts or len(set(texts)) < len(texts) or not all(texts) or not np.isfinite(scores).all():
        raise ValueError
    return Pieces(texts, np.array(scores, np.float32), np.array(types, np.int32), bool(normalizer.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a protobuf message: field numbers, with integers or bytes. Raises ValueError, IndexError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length, at = (8, at) if kind == 1 else (4, at) if kind == 5 else _varint(data, at) if kind == 2 else (-1, at)
        if length < 0 or at + length > len(data):
            raise ValueError
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError
