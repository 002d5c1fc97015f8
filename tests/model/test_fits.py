"""Models whose file is not here: their tensors, types and bytes are counted from published figures, and planned."""

from __future__ import annotations

import base64
import json
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import run_child
from test_cli import edge_here
from typer.testing import CliRunner

from edge.backends import llamacpp
from edge.cli.commands import app
from edge.converters.gguf.ggml import quantize_with_llamacpp
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_outline
from edge.lab.prediction.fits import READABLE, fits
from edge.model.layout import list_tensors
from edge.model.mixtures import plan_types
from edge.model.names.catalog import find_model
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.model.structure.spec import format_count

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.gguf"))
GOLDEN = [path for path in FILES if path.stem != "mtp"]  # whose last layer is not one of the model
REAL = [("smollm2-135m", "smollm2:135m", "Q4_1"), ("gemma3-270m", "gemma3:270m", "Q4_K_M")]


def outline_of(file: GGUFFile, path: Path) -> GGUFFile:
    """With the header of a file, and of its tensors those that no header implies."""
    stated = ("token_embd.weight", "output.weight", "rope_freqs.weight", "rope_factors_long.weight",
              "rope_factors_short.weight")  # fmt: skip
    return write_outline(
        path, fields_of(file), planned_as(file.tensors[name] for name in stated if name in file.tensors)
    )


UNKNOWN = {"cohere2", "gpt2", "jamba", "nemotron", "stablelm", "starcoder2"}  # architectures


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_header_implies_tensors_that_converters_write(path: Path, tmp_path: Path) -> None:
    file = read_gguf(path)
    bare = outline_of(file, tmp_path / "bare.gguf")
    if file.metadata["general.architecture"] in UNKNOWN:
        with pytest.raises((UnsupportedError, ModelFormatError)):
            list_tensors(bare)
        return
    expected = {(info.name, info.shape) for info in file.tensors.values()}
    if path.stem == "falcon-h1":  # one of whose norms is written without a suffix
        expected = {(f"{name}.weight" if name.endswith("ffn_norm") else name, shape) for name, shape in expected}
    found = set(list_tensors(bare))
    if path.stem == "ling":  # whose decays have no dimensions of 1 behind the heads
        found = {(name, shape[:2] if name.endswith("ssm_a") else shape) for name, shape in found}
    assert found == expected


@pytest.mark.parametrize(("real", "name", "mixture"), REAL)
def test_real_files_match_the_table(real: str, name: str, mixture: str, tmp_path: Path) -> None:
    file = read_gguf(find_model(real))
    outline = outline_model(known_models()[name], mixture, tmp_path / "outline.gguf")
    for tensors in (file.tensors, outline.tensors):
        assert len(tensors) > 200
    assert {(each.name, each.shape, each.type) for each in outline.tensors.values()} == {
        (each.name, each.shape, each.type) for each in file.tensors.values()
    }
    expected, found = asdict(read_spec(file)), asdict(read_spec(outline))
    for field in ("name", "rope_base", "norm_eps", "network"):  # that bytes do not depend on
        del expected[field], found[field]
    expected["type_bytes"], found["type_bytes"] = dict(expected["type_bytes"]), dict(found["type_bytes"])
    assert found == expected


@pytest.mark.parametrize("name", known_models())
def test_counted_parameters_are_published_ones(name: str, tmp_path: Path) -> None:
    model = known_models()[name]
    counted = sum(info.elements for info in outline_model(model, "F16", tmp_path / "outline.gguf").tensors.values())
    # Qwen3.5's counts are rounded to a digit or two, and include the image encoder and a block for drafts.
    assert counted == pytest.approx(model.parameters, rel=0.06 if name.startswith("qwen3.5") else 0.02)


@pytest.mark.parametrize(
    ("name", "mixture"),
    [("qwen3:8b", "Q4_K_M"), ("gemma3:270m", "Q4_K_M"), ("gemma3:1b", "Q4_0"), ("phi4-mini:3.8b", "Q5_K_M")],
)
def test_types_match_llama_quantize(name: str, mixture: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = known_models()[name]
    source = outline_model(model, "F16", tmp_path / "f16.gguf")
    theirs = quantize_with_llamacpp(source.path, tmp_path / "out.gguf", mixture, dry_run=True)
    ours = plan_types([(info.name, info.shape) for info in source.tensors.values()], mixture)
    assert {each.name: each.type for each in ours} == {each.name: each.type for each in theirs}


def test_fits_refuses_unknown_names_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="unknown mixture 'Q9_9'"):
        plan_types([("token_embd.weight", (256, 8))], "Q9_9")
    for options in ({"device": "toaster"}, {"threads": 0}, {"memory": "much"}, {"names": ["qwen9"]}):
        with pytest.raises(InputError):
            fits(**options)
    assert [format_count(count) for count in (134_515_008, 999_400_000, 999_885_952)] == ["135M", "999M", "1.0B"]
    (fit,) = fits(device="raspberry-pi-5", names=["lfm2:8b-a1b"], backend="llamacpp")
    assert (fit.best, fit.reason) == (None, "its Q4_0 weights take 4.4 GiB of 2.0 GiB")
    monkeypatch.setattr(llamacpp, "is_installed", lambda: False)
    (fit,) = fits(names=["lfm2.5:350m"], backend="llamacpp")
    assert fit.best is None
    assert "llama-cpp-python is not installed: pip install" in fit.reason


