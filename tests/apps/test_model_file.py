"""model.edge: what Python writes is what C reads, and a damaged file is an error.

python tests/program.py model_file 1000000 [SEED]     # opens so many damaged files
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, bundle_sources, model_of
from ctypes_bundle import _Error, _Source
from runtime_library import CHECKED, PLATFORM, build, load_runtime, said_by
from test_assistant import pair  # noqa: F401
from test_draft_model import LARGE, OTHER
from test_eagle import head  # noqa: F401
from test_mtp_drafts import MODEL as PREDICTS

from edge.apps.sections import model_file as m
from edge.apps.sections.model_file import Section
from edge.backends.tvm.packing.layout import make_layout
from edge.errors import UnsupportedError

OPENING = (
    "error.c", "model.c", "open.c", "trust.c", "hash.c", "chat.c", "vocabulary.c", "tokenizer.c", "words.c",
    "letters.c", "utf8.c", "cpu.c", "posix.c", "linux.c",
)  # fmt: skip
# Byte-level words with a chat template, SentencePiece, a fixed state, a table that is not in memory.
MODELS = ("llama-gqa-tied", "spm", "qwen35", "gemma4")
ROWS = {"prefill_step_size": 16, "threads": 2}


def test_tables_that_c_does_not_read_are_refused() -> None:
    model, name = model_of("gemma4"), "per_layer_token_embd.weight"
    other = replace(model.file.tensors[name], type="IQ4_NL")
    file = replace(model.file, tensors=model.file.tensors | {name: other})
    with pytest.raises(UnsupportedError, match=f"{name} is IQ4_NL, and apps read F32, F16, "):
        m.find_table(file, make_layout(model.file, model.spec))


def open_in_c(path: Path, offset: int = 0) -> str:
    """What model_map says of a file, or of its part behind `offset`; nothing if it is fine."""
    library = load_runtime("error.c", "model.c", *PLATFORM, "cpu.c")
    source, error = _Source(str(path).encode(), -1, offset), _Error()
    opened = ctypes.create_string_buffer(4096)
    status = library.model_map(ctypes.byref(source), opened, ctypes.byref(error))
    assert status == error.code
    if status == 0:
        library.unmap_file(opened)  # an edge_model begins with its mapping
    return error.message.decode()


def set_field(data: bytearray, section: Section, struct: Any, field: str, value: object) -> None:
    """Another value in a section, with its checksum repaired."""
    entries = np.frombuffer(data, m.ENTRY, len(Section), m.HEADER.itemsize).copy()
    index = [int(each) for each in entries["kind"]].index(section)
    start, size = int(entries[index]["offset"]), int(entries[index]["size"])
    row = np.frombuffer(data, struct, 1, start).copy()
    row[field] = value
    data[start : start + struct.itemsize] = row.tobytes()
    place = m.HEADER.itemsize + index * m.ENTRY.itemsize + m.ENTRY.fields["crc"][1]
    data[place : place + 4] = zlib.crc32(data[start : start + size]).to_bytes(4, "little")


@pytest.fixture(scope="module")
def data() -> bytes:
    return (bundle_of(MODELS[0], max_kv_size=64, kv_policy="streaming", **ROWS) / m.MODEL).read_bytes()


@pytest.mark.parametrize(("field", "value"), [
    ("layers", 0), ("layers", 3), ("kv_heads", 0), ("heads", 1 << 31), ("head", 17), ("padded_vocab", 1 << 30),
    ("capacity", 0), ("capacity", 1 << 31), ("chunk", 65), ("threads", 0), ("threads", 1 << 20), ("evict_step", 65),
    ("pinned", 64), ("sinks", 64), ("policy", 4), ("kv_dtype", 4), ("kv_dtype", 3), ("whole", 3), ("ring_rows", 8),
    ("rope_kinds", 0), ("rope_kinds", 2), ("long_from", 9), ("tempered", 1), ("temperature", float("nan")),
    ("top_p", float("inf")), ("core_watts", -1.0), ("policy", 3),
    ("whole", 0), ("states", 1 << 33), ("shapes", (2, 48, 32)), ("shapes", (0, 32, 32)), ("shapes", (2, 0, 0)),
    ("shapes", (2, 32, 17)), ("shapes", [(2, 32, 32), (2, 32, 0)]),
    ("layer_inputs", 16), ("table_type", 1), ("weights", 64), ("gpu_weights", 64),
])  # fmt: skip
def test_impossible_settings_are_errors_though_the_checksum_is_right(
    field: str, value: object, data: bytes, tmp_path: Path
) -> None:
    changed = bytearray(data)
    set_field(changed, Section.CONFIG, m.CONFIG, field, value)
    (tmp_path / "damaged").write_bytes(changed)
    assert "damaged" in open_in_c(tmp_path / "damaged")


@pytest.mark.parametrize("fields", [{"rowless": 0}, {"rowless": 2}, {"ringed": 1}, {"ringed": 2**32 - 1, "rowless": 2}])
def test_layers_that_contradict_the_settings_are_errors(fields: dict[str, int], tmp_path: Path) -> None:
    """The first layer is a gated delta net, which keeps no rows."""
    changed = bytearray((bundle_of("qwen35", max_kv_size=128, kv_policy="h2o", **ROWS) / m.MODEL).read_bytes())
    for field, value in fields.items():
        set_field(changed, Section.LAYERS, m.LAYER, field, value)
    (tmp_path / "damaged").write_bytes(changed)
    assert "damaged (its layers)" in open_in_c(tmp_path / "damaged")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(("damage", "says"), [
    (lambda data: b"", "is empty: copy it again"),
    (lambda data: b"GGUF" + data[4:], "not a model.edge"),
    (lambda data: data[:-1], "copy it again"),
    (lambda data: data + b"x", "copy it again"),
    (lambda data: data[:8] + b"\1" + data[9:], "version 1, this library reads 12: export both together"),
    (lambda data: flipped(data, 12), "damaged (its table of sections)"),
    (lambda data: flipped(data, np.frombuffer(data, m.ENTRY, 1, m.HEADER.itemsize)["offset"][0]), "(a checksum)"),
])  # fmt: skip
def test_damage_is_one_line(damage: Callable[[bytes], bytes], says: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / m.MODEL).write_bytes(damage(data))
    said = open_in_c(tmp_path / m.MODEL)
    assert says in said
    assert "\n" not in said


def test_embedded_file_needs_aligned_sections(data: bytes, tmp_path: Path) -> None:
    within = tmp_path / "within"
    for offset in (1, 4, 32, 64, 4096):
        within.write_bytes(bytes(offset) + data)
        assert ("at no multiple of 64 bytes" in open_in_c(within, offset)) == (offset % 64 > 0)
    assert "not a model.edge" in open_in_c(within, 64)


def test_hashes_are_sha256() -> None:
    library, random = load_runtime("hash.c"), Random(0)
    for length in (*range(130), 1000, 4096):
        data, cut = random.randbytes(length), random.randint(0, length)
        hasher, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        library.hash_start(hasher)
        for part in (data[:cut], data[cut:]):
            library.hash_add(hasher, part, ctypes.c_uint64(len(part)))
        library.hash_end(hasher, digest)
        assert digest.raw == hashlib.sha256(data).digest(), length


def fuzz(name: str, count: int, seed: int, *, sessions: bool, **options: str) -> tuple[int, int]:
    """How many of `count` damaged files opened. sessions: some of these answer, too; an assistant drafts always."""
    if sessions:
        sources = ("model_fuzz.c", *(("eager_model.c",) if options else ()))
        model, program = build_with(sources, name, *CHECKED, "-DWITH_SESSIONS", max_kv_size=64, **options)
    else:
        model, parts = bundle_sources(name, max_kv_size=64)
        trusted = [path for path in parts if path.name == "trusted.c"]
        flags = (*CHECKED, "-Wl,--defsym=edge_json_calls=0")  # which answers call
        program = build([*OPENING, "model_fuzz.c", *trusted], flags)
    found = re.fullmatch(r"(\d+) of (\d+)\n", said_by(program, model, count, seed))
    assert found
    return int(found[1]), int(found[2])


def test_damaged_files_are_errors() -> None:
    """Of one line, never an access outside the file."""
    opened, count = fuzz(MODELS[0], 3000, 1, sessions=False)
    assert count == 3000
    assert 300 < opened < 2700  # many are refused, and many checksums were repaired


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_damaged_files_are_errors_in_sessions_too(name: str) -> None:
    opened, count = fuzz(name, 50_000, 2, sessions=True)
    assert count == 50_000
    assert 0.1 * count < opened < 0.9 * count


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["assistant", "layer", "head", "model"])
def test_damaged_drafts_are_errors(by: str, pair: tuple[Path, Path], head: Path) -> None:  # noqa: F811
    """Bytes of the file inside model.edge that drafts are damaged, and bytes around it."""
    model, count, options = {
        "assistant": (pair[0], 50_000, {"draft": str(pair[1])}), "layer": (PREDICTS, 6000, {"kv_policy": "streaming"}),
        "head": (PREDICTS, 6000, {"draft": str(head)}), "model": (LARGE, 6000, {"draft": str(OTHER)}),
    }[by]  # fmt: skip
    opened, _ = fuzz(str(model), count, 3, sessions=True, **options)
    assert 0.1 * count < opened < 0.9 * count


if __name__ == "__main__":
    wanted, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for each in MODELS:
        print(each, *fuzz(each, wanted // len(MODELS), first, sessions=True))
