"""Selection of the pages of rows that a step reads: bounds and scores of all, and each head's list of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import Tiles
from edge.backends.tvm.cpu.kernels.pages import ALWAYS, choose_pages, make_bounds, score_page
from edge.backends.tvm.cpu.kernels.vectors import Register, Value, i64, let, loop, quotient, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.kv.pages import NEWEST
from edge.backends.tvm.kv.regions import SPARE_TILES, TILE


@contextmanager
def if_chosen(b: PassBuilder, layer: Value) -> Iterator[Value]:
    """Guard code for a layer that does not read all pages; yields the number of all."""
    pages = let(quotient(b.row(b.rows_of(layer), i64(0), i64(0)) + TILE, TILE))
    with when(T.And(b.layer_at(layer, "chooses") > 0, pages > b.at("pages"))):
        yield pages


def score_pages(b: PassBuilder, layer: Value) -> None:
    """Score the thread's share of the pages of all heads, and compute missing bounds."""
    core, source = b.attention, b.rows_of(layer)
    with if_chosen(b, layer) as pages, b.phase("pages", layer), loop(i64(0), i64(core.kv_heads)) as kv_head:
        first_row = b.first_row(source, kv_head, i64(0))
        queries = let(b.at("queries") + kv_head * b.at("query_rows") * b.cache.key)
        scores = let(b.at("page_scores") + kv_head * b.at("page_stride"))
        with b.shared_out(pages - NEWEST) as page:
            at = let((quotient(first_row, TILE) + page) * (2 * b.cache.key))
            with when(page >= b.at("bounded")):
                make_bounds(b.cache, b.bounds, at, first_row, page)
            score = score_page(b.cache, b.bounds, at, b.floats, queries, core.group)
            T.buffer_store(b.floats, T.if_then_else(page > 0, score, T.float32(ALWAYS)), [scores + page])


@dataclass(frozen=True)
class Pages:
    """The pages that a head reads. count: of them. page: the page at a place of the list."""

    count: Value
    page: Callable[[Value], Value]

    def of(self, first: Value, last: Value) -> Tiles:
        """Those at some places."""
        return Tiles(first, last, self.page)


def list_pages(b: PassBuilder, layer: Value, kv_head: Value, pages: Value) -> Pages:
    """The pages that a head reads. Each thread lists all of them for itself."""
    stride = b.at("page_stride")
    listed = let(b.at("page_list") + b.thread * stride)

    def put(index: Value, page: Value) -> None:
        T.buffer_store(b.integers, T.cast(page, "int32"), [listed + index])

    count = Register("int64", lanes=1)
    count.value = pages
    with if_chosen(b, layer):
        count.value = b.at("pages")
        older = let(count.value - NEWEST)
        choose_pages(b.floats, let(b.at("page_scores") + kv_head * stride), let(pages - NEWEST), older, put)
        with loop(i64(0), i64(NEWEST)) as index:
            put(older + index, pages - NEWEST + index)
    with when(count.value == pages), loop(i64(0), pages) as page:
        put(page, page)
    with loop(i64(0), i64(SPARE_TILES)) as index:
        put(count.value + index, i64(0))
    return Pages(let(count.value), lambda index: T.cast(b.integers[listed + index], "int64"))
