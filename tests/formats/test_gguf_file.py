"""The GGUF reader: good files are read as gguf-py reads them, and every kind of damage is refused in one line."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.errors import EdgeError, ModelFormatError, UnsupportedError
from edge.formats.blocks import BLOCK_TYPES
from edge.formats.gguf import MAX_COUNT, MAX_HEADER, ArrayRef, read_gguf
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.model.model import Model

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*.gguf"))
TIED = GOLDEN / "llama-gqa-tied.gguf"

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

Value = tuple[int, Any]
"""A metadata value and its type; (ARRAY, (item type, items)) for lists."""


@dataclass
class GGUF:
    """A GGUF file as data: read a good one, damage it, write it. The other tests build their files with it, too."""

    metadata: dict[str | bytes, Value] = field(default_factory=dict)
    tensors: dict[str | bytes, tuple[tuple[int, ...], int, bytes]] = field(default_factory=dict)  # shape, type, data
    version: int = 3
    alignment: int = 32

    @classmethod
    def read(cls, path: Path = TIED) -> GGUF:
        reader, file = gguf.GGUFReader(path), cls()
        for name, entry in reader.fields.items():
            if not name.startswith("GGUF."):  # gguf-py's own, made of the first bytes
                types = [int(kind) for kind in entry.types]
                value = entry.contents()
                file.metadata[name] = (ARRAY, (types[1], value)) if types[0] == ARRAY else (types[0], value)
        for tensor in reader.tensors:
            shape = tuple(int(extent) for extent in tensor.shape)
            file.tensors[tensor.name] = (shape, int(tensor.tensor_type), tensor.data.tobytes())
        return file

    def set(self, **values: Value) -> GGUF:
        """Metadata of the llama architecture: `set(block_count=(U32, 3))`; double underscores are dots."""
        self.metadata |= {f"llama.{name.replace('__', '.')}": value for name, value in values.items()}
        return self

    def header(self, counts: tuple[int, int] | None = None) -> bytes:
        tensor_count, key_count = counts or (len(self.tensors), len(self.metadata))
        parts = [b"GGUF", struct.pack("<IQQ", self.version, tensor_count, key_count)]
        parts += [
            text(name) + struct.pack("<I", kind) + pack(kind, value) for name, (kind, value) in self.metadata.items()
        ]
        offset = 0
        for name, (shape, kind, data) in self.tensors.items():
            parts.append(tensor_info(name, shape, kind, offset))
            offset += len(data) + -len(data) % self.alignment
        return b"".join(parts)

    def to_bytes(self) -> bytes:
        blocks = [self.header(), *(data for _, _, data in self.tensors.values())]
        return b"".join(block + bytes(-len(block) % self.alignment) for block in blocks)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pack(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item_kind, items = value
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(pack(item_kind, item) for item in items)
    return struct.pack("<" + FORMATS[kind], value)


def tensor_info(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def small() -> GGUF:
    """The smallest file that the reader accepts: two keys, two tensors."""
    return GGUF(
        {"general.architecture": (STRING, "llama"), "list": (ARRAY, (U32, [1, 2, 3]))},
        {"a.weight": ((8, 4), 0, bytes(128)), "b.weight": ((8,), 0, bytes(32))},
    )


def refusal(path: Path, error: type[EdgeError] | tuple[type[EdgeError], ...] = ModelFormatError) -> str:
    """The message with which a file is refused: one line, not a long one, that names the file."""
    with pytest.raises(error) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < len(str(path)) + 300
    return message.removeprefix(f"{path}: ")


# Good files


def test_block_types_match_ggml() -> None:
    known = {kind: BLOCK_TYPES[kind] for kind in gguf.constants.GGML_QUANT_SIZES}  # older than ggml's newest types
    assert {kind: (each.values, each.nbytes) for kind, each in known.items()} == gguf.constants.GGML_QUANT_SIZES
    assert {int(kind): each.name for kind, each in known.items()} == {int(kind): kind.name for kind in known}


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_header_equals_gguf_pys(path: Path) -> None:
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    assert (file.version, file.size, file.data_offset) == (3, path.stat().st_size, reader.data_offset)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape)
        assert (info.type, info.type_id) == (tensor.tensor_type.name, tensor.tensor_type)
        assert (info.offset, info.nbytes, info.elements) == (tensor.data_offset, tensor.n_bytes, tensor.n_elements)
        assert file.tensor_bytes(info).tobytes() == tensor.data.tobytes()

    expected = {name: entry for name, entry in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(expected)
    for name, entry in expected.items():
        value = file.metadata[name]
        if not isinstance(value, ArrayRef):
            assert value == entry.contents()
        elif value.type_id == STRING:
            assert list(file.strings(name)) == entry.contents()
        else:
            assert file.numbers(name).tolist() == entry.contents()


@pytest.mark.parametrize(("kind", "value"), [
    (U8, 200), (I8, -3), (U16, 1 << 15), (I16, -5), (U32, 1 << 31), (I32, -1), (F32, 0.5), (BOOL, True), (BOOL, False),
    (STRING, "ä \n €"), (STRING, ""), (U64, 1 << 63), (I64, -1), (F64, 0.1),
])  # fmt: skip
def test_values_of_every_type(tmp_path: Path, kind: int, value: Any) -> None:
    file = small()
    file.metadata |= {"key": (kind, value), "items": (ARRAY, (kind, [value] * 3)), "none": (ARRAY, (kind, []))}
    read = read_gguf(file.write(tmp_path / "m.gguf"))
    items = read.strings if kind == STRING else read.numbers
    assert read.metadata["key"] == value
    assert list(items("items")) == [value] * 3
    assert list(items("none")) == []


def test_alignments_versions_and_invalid_text_are_read(tmp_path: Path) -> None:
    for version, alignment in ((2, 32), (3, 64), (3, 4096)):
        file = small()
        file.version, file.alignment = version, alignment
        file.metadata |= {"general.alignment": (U32, alignment), "text": (STRING, b"a\xffb")}
        read = read_gguf(file.write(tmp_path / "m.gguf"))
        assert [info.offset % alignment for info in read.tensors.values()] == [0, 0]
        assert (read.version, read.metadata["text"]) == (version, "a\ufffdb")


def test_lists_of_another_kind_are_refused(tmp_path: Path) -> None:
    read = read_gguf(small().write(tmp_path / "m.gguf"))
    for call, message in (
        (lambda: list(read.strings("list")), "list is not a list of strings"),
        (lambda: list(read.strings("general.architecture")), "the list general.architecture is missing"),
        (lambda: read.numbers("nothing"), "the list nothing is missing"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            call()


@pytest.mark.parametrize("seed", range(4))
def test_lists_of_strings_of_any_length_and_content(tmp_path: Path, seed: int) -> None:
    """Content that looks like lengths, and strings that pass the bytes whose lengths are guessed at once."""
    chance = random.Random(seed)
    pieces = [b"a", b"\0", bytes(7), b"\5" + bytes(7), b"\xff" + bytes(9), b"token", b"\xc4\xa0the", b"b" * 300]
    lengths = [1, 1, 2, 3, 5, *(0, 255, 256, 70_000)[: chance.randrange(5)]]

    def string() -> bytes:
        wanted = chance.choice(lengths)
        made = b"x" * wanted if chance.random() < 0.7 else chance.choice(pieces) * wanted
        return made[:wanted]

    items = [string() for _ in range(chance.choice([0, 1, 700, 6000]))]
    file = small()
    file.metadata |= {"strings": (ARRAY, (STRING, items)), "behind": (U32, 7)}
    read = read_gguf(file.write(tmp_path / "m.gguf"))
    assert (read.metadata["behind"], read.count("strings")) == (7, len(items))
    assert b"".join(read.field_parts("strings")) == struct.pack("<I", ARRAY) + pack(ARRAY, (STRING, items))
    assert list(read.raw_strings("strings")) == items
    assert set(read.tensors) == {"a.weight", "b.weight"}


# Files as we write them

VALUES = st.one_of(
    st.booleans(),
    st.text(max_size=40).filter(lambda text: "\0" not in text),
    st.lists(st.text(max_size=9).filter(lambda text: "\0" not in text), max_size=5),
    st.integers(0, 2**32 - 1).map(np.uint32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32, allow_nan=False).map(np.float32),
    hnp.arrays(st.sampled_from(["float32", "int32", "uint8"]), st.integers(0, 9), elements={"allow_nan": False}),
)


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
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
    found = gguf.GGUFReader(path).fields
    for name, value in fields.items():
        said = found[name].contents()
        assert list(said) == list(value) if isinstance(value, list | np.ndarray) else said == value


# Files that are no GGUF files


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.gguf") == refusal(tmp_path / "a" / "b") == "no such file"
    assert refusal(tmp_path) == "not a file"
    with pytest.raises(ModelFormatError, match="File name too long"):
        read_gguf(tmp_path / ("x" * 256))
    path = tmp_path / "m.gguf"
    for content, message in (
        (b"", "the file is empty"), (b"GGU", "not a GGUF file: only 3 bytes"),
        (b"GGUF\3\0\0\0" + bytes(15), "not a GGUF file: only 23 bytes"),
        (b"GGJT" + bytes(100), "it starts with b'GGJT'"), (b"FUGG" + bytes(100), "it starts with b'FUGG'"),
        (b"EDGEMDL1" + bytes(100), "a bundle's, which apps open"),
        (b"PK\3\4" + bytes(100), "it starts with b'PK\\x03\\x04'"),
        (b"\n\n\n\n" + bytes(100), r"it starts with b'\n\n\n\n'"),
    ):  # fmt: skip
        path.write_bytes(content)
        assert message in refusal(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "not a file"


# Damage


def with_version(version: int) -> bytes:
    return b"GGUF" + struct.pack("<I", version) + small().to_bytes()[8:]


def with_key(name: str | bytes, value: bytes) -> bytes:
    """A file whose only key has this raw value: its type, then its bytes."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(name) + value + bytes(64)


