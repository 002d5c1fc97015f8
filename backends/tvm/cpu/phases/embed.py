"""Tokens to rows: embeddings, plus learned positions and a token type if the model has them, and their norm."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.matmul import copy_row
from edge.backends.tvm.cpu.kernels.vectors import Value, floats, i64, let, load, loop, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.phases.streaming import evict_embeddings


def embed(b: PassBuilder) -> None:
    shape = b.shape
    with b.shared_out(b.count) as token:
        at = let(b.at("x") + token * shape.padded_hidden)
        if b.design.embedding:
            _look_up(b, token, at)
        for padding in range(shape.hidden, shape.padded_hidden):
            T.buffer_store(b.floats, T.float32(0), [at + padding])
        evict_embeddings(b)
        if b.design.positions:
            _add_row(b, "position_embd", b.design.positions, b.position_of(token), token, at)
        if b.design.token_types:
            _add_row(b, "token_types", b.design.token_types, b.type_of(token), token, at)
        if shape.embedding_norm:
            b.norm_row(token, token, "token_embd_norm", None, "x")


def _look_up(b: PassBuilder, token: Value, at: Value) -> None:
    """The embedding of a token, unless the engine has put a given row there."""
    shape, row = b.shape, let(T.cast(b.tokens[token], "int64"))
    with when(row >= 0):
        copy_row(b.isa, b.weights, b.matrix(b.design.embedding, shape.hidden, "token_embd"), row, b.floats, at)
        if shape.embedding_scale != 1:
            with loop(i64(0), i64(shape.padded_hidden // 16)) as part:
                place = at + part * 16
                store(b.floats, place, load(b.floats, place) * floats(shape.embedding_scale))


def keep_input(b: PassBuilder, layer: Value) -> None:
    """Copy the hidden states that enter a layer, if they are wanted for drafts; no barrier is needed, since the layer
    changes them behind one."""
    place, taps, hidden = let(b.layer_at(layer, "tap")), let(b.at("taps_each")), b.shape.padded_hidden
    with when(place > 0), b.shared_out(b.count) as token:
        source, target = let(b.at("x") + token * hidden), let(b.at("taps") + (token * taps + place - 1) * hidden)
        with loop(i64(0), i64(hidden // 16)) as part:
            store(b.floats, target + part * 16, load(b.floats, source + part * 16))


def add_given(b: PassBuilder, layer: Value) -> None:
    """x += the layer's part of given rows (`Network.deepstack`)."""
    shape = b.shape
    with b.phase("deepstack"), b.shared_out(b.count) as token, when(T.cast(b.tokens[token], "int64") < 0):
        at = let(b.at("x") + token * shape.padded_hidden)
        part = let(b.at("deepstack") + (token * shape.deepstack + layer) * shape.padded_hidden)
        with loop(i64(0), i64(shape.padded_hidden // 16)) as vector:
            store(b.floats, at + vector * 16, load(b.floats, at + vector * 16) + load(b.floats, part + vector * 16))


def _add_row(b: PassBuilder, table: str, block: str, row: Value, token: Value, at: Value) -> None:
    """x += a row of a table."""
    shape = b.shape
    learned = let(b.at("normed") + token * shape.padded_hidden)
    copy_row(b.isa, b.weights, b.matrix(block, shape.hidden, table), row, b.floats, learned)
    with loop(i64(0), i64(shape.hidden)) as index:
        T.buffer_store(b.floats, b.floats[at + index] + b.floats[learned + index], [at + index])
