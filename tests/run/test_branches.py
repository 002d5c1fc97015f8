"""Beams against transformers' (tests/golden/beams.py), and branches of a conversation: each answers as though it were
the only one, and its beginning runs once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive

from edge.errors import BudgetError, BusyError, InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.model.model import Model, open_model
from edge.run.branching.outlining import points_of
from edge.run.branching.several import Spent
from edge.run.branching.voting import words_of
from edge.run.budgets.meters import Watch
from edge.run.conversation import Conversation
from edge.run.request import Request
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.sampling import SamplingParams

SEQUENCES = 5  # as in test_batch.py, which compiles the same code
QUESTIONS = ("one", "two of them", "three", "four")
BENEFITS = "What are the benefits of regular exercise?"
OPTIONS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "raw": True}
LLAMA = open_model(GOLDEN / "llama-gqa-tied.gguf")
NAN = float("nan")
with np.load(GOLDEN / "beams.npz") as found:
    FOUND = dict(found)
CASES = json.loads(str(FOUND.pop("cases")))
SELDOM = {("gemma3", "cpu", 1), ("gemma3", "cpu", SEQUENCES), ("qwen35", "cpu", 1)}


@pytest.mark.parametrize(("index", "backend", "sequences"), [
    (exhaustive if (name, backend, count) in SELDOM else pytest.param)(at, backend, count)
    for at, (name, *_) in enumerate(CASES)
    for backend, count in [("reference", 1), ("cpu", 1), ("cpu", SEQUENCES)]
])  # fmt: skip
def test_beams_match_transformers(index: int, backend: str, sequences: int) -> None:
    """Also those of models with windows or recurrent states, of which a beam has a copy of its own."""
    name, beams, penalty, most, ends = CASES[index]
    model = open_model(GOLDEN / f"{name}.gguf")
    model.tokenizer.end_ids = frozenset(ends)
    with load(model, backend=backend, max_kv_size=64, sequences=sequences) as session:
        text = session.generate(
            FOUND[f"{index}.prompt"], beams=beams, length_penalty=penalty, max_tokens=most, sampling=SamplingParams()
        )
        report = session.report
        expected = [[token for token in row if token >= 0] for row in FOUND[f"{index}.tokens"].tolist()]
        assert [list(each.tokens) for each in report.beams] == expected
        scores = [each.score for each in report.beams]
        assert scores == pytest.approx(FOUND[f"{index}.scores"].tolist(), rel=5e-3, abs=5e-3)
        ended = expected[0][-1] in ends
        assert report.stop_reason == ("eos" if ended else "length")
        assert report.tokens.generated == len(expected[0]) - ended
        said = expected[0][:-1] if ended else expected[0]
        assert text == report.text
        assert session.tokenizer.decode(said).startswith(text)  # characters that are not complete are left out
        # The conversation goes on behind the best answer.
        follow = np.array([70, 71], np.int32)
        session.generate(follow, follow_up=True, max_tokens=1)
        assert session.report.tokens.prompt == report.tokens.generated + 2


@pytest.mark.parametrize(("sequences", "policy"), [(1, "streaming"), (SEQUENCES, "full"), (SEQUENCES, "streaming")])
def test_trim_ends_search_with_best_so_far(sequences: int, policy: str) -> None:
    """Its rows stay, since it returns to them."""
    prompt = np.arange(400, dtype=np.int32) % 190 + 3
    with load(LLAMA, backend="cpu", max_kv_size=480, sequences=sequences, kv_policy=policy) as session:
        name = "forward_batch" if sequences > 1 else "forward"
        forward = getattr(session.engine, name)

        def trimmed(*arguments: Any) -> Any:
            if session.engine.kv.length == 405 and session.engine.kv.capacity == 480:
                asking = Thread(target=session.trim, args=(1.0,))
                asking.start()
                asking.join()
            return forward(*arguments)

        setattr(session.engine, name, trimmed)
        text = session.generate(prompt, beams=3, max_tokens=40, ignore_eos=True)
        report = session.report
        assert report.stop_reason == "memory"
        assert 1 <= report.tokens.generated < 40
        assert text == report.text
        assert session.engine.kv.capacity < 480
        if policy == "streaming":
            session.generate(np.array([70], np.int32), follow_up=True, max_tokens=1)
            assert session.report.tokens.prompt == report.tokens.generated + 1


@pytest.mark.parametrize("name", ["llama-gqa-tied", "falcon-h1"])
def test_branches_answer_as_a_session_that_rewinds(name: str) -> None:
    """Attention alone, and a state that cannot be copied from the middle of a text."""
    model = open_model(GOLDEN / f"{name}.gguf")
    expected, after = [], []
    with load(model, max_kv_size=200, threads=2) as alone:
        alone.generate("some text to begin with", **OPTIONS)
        before = alone.mark(hold=True)
        for question in QUESTIONS:
            expected.append(alone.generate(question, follow_up=True, **OPTIONS))
            after.append(alone.generate("and", follow_up=True, **OPTIONS))
            alone.rewind(before)
        plain = alone.generate("and", follow_up=True, **OPTIONS)
    with load(model, sequences=SEQUENCES, max_kv_size=200, threads=2) as session:
        session.generate("some text to begin with", **OPTIONS)
        rows = session.engine.kv.length
        mark = session.mark(hold=True)
        for joined in (2, 0, None):
            with session.fork(4) as fork:
                streams = [branch.stream(question, **OPTIONS) for branch, question in zip(fork, QUESTIONS, strict=True)]
                with pytest.raises(BusyError):
                    session.stream("other")
                with pytest.raises(BusyError):
                    fork[0].stream("other")
                assert ["".join(each) for each in streams] == expected
                assert all(each.report and each.report.tokens.reused >= rows for each in streams)
                if joined is not None:
                    fork.join(fork[joined])
            found = session.generate("and", follow_up=True, **OPTIONS)
            assert session.report.tokens.ran < rows
            assert found == (plain if joined is None else after[joined])
            session.rewind(mark)


def test_branch_goes_on_and_ends_with_its_fork() -> None:
    with load(LLAMA, sequences=SEQUENCES, max_kv_size=200, threads=2) as session:
        one = session.generate("some text", **OPTIONS)
        two = session.generate("more", follow_up=True, **OPTIONS)
        session.reset()
        with session.fork(7) as fork:  # more than there are sequences, of an empty conversation
            assert [branch.generate("some text", **OPTIONS) for branch in fork] == 7 * [one]
            assert fork[6].generate("more", **OPTIONS) == two
            open_one = fork[1].stream("more", **{**OPTIONS, "max_tokens": None})
            next(open_one)
        assert open_one.report.stop_reason == "interrupted"
        with session.fork(1) as fork, pytest.raises(InputError, match="a branch gives one answer"):
            fork[0].stream("hi", vote=3)
        with pytest.raises(InputError, match="no branch of an open fork"):
            fork.join(fork[0])
        for n in (0, 65, True, "3"):
            with pytest.raises(InputError, match="from 1 to 64"):
                session.fork(n)
    with load(LLAMA, max_kv_size=24, threads=2) as session:
        session.generate("some text", **{**OPTIONS, "max_tokens": 40})
        with pytest.raises(InputError, match="evicted"):
            session.fork(2)


def test_vote_gives_what_most_of_its_answers_say() -> None:
    """Of the answers that single runs draw with the seeds that follow each other; a conversation goes on with it."""
    form = Grammar(regex="(yes|no|maybe)\\.?")
    with load(LLAMA, sequences=SEQUENCES, max_kv_size=200, threads=2) as session:
        for seed in range(3):
            single = []
            for number in range(7):
                sampling = SamplingParams(temperature=0.9, seed=seed + number)
                single.append(session.generate("Is it?", raw=True, grammar=form, sampling=sampling))
            votes = Counter(map(words_of, single))
            chosen = session.generate(
                "Is it?", raw=True, grammar=form, sampling=SamplingParams(temperature=0.9, seed=seed), vote=7
            )
            assert votes[words_of(chosen)] == max(votes.values())
            report = session.report
            assert report.seed == seed
            uses = report.branched.branches
            assert 1 < report.branched.side_by_side <= SEQUENCES
            assert report.tokens.generated == sum(each.generated for each in uses)
            assert report.energy.joules == pytest.approx(sum(each.joules for each in uses))
            ended = [each.votes for each in uses if each.stop_reason != "interrupted"]
            assert len(ended) == 7 or 2 * max(ended) > 7 - len(ended)  # the others cannot change the vote
            after = session.generate("and", follow_up=True, **OPTIONS)
            session.generate("Is it?" + chosen, raw=True, max_tokens=1)
            assert session.generate("Is it?" + chosen + "and", **OPTIONS) == after


def test_outline_writes_points_as_single_answers_do(smollm2: Model) -> None:
    question, limit = BENEFITS, 120
    with load(smollm2, max_kv_size=1024, threads=1) as session:
        pieces = list(session.stream(question, outline="always", max_tokens=limit))
        report = session.report
        outline, *points = report.branched.branches
        heads = points_of(outline.text)
        assert (outline.part, len(points)) == ("outline", len(heads)) >= ("outline", 2)
        lines = "".join(pieces).splitlines()
        assert lines == report.text.splitlines() if report.text else False
        assert report.tokens.generated <= limit
        for number, (line, head, point) in enumerate(zip(lines, heads, points, strict=True), 1):
            assert line.startswith(f"{number}. {head}:")
            assert point.text in line
            assert number == 1 or point.ran < outline.ran  # the conversation's rows are shared
        session.generate("Why?", follow_up=True, max_tokens=4)
        assert session.report.tokens.prompt > report.tokens.generated / 2  # the answer is in the conversation
        plain = session.generate("Say hi.", max_tokens=8)
        session.reset()
        assert session.generate("Say hi.", outline="always", max_tokens=8) == plain  # an outline without points
        assert [each.part for each in session.report.branched.branches] == ["outline", "answer"]
        assert session.report.branched.one_piece == "the outline has no two points"
    for rows, limit, why in ((1024, 40, "-n 40 has"), (120, 120, "120 KV rows have"), (60, 40, "60 KV rows have")):
        with load(smollm2, max_kv_size=rows, threads=1) as session:
            stream = session.stream(question, outline="always", max_tokens=limit)
            assert next(stream)
            stream.close()
            assert session.report.branched.one_piece == f"{why} no room for its points"


def test_outline_that_ends_early_leaves_question_and_text(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of its own prompts; in a conversation, too. The report counts what was spent."""
    passed = [0.0]  # seconds by which the clock of budgets is ahead
    clocks = cast(dict[str, Any], Watch.__init__.__kwdefaults__)
    monkeypatch.setitem(clocks, "clock", lambda: time.perf_counter() + passed[0])
    with load(smollm2, max_kv_size=1024, threads=1) as session:
        talk = Conversation(session)
        "".join(talk.say("Say hi.", max_tokens=4))
        known, messages = session._sequence.tokens, talk.messages
        for end, reason in (("close", "interrupted"), ("interrupt", "interrupted"), ("time", "time")):
            pieces = talk.say(BENEFITS, outline="always", max_tokens=120, time_limit=1000)
            said = next(pieces)
            if end == "close":
                said += next(pieces)
                pieces.close()
            elif end == "interrupt":
                session.interrupt()
            else:
                passed[0] = 1000
            said += "".join(pieces)
            assert session.report.branched is not None
            assert session.report.stop_reason == reason
            assert talk.messages[-2:] == [
                {"role": "user", "content": BENEFITS}, {"role": "assistant", "content": said},
            ]  # fmt: skip
            asked, answer = smollm2.follow_up(BENEFITS).first(None), smollm2.tokenizer.encode(said, start=False)
            np.testing.assert_array_equal(session._sequence.tokens, np.concatenate([known, asked, answer]))
            assert talk.undo() == BENEFITS
        assert not list(talk.say(BENEFITS, outline="always", on_prefill=lambda *_: session.interrupt()))
        with pytest.raises(BudgetError, match="time"):
            list(session.stream(BENEFITS, follow_up=True, outline=True, time_limit=1e-6))
        assert session.report.branched is not None
        assert (session.report.stop_reason, talk.messages) == ("time", messages)


