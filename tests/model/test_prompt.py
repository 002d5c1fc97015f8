"""Prompts of any length: read while they are run, in bounded memory, and never lost or run by two at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, open_golden, run_child

from edge.errors import BudgetError, BusyError, InputError
from edge.model.parts.prompt import Prompt
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import IntArray

MODEL = "llama-gqa-tied"


@pytest.fixture
def session() -> Iterator[Session]:
    with load(open_golden(MODEL).model, backend="reference", max_kv_size=64, prefill_step_size=8) as session:
        yield session


def endless_text(read: list[int]) -> Iterator[str]:
    """The same words for ever; `read` counts the parts that were taken."""
    while True:
        read.append(1)
        yield "the quick brown fox jumps over the lazy dog " * 20


def test_endless_text_is_read_as_it_runs(session: Session) -> None:
    read: list[int] = []
    ran: list[int] = []

    def stop(done: int, known: int) -> None:
        ran.append(done)
        assert known >= done
        if done >= 200:
            session.terminate()

    assert session.generate(endless_text(read), raw=True, on_prefill=stop) == ""
    tokens = session.report.tokens
    assert (session.report.stop_reason, tokens.ran, tokens.generated) == ("terminated", ran[-1], 0)
    assert tokens.unread
    assert tokens.cut
    assert tokens.prompt < 200 + 64 + 8 + 20_000  # what the cache holds, a chunk, and a block of text
    assert len(read) < 60


@pytest.mark.parametrize("ended", ["interrupt", "terminate", "time"])
def test_follow_up_first_runs_rest_of_prompt(session: Session, ended: str) -> None:
    tokens = open_golden(MODEL).tokens[:40]
    model_tokens: list[int] = []
    forward = session.engine.forward

    def recorded(part: IntArray) -> object:
        model_tokens.extend(part.tolist())
        return forward(part)

    session.engine.forward = recorded  # type: ignore[method-assign, assignment]

    def end(done: int, _: int) -> None:
        if done >= 16:
            if ended == "interrupt":
                raise KeyboardInterrupt
            if ended == "terminate":
                session.terminate()

    limits = {"time_limit": 60.0, "time_spent": 60.0} if ended == "time" else {}
    with pytest.raises((KeyboardInterrupt, BudgetError)) if ended != "terminate" else nullcontext():
        session.generate(tokens, on_prefill=end, **limits)
    session.terminated = False
    session.generate(np.array([7], np.int32), follow_up=True, max_tokens=1)
    assert model_tokens == [*tokens.tolist(), 7]


def test_interrupt_while_prompt_is_first_read_ends_it(session: Session) -> None:
    def blocks() -> Iterator[IntArray]:
        session.interrupt()
        while True:
            yield np.ones(5000, np.int32)

    assert session.generate(Prompt(blocks()), max_tokens=2) == ""
    assert (session.report.stop_reason, session.report.tokens.ran) == ("interrupted", 0)
    session.generate(np.ones(5, np.int32), max_tokens=2, ignore_eos=True)
    assert session.report.stop_reason == "length"  # the next generation knows nothing of it


_LONG_PROMPT = """
import json, sys, time
import numpy as np
from edge.devices.memory import memory_use
from edge.run.starting.loading import load
from edge.model.model import open_model
session = load(open_model(sys.argv[1]), backend="reference", max_kv_size=64, prefill_step_size=8, memory="1GiB")
def text():
    for _ in range(20_000):
        yield "the quick brown fox jumps over the lazy dog " * 25
def tokens():
    return np.ones(4_000_000, np.int32)
def stop(done, known):
    if done >= 1000:
        session.terminate()
session.generate("warm up " * 200, raw=True, max_tokens=4)
found = []
for prompt in (text(), tokens()):
    before = memory_use().peak
    session.generate(prompt, raw=True, on_prefill=stop)
    session.reset()
    held = 16_000_000 if found else 0  # the caller's array
    found.append([memory_use().peak - before - held, session.report.tokens.ran])
    session.terminated = False
print(json.dumps(found))
"""


def test_long_prompts_take_no_memory() -> None:
    """The caller's array of tokens does not count; when the run ends, the rest is not copied."""
    for grown, ran in run_child(_LONG_PROMPT, GOLDEN / f"{MODEL}.gguf").output:
        assert ran >= 1000
        assert grown < 3 << 20


def test_second_stream_is_refused_while_one_is_open(session: Session) -> None:
    tokens = open_golden(MODEL).tokens[:8]
    whole = session.generate(tokens, max_tokens=6, ignore_eos=True)
    first = session.stream(tokens, max_tokens=6, ignore_eos=True)
    made_before = session.stream(tokens, max_tokens=2)
    text = next(first)
    with pytest.raises(BusyError):
        next(made_before)
    with pytest.raises(BusyError, match="one generation at a time: finish or close that stream first, or load another"):
        session.stream(tokens)
    for refused in (session.reset, lambda: session.generate(tokens)):
        with pytest.raises(BusyError):
            refused()
    assert text + "".join(first) == whole
    left_open = session.stream(tokens, max_tokens=6, ignore_eos=True)
    next(left_open)
    left_open.close()
    assert session.generate(tokens, max_tokens=6, ignore_eos=True) == whole


def test_closing_session_ends_its_open_stream() -> None:
    session = load(open_golden(MODEL).model, backend="reference", max_kv_size=64)
    with session:
        pieces = session.stream(open_golden(MODEL).tokens[:8], max_tokens=50, ignore_eos=True)
        next(pieces)
    assert list(pieces) == []
    assert session.report.stop_reason == "interrupted"
    with pytest.raises(InputError, match="this session is closed"):
        session.generate("x")


def test_forked_child_is_told_to_load_model_itself(tmp_path: Path) -> None:
    model = open_golden(MODEL).model
    options = {"backend": "cpu", "max_kv_size": 64, "threads": 1}
    with load(model, **options) as session:  # type: ignore[arg-type]
        answer = session.generate("x", raw=True, max_tokens=4, ignore_eos=True)
        said = tmp_path / "said"
        child = os.fork()
        if child == 0:
            try:
                try:
                    session.generate("x", raw=True)
                except BusyError as error:
                    session.close()
                    with load(model, **options) as own:  # type: ignore[arg-type]
                        text = own.generate("x", raw=True, max_tokens=4, ignore_eos=True)
                    said.write_text(f"{text == answer} {error}")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert said.read_text().startswith("True this session belongs to process")
        assert session.generate("x", raw=True, max_tokens=4, ignore_eos=True) == answer
