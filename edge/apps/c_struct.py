"""Structs of model.edge as C compilers lay them out: `constants.py` declares them for the runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def c_struct(**fields: str | np.dtype[np.void] | tuple[str | np.dtype[np.void], tuple[int]]) -> np.dtype[np.void]:
    """A struct with these fields, in NumPy's type codes; (code or struct, (count,)) declares an array."""
    return np.dtype(list(fields.items()), align=True)


def filled(struct: np.dtype[np.void], values: Mapping[str, object]) -> bytes:
    """The bytes of a struct with these values. Other fields and padding are 0."""
    row = np.zeros(1, struct)
    for name, value in values.items():
        row[name] = value
    return row.tobytes()
