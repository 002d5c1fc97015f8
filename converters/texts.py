"""Calibration texts: so many tokens of them, from all alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge.errors import InputError
from edge.model.tokenizer import Tokenizer
from edge.types import IntArray

_CHARACTERS_PER_TOKEN = 16  # more than any text has: what lies behind is not tokenized


def check_texts(paths: Sequence[Path]) -> None:
    """Raises InputError."""
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: {'not a file' if path.exists() else 'no such file'}")


def calibration_tokens(tokenizer: Tokenizer, paths: Sequence[Path], count: int) -> IntArray:
    """int32 [count or fewer]: the beginnings of all texts, as long as each other where they are long enough.

    Raises InputError if a text cannot be read or is empty.
    """
    parts: list[IntArray] = []
    for number, path in enumerate(paths):
        share = (count - sum(part.size for part in parts)) // (len(paths) - number)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_CHARACTERS_PER_TOKEN * share)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        ids = tokenizer.encode(text)[:share]
        if ids.size == 0:
            raise InputError(f"{path} is empty")
        parts.append(ids)
    return np.concatenate(parts)
