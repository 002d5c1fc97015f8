"""Files that engines map: images of compiled passes, of which a header that leads outside is refused before anything is
copied or run; packed weights, whose floats are rounded as the gguf package does; and files that are cut short."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import GOLDEN, run_child
from hypothesis import given
from hypothesis import strategies as st

from edge.backends.tvm.cpu.elf import MAGIC, MOST_BYTES, PAGE, Image, parse
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import pack_weights
from edge.devices.regular import read_regular
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.model.reader import read_spec
from edge.model.structure.rounding import in_q8_0, is_rounded
from edge.types import AnyArray

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
    for read in (Image, lambda path: read_regular(path, MOST_BYTES)):  # a budget has no room for the largest image
        tracemalloc.start()
        read(tmp_path / "pass.img")
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES // 16
        tracemalloc.stop()


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


def test_unfit_images_are_not_loaded(tmp_path: Path) -> None:
    lacking, good = ({"entries": {"run": 0}, "imports": each} for each in ({"no_such_function": 0}, {}))
    with pytest.raises(EngineError, match="calls 'no_such_function', which this system does not have"):
        Image(written(tmp_path, image(lacking)))
    path = written(tmp_path, image(good))
    path.chmod(0o666)
    with pytest.raises(EngineError, match=r"other users may write to it \(mode 0666\)"):
        Image(path)
    path.chmod(0o600)
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(EngineError, match="too long"):
        Image(path)


def test_packed_floats_are_those_of_a_q8_0_file(tmp_path: Path) -> None:
    plain = read_gguf(GOLDEN / "llama-gqa-tied.gguf")
    quantized = written_in_q8_0(plain, tmp_path / "q8_0.gguf")
    rounded, spec = in_q8_0(plain, read_spec(plain)), read_spec(quantized)
    assert (rounded.type_bytes, rounded.weight_bytes) == (spec.type_bytes, spec.weight_bytes)
    packed = []
    for file, each in ((plain, rounded), (quantized, spec)):
        pack_weights(file, make_layout(file, each), tmp_path / "packed")
        packed.append((tmp_path / "packed").read_bytes())
    assert packed[0] == packed[1]


def written_in_q8_0(file: GGUFFile, target: Path) -> GGUFFile:
    def data(info: TensorInfo) -> AnyArray:
        stored = file.tensor_bytes(info)
        if not is_rounded(info):
            return stored
        values = stored.view({"F32": np.float32, "F16": np.float16}[info.type]).reshape(-1, info.shape[0])
        return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)

    tensors = list(file.tensors.values())
    planned = [
        replace(each, type="Q8_0") if is_rounded(info) else each
        for each, info in zip(planned_as(tensors), tensors, strict=True)
    ]
    write_gguf(target, fields_of(file), planned, map(data, tensors))
    return read_gguf(target)


# Files that are cut short while an engine has mapped them: an error, not the end of the process (SIGBUS)
CODE = """
import json, os, shutil, sys
import edge
from edge.errors import EngineError
path, backend = sys.argv[1:]
cut = path
if backend == "onnx":  # converted weights, in a cache folder of its own
    os.environ["EDGE_CACHE"] = os.path.dirname(path)
if backend == "cpu":  # its own copy of the packed weights
    from edge.backends.tvm.packing import weights
    cut = path + ".bin"
    mapped = lambda source, mode: source.suffix == ".bin" and mode == "rb"
    weights.open = lambda source, mode: open(shutil.copy(source, cut) if mapped(source, mode) else source, mode)
said = []
with edge.load(path, backend=backend, max_kv_size=64, threads=1) as session:
    session.generate("x", raw=True, max_tokens=2, ignore_eos=True)
    if backend == "onnx":
        cut, *_ = (line.split()[-1] for line in open("/proc/self/maps") if ".onnx.data" in line)
    os.truncate(cut, 0)
    for again in range(2):
        try:
            session.generate("x", raw=True, max_tokens=2, ignore_eos=True)
        except EngineError as error:
            said.append(str(error))
print(json.dumps([cut, said]))
"""


@pytest.mark.parametrize("backend", ["cpu", "llamacpp", "onnx"])
def test_file_that_is_cut_short_is_an_error(backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"cpu": "tvm_ffi", "llamacpp": "llama_cpp", "onnx": "onnxruntime"}[backend])
    path = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "llama-gqa-tied.gguf", path)
    child = run_child(CODE, path, backend)
    assert child.status == 0, child.errors
    cut, said = child.output
    name = "a file of packed weights in the cache folder" if backend == "cpu" else cut
    assert said == [f"{name} was cut short while it was in use: restore it, and load the model again"] * 2
