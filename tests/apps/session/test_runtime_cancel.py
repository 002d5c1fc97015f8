"""Questions that are cancelled, asked twice or loaded in the C runtime; reading and trimming by other threads."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of, pair_of, refused
from conftest import exhaustive
from ctypes_bundle import BundleSession, open_bundle
from profiles import MIB
from small_models import Small, write_small

from edge.apps.enums import Finish, Role, Trim
from edge.errors import BusyError, InputError, ModelFormatError

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2}
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": 1}
LONG = np.random.default_rng(7).integers(3, 200, 60).tolist()


def cancel_in_prompt(session: BundleSession, question: str | list[int], role: Role = Role.IDS) -> None:
    """Ask, and cancel when a chunk of the prompt has run."""
    session.append(role, question)
    piece = session.next()
    assert (piece.token, piece.text, piece.finish) == (None, "", Finish.GOING)
    session.cancel()
    assert session.next().finish == Finish.INTERRUPTED


def tokens_of(session: BundleSession) -> list[int]:
    return [piece.token for piece in session.pieces() if piece.token is not None]


def test_long_prompt_is_told_chunk_by_chunk() -> None:
    with pair_of(MODEL, kv_policy="full", **ROWS) as pair:
        session = pair.exported
        session.set(**GREEDY)
        session.append(Role.IDS, LONG)
        pieces = list(session.pieces())
        assert [piece.prompt for piece in pieces] == [(16, 60), (32, 60), (48, 60), *[(60, 60)] * 6]
        tokens = [piece.token for piece in pieces]
        assert tokens[:3] == [None] * 3
        pair.python.generate(np.array(LONG, np.int32), max_tokens=6, ignore_eos=True)
        assert pair.recorded == tokens[3:]


@pytest.mark.parametrize(("name", "policy"), [(MODEL, "streaming"), ("qwen35", "h2o")])
def test_question_cancelled_in_its_prompt_is_taken_back(name: str, policy: str) -> None:
    with pair_of(name, kv_policy=policy, **ROWS) as pair:
        pair.exported.append(Role.SYSTEM, "Be brief.")
        cancel_in_prompt(pair.exported, "word " * 9, Role.USER)
        pair.ask("Hi", system="Be brief.", told=True, **GREEDY)
        rows = pair.exported.use()["rows"]
        cancel_in_prompt(pair.exported, "word " * 9, Role.USER)
        if policy != "h2o":  # whose attention the rows have been part of
            assert pair.exported.use()["rows"] <= rows
            pair.ask("And?", **GREEDY)
        else:
            pair.exported.answer("And?")


def test_question_behind_an_unanswered_one_gives_it_an_empty_answer() -> None:
    """It gives the first an empty answer; taken back, the first waits again."""
    folder = bundle_of(MODEL, kv_policy="streaming", **ROWS)
    with open_bundle(folder) as bundle, bundle.session(**GREEDY) as session, bundle.session(**GREEDY) as other:
        session.append(Role.USER, "Hi")
        alone = session.answer("And?")
        other.append(Role.USER, "Hi")
        other.append(Role.ASSISTANT, "")
        assert other.answer("And?") == alone
        other.rewind()
        other.append(Role.USER, "Hi")
        state = other.save()
        cancel_in_prompt(other, "word " * 9, Role.USER)
        first = tokens_of(other)
        other.load(state)
        assert tokens_of(other) == first
        session.rewind(1)
        assert tokens_of(session) == first
        session.append(Role.RAW, "x")
        refused(InputError, "waits for its answer", session.append, Role.USER, "y")


def test_cancel_between_answers_does_nothing() -> None:
    """Not to a question that is loaded, or waits again; whose progress is told from its own beginning."""
    folder = bundle_of(MODEL, kv_policy="streaming", **ROWS)
    with open_bundle(folder) as bundle, bundle.session(**GREEDY) as session:
        session.append(Role.USER, "Hi")
        state = session.save()
        pieces = list(session.pieces())
        for cancelled_before_load in (True, False):
            session.answer("And?")
            if cancelled_before_load:
                session.cancel()
            session.load(state)
            assert list(session.pieces()) == pieces
        session.load(state)
        session.answer("And?")
        session.cancel()
        session.rewind(1)
        again = list(session.pieces())
        assert [piece.token for piece in again][-6:] == [piece.token for piece in pieces][-6:]
        assert again[-1].prompt[1] <= pieces[-1].prompt[1]


def count_until_refused(session: BundleSession) -> None:
    while True:
        session.thread_ids()


def test_usage_and_tokens_are_read_while_another_thread_computes() -> None:
    folder = bundle_of(MODEL, kv_policy="streaming", **ROWS)
    with open_bundle(folder) as bundle, bundle.session(ignore_eos=1) as session:
        expected = session.tokenize("The 😀 fox")
        thread = threading.Thread(target=session.append, args=(Role.IDS, LONG * 4000))
        thread.start()
        refused(BusyError, "another thread", count_until_refused, session)
        seen = []
        while len(seen) < 50 or not seen[-1]:
            assert session.tokenize("The 😀 fox") == expected
            use = session.use()
            assert use["capacity"] == 128
            seen.append(use["tokens"])
        assert seen == sorted(seen)
        while thread.is_alive():
            session.cancel()
            thread.join(0.01)
        assert session.next().finish == Finish.INTERRUPTED


def test_refused_state_leaves_the_conversation() -> None:
    folder = bundle_of(MODEL, kv_policy="streaming", **ROWS | {"max_kv_size": 512})
    other = bundle_of(MODEL, kv_policy="h2o", **ROWS)
    with (
        open_bundle(folder) as bundle, open_bundle(other) as others,
        bundle.session(**GREEDY) as session, others.session() as foreign,
    ):  # fmt: skip
        session.answer("Hi")
        state, expected = session.save(), session.answer("And?")
        session.load(state)
        damaged = [b"0123456789", foreign.save()]
        for at in (0, 9, 50, 100, len(state) // 2, len(state) - 60, len(state) - 1):
            damaged += [state[:at], state[:at] + bytes([state[at] ^ 4]) + state[at + 1 :]]
        for each in damaged:
            refused(ModelFormatError, "state", session.load, each)
        with tempfile.TemporaryFile() as file:
            os.write(file.fileno(), foreign.save())
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            refused(ModelFormatError, "another bundle", session.load_from, file.fileno())
        with bundle.session(**GREEDY) as long:
            long.answer(LONG * 6, Role.IDS)
            session.trim(Trim.ALL)
            refused(InputError, "room for 256", session.load, long.save())
        assert session.answer("And?") == expected
        with tempfile.TemporaryFile() as file:
            os.write(file.fileno(), damaged[-1])
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            refused(ModelFormatError, "damaged", session.load_from, file.fileno())
        assert session.use()["rows"] == 0


@contextmanager
def two_sessions(name: str, options: dict[str, Any], **chosen: Any) -> Iterator[tuple[BundleSession, BundleSession]]:
    chosen = GREEDY | chosen
    with open_bundle(bundle_of(name, **options)) as it, it.session(**chosen) as one, it.session(**chosen) as other:
        yield one, other


def private() -> int:
    """Anonymous bytes of this process, by its page tables: the kernel's counters may lag by megabytes."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Anonymous", "Swap"))


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")
def test_soft_trim_returns_empty_pages(tmp_path: Path) -> None:
    """Pages of rows of an answer that was taken back return to the system; the capacity stays."""
    rows, prompt = 8192, np.random.default_rng(2).integers(3, 200, 6144).tolist()
    model = write_small(tmp_path / "long.gguf", Small(layers=2, context=rows))
    with two_sessions(str(model), ROWS | {"kv_policy": "full", "max_kv_size": rows}) as (trimmed, other):
        for session in (trimmed, other):
            session.answer(prompt[:300], Role.IDS)
        trimmed.answer(prompt, Role.IDS)
        trimmed.rewind(1)
        kv, before = trimmed.use()["kv"], private()
        trimmed.trim(Trim.SOFT)
        assert kv >= 2 * MIB
        assert before - private() > kv // 2
        assert (trimmed.use()["capacity"], trimmed.use()["rows"]) == (rows, other.use()["rows"])
        for count in (9, 900, 40):
            assert trimmed.answer(prompt[-count:], Role.IDS) == other.answer(prompt[-count:], Role.IDS)
        assert trimmed.save() == other.save()


