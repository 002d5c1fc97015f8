"""The package edge-kernels: what `edge compile --catalog` makes, and devices without a compiler that run it."""

from __future__ import annotations

import json
import lzma
import os
import re
import runpy
import struct
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import examples, exhaustive, run_child
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import CONTEXT, Small, write_small
from test_cli import edge
from test_compile import WITHOUT_TVM

from edge.backends.tuning import model_shape
from edge.backends.tvm.compiler import catalog, package
from edge.backends.tvm.compiler.catalog import KV_DTYPES, compile_catalog
from edge.backends.tvm.compiler.compiled import compile_design, missing, nothing_to_run, package_key
from edge.backends.tvm.compiler.volume import read_volume, volume_keys, write_volume
from edge.backends.tvm.cpu.elf import parse
from edge.backends.tvm.cpu.linker import Piece, Relocation, Section, join
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.targets import choose_target, target_named
from edge.devices.output import work_folder
from edge.errors import EngineError, MissingExtraError
from edge.model.model import open_model
from edge.model.names.catalog import find_model
from edge.model.names.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.storage.versions import edge_version

SMALL = Small(layers=2, types={"": "Q4_0", "token_embd": "Q8_0"})
FIGURES = {
    "block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "context_length": CONTEXT, "vocab_size": 272,
    "attention": {"head_count": 4, "head_count_kv": 2},
}  # fmt: skip
KNOWN = KnownModel("tiny:1", "a/b", "none", 1, "here", "llama", FIGURES, types=("Q4_0",), epsilon=1e-5)
WINGS = ("backends/", "converters/", "devices/")  # folders that install as parts of `edge`
EPSILON = {"tiny:2": replace(KNOWN, name="tiny:2", epsilon=None)}


def compile_small(folder: Path) -> tuple[catalog.Made, list[str]]:
    """The package of one model for this CPU, and the new files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "known_models", lambda: {KNOWN.name: KNOWN} | EPSILON)
        new = list[str]()
        made = compile_catalog(folder, isas=[choose_target().name], finished=lambda path: new.append(path.name))
    return made, new


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_small(folder)
    return folder


@pytest.fixture
def seen(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a copy of the package, which this process finds."""
    folder = tmp_path / package.PACKAGE
    folder.mkdir()
    for path in (made / package.PACKAGE).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    package.installed.cache_clear()
    yield folder
    package.installed.cache_clear()


def small_design(path: Path, kv_dtype: str = "f16") -> Design:
    model = open_model(write_small(path, SMALL))
    design = Design.of(make_layout(model.file, model.spec, halve=True), kv_dtype, choose_target())
    return replace(design, batches=[design.most_tokens])


