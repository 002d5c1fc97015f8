"""Attention over the KV cache, each row read once: softmax as in FlashAttention (arXiv:2205.14135), block by block.

The query heads that share a KV head are rows of one small matrix, together with the chunk's tokens in prefill. For a
block of cache rows: scores = Q Kᵀ; the running maximum m and sum l; out = out · e^(m − m') + e^(scores − m') V.
In decode the threads share the rows of the cache, and each thread that needs the result merges the parts
(FlashDecoding); in prefill they share the query rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.functions import soft_cap
from edge.backends.tvm.cpu.kernels.isas.wasm import Simd128
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
    exp,
    floats,
    i64,
    lanes_of,
    largest,
    let,
    load,
    loop,
    pinned,
    quotient,
    remainder,
    spread,
    store,
    total,
)
from edge.backends.tvm.kv.regions import SPARE_TILES
from edge.backends.tvm.targets import Target

NEVER = -1e30  # the score of a row that the query must not see


@dataclass(frozen=True)
class ScoreLimits:
    """Limits of scores, applied before softmax: a soft cap (0: none), and a sliding window, if any layer has one.

    A query at position p sees positions above p − window. positions: int32, in the order of the cache's rows.
    """

    cap: float
    window: Value | None
    positions: Buffer


@dataclass(frozen=True)
class Work:
    """The working memory of one thread, float32: offsets into `memory`."""

    memory: Buffer
    scores: Value  # [query rows, block · 16]
    out: Value  # [query rows, head]
    maxima: Value  # [query rows]
    sums: Value  # [query rows]
    block: int  # tiles of cache rows between two corrections of the maximum

    def of_rows(self, first: Value, value: int) -> Work:
        """The memory of some of many query rows, from `first` on; all use the same for scores."""
        out = let(self.out + first * value)
        return replace(self, out=out, maxima=let(self.maxima + first), sums=let(self.sums + first))


@dataclass(frozen=True)
class Tiles:
    """The tiles of rows to read: `first` up to `last` of the cache's tiles, or of a list of them.

    listed: returns the tile at an index of that list. `SPARE_TILES` more follow its end, and memory for a block.
    """

    first: Value
    last: Value
    listed: Callable[[Value], Value] | None = None

    def at(self, index: Value) -> Value:
        return index if self.listed is None else let(self.listed(index))


@dataclass(frozen=True)
class Query:
    """A row of queries: its offset, the number of cache rows that it may see, and its position (for windows).

    first: the first row that it sees; None: row 0. sink: one more score of its softmax, of a row without values; None:
    there is none.
    """

    at: Value
    visible: Value
    position: Value
    sink: Value | None = None
    first: Value | None = None


def attend(
    target: Target, cache: Cache, queries: Buffer, rows: Sequence[Query], first_row: Value, tiles: Tiles,
    work: Work, limits: ScoreLimits, *, fetch: bool,
) -> None:  # fmt: skip
    """Fill work.out (not yet divided by work.sums), work.maxima and work.sums for some of the cache's tiles.

    fetch: prefetch rows of the cache, since each is read only once.
    """
    query_sums = [query_sum(cache, queries, query) for query in rows]
    begin(cache, rows, work)
    with loop(i64(0), quotient(tiles.last - tiles.first + (work.block - 1), work.block)) as step:
        start = let(tiles.first + step * work.block)
        count = let(T.min(i64(work.block), tiles.last - start))
        _score(target, cache, queries, rows, query_sums, first_row, tiles, start, count, work, limits, fetch)
        soften(cache, rows, first_row, tiles, start, count, work)
        block = _Block(tiles, start, count, rows[-1].visible)  # the last query sees most
        _mix(target, cache, len(rows), first_row, block, work, fetch)


def begin(cache: Cache, rows: Sequence[Query], work: Work) -> None:
    """The maxima, sums and outputs of query rows that have seen their sinks only."""
    for index, query in enumerate(rows):
        sink = T.float32(NEVER) if query.sink is None else let(query.sink)
        T.buffer_store(work.memory, sink, [work.maxima + index])
        one = (
            T.float32(0) if query.sink is None else T.if_then_else(sink > T.float32(NEVER), T.float32(1), T.float32(0))
        )
        T.buffer_store(work.memory, one, [work.sums + index])
        for part in range(cache.value // 16):
            store(work.memory, work.out + index * cache.value + part * 16, floats(0))


@dataclass(frozen=True)
class _Block:
    """Tiles that are scored and mixed together: `count` of them from `start` on. most: rows that are seen."""

    tiles: Tiles
    start: Value
    count: Value
    most: Value

    @contextmanager
    def rows(self, ahead: Value | int) -> Iterator[tuple[Value, Value, tuple[Value, Value]]]:
        """Yield each row: its place in the block, its place in the cache, and (tile, part) of the keys `ahead` tiles
        later, for prefetching. A tile has as many parts as rows."""
        if self.tiles.listed is None:
            with loop(i64(0), let(T.min(self.count * 16, self.most - self.start * 16))) as row:
                yield row, self.start * 16 + row, (self.start + ahead, row)
            return
        with loop(i64(0), self.count) as index:
            tile, later = self.tiles.at(self.start + index), self.tiles.at(self.start + index + ahead)
            with loop(i64(0), let(T.min(i64(16), self.most - tile * 16))) as row:
                yield index * 16 + row, tile * 16 + row, (later, row)


def _score(
    target: Target, cache: Cache, queries: Buffer, rows: Sequence[Query], query_sums: Sequence[Value | None],
    first_row: Value, all_tiles: Tiles, start: Value, count: Value, work: Work, limits: ScoreLimits, fetch: bool,
) -> None:  # fmt: skip
    """work.scores = Q Kᵀ for `count` tiles; a few tiles at a time, all query rows in registers."""
    if _is_narrow(cache):
        _score_narrow(cache, queries, rows, query_sums, first_row, all_tiles, start, count, work, limits)
        return
    side = tiles_at_once(target, len(rows))
    share = cache.key_width // side  # parts of a tile that are prefetched one by one
    with loop(i64(0), quotient(count + (side - 1), side)) as group:
        tiles = [let(all_tiles.at(start + group * side + offset)) for offset in range(side)]
        sums = [[Register() for _ in tiles] for _ in rows]
        for line in sums:
            for each in line:
                each.value = floats(0)
        with loop(i64(0), i64(cache.key_width)) as element:
            if fetch and all_tiles.listed is None:  # the values that will be mixed next
                cache.fetch_values(first_row, tiles[0], element, side)
            elif fetch:
                of = all_tiles.at(start + group * side + quotient(element, share))
                cache.fetch_values(first_row, of, remainder(element, share), side)
            keys = [cache.load_keys(first_row, tile, element) for tile in tiles]
            for part in range(cache.form.packed):
                for line, query in zip(sums, rows, strict=True):
                    x = let(spread(queries[query.at + element * cache.form.packed + part]))
                    for each, key in zip(line, keys, strict=True):
                        each.value = each.value + x * key[part]
        for offset, tile in enumerate(tiles):
            scales = cache.scales(cache.key_scales, first_row, tile)
            for index, (line, query, sum_of_query) in enumerate(zip(sums, rows, query_sums, strict=True)):
                score = limit(scaled(line[offset].value, scales, sum_of_query), query, first_row, tile, limits)
                where = work.scores + index * (work.block * 16) + (group * side + offset) * 16
                store(work.memory, where, score)


def query_sum(cache: Cache, queries: Buffer, query: Query) -> Value | None:
    """Σ q, if rows store their least value: q k = scale · (q codes) + least · Σ q."""
    if cache.form.scales < 2:
        return None
    parts: Value = floats(0)
    for part in range(cache.key // 16):
        parts = let(parts + load(queries, query.at + part * 16))
    return let(total(parts))


def scaled(products: Value, scales: Sequence[Value], sum_of_query: Value | None) -> Value:
    """The scores of 16 rows, from a query's products with their codes."""
    if not scales:
        return products
    scores = products * scales[0]
    return scores if sum_of_query is None else scores + scales[1] * spread(sum_of_query)


