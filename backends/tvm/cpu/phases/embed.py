"""Tokens to rows: embeddings, plus learned positions if the model has them."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.matmul import copy_row
from edge.backends.tvm.cpu.kernels.vectors import Value, floats, i64, let, load, loop, store
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.phases.streaming import evict_embeddings


def embed(b: PassBuilder) -> None:
    shape = b.shape
    with b.shared_out(b.count) as token:
        row = T.cast(b.tokens[token], "int64")
        at = let(b.at("x") + token * shape.padded_hidden)
        matrix = b.matrix(b.design.embedding, shape.hidden, "token_embd")
        copy_row(b.isa, b.weights, matrix, row, b.floats, at)
        for padding in range(shape.hidden, shape.padded_hidden):
            T.buffer_store(b.floats, T.float32(0), [at + padding])
        if shape.embedding_scale != 1:
            with loop(i64(0), i64(shape.padded_hidden // 16)) as part:
                place = at + part * 16
                store(b.floats, place, load(b.floats, place) * floats(shape.embedding_scale))
        evict_embeddings(b)
        if b.design.positions:
            _add_position(b, b.design.positions, token, at)


def _add_position(b: PassBuilder, block: str, token: Value, at: Value) -> None:
    """Learned positions: x += row `position` of their table."""
    shape = b.shape
    learned = let(b.at("normed") + token * shape.padded_hidden)
    matrix = b.matrix(block, shape.hidden, "position_embd")
    copy_row(b.isa, b.weights, matrix, b.position_of(token), b.floats, learned)
    with loop(i64(0), i64(shape.hidden)) as index:
        T.buffer_store(b.floats, b.floats[at + index] + b.floats[learned + index], [at + index])
