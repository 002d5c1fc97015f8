"""Rows of one picture stay in the cache together, or leave it together, under every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import open_golden
from hypothesis import given
from hypothesis import strategies as st
from test_architectures import open_family, require_native
from test_policies import KEEPING, POLICIES, STREAMING, Shown, heads

from edge.backends.row_lists import RowLists, without_gaps
from edge.kv import POLICY_NAMES, make_policy, pinned_rows
from edge.model.parts.given import GivenRows
from edge.model.parts.prompt import Prompt
from edge.run.sequences.whole_pictures import whole_pictures
from edge.run.starting.loading import load
from edge.types import IntArray

EVICTING = tuple(name for name in POLICY_NAMES if name not in KEEPING)
GRID = (3, 4)


@pytest.mark.parametrize("name", EVICTING)
@given(st.data(), heads(), st.integers(1, 3))
def test_selections_divide_no_picture(name: str, data: st.DataObject, shown: Shown, longest: int) -> None:
    policy = make_policy(name, data.draw(st.integers(0, 6))) if name in STREAMING else data.draw(POLICIES[name])
    view, budget = shown
    rows = policy.rows_to_keep(replace(view, longest=budget * longest), budget)
    one = isinstance(rows, np.ndarray)
    chosen = [rows] if one else list(rows)
    cuts = np.sort(data.draw(st.lists(st.integers(0, 60), min_size=6, max_size=6, unique=True)))
    numbers = np.zeros(max(60, view.length), np.int32)
    for picture, (first, last) in enumerate(cuts.reshape(3, 2).tolist(), start=1):
        numbers[first:last] = picture
    lengths = [view.length] if one else view.lengths.reshape(-1).tolist()
    pictures, pinned = [numbers[:each] for each in lengths], pinned_rows(policy)
    alike = len({each.size for each in chosen}) == 1
    found = whole_pictures(chosen, pictures, pinned) if alike else [
        whole_pictures([one], [own], pinned)[0] for one, own in zip(chosen, pictures, strict=True)
    ]  # fmt: skip
    for kept, own, before in zip(found, pictures, chosen, strict=True):
        assert (np.diff(kept) > 0).all()
        assert kept.size <= before.size
        for picture in {*own.tolist()} - {0}:
            assert (own[kept] == picture).sum() in (0, (own == picture).sum())
        if not own.any():
            np.testing.assert_array_equal(kept, before)
    if alike and len(set(lengths)) == 1:  # engines whose heads keep equally many rows
        assert len({each.size for each in found}) == 1


def test_pinned_and_new_pictures_displace_old_text() -> None:
    pictures = np.repeat([0, 1, 0, 2, 0, 3], [2, 4, 10, 4, 10, 4]).astype(np.int32)
    chosen = np.array([0, 1, 2, 3, *range(20, 34)], np.int32)  # 4 sinks, and the newest 14
    (kept,) = whole_pictures([chosen], [pictures], pinned=4)
    assert kept.tolist() == [*range(6), *range(22, 34)]
    (kept,) = whole_pictures([np.arange(14, 34, dtype=np.int32)], [pictures], pinned=0)
    assert kept.tolist() == [*range(14, 34)]
    (kept,) = whole_pictures([np.arange(17, 34, dtype=np.int32)], [pictures], pinned=0)  # most of it, and no room
    assert kept.tolist() == [13, 14, 15, *range(20, 34)]


def test_gaps_close_around_pictures() -> None:
    assert without_gaps(np.array([3, 4, 9, 10, 11, 11, 11, 20])).tolist() == [0, 1, 2, 3, 4, 4, 4, 5]


def test_renumbered_lists_end_alike() -> None:
    """Of two heads, one has lost the picture that the other keeps."""
    lists = RowLists(8)
    lists.split(2)
    lists.rope_positions[:, :6] = [[0, 4, 5, 5, 5, 9], [0, 2, 7, 8, 9, 0]]
    found, following = lists.renumbered(np.array([6, 5], np.int32))
    assert [each.tolist() for each in found] == [[1, 2, 3, 3, 3, 4], [0, 1, 2, 3, 4]]
    lists.renumber(found, following)
    assert (lists.next_position, following) == (5, 5)


def prompt_with_pictures(spec: Any) -> tuple[GivenRows, IntArray]:
    table, random = GivenRows.of(spec), np.random.default_rng(5)
    parts = [random.integers(3, 250, 20).astype(np.int32)]
    for _ in range(3):
        rows = random.standard_normal((GRID[0] * GRID[1], spec.hidden)).astype(np.float32)
        parts += [table.add(rows, GRID), random.integers(3, 250, 10).astype(np.int32)]
    return table, np.concatenate(parts)


@pytest.mark.parametrize("name", [each for each in EVICTING if each != "kvzap"])  # which is fitted to a model
def test_runs_evict_whole_pictures(name: str) -> None:
    """The tokens of each head's rows are noted beside the session, from what its cache is told."""
    require_native()
    model, wanted = open_golden("llama-gqa-tied").model, ":window=4" if name in ("snapkv", "adakv", "pyramidkv") else ""
    table, tokens = prompt_with_pictures(model.spec)
    ids = [set(span.content.ids.tolist()) for span in table.pictures(tokens)]
    with load(model, backend="cpu", kv_policy=name + wanted, max_kv_size=64, prefill_step_size=8, threads=1) as session:
        kv: Any = session.engine.kv
        rows, keep, keep_heads, truncate = session._sequence.rows, kv.keep, kv.keep_heads, kv.truncate
        held, add = [list[int]() for _ in range(kv.head_lengths.size)], rows.add
        left = 0

        def noted(new: IntArray) -> None:
            add(new)
            for each in held:
                each.extend(new.tolist())

        def kept(selection: list[IntArray]) -> None:
            nonlocal left
            for own, each in zip(held, selection, strict=True):
                before = list(own)
                own[:] = [before[row] for row in each.tolist()]
                for picture in ids:
                    stayed, there = len(picture.intersection(own)), len(picture.intersection(before))
                    assert stayed in (0, there)
                    assert stayed in (0, len(picture)) or there == stayed
                    left += stayed < there

        def one_for_all(selection: IntArray, **how: Any) -> None:
            kept([selection] * len(held))
            keep(selection, **how)

        def of_heads(selection: list[IntArray]) -> None:
            kept(selection)
            keep_heads(selection)

        def cut(length: int, *others: Any) -> None:
            dropped = kv.length - length
            for each in held:
                del each[len(each) - dropped :]
            truncate(length, *others)

        rows.add, kv.keep, kv.keep_heads, kv.truncate = noted, one_for_all, of_heads, cut
        session.generate(Prompt([tokens], given=table), max_tokens=80, ignore_eos=True)
        assert [len(each) for each in held] == kv.head_lengths.reshape(-1).tolist()
        assert left


def test_positions_of_three_components_behind_evictions() -> None:
    """Both engines, whose caches differ in everything but `without_gaps`, go on alike."""
    require_native()
    model = open_family("qwen35").model
    table, tokens = prompt_with_pictures(model.spec)
    found = []
    for backend in ("cpu", "reference"):
        with load(
            model,
            backend=backend,
            kv_policy="streaming",
            max_kv_size=64,
            prefill_step_size=8,
            threads=1,
            kv_dtype="f32",
        ) as session:
            said = list[float]()
            session.generate(
                Prompt([tokens], given=table), max_tokens=40, ignore_eos=True, logprobs=0,
                on_logprob=lambda each, said=said: said.append(each.logprob),
            )  # fmt: skip
            assert session.report.kv.evicted
            found.append((said, session.engine.kv.positions.tolist()))
    assert found[0][1] == found[1][1]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-3)
