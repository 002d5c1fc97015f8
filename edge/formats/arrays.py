"""Reading arrays of numbers from files."""

from __future__ import annotations

from io import BufferedReader
from typing import Any

import numpy as np


def read_array(file: BufferedReader, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Read numbers of `dtype` from the file's current position, [count], or fewer where it ends. Raises OSError.

    np.fromfile would swallow a Ctrl-C that arrives while it checks whether its argument is a path.
    """
    data = np.empty(count, dtype)
    return data[: file.readinto(data.view(np.uint8).data) // data.itemsize]
