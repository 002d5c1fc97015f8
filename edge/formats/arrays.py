"""Reading arrays of numbers from files."""

from __future__ import annotations

from io import BufferedReader
from typing import Any

import numpy as np


def read_array(file: BufferedReader, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Read [count] numbers of `dtype` from where the file stands, or as many as it has. Raises OSError.

    np.fromfile would lose a Ctrl-C that comes while it looks whether it was given a path.
    """
    data = np.empty(count, dtype)
    return data[: file.readinto(data.view(np.uint8).data) // data.itemsize]