@pytest.mark.slow
def test_package_is_resumed_and_has_equal_bytes(made: Path) -> None:
    (made / package.PACKAGE / "old.xz").write_text("of another version")
    (wheel,) = made.glob("*.whl")
    before = wheel.read_bytes()
    again, new = compile_small(made)
    assert (new, again.wheel.read_bytes() == before) == ([], True)
    assert again.left_out == {"tiny:2": "the table of models does not have the epsilon of its norms"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert len([name for name in names if name.endswith(".xz")]) == 1
        assert b"Requires-Dist: edge-runtime==" in archive.read(next(each for each in names if "METADATA" in each))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_image_from_pieces_equals_a_compiled_one(seen: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Those of int8 rows have the products of f16's, which were compiled once."""
    design = small_design(tmp_path / "m.gguf", kv_dtype)
    compile_design(design, tmp_path / "run.img")
    assert package.packaged_image(package_key(design)) == (tmp_path / "run.img").read_bytes()


@pytest.mark.slow
def test_package_replaces_the_compiler(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts or without them, as the budget says; other models are refused in one line."""
    model = write_small(tmp_path / "m.gguf", SMALL)

    def run(*more: str) -> Any:
        return run_child(WITHOUT_TVM, "run", model, "-p", "Hi", "-n", "5", "--raw", "--backend", "cpu", *more)

    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    before = run()
    assert (before.output, "edge-runtime[kernels] has known ones" in before.errors) == (2, True)
    monkeypatch.setattr(sys, "path", [str(made), *sys.path])
    assert run().output == 0
    assert run("--speculate=off").output == 0
    refused = run("--kv-dtype", "int4", "--kv-policy", "full")
    assert (refused.output, refused.errors.count("\n")) == (2, 1)
    assert "(2 layers, int4 KV, " in refused.errors
    assert "here edge cache add DIR" in refused.errors


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["volume", "index", "source", "elsewhere"])
def test_damaged_or_foreign_package_is_refused(seen: Path, tmp_path: Path, damage: str) -> None:
    design, index = small_design(tmp_path / "m.gguf"), json.loads((seen / package.INDEX).read_text())
    (name,) = index["volumes"]
    if damage == "volume":
        data = bytearray((seen / name).read_bytes())
        data[len(data) // 2] ^= 1
        (seen / name).write_bytes(data)
        with pytest.raises(EngineError, match=r"does not match index.json\): install edge-kernels again"):
            package.packaged_image(package_key(design))
        return
    if damage == "source":
        (seen / package.INDEX).write_text(json.dumps(index | {"source": "0"}))
        assert not package.holds(package_key(design))
        for error in (missing(design), nothing_to_run()):
            assert "(edge-kernels is of another version of edge)" in str(error)
        return
    text = "[]" if damage == "index" else json.dumps(index).replace(name, "../volume")
    (seen / package.INDEX).write_text(text)
    with pytest.raises(EngineError, match=r"index.json is damaged"):
        package.holds(package_key(design))


def requirements(name: str, found: set[str]) -> set[str]:
    """The installed distributions that one needs, without its extras."""
    for line in metadata.requires(name) or []:
        each = re.split(r"[^\w.-]", line)[0]
        if "extra ==" not in line and each not in found:
            with suppress(metadata.PackageNotFoundError):  # of other systems
                metadata.distribution(each)
                found.add(each)
                requirements(each, found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("builds", [1, exhaustive(2)])
def test_dist_is_reproducible_and_installs_without_a_compiler(made: Path, tmp_path: Path, builds: int) -> None:
    """In an environment that has what edge-runtime requires, and nothing else."""
    pytest.importorskip("setuptools", minversion="77")
    dist = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "dist.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_DIST_ISOLATED", "0")  # no network
        one, *others = (sorted(dist["build_all"](tmp_path / str(build))) for build in range(builds))
    for other in others:
        assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    names = [path.name.replace(edge_version(), "V") for path in one]
    assert names == [
        "SHA256SUMS", "edge-runtime.rb", "edge-web-V.tgz", "edge_runtime-V-py3-none-any.whl", "edge_runtime-V.tar.gz",
    ]  # fmt: skip
    with tarfile.open(one[-1]) as source, zipfile.ZipFile(one[-2]) as wheel:
        files = [name.partition("/")[2] for name in source.getnames()]
        moved = [f"edge/{name}" if name.startswith(WINGS) else name for name in files]
        assert {name for name in moved if name.startswith("edge/")} - set(wheel.namelist()) == set()

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-compile"]  # of the files that nothing imports
    wheels = [str(next(path for path in one if path.suffix == ".whl")), *map(str, made.glob("*.whl"))]
    subprocess.run([*pip, "--no-deps", "--no-index", *wheels], check=True)
    for name in requirements("edge-runtime", set()):
        for path in metadata.files(name) or []:
            top = path.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(path.locate())).parents[len(path.parts) - 1] / top)

    model = write_small(tmp_path / "m.gguf", SMALL)
    command = [str(tmp_path / "venv" / "bin" / "edge"), "run", str(model), "-p", "Hi", "-n", "5", "--raw", "-q"]
    environment = {**os.environ, "EDGE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == edge("run", str(model), "-p", "Hi", "-n", "5", "--raw", "-q", "--backend", "cpu").stdout
    asked = "import importlib.util, edge; print(importlib.util.find_spec('tvm'), edge.__file__)"
    said = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert said.stdout == f"None {site / 'edge' / '__init__.py'}\n"


PIECES = [
    Piece("x64", (Section(16, b"\xe8" + bytes(15)), Section(4, b"abcd")), (("__tvm_ffi_run", 0, 0),), relocations)
    for relocations in ((Relocation(4, 0, 1, "doze", -1, 0, -4),), (Relocation(4, 0, 1, "", 1, 0, -4),))
]
VOLUME = write_volume({"aa": PIECES, "bb": PIECES[:1]})
VALUES = st.one_of(
    st.integers(-(1 << 70), 1 << 70), st.none(), st.text(max_size=3), st.lists(st.integers(-2, 9), max_size=3)
)


@settings(max_examples=examples(100))
@given(st.data())
def test_volume_with_other_values_is_refused_or_stays_within(data: st.DataObject) -> None:
    """Anyone can make a volume whose checksums are right: no value of its header leads outside of its bytes."""
    content = lzma.decompress(VOLUME)
    (length,) = struct.unpack_from("<I", content)
    header = json.loads(content[4 : 4 + length])
    place: Any = header
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 4)) == 0:
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    text = json.dumps(header).encode()
    volume = lzma.compress(struct.pack("<I", len(text)) + text + content[4 + length :])
    try:
        image = join(read_volume(volume, "aa"))
    except (ValueError, KeyError):
        return
    assert parse(image)
    assert len(image) < 1 << 20


def test_volume_holds_each_piece_once() -> None:
    content = lzma.decompress(VOLUME)
    assert (volume_keys(VOLUME), content.count(b"abcd")) == (["aa", "bb"], 2)
    assert [read_volume(VOLUME, key) for key in ("aa", "bb")] == [PIECES, PIECES[:1]]
    with pytest.raises(KeyError):
        read_volume(VOLUME, "cc")
    for at in range(len(VOLUME)):  # any damage is noticed
        for damaged in (VOLUME[:at], VOLUME[:at] + bytes([VOLUME[at] ^ 1]) + VOLUME[at + 1 :]):
            with pytest.raises(ValueError, match=r"."):
                read_volume(damaged, "aa")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    for name, value, says in (("models", "x", "is no model of the"), ("targets", "x", "is no instruction set of the")):
        done = edge("compile", "--catalog", "-o", str(tmp_path / "out"), f"--{name}", value)
        assert (done.returncode, says in done.stderr, (tmp_path / "out").exists()) == (2, True, False)
    (tmp_path / "other.txt").write_text("mine")
    done = edge("compile", "--catalog", "-o", str(tmp_path), "--models", "smollm2:135m", "--targets", "none")
    assert (done.returncode, f"{tmp_path} holds other files: --force" in done.stderr) == (2, True)
    for args in ((), ("--models", "smollm2:135m"), (str(tmp_path), "--catalog")):
        done = edge("compile", "-o", str(tmp_path / "out"), *args)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


# The package's designs are found for files that others published.


@pytest.mark.parametrize(
    ("name", "known", "mixture"),
    [("smollm2-135m", "smollm2:135m", "Q4_1"), exhaustive("gemma3-270m", "gemma3:270m", "Q4_K_M")],
)
def test_catalogue_has_the_designs_of_published_files(name: str, known: str, mixture: str) -> None:
    try:
        real = open_model(find_model(name))
    except MissingExtraError as error:
        pytest.skip(str(error))
    with work_folder() as folder:
        outline = outline_model(known_models()[known], mixture, folder / "outline.gguf")
        spec = read_spec(outline)
        layouts = [make_layout(real.file, real.spec, halve=True), make_layout(outline, spec, halve=True)]
        for kv_dtype in KV_DTYPES:
            designs = [Design.of(layout, kv_dtype, target_named("avx2", "")) for layout in layouts]
            assert designs[0].to_json() == designs[1].to_json()
    assert model_shape(real.spec) == model_shape(spec)
