"""KV dtypes chosen by what was measured of a model: the record, and the plans that read it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from conftest import load_engine
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, write_small
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.backends import engine_named
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.kv_losses import LEAST_TOKENS, KVLoss, Losses, find_losses, remember_losses
from edge.plan.resolve import MOST_KL, resolve
from edge.storage import cache

NATIVE, LLAMACPP = engine_named("cpu"), engine_named("llamacpp")
AUTO = Options(kv_policy="auto")
FAIR, POOR = KVLoss(MOST_KL / 2, 1e-4, 4000), KVLoss(MOST_KL * 2, 1e-4, 4000)
SMOLLM2 = open_model("smollm2-135m")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """With a cache folder of its own."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    return open_model(write_small(tmp_path / "small.gguf", Small(context=4096)))


def test_record_belongs_to_content_and_engine(model: Model, tmp_path: Path) -> None:
    remember_losses(model.file, NATIVE, {"int8": FAIR})
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.file.path.read_bytes())
    other = open_model(write_small(tmp_path / "other.gguf", Small(context=4096), lambda weights: weights.update(
        {name: each * 1.5 for name, each in weights.items()}
    )))  # fmt: skip
    assert find_losses(open_model(copy).file, NATIVE, AUTO) == {"int8": FAIR}
    assert find_losses(other.file, NATIVE, AUTO) == {}
    assert find_losses(model.file, LLAMACPP, AUTO) == {}
    for stated in (Options(), Options(kv_policy="auto", kv_dtype="f16")):
        assert find_losses(model.file, NATIVE, stated) == {}


def test_better_measured_records_replace_others(model: Model) -> None:
    few, some, more = (KVLoss(0.02, 0.01, n) for n in (LEAST_TOKENS - 1, LEAST_TOKENS, 4000))
    for found, kept in ((few, {}), (some, {"int8": some}), (more, {"int8": more}), (some, {"int8": more})):
        remember_losses(model.file, NATIVE, {"int8": found})
        assert find_losses(model.file, NATIVE, AUTO) == kept
    remember_losses(model.file, NATIVE, {"int4": some})
    assert find_losses(model.file, NATIVE, AUTO) == {"int8": more, "int4": some}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"int8": {"kl": "NaN"}}', b'{"int9": {"kl": 0, "stderr": 0, "tokens": 600}}']
)
def test_damaged_record_counts_as_none(model: Model, content: bytes) -> None:
    remember_losses(model.file, NATIVE, {"int8": FAIR})
    (entry,) = cache.entries("losses")
    with cache.create("losses", entry.key, ".json") as path:
        path.write_bytes(content)
    assert find_losses(model.file, NATIVE, AUTO) == {}


def chosen(losses: Losses, engine: str = "cpu", **options: object) -> tuple[str, str]:
    asked = Options(kv_policy="auto", **options)  # type: ignore[arg-type]
    run = resolve(SMOLLM2.spec, engine_named(engine), asked, elsewhere=False, losses=losses)[-1]
    return run.kv_dtype, run.dtype_by


@pytest.mark.parametrize(("losses", "dtype"), [
    ({"int8": FAIR, "int4": POOR}, "int8"), ({"int8": FAIR, "int4": FAIR}, "int4"),
    ({"int8": POOR, "int4": POOR}, "f16"), ({"int8": POOR, "int4": FAIR}, "int4"), ({"int8": POOR}, "f16"),
    ({"f32": FAIR}, "int8"),  # by rule as long as it was not measured
    ({"int4": POOR}, "int8"),
])  # fmt: skip
def test_auto_takes_smallest_dtype_that_loses_little(losses: Losses, dtype: str) -> None:
    found, by = chosen(losses)
    assert found == dtype
    assert "measured on this model" in by
    assert all(f"{name} KL {each.kl:.4f}" in by for name, each in losses.items())


def test_without_measurements_or_with_stated_dtype_rule_holds() -> None:
    assert chosen({}) == ("int8", "by rule: not measured on this model")
    assert chosen({"int8": POOR}, kv_dtype="int8") == ("int8", "")
    assert chosen({}, "llamacpp") == ("f16", "")
    assert chosen({"q8_0": FAIR}, "llamacpp")[0] == "q8_0"


@given(st.dictionaries(st.sampled_from(["int8", "int4", "f32"]), st.floats(0, 1), min_size=1))
def test_no_chosen_dtype_loses_more_than_is_allowed(kl: dict[str, float]) -> None:
    dtype, _ = chosen({name: KVLoss(each, 0.0, 4000) for name, each in kl.items()})
    assert dtype == "f16" or kl.get(dtype, 0.0) <= MOST_KL
    assert dtype in ("f16", "int8", *kl)  # int8 by rule


def test_eval_kv_follows_formula_and_serves_plans(tmp_path: Path) -> None:
    """The formula is written out again, over the logits of engines."""
    path, text = write_small(tmp_path / "kl.gguf", Small(layers=2, context=1024)), tmp_path / "stones.txt"
    text.write_text("".join(f"The {number}th stone lies beside the river. " for number in range(40)), encoding="utf-8")
    for entry in cache.entries("losses"):
        if "kl.gguf" in entry.about:
            cache.discard(entry)
    flags = ["--policies", "full", "--kv-dtype", "f16,int8", "--tasks", "kl", "--tokens", "600", "--backend", "cpu"]
    found = edge_json("eval", "kv", str(path), "--text", str(text), *flags, "--threads", "1", "--json", "-q")
    figures = [row["figures"]["kl"] for row in found["rows"]]
    opened = open_model(path)
    tokens = opened.encode_text(text.read_text())[:601]
    logits = []
    for dtype in ("f16", "int8"):
        engine = load_engine(opened, "cpu", dtype, capacity=600, chunk=64, logits_rows=64)
        parts = [np.array(engine.forward_all(tokens[at : at + 64][: 600 - at])) for at in range(0, 600, 64)]
        logits.append(np.concatenate(parts).astype(np.float64))
        engine.close()
    p, q = (np.exp(each) / np.exp(each).sum(axis=-1, keepdims=True) for each in logits)
    kl = (p * np.log(p / q)).sum(axis=-1)
    assert [each["over"] for each in figures] == [600, 600]
    assert figures[0]["value"] == 0
    assert figures[1]["value"] == pytest.approx(kl.mean(), rel=1e-3)
    assert figures[1]["stderr"] == pytest.approx(kl.std(ddof=1) / math.sqrt(600), rel=1e-2)
    assert find_losses(opened.file, NATIVE, AUTO)["int8"].kl == figures[1]["value"]
    plan = edge_json("plan", str(path), "--kv-policy", "auto", "--json")
    assert f"int8 KL {figures[1]['value']:.4f}" in plan["dtype_by"]
    assert "KV rows: int8, measured on this model" in edge("plan", str(path), "--kv-policy", "auto").stdout