def limit(scores: Value, query: Query, first_row: Value, tile: Value, limits: ScoreLimits) -> Value:
    """The scores of 16 rows, capped; NEVER for those that the query must not see."""
    scores = soft_cap(scores, limits.cap)
    numbers = T.ramp(T.cast(tile * 16, "int32"), T.int32(1), 16)
    scores = T.Select(numbers < spread(T.cast(query.visible, "int32")), scores, floats(NEVER))
    if query.first is not None:
        scores = T.Select(numbers >= spread(T.cast(query.first, "int32")), scores, floats(NEVER))
    if limits.window is not None:
        oldest = T.cast(query.position - limits.window, "int32")
        newer = load(limits.positions, first_row + tile * 16) > spread(oldest)
        scores = T.Select(newer, scores, floats(NEVER))
    return scores


def soften(
    cache: Cache, rows: Sequence[Query], first_row: Value, tiles: Tiles, start: Value, count: Value, work: Work,
    power_of: Callable[[Value], Value] = exp, pack: Callable[[Value, Value], Value] = lambda powers, _: powers,
) -> None:  # fmt: skip
    """Replace the block's scores by their powers, and correct the sum and output so far for the new maximum.

    power_of: e to the power of 16 numbers that are not positive. pack: how the 16 powers of a tile of
    the block, by its number, are stored, as 16 lanes or fewer.
    """
    for index in range(len(rows)):
        scores = let(work.scores + index * (work.block * 16))
        most, powers, least = Register(), Register(), Register()
        most.value = load(work.memory, scores)
        with loop(i64(1), count) as tile:
            most.value = T.max(most.value, load(work.memory, scores + tile * 16))
        before = let(work.memory[work.maxima + index])
        maximum = let(T.max(before, largest(most.value)))
        powers.value = least.value = floats(0)
        with loop(i64(0), count) as tile:
            power = power_of(load(work.memory, scores + tile * 16) - spread(maximum))
            powers.value = powers.value + power
            scales = cache.scales(cache.scales_of_values, first_row, tiles.at(start + tile))
            packed = pack(power * scales[0] if scales else power, tile)
            lanes = lanes_of(packed)
            store(work.memory, scores + tile * lanes, packed, lanes)
            if len(scales) > 1:  # every dimension of a row has its least value
                least.value = least.value + power * scales[1]
        correction = let(exp(spread(before - maximum)))
        scalar = let(exp(before - maximum, lanes=1))
        T.buffer_store(work.memory, maximum, [work.maxima + index])
        T.buffer_store(work.memory, work.memory[work.sums + index] * scalar + total(powers.value), [work.sums + index])
        added = let(spread(total(least.value))) if cache.form.scales > 1 else floats(0)
        for part in range(cache.value // 16):
            at = work.out + index * cache.value + part * 16
            corrected = load(work.memory, at) * correction
            store(work.memory, at, corrected + added if cache.form.scales > 1 else corrected)


def _mix(target: Target, cache: Cache, rows: int, first_row: Value, block: _Block, work: Work, fetch: bool) -> None:
    """work.out += powers · V over a block's rows."""
    if cache.shared:
        _mix_keys(target, cache, rows, first_row, block, work)
        return
    if _is_narrow(cache):
        _mix_narrow(cache, rows, first_row, block, work)
        return

    @contextmanager
    def over() -> Iterator[tuple[Value, Value]]:
        with block.rows(work.block) as (row, of_cache, next_keys):
            if fetch:  # the next block's
                cache.fetch_keys(first_row, *next_keys)
            yield row, of_cache

    mix(target, cache, rows, work, over, lambda row, parts: cache.load_values(first_row, row, parts), add_product)


def add_product(so_far: Value, power: Value, value: Value) -> Value:
    return so_far + power * value


def mix(
    target: Target, cache: Cache, rows: int, work: Work,
    over: Callable[[], AbstractContextManager[tuple[Value, Value]]],
    load_values: Callable[[Value, Sequence[int]], dict[int, Value]], add: Callable[[Value, Value, Value], Value],
) -> None:  # fmt: skip
    """work.out += powers · V; at a time, as many sums as fit in registers.

    over: a loop over powers, with the place of each, and of its values, which `load_values` loads. add: a sum plus a
    power times a value.
    """
    parts = cache.value // 16
    width = min(parts, target.mix_registers)
    height = max(1, target.mix_registers // width)
    for top in range(0, rows, height):
        lines = range(top, min(top + height, rows))
        for left in range(0, parts, width):
            columns = range(left, min(left + width, parts))
            sums = {(line, part): Register() for line in lines for part in columns}
            places = {(line, part): work.out + (line * cache.value + part * 16) for line, part in sums}
            for key, each in sums.items():
                each.value = load(work.memory, places[key])
            with over() as (row, of_values):
                values = load_values(of_values, columns)
                for line in lines:
                    power = let(spread(work.memory[work.scores + line * (work.block * 16) + row]))
                    for part in columns:
                        sums[line, part].value = add(sums[line, part].value, power, values[part])
            for key, each in sums.items():
                store(work.memory, places[key], each.value)


def _mix_keys(target: Target, cache: Cache, rows: int, first_row: Value, block: _Block, work: Work) -> None:
    """`_mix` where keys are mixed: each lane of a sum has the products of its rows of the tiles, which are summed up at
    the block's end."""
    height = min(rows, max(1, target.mix_registers // 3))
    fitting = max(1, target.mix_registers // (height * cache.form.packed))
    step = next(count for count in range(fitting, 0, -1) if cache.key_width % count == 0)  # elements at a time
    for top in range(0, rows, height):
        lines = range(top, min(top + height, rows))
        with loop(i64(0), i64(cache.key_width // step)) as part:
            sums = [[Register() for _ in range(step * cache.form.packed)] for _ in lines]
            for register in itertools.chain(*sums):
                register.value = floats(0)
            with loop(i64(0), block.count) as index:
                tile = block.tiles.at(block.start + index)
                there = T.ramp(T.cast(tile * 16, "int32"), T.int32(1), 16) < spread(T.cast(block.most, "int32"))
                scores = let(work.scores + index * 16)
                powers = [let(load(work.memory, scores + line * (work.block * 16))) for line in lines]
                keys = [key for at in range(step) for key in cache.load_keys(first_row, tile, part * step + at)]
                for number, key in enumerate(keys):
                    key = let(T.Select(there, key, floats(0)))  # rows behind the last may be no numbers
                    for own, power in zip(sums, powers, strict=True):
                        own[number].value = own[number].value + power * key
            for line, found in zip(lines, sums, strict=True):
                at = let(work.out + line * cache.value + part * (step * cache.form.packed))
                for number, each in enumerate(found):
                    T.buffer_store(work.memory, work.memory[at + number] + total(each.value), [at + number])


def _is_narrow(cache: Cache) -> bool:
    """Whether vectors of 4 lanes are faster: see `Simd128`."""
    return isinstance(cache.isa, Simd128) and cache.form.packed == 1


def _score_narrow(
    cache: Cache, queries: Buffer, rows: Sequence[Query], query_sums: Sequence[Value | None], first_row: Value,
    tiles: Tiles, start: Value, count: Value, work: Work, limits: ScoreLimits,
) -> None:  # fmt: skip
    """`_score` for 4 rows of the cache at a time."""
    with loop(i64(0), count) as index:
        tile = let(tiles.at(start + index))
        places = [let(work.scores + line * (work.block * 16) + index * 16) for line in range(len(rows))]
        with loop(i64(0), i64(4)) as quarter:
            lane = let(quarter * 4)
            sums = [[Register(lanes=4)] for _ in rows]
            for (each,) in sums:
                each.value = floats(0, 4)
            with loop(i64(0), i64(cache.key_width)) as element:
                keys = cache.load_some_keys(first_row, tile, element, lane)
                _accumulate(sums, [queries[query.at + element] for query in rows], [keys])
            for (each,), place in zip(sums, places, strict=True):
                store(work.memory, place + lane, each.value, 4)
        scales = cache.scales(cache.key_scales, first_row, tile)
        for query, sum_of_query, place in zip(rows, query_sums, places, strict=True):
            score = limit(scaled(load(work.memory, place), scales, sum_of_query), query, first_row, tile, limits)
            store(work.memory, place, score)


def _mix_narrow(cache: Cache, rows: int, first_row: Value, block: _Block, work: Work) -> None:
    """`_mix` for 8 dimensions at a time."""
    with loop(i64(0), i64(cache.value // 8)) as part:
        dimensions = [let(part * 8 + at) for at in (0, 4)]
        sums = [[Register(lanes=4) for _ in dimensions] for _ in range(rows)]
        places = [[work.out + line * cache.value + dimension for dimension in dimensions] for line in range(rows)]
        pairs = list(zip(itertools.chain(*sums), itertools.chain(*places), strict=True))
        for each, place in pairs:
            each.value = load(work.memory, place, 4)
        with block.rows(0) as (row, of_cache, _):
            values = [cache.load_some_values(first_row, of_cache, dimension) for dimension in dimensions]
            powers = [work.memory[work.scores + line * (work.block * 16) + row] for line in range(rows)]
            _accumulate(sums, powers, values)
        for each, place in pairs:
            store(work.memory, place, each.value, 4)


def _accumulate(sums: Sequence[Sequence[Register]], factors: Sequence[Value], vectors: Sequence[Value]) -> None:
    """sums += factors ⊗ vectors, each product rounded before it is added."""
    for line, factor in zip(sums, factors, strict=True):
        x = let(spread(factor, 4))
        for each, vector in zip(line, vectors, strict=True):
            each.value = each.value + pinned(x * vector)


Restore = Callable[[Sequence[Value]], Sequence[Value]]
"""From sums of stored values to sums of values, 16 in each vector."""


def finish(cache: Cache, size: int, index: int, work: Work, out: Buffer, at: Value, restore: Restore) -> None:
    """out[at : at + size] = work.out / work.sums for one query row."""
    inverse = let(T.float32(1) / work.memory[work.sums + index])
    first = work.out + index * cache.value
    vectors = [let(load(work.memory, first + part * 16) * spread(inverse)) for part in range(cache.value // 16)]
    _store_head(restore(vectors), out, at, size)


def merge(
    cache: Cache, memory: Buffer, size: int, count: Value, part_stride: int, index: Value, outs: Value,
    maxima: Value, sums: Value, out: Buffer, at: Value, restore: Restore,
) -> None:  # fmt: skip
    """out[at : at + size] = one query row, merged from the parts of `count` threads.

    Thread p's part starts `part_stride` · p after `outs`, `maxima`, `sums`; `index` is the row within a part.
    """
    most, weights = Register(lanes=1), Register(lanes=1)
    most.value = T.float32(NEVER)
    with loop(i64(0), count) as part:
        most.value = T.max(most.value, memory[maxima + part * part_stride + index])
    mixed = [Register() for _ in range(cache.value // 16)]
    for each in mixed:
        each.value = floats(0)
    weights.value = T.float32(0)
    with loop(i64(0), count) as part:
        weight = let(exp(memory[maxima + part * part_stride + index] - most.value, lanes=1))
        weights.value = weights.value + weight * memory[sums + part * part_stride + index]
        for position, each in enumerate(mixed):
            where = outs + part * part_stride + index * cache.value + position * 16
            each.value = each.value + spread(weight) * load(memory, where)
    inverse = let(T.float32(1) / weights.value)
    _store_head(restore([let(each.value * spread(inverse)) for each in mixed]), out, at, size)


def _store_head(vectors: Sequence[Value], out: Buffer, at: Value, size: int) -> None:
    """Store vectors of 16 lanes, the last one in part if the head's size is not a multiple of 16."""
    for part, vector in enumerate(vectors[: -(-size // 16)]):
        left = size - part * 16
        if left >= 16:
            store(out, at + part * 16, vector)
            continue
        value = Register()
        value.value = vector
        for lane in range(left):
            T.buffer_store(out, value.lane(i64(lane)), [at + part * 16 + lane])


def tiles_at_once(target: Target, rows: int) -> int:
    """The number of key tiles for which all sums fit in registers; few, so that short caches waste little."""
    fitting = max(1, target.score_rows * target.score_tiles // rows)
    return next(side for side in (SPARE_TILES, 2, 1) if side <= fitting)
