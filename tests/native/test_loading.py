"""Images of compiled passes: a header that leads outside of the image is refused before anything is copied or run."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.backends.tvm.cpu.elf import MAGIC, MOST_BYTES, PAGE, Image, parse
from edge.errors import EngineError

BODY = bytes(range(256))


def image(header: object, body: bytes = BODY, magic: bytes = MAGIC) -> bytes:
    said = json.dumps(header).encode()
    start = magic + struct.pack("<Q", len(said)) + said
    return start.ljust(-(-len(start) // PAGE) * PAGE, b"\0") + body


def written(folder: Path, data: bytes) -> Path:
    path = folder / "pass.img"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_good_image_is_copied_as_it_is(tmp_path: Path) -> None:
    header = {"entries": {"run": 0, "move": 255}, "imports": {"madvise": 248}}
    assert parse(image(header)) == (header["entries"], header["imports"], BODY)
    loaded = Image(written(tmp_path, image(header)))
    assert loaded.entry("move") - loaded.entry("run") == 255
    with pytest.raises(EngineError, match="no function walk: edge cache clear"):
        loaded.entry("walk")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC + struct.pack("<Q", 2**64 - 1),
        MAGIC + struct.pack("<Q", 9) + b"{}",
        image({"entries": {}, "imports": {}}, magic=b"EDGEIMG0"),
        image({}),
        image({"entries": [0], "imports": {}}),
        image({"entries": {"run": -1}, "imports": {}}),
        image({"entries": {"run": 2**70}, "imports": {}}),
        image({"entries": {"run": 0}, "imports": {}}, b""),
        image({"entries": {}, "imports": {"madvise": 249}}),
        image({"entries": {}, "imports": {"madvise": "0"}}),
        MAGIC + struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=range(12),
)
def test_damaged_image_raises_one_line(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^[^\n]*pass\.img is no compiled pass \([^\n]+\): edge cache clear"):
        Image(written(tmp_path, data))


@given(st.data())
def test_no_place_lies_outside(data: st.DataObject) -> None:
    """Whatever is changed in a good image, it is refused or every place lies within."""
    good = bytearray(image({"entries": {"run": 16, "move": 200}, "imports": {"madvise": 240, "syscall": 128}}))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, 96))] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    for each in (bytes(good), cut):
        try:
            entries, imports, body = parse(each)
        except ValueError:
            continue
        assert all(0 <= at < len(body) for at in entries.values())
        assert all(0 <= at <= len(body) - 8 for at in imports.values())


def test_function_that_the_system_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="calls 'no_such_function', which this system does not have"):
        Image(written(tmp_path, image({"entries": {}, "imports": {"no_such_function": 0}})))


def test_oversized_image_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, image({"entries": {}, "imports": {}}))
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(EngineError, match="too long"):
        Image(path)


def test_image_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    good: dict[str, Any] = {"entries": {"run": 0}, "imports": {}}
    path = written(tmp_path, image(good))
    path.chmod(0o666)
    with pytest.raises(EngineError, match=r"other users may write to it \(mode 0666\)"):
        Image(path)