NAMES = [  # some that fit, are streamed, have tables, or are too large
    "smollm2:135m", "smollm2:360m", "smollm2:1.7b", "gemma3:270m", "gemma3:1b", "qwen3:0.6b", "qwen3:1.7b", "qwen3:8b",
    "gemma4:e2b", "gemma4:e4b", "lfm2:8b-a1b",
]  # fmt: skip
FITS = """
import base64, json, pickle, sys
from edge.lab.prediction.fits import fits
print(json.dumps(base64.b64encode(pickle.dumps(fits(device="raspberry-pi-5", **json.loads(sys.argv[1])))).decode()))
"""


def fits_on_a_pi(**options: Any) -> list[Any]:
    """In a process of its own: a plan counts what its process holds, and here other tests have grown it."""
    done = run_child(FITS, json.dumps(options))
    assert done.status == 0, done.errors
    return pickle.loads(base64.b64decode(done.output))


@pytest.fixture(scope="module")
def on_a_pi() -> list[Any]:
    return fits_on_a_pi(memory="2GiB", backend="cpu", names=NAMES)


def test_models_that_fit_come_best_first(on_a_pi: list[Any]) -> None:
    fitting = [each for each in on_a_pi if each.best]
    assert on_a_pi[: len(fitting)] == fitting
    assert {each.name for each in on_a_pi} == set(NAMES)
    whole = [each for each in fitting if not each.best.streamed]
    assert fitting[: len(whole)] == whole
    speeds = [each.best.tok_s.value for each in whole]
    assert len(whole) > 5
    readable = [each.parameters for each, speed in zip(whole, speeds, strict=True) if speed >= READABLE]
    assert readable == sorted(readable, reverse=True)
    for each in whole:
        assert each.best.weights - each.best.on_disk < each.best.memory <= 2 << 30
        assert "estimated" in each.best.joules.source


def test_models_have_best_fitting_type_and_reason(on_a_pi: list[Any]) -> None:
    found = {each.name: each for each in on_a_pi}
    small, larger, streamed = (found[name] for name in ("smollm2:135m", "smollm2:1.7b", "qwen3:8b"))
    assert (small.best.type, small.reason) == ("Q8_0", None)
    assert (larger.best.type, [each.type for each in larger.tried]) == ("Q4_K_M", ["Q8_0", "Q6_K", "Q4_K_M"])
    assert larger.reason.startswith("Q6_K would read")
    assert streamed.best.streamed > 2 << 30
    assert "not all weights fit" in streamed.reason
    for name in ("gemma4:e2b", "gemma4:e4b"):  # of whose file half is a table, which no token reads whole
        best = found[name].best
        assert best.weights > best.on_disk > best.weights / 3
        assert best.streamed < best.weights / 3


def test_mixtures_hold_all_experts_and_read_active_ones() -> None:
    pytest.importorskip("llama_cpp")
    names = ["lfm2:8b-a1b", "qwen3:8b"]
    found = {each.name: each for each in fits(device="steam-deck", backend="llamacpp", names=names)}
    experts, dense = (found[name].tried[0] for name in names)
    assert (experts.type, dense.type) == ("Q8_0", "Q8_0")
    assert experts.weights == pytest.approx(dense.weights, rel=0.05)
    assert experts.memory > experts.weights
    assert 3 < experts.tok_s.value / dense.tok_s.value < 8.2 / 1.3  # 1.5B parameters of 8.3B are active


def test_too_small_device_names_smallest() -> None:
    (smallest,) = fits_on_a_pi(memory="100MiB", backend="llamacpp", names=["smollm2:135m"])
    needs = smallest.tried[-1].needs
    assert f'the smallest that fits is memory="{needs >> 20}MiB"' in smallest.reason
    assert (smallest.best, smallest.why) == (None, f"Q4_0 needs {needs >> 20} MiB")


SIZE = r"[\d.]+ [MG]iB"  # depends on what the process holds when it plans


def test_command_prints_what_python_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: known_models()[name] for name in ("smollm2:135m", "qwen3:8b")}
    monkeypatch.setattr("edge.lab.prediction.fits.known_models", lambda: some)
    command = ["models", "--fits", "--device", "raspberry-pi-5", "--memory", "2GiB", "--backend", "cpu", "--json"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    found = json.loads(shown.stdout)
    assert (found["device"], found["tokens"]) == ("raspberry-pi-5", 4096)
    expected = fits(device="raspberry-pi-5", memory="2GiB", backend="cpu")
    names = [(each["name"], re.sub(SIZE, "", each["why"] or "")) for each in found["models"]]
    assert names == [(each.name, re.sub(SIZE, "", each.why or "")) for each in expected]
    assert "all figures are estimated" not in shown.stderr


def test_options_of_fits_are_refused_without_it() -> None:
    for options in (["--device", "raspberry-pi-5"], ["--memory", "2GiB"], ["--tokens", "9"]):
        done = edge_here("models", *options)
        assert (done.returncode, f"{options[0]} is for --fits" in done.stderr) == (2, True)
    assert edge_here("models", EDGE_MEMORY="2GiB").returncode == 0
