"""Tokens to rows: embeddings, and learned positions where a model has them."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.lanes import Value, floats, i64, let, load, loop, store
from edge.backends.tvm.cpu.kernels.matmul import copy_row
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.cpu.phases.stream import let_go_of_rows


def embed(f: Frame) -> None:
    shape = f.shape
    with f.shared_out(f.count) as token:
        row = T.cast(f.tokens[token], "int64")
        at = let(f.at("x") + token * shape.padded_hidden)
        matrix = f.matrix(f.design.embedding, shape.hidden, "token_embd")
        copy_row(f.isa, f.weights, matrix, row, f.floats, at)
        for padding in range(shape.hidden, shape.padded_hidden):
            T.buffer_store(f.floats, T.float32(0), [at + padding])
        if shape.embedding_scale != 1:
            with loop(i64(0), i64(shape.padded_hidden // 16)) as part:
                place = at + part * 16
                store(f.floats, place, load(f.floats, place) * floats(shape.embedding_scale))
        let_go_of_rows(f)
        if f.design.positions:
            _add_position(f, f.design.positions, token, at)


def _add_position(f: Frame, block: str, token: Value, at: Value) -> None:
    """Learned positions: x += row `position` of their table."""
    shape = f.shape
    learned = let(f.at("normed") + token * shape.padded_hidden)
    matrix = f.matrix(block, shape.hidden, "position_embd")
    copy_row(f.isa, f.weights, matrix, let(f.position + token), f.floats, learned)
    with loop(i64(0), i64(shape.hidden)) as index:
        T.buffer_store(f.floats, f.floats[at + index] + f.floats[learned + index], [at + index])
