"""Sessions with a prompt cache: the same answers, without running again what is known."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import exhaustive, open_golden, run_child, some_tokens
from test_cli import edge_here as edge

from edge.model.model import Model, open_model
from edge.prompt_cache.cache import PromptCache
from edge.prompt_cache.tree import BLOCK
from edge.run.session import Session
from edge.types import FloatArray, IntArray

ENGINES = [("reference", "f32", 1e-3), ("llamacpp", "f16", 5e-2), ("cpu", "f32", 1e-3), exhaustive("cpu", "int8", 5e-1)]

OpenSession = Callable[..., Session]


@pytest.fixture
def open_session(open_session: OpenSession) -> OpenSession:
    return partial(open_session, speculate="off")


def answer(session: Session, tokens: IntArray, count: int = 4) -> list[FloatArray]:
    """The logits after the prompt and after each token of the answer."""
    seen: list[FloatArray] = []
    forward = session.engine.forward

    def record(tokens: IntArray) -> FloatArray:
        seen.append(forward(tokens).copy())
        return seen[-1]

    session.engine.forward = record  # type: ignore[method-assign]
    session.generate(tokens, max_tokens=count, ignore_eos=True)
    session.engine.forward = forward  # type: ignore[method-assign]
    return seen[-count:]


def reused(session: Session) -> int:
    return session.report.tokens.reused


@pytest.mark.parametrize(("backend", "kv_dtype", "tolerance"), ENGINES)
@pytest.mark.parametrize("shared", [1, BLOCK, 2 * BLOCK + 1])
def test_logits_are_those_without_cache(
    backend: str, kv_dtype: str, tolerance: float, shared: int, open_session: OpenSession, tmp_path: Path
) -> None:
    options = {"backend": backend, "kv_dtype": kv_dtype, "max_kv_size": 256}
    first, second = some_tokens(200), np.concatenate([some_tokens(shared), some_tokens(30, seed=2)])
    answer(open_session(prompt_cache=tmp_path, **options), first)
    with_cache = open_session(prompt_cache=tmp_path, **options)
    ours = answer(with_cache, second, count=1)
    assert reused(with_cache) >= shared
    np.testing.assert_allclose(ours, answer(open_session(**options), second, count=1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_prompts_longer_than_cache_evict_same_rows(policy: str, open_session: OpenSession, tmp_path: Path) -> None:
    options = {"backend": "cpu", "kv_dtype": "f32", "kv_policy": policy, "max_kv_size": 100, "prefill_step_size": 16}
    answer(open_session(prompt_cache=tmp_path, **options), some_tokens(300))
    other = np.concatenate([some_tokens(43), some_tokens(257, seed=2)])  # of which chunks of 16 divide what is shared
    for tokens, known in ((some_tokens(300), 96), (other, 32)):
        with_cache, plain = open_session(prompt_cache=tmp_path, **options), open_session(**options)
        np.testing.assert_array_equal(answer(with_cache, tokens), answer(plain, tokens))
        np.testing.assert_array_equal(with_cache.engine.kv.positions, plain.engine.kv.positions)
        assert reused(with_cache) == known


@pytest.mark.parametrize(("policy", "rows", "count", "known"), [
    ("h2o", 96, 80, 0), ("fastgen", 96, 80, 0), ("snapkv:window=12", 112, 112, 80), ("tova", 112, 112, 80),
])  # fmt: skip
def test_policy_sees_the_attention_that_it_chooses_by(
    policy: str, rows: int, count: int, known: int, open_session: OpenSession, tmp_path: Path
) -> None:
    """Rows that come back have none: what it asks for is run, of all of a prompt or of the last tokens."""
    options = {"kv_policy": policy, "max_kv_size": rows, "prefill_step_size": 16, "kv_dtype": "f32", "backend": "cpu"}
    answer(open_session(prompt_cache=tmp_path, **{**options, "kv_policy": "streaming"}), some_tokens(count))
    session, plain = open_session(prompt_cache=tmp_path, **options), open_session(**options)
    ours, theirs = (answer(each, some_tokens(count), count=60) for each in (session, plain))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(session.engine.kv.positions, plain.engine.kv.positions)
    assert reused(session) in (range(known, count) if known else (0,))


def test_rows_do_not_depend_on_policy_or_capacity(open_session: OpenSession, tmp_path: Path) -> None:
    common = {"kv_dtype": "f32", "backend": "cpu", "prompt_cache": tmp_path}
    answer(open_session(kv_policy="h2o", max_kv_size=200, **common), some_tokens(150))
    session = open_session(kv_policy="window", max_kv_size=300, **common)
    answer(session, some_tokens(150))
    assert reused(session) == 149


def test_longrope_caches_short_and_long_texts_apart(open_session: OpenSession, tmp_path: Path) -> None:
    common = {"kv_dtype": "f32", "backend": "cpu", "prompt_cache": tmp_path}
    short = some_tokens(50)
    long = np.concatenate([short, some_tokens(250)])  # more than the original context of 256
    for rows, tokens, expected in (
        (100, short, 0), (500, short, 49), (500, long, 0), (500, long, 299), (100, short, 49),
    ):  # fmt: skip
        session = open_session("phi3-longrope", max_kv_size=rows, **common)
        answer(session, tokens)
        assert reused(session) == expected


def test_other_weights_of_same_shape_share_nothing(open_session: OpenSession, tmp_path: Path) -> None:
    model = open_golden("llama-gqa-tied").model
    answer(open_session(model, prompt_cache=tmp_path, max_kv_size=128), some_tokens(100))
    data = bytearray(model.path.read_bytes())
    at = len(data) - 300
    data[at] ^= 1  # one weight, where no sample of the tensors is taken
    (tmp_path / "other.gguf").write_bytes(data)
    session = open_session(open_model(tmp_path / "other.gguf"), prompt_cache=tmp_path, max_kv_size=128)
    answer(session, some_tokens(100))
    assert reused(session) == 0


@pytest.mark.parametrize("max_kv_size", [400, 180], ids=["all-fits", "evicts"])
def test_conversation_goes_on_in_another_session(max_kv_size: int, open_session: OpenSession, tmp_path: Path) -> None:
    """All prompts and the answers between them are known; after an eviction, what was there before it."""
    options = {"prompt_cache": tmp_path, "max_kv_size": max_kv_size, "kv_dtype": "f32", "backend": "cpu"}
    session, fed = open_session(**options), list[int]()
    forward = session.engine.forward
    session.engine.forward = lambda tokens: (fed.extend(tokens.tolist()), forward(tokens))[1]  # type: ignore[method-assign]
    session.generate(some_tokens(70), max_tokens=30, ignore_eos=True)
    session.generate(some_tokens(50, seed=2), max_tokens=60, ignore_eos=True, follow_up=True)
    assert len(fed) == 70 + 30 + 50 + 59
    other = open_session(**{**options, "max_kv_size": 400})
    answer(other, np.array(fed, np.int32))
    # An eviction comes in the midst of the second answer; what was stored then is the prompts and the first answer.
    assert reused(other) == 70 + 30 + 50


def test_sessions_share_cache_in_memory(open_session: OpenSession) -> None:
    cache = PromptCache(memory="4MiB")
    options = {"prompt_cache": cache, "max_kv_size": 256}
    answer(open_session(**options), some_tokens(150))
    session = open_session(**options)
    answer(session, some_tokens(150))
    assert reused(session) == 149
    assert session.plan.bytes.scratch > open_session(max_kv_size=256).plan.bytes.scratch + (4 << 20)


def test_damage_costs_warning_and_time_to_run_prompt(
    open_session: OpenSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each block is checked when it is needed, so three damaged ones are found one by one."""
    options = {"prompt_cache": tmp_path, "max_kv_size": 256}
    expected = answer(open_session(**options), some_tokens(150))
    files = list(tmp_path.glob("*.kv"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    session, found = open_session(**options), []
    with caplog.at_level(logging.WARNING, "edge"):
        for _ in range(4):
            np.testing.assert_allclose(answer(session, some_tokens(150)), expected, rtol=0, atol=5e-2)
            found.append(reused(session))
    assert found == [0, BLOCK, 2 * BLOCK, 149]
    assert len(caplog.messages) == len(files) == 3


def test_read_only_folder_is_read(
    open_session: OpenSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    options = {"prompt_cache": tmp_path, "max_kv_size": 256}
    answer(open_session(**options), some_tokens(150))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr("edge.prompt_cache.disk.file_lock", refuse)
    session = open_session(**options)
    answer(session, some_tokens(150))
    assert reused(session) == 149
    assert "the prompt cache could not be written: Read-only" in caplog.text


_RUN = """
import json, sys
import edge

options = {"backend": sys.argv[1], "memory": "300MiB", "max_kv_size": 512, "prompt_cache": sys.argv[2]}
with edge.load("smollm2-135m", **options) as session:
    tokens = session.model.tokenizer.encode("All that is gold does not glitter. " * 55)
    session.generate(tokens, max_tokens=2)
    report = session.report
    print(json.dumps([report.tokens.prompt, report.tokens.reused, report.plan["predicted_peak"]]))
"""


@pytest.mark.parametrize("backend", ["cpu", exhaustive("llamacpp")])
def test_predicted_peak_holds(backend: str, smollm2: Model, open_session: OpenSession, tmp_path: Path) -> None:
    """While all of a long prompt is stored, and while it comes back."""
    open_session(smollm2, backend=backend, max_kv_size=512)  # compiling is not part of the plan
    for known in (False, True):
        child = run_child(_RUN, backend, tmp_path)
        assert child.status == 0, child.errors
        prompt, reused, predicted = child.output
        assert reused == (prompt - 1 if known else 0)
        assert child.peak <= predicted


def test_second_run_reports_reused_tokens(tmp_path: Path) -> None:
    common = ["run", "smollm2-135m", "--system", "You answer in one word." * 9, "-n", "3", "--prompt-cache"]
    folder = str(tmp_path / "prompts")
    first = edge(*common, folder, "-p", "Name a colour.", "--json")
    assert json.loads(first.stdout)["tokens"]["reused"] == 0
    second = edge(*common, folder, "-p", "Name a fruit.", "-v")
    assert second.returncode == 0
    assert "of them reused" in second.stderr
    third = json.loads(edge(*common, folder, "-p", "Name a colour.", "--json").stdout)
    assert third["tokens"]["reused"] == third["tokens"]["prompt"] - 1
    assert third["text"] == json.loads(first.stdout)["text"]
