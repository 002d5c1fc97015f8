"""Rows of a table of per-layer embeddings, which the C runtime reads from the file: gguf's values, bit for bit."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
from runtime_library import PLATFORM, load_runtime
from small_models import random_bytes

from edge.apps.sections.model_file import TABLE_TYPES
from edge.formats.blocks import dequantize

HARNESS = Path(__file__).parents[1] / "runtime" / "table_harness.c"
VOCAB, LAYERS = 40, 7


@pytest.mark.filterwarnings("ignore")  # of scales that are no numbers
@pytest.mark.parametrize("size", [256, 24])
@pytest.mark.parametrize("kind", TABLE_TYPES)
def test_rows_are_those_of_gguf(kind: str, size: int, tmp_path: Path) -> None:
    """Any bytes. size: of the vectors, which are padded to whole vectors of a CPU."""
    layers = 32 if size % 256 else LAYERS  # rows of whole blocks
    raw = random_bytes(kind, VOCAB, layers * size, 3)
    path, tokens = tmp_path / "file", np.array([0, VOCAB - 1, 5, 5], np.int32)
    path.write_bytes(b"before" + raw.tobytes())
    expected = dequantize(raw.reshape(VOCAB, -1)[tokens], kind).reshape(len(tokens), layers, size)
    expected = expected * np.float32(math.sqrt(size / 2))
    found = np.full((len(tokens), layers, -(-size // 16) * 16), -7, np.float32)
    c = load_runtime("table.c", "rows.c", *PLATFORM, "cpu.c", "error.c", HARNESS)
    c.read_table.restype = ctypes.c_bool

    def read(path: Path) -> bool:
        with path.open("rb") as file:
            about = np.array([file.fileno(), VOCAB, layers, size], np.int32)
            reader = ctypes.cast(getattr(c, f"table_{kind.lower()}"), ctypes.c_void_p)
            where = ctypes.c_uint64(raw.nbytes), ctypes.c_uint64(6 + raw.nbytes)
            arguments = tokens.ctypes.data_as(ctypes.c_void_p), len(tokens), found.ctypes.data_as(ctypes.c_void_p)
            return bool(c.read_table(reader, about.ctypes.data_as(ctypes.c_void_p), *where, *arguments))

    assert read(path)
    np.testing.assert_array_equal(found[..., :size], expected)
    assert (found[..., size:] == -7).all()
    path.write_bytes(path.read_bytes()[:-1])
    assert not read(path)
