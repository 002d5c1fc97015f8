"""The table with which conversions end, against the reference engine's own predictions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.converters.convert import Conversion, convert
from edge.converters.evaluate import TOKENS
from edge.converters.gguf.quantize import Settings
from edge.converters.held_out import TEXT
from edge.lab.quality.windows import Windows, divergence
from edge.likelihood import Divergence
from edge.model.model import open_model

SOURCE = GOLDEN / "llama-gqa-tied.gguf"


def divergence_of(source: Path, target: Path, backend: str) -> Divergence:
    """Of the predictions of whole engines. backend: of the target."""
    first, second = open_model(source), open_model(target)
    sizes = {"capacity": TOKENS, "chunk": TOKENS, "logits_rows": TOKENS}
    engines = (load_engine(each, name, "f32", **sizes) for each, name in ((first, "reference"), (second, backend)))
    return divergence(*engines, Windows(first.tokenizer.encode(TEXT)[:TOKENS], TOKENS))


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma3", "gemma4", "lfm2"])
def test_losses_match_whole_models(name: str, tmp_path: Path) -> None:
    source, target = GOLDEN / f"{name}.gguf", tmp_path / "small.gguf"
    wanted = Conversion("gguf", settings=Settings("Q4_0", "rtn"), evaluates=True)
    ours = convert(source, target, wanted).evaluated.divergence
    found = divergence_of(source, target, "reference")
    assert ours.tokens == found.tokens == TOKENS - 1
    assert ours.kl_mean > 0.01
    for figure in ("kl_mean", "kl_p99", "kl_p999", "top1", "ratio", "perplexity"):
        np.testing.assert_allclose(getattr(ours, figure), getattr(found, figure), rtol=1e-3, err_msg=figure)


@pytest.mark.parametrize("method", ["nf4", "w8a8", "smoothquant", "llm-int8"])
def test_methods_of_onnx_are_compared_with_their_source(method: str, tmp_path: Path) -> None:
    """By ONNX Runtime's predictions, which have the rounded activations."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    source, target = SOURCE, tmp_path / "model"
    report = convert(source, target, Conversion("onnx", onnx_method=method, evaluates=True))
    found = divergence_of(source, target, "onnx")
    assert report.evaluated.divergence.tokens == found.tokens
    assert report.evaluated.divergence.kl_mean > 1e-4
    for figure in ("kl_mean", "top1", "ratio"):
        np.testing.assert_allclose(getattr(report.evaluated.divergence, figure), getattr(found, figure), rtol=5e-2)
    assert 4 < report.bits_per_weight < 32


def test_commands_end_with_table(tmp_path: Path) -> None:
    """That of edge quantize is in test_quantize_and_convert_meet_size_alike."""
    done = edge("convert", str(SOURCE), str(tmp_path / "a.gguf"), "--type", "q4_0")
    assert done.returncode == 0
    assert "KL divergence" in done.stdout
    assert "bits per weight" in done.stdout
    shares = {share: float(re.search(rf"{share} % of predictions below *\| *([\d.]+)", done.stdout)[1])
              for share in ("99", "99.9")}  # fmt: skip
    assert 0 < shares["99"] < shares["99.9"]
    said = edge_json("quantize", str(SOURCE), str(tmp_path / "b.gguf"), "q4_0", "--json")
    lost = said["evaluated"]["divergence"]
    assert lost["tokens"] == TOKENS - 1
    assert lost["kl_p99"] < lost["kl_p999"] < lost["kl_max"]
    without = edge_json("convert", str(SOURCE), str(tmp_path / "c.gguf"), "--type", "q4_0", "--json", "--no-eval")
    assert without["evaluated"] is None


def test_unevaluable_model_is_converted(tmp_path: Path) -> None:
    done = edge("quantize", str(GOLDEN / "encoders/bert.gguf"), str(tmp_path / "a.gguf"), "q8_0")
    assert done.returncode == 0
    assert "what was lost is not known" in done.stderr
