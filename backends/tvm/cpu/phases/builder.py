"""The state of a pass while it is built: its arguments, the thread's share of the work, and rows of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu import timing
from edge.backends.tvm.cpu.arguments import CROSS, Job, Table, cross_dtype
from edge.backends.tvm.cpu.kernels import team
from edge.backends.tvm.cpu.kernels.activations import Quantized, Sums, quantize
from edge.backends.tvm.cpu.kernels.attention import Restore
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.functions import NORMS
from edge.backends.tvm.cpu.kernels.isas import ISAS
from edge.backends.tvm.cpu.kernels.low_rank import add_low_rank
from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix, Weights, multiply
from edge.backends.tvm.cpu.kernels.row_formats import memory_types, reflect
from edge.backends.tvm.cpu.kernels.threads import meet
from edge.backends.tvm.cpu.kernels.timing import add_time
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
    i64,
    let,
    load,
    loop,
    pure,
    quotient,
    spread,
    store,
    when,
)
from edge.backends.tvm.cpu.phases.kinds import PassKind
from edge.backends.tvm.design import Design, low_rank_blocks
from edge.backends.tvm.kv.row_formats import centres_keys
from edge.backends.tvm.packing.blocks import BLOCKS, PACKINGS, PART, IntegerBlock
from edge.backends.tvm.packing.cores import LANES, Groups, groups_of, round_up
from edge.model import cores
from edge.model.structure import layers


class PassBuilder:
    """A pass as one thread runs it. Its methods return and emit expressions of TVM.

    In a step every thread normalises and quantizes its own copy of the one row, which is cheaper than a barrier; in a
    chunk the threads divide the rows in a phase of its own. A batch is a chunk in all but attention, which is computed
    for each token as in a step: its numbers are the same to the last bit.
    """

    def __init__(
        self, design: Design, kind: PassKind, pointers: dict[str, Any], thread: Value, number: int | None = None,
        wave: Value = None,
    ) -> None:  # fmt: skip
        """number: the block that is built, of `Shape.blocks`; None: a unit outside of layers. wave: of experts."""
        self.design, self.thread, self._number, self.wave = design, thread, number, wave
        self.single, self.apart, self.batch = kind.single, kind.apart, kind.batch
        self.stepwise, self.forgets = kind.stepwise or kind.single, kind.drafts
        self.shape, self.target, self.isa = design.shape, design.target, ISAS[design.target.name]
        self._slots = Table.of(design.shape)
        self.dealt = self.target.step_dealt if self.single else self.target.chunk_dealt

        def view(name: str, dtype: str) -> Buffer:
            return T.decl_buffer((1 << 48,), dtype, data=pointers[name])

        self._view = view
        job, self.lines = view("job", "int64"), view("lines", "int32")
        count, self.position, self.first_angle, self.threads, self.wanted, self.observed, self.votes, self.disk = (
            let(job[Job.slot(name)])
            for name in ("count", "position", "angle", "threads", "wanted", "observed", "votes", "disk")
        )
        self.parts, self.notes = let(job[Job.slot("parts")]), let(team.notes(job, thread))
        self.job = let(job[Job.slot("kind")])
        self.sequence, self.drafts = (let(job[Job.slot(name)]) for name in ("sequence", "drafts"))
        self.given = count  # also of a job that is no pass
        self.count = i64(1) if self.single else count
        self.weights = Weights(*(view("weights", dtype) for dtype in ("int32", "uint16", "int8", "float32")))
        # In a step with adapters: functions that complete A x of a matrix.
        self.add_up: dict[str, Callable[[], None]] = {}
        if design.lora:
            self.adapters = Weights(*(view("lora", dtype) for dtype in ("int32", "uint16", "int8", "float32")))
        self.table, self.tokens = view("table", "int64"), view("tokens", "int32")
        self.floats, self.integers = view("floats", "float32"), view("integers", "int32")
        self.rope, self.logits = view("rope", "float32"), view("logits", "float32")
        self.paid = view("attention", "float32")
        self.lengths = view("lengths", "int32")
        self.states = view("states", "float32") if design.shape.states else None
        self.bounds = view("bounds", "uint16") if design.pages and kind.single else None  # of pages, which steps choose
        self._times = view("times", "int64") if design.timed else None

    @functools.cached_property
    def block(self) -> layers.Block:
        assert self._number is not None
        return self.shape.blocks[self._number]

    @functools.cached_property
    def attention(self) -> cores.Attention:
        """The core of a block of attention."""
        assert isinstance(self.block.core, cores.Attention)
        return self.block.core

    @functools.cached_property
    def cache(self) -> Cache:
        """The rows that a block of attention reads."""
        dtype = cross_dtype(self.design.kv_dtype) if self.attention.across else self.design.kv_dtype
        types, row = memory_types(dtype), self.attention.row.padded(LANES)
        return Cache(
            isa=self.isa, dtype=dtype, starts=self._view("starts", "int32"),
            kv_heads=self.shape.kv_heads, key=row.key, value=row.mixed, shared=row.shared,
            **{name: self._view(self._arena(name), dtype) for name, dtype in types.items()},
        )  # fmt: skip

    def restore(self, layer: Value) -> Restore:
        """From sums of stored values to sums of values."""
        if self.cache.shared and self.cache.form.transformed:
            return lambda vectors: self.reflected(layer, i64(0), self.cache.transform(vectors))
        return self.cache.transform

    def reflected(self, layer: Value, kv_head: Value, vectors: Sequence[Value]) -> list[Value]:
        """A key or query, 16 values a vector, reflected by the normal of its head."""
        return reflect(vectors, self.normal(layer, kv_head, len(vectors)))

    @property
    def centred(self) -> bool:
        """Whether rows of keys lack a mean. Apps keep it."""
        return centres_keys(self.attention, self.design.kv_dtype) and not self.design.exported

    def normal(self, layer: Value, kv_head: Value, parts: int) -> list[Value]:
        first = let(self.at("normals") + (self.rows_of(layer) * self.shape.kv_heads + kv_head) * self.shape.padded_head)
        return [let(load(self.floats, first + part * 16)) for part in range(parts)]

    @functools.cached_property
    def positions(self) -> Buffer:
        return self._view(self._arena("positions"), "int32")

    def _arena(self, name: str) -> str:
        if self.attention.across and f"cross_{name}" in CROSS:
            return f"cross_{name}"
        return f"ring_{name}" if self.shape.apart and self.attention.window else name

    def rows_of(self, layer: Value) -> Value:
        """The layer whose rows a layer reads."""
        return layer if self.attention.rows_of is None else let(self.layer_at(layer, "rows_of"))

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of the block's tensors, a shared norm included; outside of layers, names of the norms there."""
        if self._number is None:
            biases = ["token_embd_norm.bias"] * self.shape.embedding_norm_bias
            biases += ["output_norm.bias"] * self.shape.output_norm_bias
            return frozenset(["token_embd_norm", "output_norm", *biases])
        return frozenset(tensor.name for tensor in replace(self.block, beside=False).tensors(self.shape.hidden))

    def variants(self, group: str) -> list[tuple[str, ...]]:
        """The combinations of block types that the group's matrices have in some layer."""
        return self.design.variants[group if self._number is None else self.shape.code(self._number, group)]

    @functools.cached_property
    def groups(self) -> Groups:
        return groups_of(self.block.core)

    def normalise_chunk(self, norm: str, layer: Value, *groups: str) -> None:
        """In a chunk, normalise and quantize rows, in a phase of its own; in a step, nothing."""
        if not norm:
            self.quantize_chunk("x", self.shape.padded_hidden, layer, *groups)
            return
        if self.single:
            return
        with self.phase(norm, layer), self.shared_out(self.count) as token:
            self.norm_row(token, token, norm, layer)
            if getattr(self.block.core, "clipped", False):
                row = let(self.at("normed") + token * self.shape.padded_hidden)
                self.clip_row(layer, self.block.core.inputs[0], row, self.shape.padded_hidden)
            self.quantize_row("normed", self.shape.padded_hidden, token, token, self.blocks(*groups))

    def normalised_inputs(self, norm: str, layer: Value, *groups: str) -> Inputs:
        """The normalised rows; in a step, the thread makes its own copy."""
        if not norm:
            return self.quantized_inputs("x", self.shape.padded_hidden, layer, *groups, private=False)
        if self.single:
            self.norm_row(i64(0), self.thread, norm, layer)
            self.quantize_row("normed", self.shape.padded_hidden, self.thread, self.thread, self.blocks(*groups))
            self.mark(norm, layer)
        return self.inputs("normed", self.shape.padded_hidden)

    def quantize_chunk(self, name: str, width: int, layer: Value, *groups: str) -> None:
        """In a chunk, quantize rows, in a phase of its own; in a step, nothing."""
        if self.single or not self.group_sizes(self.blocks(*groups)):
            return
        with self.phase(f"quantize_{name}", layer), self.shared_out(self.count) as token:
            self.quantize_row(name, width, token, token, self.blocks(*groups))

    def quantized_inputs(self, name: str, width: int, layer: Value, *groups: str, private: bool) -> Inputs:
        """The quantized rows; in a step, a copy for this thread, of its own row (`private`) or of the common one."""
        source = self.thread if private else i64(0)
        if self.single and self.group_sizes(self.blocks(*groups)):
            self.quantize_row(name, width, source, self.thread, self.blocks(*groups))
            self.mark(f"quantize_{name}", layer)
        return self.inputs(name, width, shared=not private)

    def norm_row(self, source: Value, row: Value, norm: str, layer: Value | None, out: str = "normed") -> None:
        shape = self.shape
        weight, bias = (
            let(self.at(name) if layer is None else self.layer_at(layer, name)) if name in self.names else None
            for name in (norm, f"{norm}.bias")
        )
        NORMS[shape.norm](
            self.floats, let(self.at("x") + source * shape.padded_hidden), self.weights.floats, weight, bias,
            shape.hidden, shape.padded_hidden, shape.norm_eps,
            self.floats, let(self.at(out) + row * shape.padded_hidden),
        )  # fmt: skip

    def quantize_row(self, name: str, width: int, source: Value, row: Value, blocks: Sequence[str]) -> None:
        if group_sizes := self.group_sizes(blocks):
            quantize(self.floats, let(self.at(name) + source * width), width, self.quantized(), row, group_sizes)

    def group_sizes(self, blocks: Sequence[str]) -> Sequence[int]:
        """The group sizes of these weights, for which activations need sums; none if no weights are integers."""
        integers = [block for block in map(PACKINGS.__getitem__, blocks) if isinstance(block, IntegerBlock)]
        sizes = {block.group_size for block in integers} | ({PART} if integers and self.design.lora else set())
        return [] if self.design.exact else sorted(sizes)

    def inputs(self, name: str, width: int, *, shared: bool = False) -> Inputs:
        """shared: in a step, all threads read the same row of floats rather than their own copies."""
        stride = 0 if self.single and shared else width
        return Inputs(self.floats, self.at(name), stride, None if self.design.exact else self.quantized())

    def multiply(self, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value]) -> list[Register]:
        # A chunk is bound by arithmetic, a step or a batch by memory.
        target = self.target if self.single or self.apart or len(rows) == 1 else None
        return multiply(self.isa, self.weights, matrix, tile, inputs, rows, target)

    def product(
        self, name: str, layer: Value, tile: Value, inputs: Inputs, rows: Sequence[Value], expert: Value = None,
        low_rows: Sequence[Value] = (), *, adapted: bool = True,
    ) -> list[Register]:  # fmt: skip
        """As `multiply`, with a matrix of the layer, plus its bias if it has one; or with an expert's.

        low_rows: `PassBuilder.rows` of the tokens, where `rows` are others. adapted: an adapter may change the matrix.
        There is code for every block type that the matrix has in some layer; each layer selects its own.
        """
        moved = None if expert is None else let(self.table[self.layer_at(layer, "expert_moves") + expert])
        group, index = self._place_of(name)
        types: dict[str, list[int]] = {}  # block types, and the numbers of the variants that have them
        for number, blocks in enumerate(self.variants(group)):
            types.setdefault(blocks[index], []).append(number)
        if len(types) == 1:
            sums = self.multiply(self.layer_matrix(layer, name, next(iter(types)), moved), tile, inputs, rows)
        else:
            sums = [Register() for _ in rows]
            variant = let(self.layer_at(layer, group))
            for block, numbers in types.items():
                with when(functools.reduce(T.Or, [variant == number for number in numbers])):
                    products = self.multiply(self.layer_matrix(layer, name, block, moved), tile, inputs, rows)
                    for each, result in zip(sums, products, strict=True):
                        each.value = result.value
        if f"{name}.bias" in self.names:
            row = tile * 16 if expert is None else expert * round_up(self._tensor(name).rows, 16) + tile * 16
            bias = let(load(self.weights.floats, self.layer_at(layer, f"{name}.bias") + row))
            for each in sums:
                each.value = each.value + bias
        if f"{name}.output_min" in self.names:
            for each in sums:
                each.value = self.clipped(layer, name, "output", each.value)
        if self.design.lora and adapted and expert is None:
            self._add_low_rank(name, layer, tile, low_rows or rows, sums)
        return sums

    def clipped(self, layer: Value, name: str, what: str, value: Value) -> Value:
        """A vector of a matrix's inputs or outputs within its bounds, if it has any."""
        if f"{name}.{what}_min" not in self.names:
            return value
        low, high = (
            spread(self.weights.floats[self.layer_at(layer, f"{name}.{what}_{end}")]) for end in ("min", "max")
        )
        return pure("float32x16", "llvm.minnum", pure("float32x16", "llvm.maxnum", value, low), high)

    def clip_row(self, layer: Value, name: str, row: Value, width: int) -> None:
        """Clip a row of a matrix's inputs, `width` values from `row` on, in place."""
        if f"{name}.input_min" in self.names:
            with loop(i64(0), i64(width // 16)) as part:
                at = row + part * 16
                store(self.floats, at, self.clipped(layer, name, "input", load(self.floats, at)))

    def _add_low_rank(
        self, name: str, layer: Value, tile: Value, rows: Sequence[Value], sums: Sequence[Register]
    ) -> None:
        """Add an adapter's B · (A x) to a product; `adapt.py` has computed A x."""
        _, kind = low_rank_blocks(self.variants(self._place_of(name)[0]), exact=self.design.exact)
        matrix, rank = let(self.layer_at(layer, f"{name}.lora_b")), let(self.at("lora_rank"))
        with when(matrix > 0):
            if self.single:
                self.add_up[name]()
            found = [self.low_rank_at(name, row) for row in rows]
            apart = [[at] for at in range(len(rows))] if self.stepwise else [range(len(rows))]  # sums in a step's order
            for each in apart:
                add_low_rank(
                    self.isa, self.adapters, kind, matrix, tile, rank, self.floats,
                    [found[at] for at in each], [sums[at] for at in each], fetch=len(each) == 1 and each[0] == 0,
                )  # fmt: skip

    def low_rank_at(self, name: str, row: Value, of: str = "lora") -> Value:
        """The offset of a matrix's A x in a row of `of`, which has `lora_rank` values for each matrix of a phase."""
        _, index = self._place_of(name)
        return let(self.at(of) + (row * self.shape.most_matrices + index) * self.at("lora_rank"))

    @staticmethod
    def counter() -> Register:
        """A variable that is zero."""
        found = Register("int32", lanes=1)
        found.value = T.int32(0)
        return found

    def _place_of(self, name: str) -> tuple[str, int]:
        """The group of a matrix, and its place in it."""
        return next((group, names.index(name)) for group, names in self.groups.items() if name in names)

    def quantized(self) -> Quantized:
        sums = {
            32: Sums(self.at("corrections"), self.at("sums")),
            16: Sums(self.at("half_corrections"), self.at("half_sums")),
        }
        return Quantized(self.integers, self.at("words"), self.floats, self.at("scales"), sums, self.shape.widest)

    @contextmanager
    def phase(self, name: str, layer: Value | None = None) -> Iterator[None]:
        """Work of all threads, with a barrier at its end. `name`: one of `timing.MARKS`."""
        yield
        self.end_phase(name, layer)

    def end_phase(self, name: str, layer: Value | None) -> None:
        self.mark(name, layer)
        meet(self.lines, self.thread, self.threads, self.notes)
        self.mark(name, layer, timing.WAIT)

    def mark(self, name: str, layer: Value | None = None, kind: int = timing.WORK) -> None:
        """In a timed pass, add the time since the thread's last mark to this one; in others, emit nothing."""
        if self._times is None:
            return
        layers = self.shape.layers
        thread = let(self.thread * timing.thread_words(layers))
        counters = timing.layer_offset(i64(layers) if layer is None else layer) + timing.mark_offset(name, kind)
        add_time(self._times, thread, thread + counters)

    def range(self, count: Value | int) -> tuple[Value, Value]:
        """The thread's part of `count` pieces, as start and stop."""
        return let(quotient(self.thread * count, self.threads)), let(quotient((self.thread + 1) * count, self.threads))

    def sums(self) -> tuple[Value, Value]:
        """The thread's parts of sums, of which there are as many whatever the number of threads, as start and stop."""
        return self.range(self.parts)

    def range_of(self, part: Value, count: Value | int) -> tuple[Value, Value]:
        """A part of `count` pieces whose results are summed up, as start and stop."""
        return let(quotient(part * count, self.parts)), let(quotient((part + 1) * count, self.parts))

    @contextmanager
    def shared_out(self, count: Value) -> Iterator[Value]:
        """The thread's pieces: a contiguous range, or every n-th one."""
        if self.dealt:
            with self.dealt_out(count) as index:
                yield index
            return
        start, stop = self.range(count)
        with loop(start, stop) as index:
            yield index

    @contextmanager
    def dealt_out(self, count: Value) -> Iterator[Value]:
        """The thread's pieces, which go to the threads in turn."""
        with loop(i64(0), quotient(count - self.thread + self.threads - 1, self.threads)) as turn:
            yield let(self.thread + turn * self.threads)

    @contextmanager
    def tiles(self, count: int) -> Iterator[Value]:
        with self.shared_out(i64(count)) as tile:
            yield tile

    @contextmanager
    def batches(self) -> Iterator[list[Value]]:
        """The tokens that are multiplied with a tile at once; the last ones may lie beyond the chunk."""
        if self.single:
            yield [i64(0)]
            return
        with loop(i64(0), quotient(self.count + (self.batch - 1), self.batch)) as batch:
            yield [let(batch * self.batch + index) for index in range(self.batch)]

    @contextmanager
    def if_in_chunk(self, token: Value) -> Iterator[None]:
        if self.single:
            yield
            return
        with when(token < self.count):
            yield

    def rows(self, tokens: Sequence[Value]) -> Sequence[Value]:
        """Rows of activations: in a step, the thread's own copy."""
        return [self.thread] if self.single else tokens

    def blocks(self, *groups: str) -> list[str]:
        return [name for group in groups for blocks in self.variants(group) for name in blocks]

    def layer_matrix(self, layer: Value, name: str, block: str, moved: Value = None) -> Matrix:
        """A matrix of a layer. moved: an expert's offset from the first expert, in bytes."""
        quants, scales = self.layer_at(layer, name), self.layer_at(layer, f"{name}.scales")
        if moved is not None:
            quants, scales = quants + moved, scales + moved
        return Matrix(BLOCKS[block], self.columns(name), let(quants), let(scales))

    def columns(self, name: str) -> int:
        """The columns of a matrix of the block."""
        return self._tensor(name).columns

    def _tensor(self, name: str) -> cores.Tensor:
        return next(each for each in self.block.core.tensors(self.shape.hidden) if each.name == name)

    def matrix(self, block: str, columns: int, name: str) -> Matrix:
        """A matrix outside of the layers. One in bands has a row for each token of the vocabulary."""
        return Matrix(PACKINGS[block], columns, self.at(name), self.at(f"{name}.scales"), self.shape.padded_vocab // 16)

    def first_row(self, layer: Value, kv_head: Value, token: Value) -> Value:
        """The arena row where a head's region begins, in the token's sequence."""
        if self.attention.across:
            return let(self.layer_at(layer, "cross") + kv_head * self.at("cross_stride"))
        return let(self.cache.first_row(self._of_sequence(layer, token), kv_head))

    def row(self, layer: Value, kv_head: Value, token: Value) -> Value:
        """The row of a head where a token's key and value belong, and so the number of rows before it; across, the last
        row."""
        if self.attention.across:
            return let(self.at("cross_rows") - 1)
        place = self._of_sequence(layer, token) * self.shape.kv_heads + kv_head
        before = T.cast(self.lengths[place], "int64")
        return let(before if self.apart else before + token)

    def seen(self, token: Value) -> Value:
        """The last token of the pass that a token sees."""
        if self.single or self.apart or not self.attention.spans:
            return token
        return self._beside(token, 1)

    def span_of(self, layer: Value, token: Value) -> tuple[Value, Value]:
        """The first token that an encoder's token sees in a layer, and the number of those before the last's end."""
        side = let(self.layer_at(layer, "window"))
        return let(T.max(self._beside(token, 2), token - side)), let(T.min(self.seen(token), token + side) + 1)

    def position_of(self, token: Value) -> Value:
        if self.shape.encoder:
            return self._beside(token, 3)
        return self._beside(token, 1) if self.apart else let(self.position + token)

    def type_of(self, token: Value) -> Value:
        """The row of the table of token types."""
        return self._beside(token, 4) if self.shape.encoder else i64(0)

    def _beside(self, token: Value, number: int) -> Value:
        """The `number`-th of the integers that follow a pass's tokens (see `Job`)."""
        return let(T.cast(self.tokens[self.count * number + token], "int64"))

    def _of_sequence(self, layer: Value, token: Value) -> Value:
        """The index of the layer's lengths and starts for the token's sequence."""
        return layer + token * self.shape.layers if self.apart else layer

    @contextmanager
    def each_token(self) -> Iterator[Value]:
        if self.single:
            yield i64(0)
            return
        with loop(i64(0), self.count) as token:
            yield token

    @contextmanager
    def if_observed(self, token: Value) -> Iterator[Value]:
        """Guard code for tokens whose attention is accumulated; yields whether votes are counted instead."""
        if not self.apart:
            yield self.votes
            return
        observed = let(T.cast(self.tokens[self.count * 2 + token], "int64"))
        with when(observed > 0):
            yield let(observed - 1)

    def at(self, name: str) -> Value:
        return self.table[self._slots.slot(name)]

    def layer_at(self, layer: Value, name: str) -> Value:
        return self.table[self._slots.place(layer, name)]

    def piece_at(self, piece: Value, number: int) -> Value:
        """One of the four numbers of a piece of streamed weights."""
        return self.table[self._slots.first_piece + piece * 4 + number]


Unit = Callable[[PassBuilder, Value], None]
"""Emits a part of a layer, whose number is an expression; it begins and ends between two phases."""