def with_list(item_kind: int, count: int) -> bytes:
    return with_key("key", struct.pack("<IIQ", ARRAY, item_kind, count))


def with_tensors(*infos: bytes, data: int = 1 << 12) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos)
    return head + bytes(-len(head) % 32 + data)


def with_tensor(shape: tuple[int, ...] = (8, 4), kind: int = 0, offset: int = 0, name: str | bytes = "a") -> bytes:
    return with_tensors(tensor_info(name, shape, kind, offset))


def with_alignment(kind: int, value: Any) -> bytes:
    file = small()
    file.metadata["general.alignment"] = (kind, value)
    return file.to_bytes()


def with_counts(tensors: int, keys: int) -> bytes:
    return small().header((tensors, keys)) + bytes(256)


HUGE = (1 << 63, (1 << 64) - 1, 1 << 40)
MATRIX = tensor_info("a", (8, 4), 0, 0)

DAMAGE: dict[str, tuple[bytes, str]] = {
    **{f"{count} tensors": (with_counts(count, 0), f"claims {count} tensors") for count in HUGE},
    **{f"{count} keys": (with_counts(0, count), f"claims {count} metadata keys") for count in HUGE},
    "a key too many": (small().header((2, 3)) + bytes(256), "the name of a tensor claims"),
    "a tensor too many": (small().header((3, 2)) + bytes(256), "cannot be the name of a tensor"),
    **{
        f"a string of {count} bytes": (with_key("key", struct.pack("<IQ", STRING, count)), f"claims {count} bytes")
        for count in HUGE
    },
    "a long key": (with_key("k" * 129, struct.pack("<IB", U8, 1)), "claims 129 bytes"),
    "a key of an unknown type": (with_key("key", struct.pack("<I", 13)), "'key' has the unknown type 13"),
    **{
        f"a list of {count} items of type {kind}": (with_list(kind, count), f"'key' claims {count}")
        for kind in (U8, U64, STRING)
        for count in HUGE
    },
    "a list of lists": (with_list(ARRAY, 1), "items of type 9"),
    "a list of an unknown type": (with_list(77, 1), "items of type 77"),
    "a list of long strings": (with_key("key", struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 40)),
                               "claims 1099511627776"),
    "the same key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("key") + struct.pack("<IB", U8, 1)) + bytes(64),
        "metadata key 'key' appears twice",
    ),
    "the same tensor twice": (with_tensors(MATRIX, tensor_info("a", (8, 4), 0, 128)), "tensor 'a' appears twice"),
    "a long tensor name": (with_tensor(name="n" * 64), "claims 64 bytes"),
    "five dimensions": (with_tensor((1, 1, 1, 1, 1)), "claims 5 dimensions"),
    "an extent of zero": (with_tensor((8, 0)), "impossible shape (8, 0)"),
    "a product that overflows to little": (with_tensor((1 << 32, 1 << 32)), "impossible shape"),
    "a large extent": (with_tensor((1 << 40,)), "the file is truncated: tensor 'a'"),
    "rows that are no whole blocks": (with_tensor((33, 4), 8),
                                      "rows of 33 values do not divide into Q8_0 blocks of 32"),
    "an offset that is not aligned": (with_tensor(offset=8), "tensor 'a' lies at 8, but 0 is next"),
    "a huge offset": (with_tensor(offset=1 << 63), "but 0 is next"),
    "tensors that overlap": (with_tensors(MATRIX, tensor_info("b", (8, 4), 0, 0)), "'b' lies at 0, but 128 is next"),
    "tensors with a gap": (with_tensors(MATRIX, tensor_info("b", (8, 4), 0, 192)), "'b' lies at 192, but 128 is next"),
    **{
        f"an alignment of {value}": (with_alignment(U32, value), "must be a power of two from 32")
        for value in (0, 1, 8, 16, 33, 48, 1 << 21)
    },
    "an alignment that is a text": (with_alignment(STRING, "x" * 10_000), "must be a power of two from 32"),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "version 1": (with_version(1), "GGUF version 1: edge reads versions 2 and 3"),
    "version 99": (with_version(99), "GGUF version 99"),
    "big-endian": (with_version(3 << 24), "big-endian"),
    "an unknown tensor type": (with_tensor(kind=99), "tensor 'a' has the unknown type 99"),
    "a tensor type that is gone": (with_tensor(kind=4), "tensor 'a' has the unknown type 4"),
    "a part of a split model": (with_key("split.count", struct.pack("<IH", U16, 3)), "split into 3 files"),
    "a split count that is a text": (with_key("split.count", struct.pack("<I", STRING) + text("\n")),
                                     "one part of a model split into files"),
}  # fmt: skip


