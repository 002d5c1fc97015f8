"""Operator timing, shared by engines and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from edge.backends.base import Engine, EngineConfig, Operator
from edge.backends.kv_cache import end_of
from edge.errors import InputError
from edge.records import dataclass
from edge.types import IntArray

Result = TypeVar("Result")


def by_name(operators: Iterable[Operator]) -> list[Operator]:
    """Merge operators of the same name over all layers, in the order of their first run."""
    sums: dict[str, Operator] = {}
    for each in operators:
        each = replace(each, layer=None)
        sums[each.name] = _sum(sums[each.name], each) if each.name in sums else each
    return list(sums.values())


def check_pass(config: EngineConfig, tokens: int, context: int, passes: int) -> None:
    """Raise InputError for an impossible pass."""
    if tokens < 1 or context < 0 or passes < 1:
        raise InputError(
            f"operators are timed in 1 or more passes of 1 or more tokens behind 0 or more rows, "
            f"not {passes} of {tokens} behind {context}"
        )
    if context + tokens > config.capacity:
        raise InputError(f"{tokens} tokens behind {context} rows do not fit a KV cache of {config.capacity} rows")


def repeat_pass(
    engine: Engine, tokens: int, context: int, passes: int, run: Callable[[IntArray], Result],
    progress: Callable[[float], None] | None = None,
) -> list[Result]:  # fmt: skip
    """Run `passes` passes of the same tokens after the same `context` rows; return the results of `run`.

    One uncounted warm-up pass comes first: it finds caches cold and makes memory resident.
    """
    ids = np.arange(context + tokens, dtype=np.int32) * 7919 % engine.spec.vocab
    if context:
        engine.forward(ids[:context])
    results, end = [], end_of(engine.kv)
    for done in range(passes + 1):
        results.append(run(ids[context:]))
        engine.kv.truncate(context, end)
        if progress:
            progress((done + 1) / (passes + 1))
    return results[1:]


@dataclass(frozen=True)
class Piece:
    """Tokens of a pass that run at once: `count` of them after `before` rows."""

    before: int
    count: int

    def seen(self, window: int) -> int:
        """Rows that these tokens' queries see, summed over queries. window: 0 for none."""
        most = window or self.before + self.count
        return sum(min(self.before + index + 1, most) for index in range(self.count))

    def rows(self, window: int) -> int:
        """Rows that at least one of the queries sees."""
        return min(self.before + self.count, window + self.count - 1 if window else self.before + self.count)


def pieces(tokens: int, context: int, step: int) -> Iterator[Piece]:
    """Split a pass into pieces of at most `step` tokens."""
    for start in range(0, tokens, step):
        yield Piece(context + start, min(step, tokens - start))


def attention_flops(width: int, window: int, parts: Iterable[Piece]) -> int:
    """Flops of one layer: queries by keys, weights by values; none for rows that a query does not see. width: values of
    all heads' queries."""
    return sum(4 * width * part.seen(window) for part in parts)


def _sum(one: Operator, other: Operator) -> Operator:
    """Add two operators: unknown bytes and flops count as 0 beside known ones, waiting is weighted by time."""
    seconds = one.seconds + other.seconds
    waited = None
    if one.waited is not None and other.waited is not None:
        waited = (one.waited * one.seconds + other.waited * other.seconds) / seconds if seconds else 0.0
    return replace(
        one, calls=one.calls + other.calls, seconds=seconds, waited=waited,
        bytes=_total(one.bytes, other.bytes), flops=_total(one.flops, other.flops),
    )  # fmt: skip


def _total(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other
