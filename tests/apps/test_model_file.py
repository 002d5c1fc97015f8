"""model.edge: what Python writes is what C reads, and a damaged file is an error."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from ctypes_bundle import _Error, _Source
from runtime_library import PLATFORM, load_runtime

from edge.apps.sections import model_file as m
from edge.apps.sections.model_file import Section
from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import pack_weights
from edge.backends.tvm.targets import TARGETS
from edge.devices.profiles.profile import Power
from edge.errors import UnsupportedError
from edge.kv import make_policy
from edge.model.model import open_model


def write_golden(path: Path, name: str = "llama-one-layer", policy: str = "streaming") -> dict[Section, bytes]:
    """A file without a tokenizer. Returns its sections."""
    model = open_model(GOLDEN / f"{name}.gguf")
    layout = make_layout(model.file, model.spec)
    config, rule = EngineConfig(64, 16, "f16", 2, observes=policy == "h2o"), make_policy(policy)
    targets = [target for target in TARGETS if target.machine == "x86_64"]
    sections = {
        Section.CONFIG: m.config_section(
            model, layout, config, rule, 8, chat=False, sampling=model.sampling(), power=Power(2.0, 1.0, 20.0),
            kv_bytes=1, scratch_bytes=2, peak=3,
        ),
        Section.LAYERS: m.layers_section(model, layout, "f16"),
        Section.DESIGNS: m.designs_section(model, layout, config, targets),
        Section.ANGLES: m.angles_section(model, layout, config),
        Section.STRINGS: m.strings_section(model.spec.name, "", policy, "f16"),
    }  # fmt: skip
    m.write_model(path, sections, bytes(range(32)), model.file, layout)
    packed = path.with_name("packed")
    pack_weights(model.file, layout, packed)
    return sections | {Section.WEIGHTS: packed.read_bytes()}


def test_tables_that_c_does_not_read_are_refused() -> None:
    model, name = open_model(GOLDEN / "gemma4.gguf"), "per_layer_token_embd.weight"
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


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize(
    "name", ["llama-one-layer", "gemma3", "phi3-longrope", "gpt2", "mistral3", "qwen35", "gpt-oss", "gemma4"]
)
def test_files_of_all_kinds_of_models_open(name: str, policy: str, tmp_path: Path) -> None:
    path = tmp_path / "model.edge"
    sections = write_golden(path, name, policy)
    assert open_in_c(path) == ""
    data = path.read_bytes()
    at = np.frombuffer(data, m.ENTRY, len(sections), m.HEADER.itemsize)
    for entry in at:
        start = int(entry["offset"])
        assert data[start : start + int(entry["size"])] == sections[Section(int(entry["kind"]))]


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


@pytest.mark.parametrize(("field", "value"), [
    ("layers", 0), ("layers", 3), ("kv_heads", 0), ("heads", 1 << 31), ("head", 17), ("padded_vocab", 1 << 30),
    ("capacity", 0), ("capacity", 1 << 31), ("chunk", 65), ("threads", 0), ("threads", 1 << 20), ("evict_step", 65),
    ("pinned", 64), ("sinks", 5), ("policy", 4), ("kv_dtype", 4), ("kv_dtype", 3), ("whole", 2), ("ring_rows", 8),
    ("rope_kinds", 0), ("rope_kinds", 2), ("long_from", 9), ("tempered", 1), ("temperature", float("nan")),
    ("top_p", float("inf")), ("core_watts", -1.0), ("policy", 3),
    ("whole", 0), ("states", 1 << 33), ("shapes", (2, 48, 32)), ("shapes", (0, 32, 32)), ("shapes", (2, 0, 0)),
    ("shapes", (2, 32, 17)), ("shapes", [(2, 32, 32), (2, 32, 0)]),
    ("layer_inputs", 16), ("table_type", 1), ("weights", 64), ("gpu_weights", 64),
])  # fmt: skip
def test_impossible_settings_are_errors_though_the_checksum_is_right(field: str, value: object, made: Path) -> None:
    data = bytearray(made.read_bytes())
    set_field(data, Section.CONFIG, m.CONFIG, field, value)
    damaged = made.with_name("damaged")
    damaged.write_bytes(data)
    assert "damaged" in open_in_c(damaged)


@pytest.mark.parametrize("fields", [{"rowless": 0}, {"rowless": 2}, {"ringed": 1}, {"ringed": 2**32 - 1, "rowless": 2}])
def test_layers_that_contradict_the_settings_are_errors(fields: dict[str, int], tmp_path: Path) -> None:
    """The first layer is a gated delta net, which keeps no rows."""
    write_golden(tmp_path / "model.edge", "qwen35")
    data = bytearray((tmp_path / "model.edge").read_bytes())
    for field, value in fields.items():
        set_field(data, Section.LAYERS, m.LAYER, field, value)
    (tmp_path / "model.edge").write_bytes(data)
    assert "damaged (its layers)" in open_in_c(tmp_path / "model.edge")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model.edge"
    write_golden(path)
    assert open_in_c(path) == ""
    return path


@pytest.mark.parametrize(("damage", "says"), [
    (lambda data: b"", "is empty: copy it again"),
    (lambda data: b"GGUF" + data[4:], "not a model.edge"),
    (lambda data: data[:-1], "copy it again"),
    (lambda data: data + b"x", "copy it again"),
    (lambda data: data[:8] + b"\1" + data[9:], "version 1, this library reads 12: export both together"),
    (lambda data: data[:12] + b"\xff" + data[13:], "damaged (its table of sections)"),
    (lambda data: data[:400] + b"\xff" + data[401:], "damaged (a checksum)"),
])  # fmt: skip
def test_damage_is_one_line(damage: Callable[[bytes], bytes], says: str, made: Path) -> None:
    damaged = made.with_name("damaged")
    damaged.write_bytes(damage(made.read_bytes()))
    said = open_in_c(damaged)
    assert says in said
    assert "\n" not in said


def test_embedded_file_needs_aligned_sections(made: Path) -> None:
    within = made.with_name("within")
    for offset in (1, 4, 32, 64, 4096):
        within.write_bytes(bytes(offset) + made.read_bytes())
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
