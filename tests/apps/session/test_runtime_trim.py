"""edge_trim of the C library: pages that go back to the system, and answers that do not change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of
from conftest import exhaustive
from ctypes_bundle import BundleSession, open_bundle
from profiles import MIB
from small_models import Small, write_small
from test_runtime_session import MODEL, STREAMING, TEXT, ids

from edge.apps.enums import Finish, Role, Trim

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": 1, "threads": 1}
ROWS = 8192
FULL = {"kv_policy": "full", "max_kv_size": 256}


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
    model = write_small(tmp_path / "long.gguf", Small(layers=2, context=ROWS))
    options = STREAMING | {"kv_policy": "full", "max_kv_size": ROWS}
    with two_sessions(str(model), options) as (trimmed, other):
        for session in (trimmed, other):
            session.answer(ids(300), Role.IDS)
        trimmed.answer(ids(ROWS * 3 // 4, seed=2), Role.IDS)
        trimmed.rewind(1)
        kv, before = trimmed.use()["kv"], private()
        trimmed.trim(Trim.SOFT)
        assert kv >= 2 * MIB
        assert before - private() > kv // 2
        assert (trimmed.use()["capacity"], trimmed.use()["rows"]) == (ROWS, other.use()["rows"])
        for text in (ids(9), ids(900, seed=3), ids(40, seed=4)):
            assert trimmed.answer(text, Role.IDS) == other.answer(text, Role.IDS)
        assert trimmed.save() == other.save()


@pytest.mark.parametrize(("name", "options"), [
    (MODEL, STREAMING),
    exhaustive(MODEL, STREAMING | {"kv_policy": "h2o", "kv_dtype": "int4"}),
    exhaustive("gemma3", STREAMING | FULL),
    exhaustive("qwen35", STREAMING | FULL),
    exhaustive("lfm2", STREAMING | {"kv_policy": "streaming"}),
    exhaustive("phi3-longrope", STREAMING | {"kv_policy": "h2o"}),
    exhaustive(MODEL, STREAMING | {"kv_policy": "kvzap"}),
])  # fmt: skip
def test_soft_trim_changes_no_answer(name: str, options: dict[str, Any]) -> None:
    """Before a question, between its append and its answer, and between tokens."""
    with two_sessions(name, options) as (trimmed, other):
        for length in (30, 70, 45):
            trimmed.trim(Trim.SOFT)
            for session in (trimmed, other):
                session.append(Role.IDS, ids(length, seed=length))
            trimmed.trim(Trim.SOFT)
            finish = Finish.GOING
            while not finish:
                piece, finish = trimmed.next(), Finish.GOING
                assert piece == other.next()
                finish = piece.finish
                trimmed.trim(Trim.SOFT)
        assert trimmed.save() == other.save()


def test_trim_of_another_thread_waits_for_a_token() -> None:
    """It refuses nothing, and disturbs no call of the thread that answers."""
    with two_sessions(MODEL, STREAMING, max_tokens=60, threads=2) as (trimmed, other):
        ended = threading.Event()

        def trim() -> None:
            while not ended.is_set():
                trimmed.trim(Trim.SOFT)

        thread = threading.Thread(target=trim)
        thread.start()
        try:
            for _ in range(3):
                assert trimmed.answer(TEXT) == other.answer(TEXT)
        finally:
            ended.set()
            thread.join()
        assert trimmed.save() == other.save()


def test_rows_are_given_back_while_a_prompt_runs() -> None:
    """A trim of another thread is not refused while a text longer than the cache is appended."""
    with two_sessions(MODEL, STREAMING | {"max_kv_size": 500}) as (session, _):
        thread = threading.Thread(target=session.append, args=(Role.IDS, ids(6000)))
        thread.start()

        while not session.use()["tokens"]:
            assert thread.is_alive()
        session.trim(Trim.ALL)
        thread.join()
        assert session.use()["capacity"] == 256
        assert any(piece.token is not None for piece in session.pieces())