@pytest.mark.parametrize(("refused", "error"), [(DAMAGE, ModelFormatError), (UNSUPPORTED, UnsupportedError)])
def test_damaged_gguf_files_are_refused(
    refused: dict[str, tuple[bytes, str]], error: type[EdgeError], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    for name, (content, message) in refused.items():
        path.write_bytes(content)
        assert message in refusal(path, error), name


def test_one_part_is_not_split(tmp_path: Path) -> None:
    file = small()
    file.metadata["split.count"] = (U16, 1)
    assert read_gguf(file.write(tmp_path / "m.gguf")).tensors


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole, path = small().to_bytes(), tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        message = refusal(path)
        assert "truncated" in message or length < 24


def test_file_that_shrinks_after_it_was_read(tmp_path: Path) -> None:
    path = small().write(tmp_path / "m.gguf")
    file = read_gguf(path)
    os.truncate(path, file.size - 1)
    with pytest.raises(ModelFormatError, match=r"tensor b\.weight ends before its 32 bytes"):
        file.tensor_bytes(file.tensors["b.weight"])


# Memory


def many_tensors() -> bytes:
    return with_tensors(
        *(tensor_info(f"{i:063}", (1, 1, 1, 1), 0, 32 * i) for i in range(MAX_COUNT)), data=32 * MAX_COUNT
    )


def long_texts() -> bytes:
    value = struct.pack("<I", STRING) + text("a" * ((1 << 20) - 4) + "\U0001f600")  # four bytes a character in Python
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 40) + b"".join(text(f"key{i}") + value for i in range(40))


