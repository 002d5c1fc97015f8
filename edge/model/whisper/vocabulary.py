"""Whisper's vocabulary as fields of a GGUF header: GPT-2's bytes and merges, then control tokens and timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import InputError, ModelFormatError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import read_object
from edge.model.tokens.tokenizer import BYTE_OF_CHAR
from edge.model.tokens.vocabulary import CONTROL, NORMAL
from edge.model.whisper import MANY_LANGUAGES, SPECIAL, TIMESTAMPS
from edge.model.whisper.languages import LANGUAGES

_RENAMED = {"<|nocaptions|>": "<|nospeech|>"}  # older checkpoints' names
_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def fields_of_tokenizer(folder: Path, size: int) -> dict[str, Field]:
    """The fields for `size` embeddings of a folder with a tokenizer.json, which may lack timestamps. Raises InputError,
    ModelFormatError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder}: there is no tokenizer.json in it")
    said = read_object(path)
    model, added = said.get("model"), said.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not isinstance(added, list):
        raise ModelFormatError(f"{path}: it has no vocabulary")
    ids: dict[int, str] = {number: text for text, number in model["vocab"].items() if isinstance(number, int)}
    special = {each["id"]: each["content"] for each in added if isinstance(each, dict) and _is_token(each)}
    ids |= special
    merges = [" ".join(each) if isinstance(each, list) else each for each in _list(model.get("merges"))]
    if not all(isinstance(each, str) for each in merges):
        raise ModelFormatError(f"{path}: its merges are no texts")
    known = max(special, default=-1) + 1
    texts = [ids.get(number, f"<|unused{number}|>") for number in range(min(known, size))]
    return _fields(path, _with_timestamps(texts, size), {number for number in special if number < size}, merges)


def fields_of_ranks(path: Path, tokens: Sequence[bytes], size: int) -> dict[str, Field]:
    """The fields for `size` embeddings of a vocabulary without control tokens: of texts as bytes, whose numbers are the
    ranks of merges, too. Raises ModelFormatError."""
    plain = len(tokens)
    multilingual = size >= MANY_LANGUAGES
    expected = 50257 if multilingual else 50256
    if plain < expected:
        raise ModelFormatError(f"{path}: its vocabulary has {plain} tokens of text instead of {expected}")
    tokens = tokens[:expected]
    languages = list(LANGUAGES)[: 100 if size > MANY_LANGUAGES else 99]
    eot, sot, *rest = SPECIAL
    texts = ["".join(_CHAR_OF_BYTE[byte] for byte in each) for each in tokens]
    texts += [eot, sot, *(f"<|{code}|>" for code in languages), *rest]
    return _fields(path, _with_timestamps(texts, size), set(range(expected, size)), _merges(tokens))


def _with_timestamps(texts: list[str], size: int) -> list[str]:
    texts = [_RENAMED.get(text, text) for text in texts[:size]]
    have = texts.index(TIMESTAMPS[0]) if TIMESTAMPS[0] in texts else len(texts)
    texts += list(TIMESTAMPS[len(texts) - have :])[: size - len(texts)]
    return texts + [f"<|unused{number}|>" for number in range(len(texts), size)]


def _fields(path: Path, texts: list[str], special: set[int], merges: list[str]) -> dict[str, Field]:
    eot = texts.index(SPECIAL[0]) if SPECIAL[0] in texts else -1
    if eot < 0:
        raise ModelFormatError(f"{path}: its vocabulary has no token {SPECIAL[0]}")
    kinds = [
        CONTROL if number in special or (text.startswith("<|") and number > eot) else NORMAL
        for number, text in enumerate(texts)
    ]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": np.uint32(eot), "tokenizer.ggml.eos_token_id": np.uint32(eot),
    }  # fmt: skip


def _merges(tokens: Sequence[bytes]) -> list[str]:
    """The merges, in order: each token of several bytes is made of the two that the merges before it leave of it."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for token, rank in ranks.items():
        if len(token) < 2:
            continue
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[at] + parts[at + 1], rank) for at in range(len(parts) - 1)]
            least = min(pairs)
            if least >= rank:
                break
            at = pairs.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append(" ".join("".join(_CHAR_OF_BYTE[byte] for byte in part) for part in parts))
    return found


def _is_token(each: dict[str, Any]) -> bool:
    return isinstance(each.get("id"), int) and isinstance(each.get("content"), str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
