"""Fixed states of recurrent cores: where they lie, and how drafts leave them as they were.

A pass over drafts that are still to be verified changes copies. A job of its own (`Job.APPLIED`) then runs the accepted
tokens again, from the cores' inputs, which the pass has kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, loop, quotient, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder


def state_at(b: PassBuilder, layer: Value, token: Value) -> Value:
    """The offset of a layer's state for the token's sequence."""
    sequence = b.sequence
    if b.apart:
        of_token = T.cast(b.tokens[b.count * 3 + token], "int64")
        sequence = T.if_then_else(b.drafts > 0, sequence, of_token)
    return let(b.layer_at(layer, "state") + sequence * b.at("states"))


def for_drafts(b: PassBuilder, state: Value, count: int) -> Value:
    """The offset at which to change `count` values of a state: in place, or in the thread's copy for drafts."""
    if not b.forgets:
        return state
    copy = let(b.thread * b.at("copied"))
    with when(b.drafts == Job.VERIFIED), loop(i64(0), i64(count // 16)) as part:
        store(b.states, copy + part * 16, load(b.states, state + part * 16))
    return let(T.if_then_else(b.drafts == Job.VERIFIED, copy, state))


@contextmanager
def unless_verified(b: PassBuilder) -> Iterator[None]:
    """Guard code that changes states in place: drafts under verification skip it."""
    if not b.forgets:
        yield
        return
    with when(b.drafts < Job.VERIFIED):
        yield


def inputs_at(b: PassBuilder, name: str, layer: Value) -> Value:
    """The offset of a core's inputs, "channels" or "steps"; for drafts, of those that are kept."""
    if b.single:
        return let(b.at(name))
    return let(b.at(name) + T.min(b.drafts, i64(1)) * b.layer_at(layer, f"kept_{name}"))


@contextmanager
def sequences(b: PassBuilder) -> Iterator[tuple[Value, Value]]:
    """The tokens of each sequence: the first, and the end."""
    if not b.apart:
        yield i64(0), b.count
        return
    each = let(T.if_then_else(b.drafts > 0, b.count, i64(1)))
    with loop(i64(0), quotient(b.count, each)) as number:
        yield let(number * each), let((number + 1) * each)