@pytest.mark.parametrize(("name", "policy"), [(MODEL, "streaming"), exhaustive("qwen35", "h2o")])
def test_trim_of_another_thread_waits_for_a_token(name: str, policy: str) -> None:
    """It refuses nothing, changes no answer, and disturbs no call of the thread that answers."""
    with two_sessions(name, ROWS | {"kv_policy": policy}, max_tokens=60) as (trimmed, other):
        ended = threading.Event()

        def trim() -> None:
            while not ended.is_set():
                trimmed.trim(Trim.SOFT)

        thread = threading.Thread(target=trim)
        thread.start()
        try:
            for _ in range(3):
                assert trimmed.answer(LONG, Role.IDS) == other.answer(LONG, Role.IDS)
        finally:
            ended.set()
            thread.join()
        assert trimmed.save() == other.save()


def test_rows_are_given_back_while_a_prompt_runs() -> None:
    """A trim of another thread is not refused while a text longer than the cache is appended."""
    with two_sessions(MODEL, ROWS | {"kv_policy": "streaming", "max_kv_size": 500}) as (session, _):
        thread = threading.Thread(target=session.append, args=(Role.IDS, LONG * 100))
        thread.start()
        while thread.is_alive() and not session.use()["tokens"]:
            pass
        session.trim(Trim.ALL)
        thread.join()
        assert session.use()["capacity"] == 256
        assert any(piece.token is not None for piece in session.pieces())
