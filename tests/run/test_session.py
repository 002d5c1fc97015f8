"""The loop from prompt to text, on a real model: what ends it, what it shows, what it remembers and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from test_cli import REPORT_KEYS

from edge.devices.memory import MemoryUse
from edge.errors import BudgetError, UnsupportedError
from edge.lab.report.run import report_lines
from edge.model.model import Model
from edge.run.sampling.sampler import Sampler
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray, IntArray

ROWS = 512
PROMPT = "Name three colours."


@pytest.fixture(scope="module")
def streaming(smollm2: Model) -> Iterator[Session]:
    with load(smollm2, max_kv_size=ROWS, threads=1) as session:
        yield session


Script = Callable[[Sequence[int] | IntArray], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Called with tokens, it makes the sampler draw these, one after another."""

    def set_script(tokens: Sequence[int] | IntArray) -> None:
        rest = iter([int(token) for token in tokens])
        drawn = {name: lambda self, *_logits: next(rest) for name in ("__call__", "draw_from")}
        monkeypatch.setattr("edge.run.decoding.generation.Sampler", type("Scripted", (Sampler,), drawn))

    return set_script


class Tape:
    """Records the tokens that an engine runs, and the logits that it answers with."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        self.logits = np.zeros(0, np.float32)
        self._forward = session.engine.forward
        monkeypatch.setattr(session.engine, "forward", self._record)
        monkeypatch.setattr(session.engine, "most_candidates", 0, raising=False)  # all logits
        monkeypatch.setattr(session._sequence.ahead, "most", 0)  # it would run tokens that do not stay

    def _record(self, tokens: IntArray) -> FloatArray:
        self.tokens += tokens.tolist()
        self.logits = self._forward(tokens)
        return self.logits


# What ends it


def test_end_of_turn_and_max_tokens(streaming: Session, smollm2: Model, script: Script) -> None:
    text = streaming.generate("Say hello.", max_tokens=300)
    report = streaming.report
    assert report.stop_reason == "eos"
    longer = streaming.generate("Say hello.", max_tokens=report.tokens.generated + 10, ignore_eos=True)
    assert longer.startswith(text)
    assert streaming.report.stop_reason == "length"
    assert streaming.report.tokens.generated == report.tokens.generated + 10
    script([*smollm2.tokenizer.encode("Hi there"), next(iter(smollm2.tokenizer.end_ids))])
    assert streaming.generate(PROMPT) == "Hi there"
    assert streaming.report.tokens.generated == 2


def test_stop_strings_are_not_shown(streaming: Session, smollm2: Model, script: Script) -> None:
    whole = "The quick brown fox jumps over"
    tokens = smollm2.tokenizer.encode(whole)
    for stops, shown in (
        (["fox"], "The quick brown "), ("fox", "The quick brown "), (["quick brown"], "The "),
        (["n f"], "The quick brow"), (["jumps", "brown"], "The quick "), (["The"], ""),
        (["nothing of the kind"], whole), (["over the dog"], whole),
        ([], whole),
    ):  # fmt: skip
        script(tokens)
        assert "".join(streaming.stream(PROMPT, stop=stops, max_tokens=tokens.size)) == shown
        assert streaming.report.stop_reason == ("length" if shown == whole else "stop")


def test_time_ends_run() -> None:
    with load(GOLDEN / "llama-one-layer.gguf", backend="reference", max_kv_size=256, time="1s") as session:
        session.generate("Hi", raw=True, max_tokens=None, ignore_eos=True)
        timings = session.report.timings
        assert session.report.stop_reason == "time"
        assert (timings.budget_s, timings.before_s) == (1.0, 0.0)
        assert timings.total_s >= (timings.ttft_s or 0.0)
        with pytest.raises(
            BudgetError,
            match=r"--time 5s was over after 6(\.\d+)?s, 6s of it by the start: state (about )?[0-9.]+s (and|or)",
        ):
            session.generate("Hi", raw=True, time_limit=5.0, time_spent=6.0)
        assert (session.report.stop_reason, session.report.tokens.ran) == ("time", 0)
        assert " s + 6.00 s for the start, of 5 s · stopped: time" in report_lines(session.report)[0]
        with pytest.raises(
            BudgetError, match=r"^stopped in the prompt \(0 of \d+ tokens\): no answer; --time 0ms was over"
        ):
            session.generate("Hi", raw=True, time_limit=0)
        report = session.report
        assert (report.tokens.generated, report.timings.ttft_s, report.timings.prefill_tok_s) == (0, None, None)
        assert f"prompt {report.tokens.prompt} tokens, only 0 run · generated 0" in report_lines(report)[0]


def test_memory_beyond_budget_ends_run(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, readings = 8 << 30, iter([1 << 30, 1 << 30])
    with load(smollm2, max_kv_size=256, threads=1, memory=budget) as session:
        monkeypatch.setattr(
            "edge.run.budgets.meters.memory_use", lambda: MemoryUse(0, next(readings, budget + 1), None, None)
        )
        session.generate(PROMPT, max_tokens=None, ignore_eos=True)
        assert session.report.stop_reason == "memory"
        assert session.report.tokens.generated > 1


# What is remembered


def test_model_above_prediction_is_given_up(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 8 << 30
    monkeypatch.setattr("edge.run.session.memory_use", lambda: MemoryUse(0, budget + 1, None, None))
    with pytest.raises(BudgetError, match="loading took"):
        load(smollm2, max_kv_size=256, threads=1, memory=budget)


def test_follow_up_equals_fresh_run_over_whole_conversation(
    streaming: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape(streaming, monkeypatch)
    streaming.generate("Say hello.", max_tokens=300)
    assert streaming.report.stop_reason == "eos"
    streaming.generate("Now say goodbye.", max_tokens=1, follow_up=True)
    conversation, logits = np.array(tape.tokens, np.int32), tape.logits.copy()
    assert streaming.report.kv.evicted == 0
    assert streaming.model.tokenizer.decode(conversation).count("Say hello.") == 1

    streaming.generate(conversation, max_tokens=1)
    assert tape.tokens == [*conversation, *conversation]
    assert tape.logits.argmax() == logits.argmax()
    assert np.corrcoef(tape.logits, logits)[0, 1] > 0.999


@pytest.mark.parametrize("name", ["llama-gqa-tied", "spm"])  # with a template; with BOS, and a space before words
def test_raw_follow_up_goes_on_with_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(GOLDEN / f"{name}.gguf", backend="reference", max_kv_size=64) as session:
        tokenizer, tape = session.model.tokenizer, Tape(session, monkeypatch)
        begun = session.model.encode_prompt("one two", raw=True).tolist()
        assert (begun[0] == tokenizer.bos_id) == tokenizer.add_bos
        mark = tokenizer.text(tokenizer.bos_id)
        session.generate("one two", raw=True, max_tokens=1, ignore_eos=True)
        session.generate(f"three{mark}", raw=True, follow_up=True, max_tokens=1, ignore_eos=True)
        assert tape.tokens[: len(begun)] == begun
        assert tape.tokens[len(begun) + 1 :] == [*tokenizer.encode("three", start=False), tokenizer.bos_id]
        with pytest.raises(UnsupportedError, match="--think needs a chat template, and this prompt goes without one"):
            session.generate("four", raw=True, follow_up=True, think=True)


# What is reported


def test_ctrl_c_during_prefill_leaves_report(streaming: Session) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    streaming.report = None
    with pytest.raises(KeyboardInterrupt):
        streaming.generate(PROMPT, on_prefill=interrupt)
    report = streaming.report
    assert (report.stop_reason, report.text, report.tokens.generated) == ("interrupted", "", 0)
    assert report.tokens.ran == report.kv.rows > 0
    assert streaming.generate(PROMPT, max_tokens=3)


KEYS = REPORT_KEYS | {
    "plan": {
        "backend", "kv_policy", "sinks", "config", "evict_step", "bytes", "predicted_peak", "limit", "limit_source",
        "tuned", "gpu_limit", "gpu_limit_source", "chosen", "first_run", "dtype_by", "rows_by", "snapshots", "draft",
    },
    "versions": {"edge", "python", "numpy", "apache-tvm", "apache-tvm-ffi"},
}  # fmt: skip


def test_report_counts_and_measures(streaming: Session) -> None:
    prompt = streaming.model.encode_prompt(PROMPT)
    text = streaming.generate(prompt, max_tokens=5)
    report = streaming.report
    said: dict[str, Any] = report.to_dict()
    assert set(said) == set(json.loads(json.dumps(said))) == set(KEYS)
    for name, keys in KEYS.items():
        assert keys is None or set(said[name]) == keys, name
    assert (said["schema"], said["text"]) == (1, text)
    assert (report.tokens.prompt, report.tokens.generated) == (prompt.size, 5)
    assert (report.kv.rows, report.kv.capacity, report.kv.evicted) == (prompt.size + 4, ROWS, 0)
    assert report.memory.kv == streaming.engine.kv.nbytes
    assert report.memory.peak_rss > report.memory.weights
    assert min(report.timings.load_s, report.timings.ttft_s, report.timings.decode_tok_s) > 0


# The bound on memory
