"""`edge convert` as a user meets it: formats, methods, what stays where it fails."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, all_logits, open_golden
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.backends.calibration_text import TEXT as RANGES
from edge.converters import convert as c
from edge.converters.calibrate import OWN_TEXT
from edge.converters.convert import Conversion, convert, preview
from edge.converters.gguf.quantize import Settings
from edge.converters.held_out import TEXT as JUDGED
from edge.converters.onnx.npu import NpuTarget
from edge.converters.pruning.prune import Pruning
from edge.errors import InputError, MissingExtraError
from edge.model.model import open_model
from edge.types import FloatArray

pytest.importorskip("onnx")

SOURCE = GOLDEN / "llama-gqa-untied.gguf"
TEXT = (Path(__file__).parents[2] / "docs" / "kv-cache.md").read_text(encoding="utf-8")

FORMATS = [
    pytest.param(to, marks=pytest.mark.skipif(to == "coreml" and not find_spec("coremltools"), reason="no coremltools"))
    for to in c.FORMATS
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text" / "text.txt"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    return path


def logits(path: Path, engine: str = "reference") -> FloatArray:
    return all_logits(open_model(path), open_golden("llama-gqa-untied").tokens[:32], engine, capacity=32)


def test_conversion_through_all_formats_is_lossless(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "folder", Conversion("hf"))
    convert(tmp_path / "folder", tmp_path / "again.gguf", Conversion("gguf"))
    convert(tmp_path / "folder", tmp_path / "onnx", Conversion("onnx"))
    convert(tmp_path / "again.gguf", tmp_path / "third.gguf", Conversion("gguf"))
    first, again = open_model(SOURCE), open_model(tmp_path / "third.gguf")
    assert {name: info.shape for name, info in again.file.tensors.items()} == {
        name: info.shape for name, info in first.file.tensors.items()
    }
    for name, info in again.file.tensors.items():
        np.testing.assert_array_equal(again.file.tensor_bytes(info), first.file.tensor_bytes(first.file.tensors[name]))
    np.testing.assert_allclose(logits(tmp_path / "onnx", "onnx"), logits(SOURCE), atol=1e-3)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("arguments", [
    ("--type", "iq4_nl", "--method", "hqq"), ("--type", "q4_1", "--group-size", "96"),
    ("--type", "q4_0", "--calibration"), ("--target-size", "150KiB"),
], ids=" ".join)  # fmt: skip
def test_quantized_files_run_everywhere(tmp_path: Path, text: Path, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("llama_cpp")
    target = tmp_path / "small.gguf"
    given = [*arguments, str(text)] if "--calibration" in arguments else [*arguments]
    said = edge_json("convert", str(SOURCE), str(target), *given, "--calibration-tokens", "512", "--json")
    assert said["files"] == {"small.gguf": target.stat().st_size}
    assert said["peak"] > 0
    ours, theirs, exact = logits(target), logits(target, "llamacpp"), logits(SOURCE)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.998  # llama.cpp rounds activations
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.85


def test_quantize_and_convert_meet_size_alike(tmp_path: Path, text: Path) -> None:
    given = ["--target-size", "140KiB", "--calibration", str(text), "--calibration-tokens", "512"]
    first, second = tmp_path / "quantized.gguf", tmp_path / "converted.gguf"
    done = edge("quantize", str(SOURCE), str(first), *given)
    assert done.returncode == 0, done.stderr
    assert "types by measured loss" in done.stdout
    assert "| KL divergence" in done.stdout
    said = edge_json("convert", str(SOURCE), str(second), *given, "--method", "importance", "--no-eval", "--json")
    assert first.stat().st_size == said["files"][second.name] <= 140 << 10
    assert first.read_bytes() == second.read_bytes()
    again = edge_json("quantize", str(SOURCE), str(first), *given, "--no-eval", "--force", "--json")
    assert again["mixture"] == said["mixture"]
    assert again["evaluated"] is None


def test_calibration_and_evaluation_texts_are_disjoint() -> None:
    def phrases(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[at : at + 4]) for at in range(len(words) - 3)}

    own = OWN_TEXT.read_text(encoding="utf-8")
    for learned in (own, RANGES):
        assert not phrases(learned) & phrases(JUDGED)
    scripts = {unicodedata.name(each).split()[0] for each in own if each.isalpha()}
    assert scripts >= {"LATIN", "GREEK", "CYRILLIC", "ARABIC", "DEVANAGARI", "HANGUL", "CJK"}


def test_pruning_reports_removed_parts(tmp_path: Path, text: Path) -> None:
    said = edge_json(
        "convert", str(SOURCE), str(tmp_path / "p.gguf"), "--prune-layers", "1", "--prune-ffn", "0.5",
        "--calibration", str(text), "--calibration-tokens", "2048", "--json",
    )  # fmt: skip
    spec = open_model(tmp_path / "p.gguf").spec
    assert (spec.layers, spec.ffn) == (2, said["pruned"]["ffn"][1])
    assert set(said["perplexity"]) == {"before", "pruned"}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("from_folder", [False, True])
def test_dry_run_writes_nothing_and_knows_size(tmp_path: Path, to: str, from_folder: bool) -> None:
    source = SOURCE
    if from_folder:
        source = tmp_path / "folder"
        convert(SOURCE, source, Conversion("hf"))
    wanted = Conversion(to, settings=Settings("Q4_0", "rtn"))
    target = tmp_path / ("t.gguf" if to == "gguf" else "t")
    files, tensors, _ = preview(source, target, wanted)
    assert not target.exists()
    report = convert(source, target, wanted)
    assert all(report.files[name] == size for name, size in files.items() if size is not None)
    assert {each.type for each in tensors} == {"Q4_0", "Q8_0", "F32"}
    if to == "onnx":
        assert set(files) == set(report.files)


def test_bad_input_leaves_no_files(tmp_path: Path) -> None:
    names = ("empty", "full", "there", "older", "short", "nothing", "damaged", "source")
    places = {name: tmp_path / name for name in names}
    for name in ("empty", "full"):
        places[name].mkdir()
    (places["full"] / "mine").write_text("x")
    places["there"].write_text("x")
    places["short"].write_text("A few words.")
    places["nothing"].write_text("")
    places["damaged"].write_bytes(SOURCE.read_bytes()[:-5000])
    for name in ("source", "older"):
        shutil.copy(SOURCE, places[name])
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    for line, said in (
        ("none.gguf t.gguf", "no such model file"), ("{empty} t.gguf", "has no config.json"),
        ("{source} t.gguf --to mlx", "choose gguf, onnx, coreml, hf"), ("{source} {source}", "is the model to convert"),
        ("{source} {older} --to gguf", "is there already: --force"),
        ("{source} {there} --to gguf --force", "is no GGUF file: choose another name"),
        ("{source} {empty} --to gguf", "is a folder"),
        ("{source} {full} --to onnx", "holds other files"), ("{source} t.gguf --type q9", "matrices cannot be Q9"),
        ("{source} t.gguf --type q4_0 --method magic", "there is no method magic"),
        ("{source} t.gguf --method awq", "state the --type"), ("{source} t.gguf --method nf4", "use --to onnx"),
        ("{source} t --method nf4 --type q4_0", "leave --type q4_0 out"),
        ("{source} t.gguf --prune-layers 1", "state one with --calibration"),
        ("{source} t.gguf --repair 3", "state --prune-layers"),
        ("{source} t.gguf --calibration {there}", "of no use here"),
        ("{source} t.gguf --type q4_0 --calibration no.txt", "no.txt: no such file"),
        ("{source} t.gguf --type q4_0 --group-size 33", "multiple of 32"),
        ("{source} t.gguf --prune-layers 1 --calibration {short}", "128 tokens"),
        ("{source} t.gguf --type q4_0 --calibration {nothing}", "is empty"),
        ("{damaged} t.gguf --type q4_0", "truncated"),
    ):  # fmt: skip
        given = [str(tmp_path / each) if each in ("t", "t.gguf") else each.format(**places) for each in line.split()]
        done = edge("convert", *given)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_onnx_folder_is_no_source(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "onnx", Conversion("onnx"))
    with pytest.raises(InputError, match="in ONNX already"):
        convert(tmp_path / "onnx", tmp_path / "t.gguf", Conversion("gguf"))


STEPS = {
    "gguf": Conversion("gguf", settings=Settings("Q4_0", "rtn")),
    "onnx": Conversion("onnx", settings=Settings("Q4_0", "rtn")),
    "coreml": Conversion("coreml"),
    "hf": Conversion("hf"),
}


def interrupt(name: str) -> Callable[[float], None]:
    def step(done: float) -> None:
        if name != "reading" and done > 0.3:
            raise KeyboardInterrupt

    return step


@pytest.mark.parametrize("to", FORMATS)
def test_interrupt_keeps_only_the_old_files(tmp_path: Path, to: str) -> None:
    target = tmp_path / ("t.gguf" if to == "gguf" else "t")
    with pytest.raises(KeyboardInterrupt):
        convert(SOURCE, target, STEPS[to], steps=interrupt)
    assert not list(tmp_path.iterdir())
    convert(SOURCE, target, STEPS[to])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        convert(SOURCE, target, STEPS[to], force=True, steps=interrupt)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("wanted", "extra"), [
    (Conversion("onnx"), "onnx"), (Conversion("onnx", npu=NpuTarget("galaxy-s24")), "qnn"),
    (Conversion("gguf", pruning=Pruning(layers=1), repair=1), "train"),
], ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_missing_extra_is_named_before_any_work(
    wanted: Conversion, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("converters.onnx.writer", "converters.pruning.repair", "backends.onnx.providers"):
        monkeypatch.setattr(f"edge.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("edge.converters.convert._read", None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'edge-runtime\[{extra}\]'"):
        convert(
            GOLDEN / "llama-gqa-tied.gguf", tmp_path / "made", wanted, tokens=lambda tokenizer: np.zeros(1, np.int32)
        )
