"""The whole pass of a model, tokens to logits: one TVM function that every thread runs, with barriers between phases.

A step runs one token (decode), a chunk several (prefill). Both are this generator: in a step every thread
normalises and quantizes its own copy of the one row, which is cheaper than a barrier; in a chunk the rows are shared
out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.blocks import BLOCKS
from edge.backends.tvm.blocks.base import FloatBlock
from edge.backends.tvm.design import Design
from edge.backends.tvm.kernels.activations import Quantized, quantize, rms_norm
from edge.backends.tvm.kernels.attention import Query, Window, Work, attend, finish, merge
from edge.backends.tvm.kernels.cache import MEMORY_TYPE, Cache
from edge.backends.tvm.kernels.isa import ISAS
from edge.backends.tvm.kernels.lanes import (
    Buffer,
    Register,
    Value,
    exp,
    floats,
    i64,
    let,
    load,
    loop,
    store,
    swap_pairs,
    when,
)
from edge.backends.tvm.kernels.matmul import Inputs, Matrix, Weights, copy_row, multiply
from edge.backends.tvm.kernels.move import move_rows
from edge.backends.tvm.kernels.observe import observe
from edge.backends.tvm.kernels.threads import arrive, imports, meet, wait
from edge.backends.tvm.layout import GROUPS, Job, Table, work_offsets

POINTERS = {  # arguments of `run`, and what they point to
    "job": "int64", "lines": "int32",
    "weights": "uint8", "table": "int64", "floats": "float32", "integers": "int32",
    "keys": "", "values": "", "key_scales": "float32", "value_scales": "float32",
    "lengths": "int32",  # rows in use, [layers, KV heads]: heads may keep different numbers
    "positions": "int32",  # of every row, for sliding windows
    "tokens": "int32", "logits": "float32", "rope": "float32",
    "attention": "float32",  # what rows got from observed queries, [layers, KV heads, capacity]
}  # fmt: skip


def build(design: Design) -> Any:
    """The module with `run` and `move`, ready for TVM's compiler."""
    return tvm.IRModule({"run": run(design), "move": move_rows(design.shape, design.kv_dtype)})


def run(design: Design) -> Any:
    """What every thread calls: thread 0 for one job, at whose start it wakes the others; these for all jobs to come."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("run")
        T.func_attr({"global_symbol": "run", "tirx.noalias": True})
        memory = MEMORY_TYPE[design.kv_dtype]
        pointers = {name: T.arg(name, T.ptr(dtype or memory)) for name, dtype in POINTERS.items()}
        thread = T.arg("thread", T.int64())
        # Raw pointers carry no device; TVM's lowering wants to know it.
        llvm = imports(design.target.spins)
        with T.attr(0, "device_id", 0), T.attr(0, "device_type", 1), T.attr(0, "pragma_import_llvm", llvm):
            _work(design, pointers, thread)
    return builder.get()


def run_job(design: Design, threads: int) -> Any:
    """The same for one job that is there, with arrays instead of pointers and TVM's own threads: what measures a
    device elsewhere. TVM must have `threads` threads, as they wait for each other.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("run_job")
        T.func_attr({"global_symbol": "run_job", "tirx.noalias": True})
        memory = MEMORY_TYPE[design.kv_dtype]
        arguments = {name: T.arg(name, T.handle()) for name in POINTERS}
        pointers = {
            name: T.match_buffer(argument, (T.int64(),), POINTERS[name] or memory).data
            for name, argument in arguments.items()
        }
        with T.attr(0, "pragma_import_llvm", imports(design.target.spins)), T.parallel(0, threads) as thread:
            job = T.decl_buffer((1 << 48,), POINTERS["job"], data=pointers["job"])
            _job(design, pointers, T.cast(thread, "int64"), let(job[Job.slot("kind")]))
    return builder.get()


def _work(design: Design, pointers: dict[str, Any], thread: Value) -> None:
    job, lines = (T.decl_buffer((1 << 48,), POINTERS[name], data=pointers[name]) for name in ("job", "lines"))
    threads = let(job[Job.slot("threads")])
    seen, busy = Register("int32", lanes=1), Register("int32", lanes=1)
    seen.value, busy.value = T.int32(0), T.int32(1)
    with T.While(busy.value == 1):
        with when(thread == 0):
            T.evaluate(arrive(lines, threads))
            busy.value = T.int32(0)
        with when(thread > 0):
            seen.value = seen.value + 1
            wait(lines, threads, seen.value)
        kind = let(job[Job.slot("kind")])
        with when(kind == Job.QUIT):
            busy.value = T.int32(0)
        _job(design, pointers, thread, kind)


