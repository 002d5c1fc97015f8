"""KL divergence and perplexity in windows: the formulas, written out again in NumPy; windows; resuming; the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, load_engine, log_softmax, open_golden
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, write_small
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.errors import EngineError, InputError
from edge.lab.quality.windows import Windows, divergence, windowed_perplexity
from edge.likelihood import compare, negative_log_likelihoods
from edge.model.model import open_model
from edge.types import AnyArray, IntArray

SHAPE, CONTEXT = Small(context=128), 32
TEXT = "".join(f"The {number}th stone lies beside the river, and no one counts. " for number in range(5))


def spoil(weights: dict[str, AnyArray]) -> None:
    """Rough weights, as a bad quantizer leaves them."""
    random = np.random.default_rng(5)
    for name in ("blk.0.ffn_up", "blk.0.attn_q"):
        weights[name] += (random.standard_normal(weights[name].shape) * 0.05).astype(np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same one with noise in its weights."""
    folder = tmp_path_factory.mktemp("models")
    return write_small(folder / "good.gguf", SHAPE), write_small(folder / "noisy.gguf", SHAPE, spoil)


@pytest.fixture(scope="module")
def ids(models: tuple[Path, Path]) -> IntArray:
    return open_model(models[0]).encode_prompt(TEXT, raw=True)


@given(seed=st.integers(0, 999), spread=st.floats(0.1, 20), noise=st.floats(0, 5), offset=st.floats(-1000, 1000))
def test_divergence_equals_the_formula(seed: int, spread: float, noise: float, offset: float) -> None:
    random = np.random.default_rng(seed)
    a = (random.standard_normal((4, 50)) * spread).astype(np.float32)
    b = (a + random.standard_normal(a.shape) * noise + offset).astype(np.float32)
    targets = random.integers(0, 50, 4).astype(np.int32)
    found = compare(a, b, targets)
    p, q = log_softmax(a), log_softmax(b)
    every = np.arange(4)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(axis=-1), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.nll, -q[every, targets], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.reference_nll, -p[every, targets], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(found.nll, negative_log_likelihoods(b, targets))
    np.testing.assert_array_equal(found.same, p.argmax(axis=-1) == q.argmax(axis=-1))
    assert (found.kl >= 0).all()


def test_logits_that_are_no_numbers_are_refused() -> None:
    good = np.zeros((2, 9), np.float32)
    bad = good.copy()
    bad[1, 3] = np.nan
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(EngineError, match="not finite numbers"):
            compare(*pair, np.zeros(2, np.int32))


@given(size=st.integers(2, 90), context=st.integers(2, 40), half=st.booleans(), bos=st.sampled_from([None, 999]))
def test_every_token_is_scored_once(size: int, context: int, half: bool, bos: int | None) -> None:
    tokens = np.arange(size, dtype=np.int32)
    first = context // 2 if half else 0
    expected = [
        token for token in range(size) if token % context > first  # the first of a window, or its first half, is not
    ]  # fmt: skip
    if not expected:
        with pytest.raises(InputError, match="nothing to predict"):
            Windows(tokens, context, half, bos)
        return
    windows = Windows(tokens, context, half, bos)
    scored: list[int] = []
    for number in range(len(windows)):
        read, targets = windows.read(number), windows.targets(number)
        assert read.size == targets.size < context
        np.testing.assert_array_equal(read[1:], targets[:-1])
        assert read.size == 0 or read[0] == (number * context if bos is None else bos)
        assert windows.scored(number) == targets[first:].size
        scored += targets[first:].tolist()
    assert scored == expected
    np.testing.assert_array_equal(tokens, np.arange(size))


def test_perplexity_matches_transformers() -> None:
    golden = open_golden("llama-gqa-tied")
    engine = load_engine(golden.model, "reference", "f32")
    found = windowed_perplexity(engine, Windows(golden.tokens, 512))
    wanted = -log_softmax(golden.logits)[np.arange(golden.tokens.size - 1), golden.tokens[1:]]
    assert found.nll == pytest.approx(wanted.mean(), abs=1e-4)
    assert found.tokens == golden.tokens.size - 1


class CutError(Exception):
    """Stands for Ctrl-C."""


def test_interrupted_run_gives_same_figures(models: tuple[Path, Path], ids: IntArray, tmp_path: Path) -> None:
    good, noisy = (load_engine(open_model(path), "reference", "f32") for path in models)
    journal, windows, settings = tmp_path / "kl.jsonl", Windows(ids, CONTEXT), {"seed": 1}
    whole = divergence(good, noisy, windows, journal=tmp_path / "whole.jsonl", settings=settings)

    def cut(done: int, _: int) -> None:
        if done > 2.5 * CONTEXT:
            raise CutError

    with pytest.raises(CutError):
        divergence(good, noisy, windows, journal=journal, settings=settings, on_progress=cut)
    assert len(journal.read_text().splitlines()) == 1 + 2
    journal.write_text(journal.read_text() + '{"window": 2, "kl": [0.')  # as a crash leaves it
    shown: list[tuple[int, int]] = []
    again = divergence(
        good, noisy, windows, journal=journal, settings=settings, resume=True, on_progress=lambda *of: shown.append(of)
    )
    assert again == whole
    assert shown[0][0] == CONTEXT - 1  # taken from the journal at once
    assert shown[-1][0] == shown[-1][1]
    assert journal.read_text() == (tmp_path / "whole.jsonl").read_text()
    for wrong in ({"window": 99}, {"window": 0, "kl": [1.0]}, {"window": "x"}, []):
        journal.write_text(f"{json.dumps(settings)}\n{json.dumps(wrong)}\n")
        with pytest.raises(InputError, match="line 2 is no measurement"):
            divergence(good, noisy, windows, journal=journal, settings=settings, resume=True)
    with pytest.raises(InputError, match="other settings"):
        divergence(good, noisy, windows, journal=journal, settings={"seed": 2}, resume=True)


def test_command_prints_the_measured_divergence(models: tuple[Path, Path], tmp_path: Path) -> None:
    out, text = tmp_path / "kl.json", tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    flags = ["eval", "kl", str(models[1]), "--reference", str(models[0]), "--text", str(text), "--context", "32"]
    flags += ["--backend", "reference", "--reference-backend", "reference", "-o", str(out)]
    said = edge_json(*flags, "--json")
    assert json.loads(out.read_text()) == said
    assert said["settings"]["tokens_read"] - said["tokens"] == 9  # windows
    assert 0 < said["kl_median"] <= said["kl_p99"] <= said["kl_p999"] <= said["kl_max"]
    assert said["settings"]["model"]["backend"] == "reference"
    shown = edge(*flags, "--resume")
    assert shown.returncode == 0, shown.stderr
    assert f"{said['kl_mean']:.6f} ± {said['kl_stderr']:.6f} |" in shown.stdout
    assert "windows of 32 tokens" in shown.stdout
    alone = ["eval", "perplexity", str(models[1]), "--text", str(text), "--backend", "reference", "--context", "32"]
    assert edge_json(*alone, "--json")["perplexity"] == pytest.approx(said["perplexity"])
    other = edge(*flags, "--resume", "--kv-dtype", "f32", "--second-half")
    assert other.returncode == 2
    assert "was made with other settings" in other.stderr


def test_control_tokens_in_measured_text_are_text(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("<|im_end|>" * 3)
    flags = ["eval", "perplexity", str(GOLDEN / "llama-one-layer.gguf"), "--text", str(text), "--backend", "reference"]
    assert edge_json(*flags, "--json")["tokens"] == 3 * len("<|im_end|>") - 1
