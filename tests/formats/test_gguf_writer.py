"""GGUF files as we write them: what another reader finds in them, and nothing left behind where writing failed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Planned, fields_of, write_gguf

VALUES = st.one_of(
    st.booleans(),
    st.text(max_size=40).filter(lambda text: "\0" not in text),
    st.lists(st.text(max_size=9).filter(lambda text: "\0" not in text), max_size=5),
    st.integers(0, 2**32 - 1).map(np.uint32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32, allow_nan=False).map(np.float32),
    hnp.arrays(st.sampled_from(["float32", "int32", "uint8"]), st.integers(0, 9), elements={"allow_nan": False}),
)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_file_written_again_has_same_bytes(path: Path, tmp_path: Path) -> None:
    file = read_gguf(path)
    planned = [Planned(info.name, info.shape, info.type) for info in file.tensors.values()]
    data = (file.tensor_bytes(info) for info in file.tensors.values())
    write_gguf(tmp_path / "again.gguf", fields_of(file), planned, data)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


@given(fields=st.dictionaries(st.from_regex(r"[a-z]{1,9}\.[a-z]{1,9}", fullmatch=True), VALUES, max_size=6))
def test_another_reader_finds_same_fields(fields: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    fields = {"general.architecture": "llama", **fields}
    write_gguf(path, fields, [Planned("a", (32, 2), "F32")], [np.zeros((2, 32), np.float32)])
    found = GGUFReader(path).fields
    for name, value in fields.items():
        said = found[name].contents()
        assert list(said) == list(value) if isinstance(value, list | np.ndarray) else said == value