def test_points_have_parts_of_energy_and_later_deadlines(open_session: Callable[..., Session]) -> None:
    spent = Spent(open_session(), Request("some text", time=80.0, time_spent=40.0, energy=9.0, energy_spent=1.0))
    assert spent.part(4).energy == pytest.approx(2.0)
    shares = [spent.share(number, 4) for number in range(4)]
    assert shares == [pytest.approx(each, abs=1) for each in (50, 60, 70, 80)]


def test_points_are_lines_of_numbered_lists() -> None:
    text = "1. **Better sleep**: it is good\n2) Less stress - as said\n3. better sleep.\nand more\n4. " + "x" * 90
    assert points_of(text) == ["Better sleep", "Less stress"]
    assert words_of(" **Paris**.\n") == words_of("paris") == "paris"


@pytest.mark.parametrize(("options", "named"), [
    ({"vote": 1}, "from 2 to 64"), ({"vote": True}, "from 2 to 64"), ({"vote": 3, "beams": 2}, "without --beams"),
    ({"vote": 3, "logprobs": 1}, "without logprobs"), ({"outline": True, "vote": 3}, "without --vote"),
    ({"outline": "never"}, "always"), ({"outline": True, "stop": "x"}, "without --stop"),
    ({"vote": 3, "sampling": SamplingParams(temperature=0)}, "temp"),
    ({"beams": 0}, "from 1 to 64"), ({"beams": True}, "from 1 to 64"), ({"length_penalty": 2.0}, "state .*beams"),
    ({"length_penalty": NAN}, "length.penalty must be"),
    ({"beams": 2, "length_penalty": NAN}, "length.penalty must be"),
    ({"beams": 2, "stop": "x"}, "goes without .*stop"), ({"beams": 2, "logprobs": 0}, "goes without logprobs"),
    ({"beams": 2, "grammar": Grammar(regex="a")}, "goes without a grammar"),
    ({"beams": 2, "sampling": SamplingParams(temperature=1.0)}, "goes without a temperature"),
    ({"beams": 2, "max_tokens": None}, "needs a .*max.tokens"), ({"beams": 2, "max_tokens": 60}, "needs KV rows"),
])  # fmt: skip
def test_other_options_are_refused_by_name(
    open_session: Callable[..., Session], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        open_session(max_kv_size=64).generate("some text", **{"max_tokens": 2, **options})


def test_outlines_and_votes_that_cannot_begin(open_session: Callable[..., Session]) -> None:
    session = open_session(max_kv_size=64)
    with pytest.raises(UnsupportedError, match="question of text"):
        session.generate(messages=[{"role": "user", "content": "a"}], outline=True)
    size = session.model.prompt("some text").first(None).size
    with pytest.raises(BudgetError, match=rf"energy.* is spent .*: state .* and what the prompt's {size} tokens take"):
        session.generate("some text", vote=3, energy_limit=1e-9)
