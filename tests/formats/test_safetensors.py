"""safetensors: what is written is read back, every lie of a header is refused in one line, and nothing crashes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hf_folders import FOLDERS, Tensors, complaint, read_tensors, safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ModelFormatError
from edge.formats.safetensors import Planned, read_header, write_safetensors

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
GOOD = FOLDERS / "qwen2" / "model.safetensors"


@pytest.mark.parametrize("path", sorted(FOLDERS.glob("*/*.safetensors")), ids=lambda path: path.parent.name)
def test_files_of_original_library(path: Path) -> None:
    found, expected = read_header(path), read_tensors(path)
    assert list(found) == list(expected)
    for name, (dtype, array) in expected.items():
        assert found[name].dtype == dtype
        if dtype != "BOOL":  # a table of an EAGLE-3 head, which nothing reads
            np.testing.assert_array_equal(found[name].read(), array)


@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=9), st.tuples(st.sampled_from(list(NUMPY)), SHAPES), max_size=5
    )
)
def test_written_tensors_read_back_equal(
    tensors: dict[str, tuple[str, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors.pop("__metadata__", None)
    path, random = tmp_path_factory.mktemp("safetensors") / "model.safetensors", np.random.default_rng(1)
    expected: Tensors = {
        name: (dtype, random.integers(0, 9, shape).astype(NUMPY[dtype])) for name, (dtype, shape) in tensors.items()
    }
    planned = [Planned(name, dtype, array.shape) for name, (dtype, array) in expected.items()]
    write_safetensors(path, planned, (array for _, array in expected.values()))
    for found in (read_tensors(path), {name: (each.dtype, each.read()) for name, each in read_header(path).items()}):
        assert list(found) == list(expected)
        for name, (dtype, array) in expected.items():
            assert found[name][0] == dtype
            np.testing.assert_array_equal(found[name][1], array)


def refused(path: Path, data: bytes, match: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=match) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


A, B = entry(0, 8), entry(8, 16)
LIES: list[tuple[Any, str]] = [
    ({"a": entry(0, 8, (3,))}, "has 8 bytes, but F32 .* needs 12"), ({"a": entry(0, 8, dtype="F16")}, "has 8 bytes"),
    ({"a": entry(0, 8, dtype="F33")}, "unknown type 'F33'"), ({"a": entry(0, 8, dtype=[1])}, "unknown type"),
    ({"a": entry(0, 8, (-2,))}, "impossible shape"), ({"a": entry(0, 8, (2.0,))}, "impossible shape"),
    ({"a": entry(0, 8, (True, 2))}, "impossible shape"), ({"a": entry(0, 8, (2**60,))}, "impossible shape"),
    ({"a": entry(0, 0, (2**40, 2**40, 2**40))}, "has 0 bytes, but"), ({"a": entry(0, 8, (1,) * 9)}, "impossible shape"),
    ({"a": {"dtype": "F32", "shape": [2]}}, "lies at null"),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}}, "lies at"),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "lies at"), ({"a": [1, 2]}, "is not described"),
    ({"a": A, "b": A}, "but .* is next"), ({"a": A, "b": entry(4, 12)}, "but .* is next"),
    ({"a": entry(8, 0), "b": B}, "has -8 bytes"), ({"b": B}, "but .* is next"),
    ({"a": A, "b": entry(12, 20)}, "but .* is next"), ({"a": A}, "truncated"),
    ({"a": A, "b": B, "c": entry(16, 24)}, "truncated"), (b"", "no JSON"), (b"null", "no JSON object"),
    (b'{"a"', "no JSON"), (b'{"a": 1, "a": 2}', "twice"), (b"\xff{}", "UTF-8"), (b"[" * 50_000, "brackets|no JSON"),
    (b'{"a": ' * 50_000, "brackets|no JSON"), (b'{"a": ' + b"9" * 5_000 + b"}", "no JSON|not described"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "match"), LIES, ids=range(len(LIES)))
def test_lying_headers_are_refused(header: Any, match: str, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(safetensors({"a": A, "b": B}, bytes(16)))
    assert list(read_header(tmp_path / "good")) == ["a", "b"]
    refused(tmp_path / "bad", safetensors(header, bytes(16)), match)


def test_other_files_are_no_safetensors(tmp_path: Path) -> None:
    refused(tmp_path / "bad", b"", "no safetensors file")
    refused(tmp_path / "bad", b"1234567", "no safetensors file")
    for length in (17, 1 << 31, (1 << 64) - 1):
        refused(tmp_path / "bad", safetensors(b"{}", b"", length), "its header claims")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        read_header(tmp_path / "missing")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        read_header(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = GOOD.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    cuts = {*range(0, 40), *range(40, len(data), 997), length + 7, length + 8, length + 9, len(data) - 1}
    for cut in sorted(cuts):
        refused(tmp_path / "bad", data[:cut])
    refused(tmp_path / "bad", data + b"\0", "truncated")


def test_file_truncated_during_reading(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD.read_bytes())
    last = max(read_header(path).values(), key=lambda each: each.offset)
    os_size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(os_size - 1)
    with pytest.raises(ModelFormatError, match="became shorter"):
        last.read()
    path.unlink()
    with pytest.raises(ModelFormatError, match="cannot be read"):
        last.read()


@settings(max_examples=examples(100))
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes of the header changed, cut out or put in: an error of ours in one line, or tensors within the file."""
    good = GOOD.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, length + 8))
        count = data.draw(st.integers(0, 3))
        changed[at : at + count] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"0", b"9", b"-", b"]", b'"', b"{"])
        )
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(changed)
    message = complaint(lambda: [each.read() for each in read_header(path).values()])
    assert "\n" not in message
    if not message:
        assert all(8 <= each.offset <= len(changed) - each.nbytes for each in read_header(path).values())
