"""Reading numbers and arrays of them from files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edge.devices.regular import open_regular
from edge.errors import ModelFormatError


def read_array(file: BufferedReader, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Read numbers of `dtype` from the file's current position, [count], or fewer where it ends. Raises OSError.

    np.fromfile would swallow a Ctrl-C that arrives while it checks whether its argument is a path.
    """
    data = np.empty(count, dtype)
    return data[: file.readinto(data.view(np.uint8).data) // data.itemsize]


@contextmanager
def open_packed(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read by `struct`. Raises ModelFormatError if it cannot be read, ends early, or has texts that are
    none."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    except (struct.error, UnicodeDecodeError):
        raise ModelFormatError(f"{path}: the file is truncated or damaged") from None