def _job(design: Design, pointers: dict[str, Any], thread: Value, kind: Value) -> None:
    for number, single in ((Job.STEP, True), (Job.CHUNK, False)):
        with when(kind == number):
            _Pass(design, single, pointers, thread).emit()


class _Pass:
    """A step or a chunk while it is built; every method emits a part of it."""

    def __init__(self, design: Design, single: bool, pointers: dict[str, Any], thread: Value) -> None:
        self.design, self.single, self.thread = design, single, thread
        self.shape, self.target, self.isa = design.shape, design.target, ISAS[design.target.name]
        self.dealt = self.target.step_dealt if single else self.target.chunk_dealt
        # In the exact mode a batch of 8 tokens would take half a minute to compile.
        self.batch = 1 if single else min(2, self.target.gemm_tokens) if design.exact else self.target.gemm_tokens
        memory = MEMORY_TYPE[design.kv_dtype]

        def view(name: str, dtype: str) -> Buffer:
            return T.decl_buffer((1 << 48,), dtype, data=pointers[name])

        job, self.lines = view("job", "int64"), view("lines", "int32")
        count, self.position, self.first_angle, self.threads, self.wanted, self.observed = (
            let(job[Job.slot(name)]) for name in ("count", "position", "angle", "threads", "wanted", "observed")
        )
        self.count = i64(1) if single else count
        self.weights = Weights(view("weights", "int32"), view("weights", "uint16"), view("weights", "float32"))
        self.table, self.tokens = view("table", "int64"), view("tokens", "int32")
        self.floats, self.integers = view("floats", "float32"), view("integers", "int32")
        self.rope, self.logits = view("rope", "float32"), view("logits", "float32")
        self.attention = view("attention", "float32")
        positions, self.lengths = view("positions", "int32"), view("lengths", "int32")
        self.window = Window(self.shape.window, positions) if self.shape.window else None
        self.cache = Cache(
            self.isa, self.design.kv_dtype, view("keys", memory), view("values", memory),
            view("key_scales", "float32"), view("value_scales", "float32"),
            self.shape.kv_heads, self.shape.padded_head, self.table[Table.slot("capacity")],
        )  # fmt: skip

    # Phases

    def emit(self) -> None:
        with self._phase():
            self._embed()
        with loop(i64(0), i64(self.shape.layers)) as layer:
            self._layer(layer)
        self._head()

    def _layer(self, layer: Value) -> None:
        shape = self.shape
        self._normalise("attn_norm", layer, "qkv")
        with self._phase():
            inputs = self._normalised("attn_norm", layer, "qkv")
            self._per_variant("qkv", layer, lambda matrices: self._qkv(layer, matrices, inputs))
        with self._phase():
            (self._attend_step if self.single else self._attend_chunk)(layer)
        with when(self.observed > 0):
            self._observe(layer)  # it changes nothing that the next phase reads
        self._share_out("mixed", shape.padded_mixed, "output")
        with self._phase():
            if self.single:
                self._merge()
            inputs = self._ready("mixed", shape.padded_mixed, "output", private=True)
            self._per_variant("output", layer, lambda matrices: self._add(matrices[0], inputs))
        self._normalise("ffn_norm", layer, "gate_up")
        with self._phase():
            inputs = self._normalised("ffn_norm", layer, "gate_up")
            self._per_variant("gate_up", layer, lambda matrices: self._gate_up(matrices, inputs))
        self._share_out("ffn", shape.padded_ffn, "down")
        with self._phase():
            inputs = self._ready("ffn", shape.padded_ffn, "down", private=False)
            self._per_variant("down", layer, lambda matrices: self._add(matrices[0], inputs))

    def _embed(self) -> None:
        matrix = self._matrix(self.design.embedding, self.shape.hidden, "embedding")
        with self._shared_out(self.count) as token:
            row = T.cast(self.tokens[token], "int64")
            at = let(self._at("x") + token * self.shape.padded_hidden)
            copy_row(self.isa, self.weights, matrix, row, self.floats, at)
            for padding in range(self.shape.hidden, self.shape.padded_hidden):
                T.buffer_store(self.floats, T.float32(0), [at + padding])

    def _qkv(self, layer: Value, matrices: Sequence[Matrix], inputs: Inputs) -> None:
        """Queries to scratch, keys and values to the cache; keys and queries turned by RoPE."""
        shape, parts = self.shape, self.shape.padded_head // 16
        if self.dealt:
            with self._tiles(shape.heads * parts) as tile:
                self._query_tile(matrices[0], tile, inputs)
            with self._shared_out(i64(2 * shape.kv_heads)) as piece:
                with when(piece < shape.kv_heads):
                    self._key_or_value(matrices[1], True, layer, piece, inputs)
                with when(piece >= shape.kv_heads):
                    self._key_or_value(matrices[2], False, layer, let(piece - shape.kv_heads), inputs)
            return
        tiles = [shape.heads * parts, shape.kv_heads * parts, shape.kv_heads * parts]
        start, stop = self._range(sum(tiles))
        with loop(_clip(start, tiles[0]), _clip(stop, tiles[0])) as tile:
            self._query_tile(matrices[0], tile, inputs)
        for which, before in ((1, tiles[0]), (2, tiles[0] + tiles[1])):
            # A head is one piece of work: int8 rows need its largest value. It is the thread's that has its first tile.
            first, last = (_clip((edge - before + (parts - 1)) // parts, shape.kv_heads) for edge in (start, stop))
            with loop(first, last) as head:
                self._key_or_value(matrices[which], which == 1, layer, head, inputs)

    def _query_tile(self, matrix: Matrix, tile: Value, inputs: Inputs) -> None:
        shape, parts = self.shape, self.shape.padded_head // 16
        head, part = let(tile // parts), let(tile % parts)
        first = let(self._at("queries") + (head // shape.group) * self._at("query_rows") * shape.padded_head)
        with self._batches() as tokens:
            sums = self._multiply(matrix, tile, inputs, self._rows(tokens))
            for token, each in zip(tokens, sums, strict=True):
                turned = self._turn(each.value, token, part)
                at = first + (token * shape.group + head % shape.group) * shape.padded_head + part * 16
                store(self.floats, at, turned * floats(shape.head**-0.5))

    def _key_or_value(self, matrix: Matrix, is_key: bool, layer: Value, head: Value, inputs: Inputs) -> None:
        parts = self.shape.padded_head // 16
        first_row, length = let(self.cache.first_row(layer, head)), let(self._length(layer, head))
        with self._batches() as tokens:
            rows = self._rows(tokens)
            sums = [self._multiply(matrix, let(head * parts + part), inputs, rows) for part in range(parts)]
            for index, token in enumerate(tokens):
                vectors = [each[index] for each in sums]
                with self._if_real(token):
                    row = let(length + token)
                    if is_key:
                        for part, vector in enumerate(vectors):
                            vector.value = self._turn(vector.value, token, i64(part))
                        self.cache.write_key(first_row, row, vectors)
                    else:
                        self.cache.write_value(first_row, row, vectors)

    def _turn(self, vector: Value, token: Value, part: Value) -> Value:
        """RoPE on 8 neighbouring pairs: (a, b) → (a cos − b sin, b cos + a sin). The table holds −sin, +sin."""
        head = self.shape.padded_head
        at = let((self.first_angle + token) * (2 * head) + part * 16)
        vector = let(vector)
        return vector * load(self.rope, at) + swap_pairs(vector) * load(self.rope, at + head)

    def _attend_step(self, layer: Value) -> None:
        """The thread's share of the cache's rows, for all heads."""
        shape, rows = self.shape, self.target.score_rows
        with loop(i64(0), i64(shape.kv_heads)) as kv_head:
            visible = let(self._length(layer, kv_head) + 1)
            mine = self._range(let((visible + 15) // 16))
            first = let(self._at("queries") + kv_head * self._at("query_rows") * shape.padded_head)
            for start in range(0, shape.group, rows):
                lines = range(start, min(start + rows, shape.group))
                queries = [Query(first + line * shape.padded_head, visible, self.position) for line in lines]
                work = self._work(self.thread, let(kv_head * shape.group + start))
                first_row = let(self.cache.first_row(layer, kv_head))
                attend(
                    self.target, self.cache, self.floats, queries, first_row, mine, work,
                    self.window, fetch=True,
                )  # fmt: skip

    def _merge(self) -> None:
        """Every thread makes its own copy of the heads' outputs from all threads' parts."""
        shape, work = self.shape, self._work(i64(0), i64(0))
        out = let(self._at("mixed") + self.thread * shape.padded_mixed)
        with loop(i64(0), i64(shape.heads)) as head:
            merge(
                self.floats, shape.padded_head, shape.head, self.threads, self._at("part_stride"), head,
                work.out, work.maxima, work.sums, self.floats, out + head * shape.head,
            )  # fmt: skip

    def _attend_chunk(self, layer: Value) -> None:
        """Blocks of query rows, dealt out in turn: later ones see more rows and cost more."""
        shape, side = self.shape, self.target.score_rows
        rows = let(self.count * shape.group)
        units = let((rows + (side - 1)) // side * shape.kv_heads)
        with self._dealt_out(units) as unit:
            kv_head, first = let(unit % shape.kv_heads), let(unit // shape.kv_heads * side)
            length = let(self._length(layer, kv_head))
            start = let(self._at("queries") + kv_head * self._at("query_rows") * shape.padded_head)
            lines = [let(first + index) for index in range(side)]
            tokens = [let(T.min(line // shape.group, self.count - 1)) for line in lines]
            queries = [
                Query(let(start + line * shape.padded_head), let(length + token + 1), self.position + token)
                for line, token in zip(lines, tokens, strict=True)
            ]
            work = self._work(self.thread, i64(0))
            tiles = (i64(0), let((queries[-1].visible + 15) // 16))
            attend(
                self.target, self.cache, self.floats, queries, let(self.cache.first_row(layer, kv_head)), tiles, work,
                self.window, fetch=False,
            )  # fmt: skip
            for index, (line, token) in enumerate(zip(lines, tokens, strict=True)):
                with when(line < rows):
                    head = kv_head * shape.group + line % shape.group
                    at = let(self._at("mixed") + token * shape.padded_mixed + head * shape.head)
                    finish(self.cache, shape.head, index, work, self.floats, at)

    def _observe(self, layer: Value) -> None:
        """The attention of the last `observed` tokens, mean over the query heads of a group."""
        shape = self.shape
        raw = let(self._at("raw") + self.thread * self.cache.capacity)
        with self._shared_out(i64(shape.kv_heads)) as kv_head:
            first = let(self._at("queries") + kv_head * self._at("query_rows") * shape.padded_head)
            first_row, length = let(self.cache.first_row(layer, kv_head)), let(self._length(layer, kv_head))
            with loop((self.count - self.observed) * shape.group, self.count * shape.group) as line:
                token = let(line // shape.group)
                query = Query(let(first + line * shape.padded_head), let(length + token + 1), self.position + token)
                observe(
                    self.cache, self.floats, query, first_row, raw, 1 / shape.group, self.attention,
                    self.window,
                )  # fmt: skip

    def _add(self, matrix: Matrix, inputs: Inputs) -> None:
        """x += matrix · inputs."""
        width = self.shape.padded_hidden
        with self._tiles(-(-self.shape.hidden // 16)) as tile, self._batches() as tokens:
            sums = self._multiply(matrix, tile, inputs, self._rows(tokens))
            for token, each in zip(tokens, sums, strict=True):
                at = let(self._at("x") + token * width + tile * 16)
                store(self.floats, at, load(self.floats, at) + each.value)

    def _gate_up(self, matrices: Sequence[Matrix], inputs: Inputs) -> None:
        """silu(gate) · up, silu(x) = x / (1 + e^−x)."""
        width = self.shape.padded_ffn
        with self._tiles(-(-self.shape.ffn // 16)) as tile, self._batches() as tokens:
            rows = self._rows(tokens)
            gates, ups = (self._multiply(matrix, tile, inputs, rows) for matrix in matrices)
            for token, gate, up in zip(tokens, gates, ups, strict=True):
                silu = gate.value / (floats(1) + exp(floats(0) - gate.value))
                store(self.floats, self._at("ffn") + token * width + tile * 16, silu * up.value)

    def _head(self) -> None:
        """Logits of the last `wanted` tokens."""
        shape = self.shape
        first = self.count - self.wanted
        matrix = self._matrix(self.design.head, shape.hidden, "head")
        if not self.single:
            with self._phase(), self._shared_out(self.wanted) as row:
                self._norm_row(first + row, row, "output_norm", None)
                self._quantize_row("normed", shape.padded_hidden, row, row, [self.design.head])
        with self._phase():
            row = self.thread if self.single else i64(0)
            if self.single:
                self._norm_row(i64(0), row, "output_norm", None)
                self._quantize_row("normed", shape.padded_hidden, row, row, [self.design.head])
            inputs = self._inputs("normed", shape.padded_hidden)
            with self._tiles(shape.padded_vocab // 16) as tile:
                with when(self.wanted == 1):
                    self._logits_tile(matrix, tile, inputs, [row], [i64(0)])
                if not self.single:
                    with when(self.wanted > 1), loop(i64(0), (self.wanted + (self.batch - 1)) // self.batch) as block:
                        rows = [let(block * self.batch + index) for index in range(self.batch)]
                        self._logits_tile(matrix, tile, inputs, rows, rows)

    def _logits_tile(
        self, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value], out: Sequence[Value]
    ) -> None:
        sums = self._multiply(matrix, tile, inputs, rows)
        for row, each in zip(out, sums, strict=True):
            with when(row < self.wanted):
                store(self.logits, row * self.shape.padded_vocab + tile * 16, each.value)

    # Rows of activations, made ready for a product

    def _normalise(self, norm: str, layer: Value, group: str) -> None:
        """In a chunk, a phase of its own."""
        if self.single:
            return
        with self._phase(), self._shared_out(self.count) as token:
            self._norm_row(token, token, norm, layer)
            self._quantize_row("normed", self.shape.padded_hidden, token, token, self._blocks(group))

    def _normalised(self, norm: str, layer: Value, group: str) -> Inputs:
        """In a step, the thread's own copy."""
        if self.single:
            self._norm_row(i64(0), self.thread, norm, layer)
            self._quantize_row("normed", self.shape.padded_hidden, self.thread, self.thread, self._blocks(group))
        return self._inputs("normed", self.shape.padded_hidden)

    def _share_out(self, name: str, width: int, group: str) -> None:
        """In a chunk, quantize rows in a phase of its own."""
        if self.single or not self._needs_integers(self._blocks(group)):
            return
        with self._phase(), self._shared_out(self.count) as token:
            self._quantize_row(name, width, token, token, self._blocks(group))

    def _ready(self, name: str, width: int, group: str, *, private: bool) -> Inputs:
        """In a step, quantize the thread's own copy, from its own row or from the one that all share."""
        source = self.thread if private else i64(0)
        if self.single:
            self._quantize_row(name, width, source, self.thread, self._blocks(group))
        return self._inputs(name, width, shared=not private)

    def _norm_row(self, source: Value, row: Value, norm: str, layer: Value | None) -> None:
        shape = self.shape
        weight = self._at(norm) if layer is None else self._layer_at(layer, norm)
        rms_norm(
            self.floats, let(self._at("x") + source * shape.padded_hidden), self.weights.floats, let(weight),
            shape.hidden, shape.padded_hidden, shape.norm_eps,
            self.floats, let(self._at("normed") + row * shape.padded_hidden),
        )  # fmt: skip

    def _quantize_row(self, name: str, width: int, source: Value, row: Value, blocks: Sequence[str]) -> None:
        if self._needs_integers(blocks):
            quantize(self.floats, let(self._at(name) + source * width), width, self._quantized(), row)

    def _needs_integers(self, blocks: Sequence[str]) -> bool:
        return not self.design.exact and any(not isinstance(BLOCKS[name], FloatBlock) for name in blocks)

    def _inputs(self, name: str, width: int, *, shared: bool = False) -> Inputs:
        """shared: in a step, all threads read the one row of floats rather than copies of their own."""
        stride = 0 if self.single and shared else width
        return Inputs(self.floats, self._at(name), stride, None if self.design.exact else self._quantized())

    def _multiply(self, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value]) -> list[Register]:
        ahead = self.target.fetch_ahead if len(rows) == 1 else 0  # for several tokens, arithmetic is what takes time
        return multiply(self.isa, self.weights, matrix, tile, inputs, rows, ahead)

    def _quantized(self) -> Quantized:
        return Quantized(
            self.integers, self._at("words"), self._at("corrections"),
            self.floats, self._at("scales"), self._at("sums"), self.shape.widest,
        )  # fmt: skip

    # Small parts

    @contextmanager
    def _phase(self) -> Iterator[None]:
        """Work of all threads, which wait for each other at its end."""
        yield
        meet(self.lines, self.thread, self.threads)

    def _range(self, count: Value | int) -> tuple[Value, Value]:
        """The thread's part of `count` pieces."""
        return let(self.thread * count // self.threads), let((self.thread + 1) * count // self.threads)

    @contextmanager
    def _shared_out(self, count: Value) -> Iterator[Value]:
        if self.dealt:
            with self._dealt_out(count) as index:
                yield index
            return
        start, stop = self._range(count)
        with loop(start, stop) as index:
            yield index

    @contextmanager
    def _dealt_out(self, count: Value) -> Iterator[Value]:
        """Every so-manieth piece is the thread's, rather than a range of them."""
        with loop(i64(0), (count - self.thread + self.threads - 1) // self.threads) as turn:
            yield let(self.thread + turn * self.threads)

    @contextmanager
    def _tiles(self, count: int) -> Iterator[Value]:
        with self._shared_out(i64(count)) as tile:
            yield tile

    @contextmanager
    def _batches(self) -> Iterator[list[Value]]:
        """The tokens that a pass over a tile serves; the last ones may be beyond the chunk."""
        if self.single:
            yield [i64(0)]
            return
        with loop(i64(0), (self.count + (self.batch - 1)) // self.batch) as batch:
            yield [let(batch * self.batch + index) for index in range(self.batch)]

    @contextmanager
    def _if_real(self, token: Value) -> Iterator[None]:
        if self.single:
            yield
            return
        with when(token < self.count):
            yield

    def _rows(self, tokens: Sequence[Value]) -> Sequence[Value]:
        """Rows of activations: in a step, the thread's own copy."""
        return [self.thread] if self.single else tokens

    def _per_variant(self, group: str, layer: Value, emit: Callable[[list[Matrix]], None]) -> None:
        """Code for every combination of block types in use; a layer picks its own."""
        variants = self.design.variants[group]
        for number, blocks in enumerate(variants):
            matrices = [
                self._layer_matrix(layer, name, block) for name, block in zip(GROUPS[group], blocks, strict=True)
            ]
            if len(variants) == 1:
                emit(matrices)
            else:
                with when(self._layer_at(layer, group) == number):
                    emit(matrices)

    def _blocks(self, group: str) -> list[str]:
        return [name for blocks in self.design.variants[group] for name in blocks]

    def _layer_matrix(self, layer: Value, name: str, block: str) -> Matrix:
        shape = self.shape
        columns = {"attn_output": shape.heads * shape.head, "ffn_down": shape.ffn}.get(name, shape.hidden)
        quants, scales = self._layer_at(layer, name), self._layer_at(layer, name, scales=True)
        return Matrix(BLOCKS[block], columns, let(quants), let(scales))

    def _matrix(self, block: str, columns: int, name: str) -> Matrix:
        return Matrix(BLOCKS[block], columns, self._at(name), self._at(f"{name}_scales"))

    def _work(self, thread: Value, line: Value) -> Work:
        sizes = work_offsets(self.shape, self.target)
        start = let(self._at("work") + thread * self._at("part_stride"))
        return Work(
            self.floats, scores=start + sizes["scores"], out=let(start + line * self.shape.padded_head),
            maxima=let(start + sizes["maxima"] + line), sums=let(start + sizes["sums"] + line),
            block=self.target.step_block if self.single else self.target.chunk_block,
        )  # fmt: skip

    def _length(self, layer: Value, kv_head: Value) -> Value:
        """Rows of a head before this pass."""
        return T.cast(self.lengths[layer * self.shape.kv_heads + kv_head], "int64")

    def _at(self, name: str) -> Value:
        return self.table[Table.slot(name)]

    def _layer_at(self, layer: Value, name: str, *, scales: bool = False) -> Value:
        return self.table[len(Table.NAMES) + layer * Table.PER_LAYER + Table.layer_slot(name, scales)]


def _clip(value: Value, most: int) -> Value:
    return let(T.max(i64(0), T.min(value, i64(most))))