def many_strings() -> bytes:
    lists = struct.pack("<IIQ", ARRAY, STRING, 1 << 21) + bytes(16 << 20)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text("a") + lists + text("b") + lists


def larger_than_any_header() -> bytes:
    lists = struct.pack("<IIQ", ARRAY, U64, 1 << 22) + bytes(32 << 20)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text("a") + lists + text("b") + lists


READ_IN_A_CHILD = """
import sys
from edge.devices.memory import memory_use
from edge.errors import EdgeError
from edge.formats.gguf import read_gguf
before = memory_use().peak
try:
    read_gguf(sys.argv[1])
    print(memory_use().peak - before, "read")
except EdgeError as error:
    print(memory_use().peak - before, error)
"""


@pytest.mark.parametrize(("content", "outcome"), [
    (many_tensors, "read"), (long_texts, "more than 4 MiB of names and texts"), (many_strings, "read"),
    (larger_than_any_header, f"larger than {MAX_HEADER >> 20} MiB"), (lambda: with_counts(1 << 63, 0), "claims"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_header_memory_is_bounded(tmp_path: Path, content: Callable[[], bytes], outcome: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content())
    child = subprocess.run(
        [sys.executable, "-c", READ_IN_A_CHILD, str(path)], capture_output=True, text=True, check=True, timeout=240
    )
    peak, _, said = child.stdout.partition(" ")
    assert outcome in said
    assert int(peak) < 64 << 20


# Fuzzing

HEADER = read_gguf(TIED).data_offset
PLACES = st.integers(0, HEADER - 1)
NUMBERS = st.sampled_from([0, 1, 2, 3, 8, 9, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63])
Mutation = tuple[str, int, Any]
MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("write"), PLACES, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("remove"), PLACES, st.integers(1, 40)),
    st.tuples(st.just("number"), PLACES, NUMBERS),
    st.tuples(st.just("copy"), PLACES, st.tuples(PLACES, st.integers(1, 60))),
    st.tuples(st.just("truncate"), PLACES, st.none()),
)


def mutate(data: bytes, mutations: list[Mutation]) -> bytes:
    """Damage the header of a file."""
    whole = bytearray(data)
    for what, place, how in mutations:
        place = min(place, len(whole) - 1)
        if what == "flip":
            whole[place] ^= 1 << how
        elif what == "write":
            whole[place : place + len(how)] = how
        elif what == "insert":
            whole[place:place] = how
        elif what == "remove" and len(whole) > 100:
            del whole[place : place + how]
        elif what == "number":
            whole[place : place + 8] = struct.pack("<Q", how)
        elif what == "copy":
            whole[place : place + how[1]] = whole[how[0] : how[0] + how[1]]
        elif what == "truncate":
            del whole[max(place, 1) :]
    return bytes(whole)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    yield path
    path.unlink(missing_ok=True)


@settings(max_examples=examples(100), derandomize=True, database=None)
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=4))
def test_damaged_models_are_refused_or_opened(scratch: Path, mutations: list[Mutation]) -> None:
    """Soon: within two seconds of CPU time."""
    scratch.write_bytes(mutate(TIED.read_bytes(), mutations))
    started = time.thread_time()
    try:
        model = Model(read_gguf(scratch))
    except EdgeError as error:
        message = str(error)
    else:
        assert model.tokenizer.encode("the end").size <= 7
        return
    finally:
        assert time.thread_time() - started < 2
    assert message.startswith(f"{scratch}: ")
    assert message.isprintable()
    assert len(message) < len(str(scratch)) + 600
