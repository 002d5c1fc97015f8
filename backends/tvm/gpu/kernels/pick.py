"""Token selection on the device: the likeliest token, or the top few for a sampler.

Logits are compared as integers of the same order, so that drivers' arithmetic does not matter: NaN comes before
everything, −0 equals 0, and the lowest id wins ties, as in NumPy's argmax and stable argsort.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    barrier,
    build,
    i32,
    let,
    loop,
    select,
    store,
    strided,
    to_int,
    to_word,
    u32,
    when,
)
from edge.backends.tvm.gpu.picking import SORTED, THREADS, TOP

_NAN, _LOWEST = 0xFFFFFFFF, 0x007FFFFF  # keys of NaN and of −∞


def kernels() -> list[Built]:
    """Build all kernels of this file; none depends on the model."""
    return [_likeliest(), _pick(), _top_logits(), _top_pairs()]


def _key(word: Value) -> Value:
    """Map a float32's bits to a uint32 of the same order."""
    sign, size = u32(1 << 31), T.bitwise_and(word, u32(0x7FFFFFFF))
    ordered = select(T.bitwise_and(word, sign) == u32(0), T.bitwise_or(word, sign), T.bitwise_not(word))
    return select(size > u32(0x7F800000), u32(_NAN), select(size == u32(0), sign, ordered))


def _before(key: Value, token: Value, other: Value, others: Value) -> Value:
    return T.Or(key > other, T.And(key == other, token < others))


def _likeliest() -> Built:
    """Find the best pair of each workgroup."""

    def body(scope: Scope) -> None:
        best, token = Register(u32(0), "uint32"), Register(u32(0), "uint32")
        stride = let(scope.parts * THREADS)
        steps = let(T.truncdiv(scope.vocab + (stride - 1), stride))
        with loop(0, steps) as step:
            at = let(step * stride + scope.group * THREADS + scope.thread)
            with when(at < scope.vocab):
                key = Register(_key(let(scope.logits[at])), "uint32")
                with when(key.value > best.value):
                    bans = to_int(scope.tables[State.BANNED])
                    with loop(0, bans) as ban, when(to_int(scope.tables[State.BANS + ban]) == at):
                        key.value = u32(_LOWEST)
                    with when(key.value > best.value):
                        best.value, token.value = key.value, to_word(at)
        keys, ids = _best(scope, best.value, token.value)
        with when(scope.thread == 0):
            store(scope.found, scope.group * 2, keys[0])
            store(scope.found, scope.group * 2 + 1, ids[0])

    reads, scalars = {"logits": "uint32", "tables": "uint32"}, ["vocab", "parts"]
    return build("edge_likeliest", THREADS, reads, {"found": "uint32"}, scalars, body)


def _pick() -> Built:
    """Find the best of all workgroups, and prepare the next step with it."""

    def body(scope: Scope) -> None:
        best, token = Register(u32(0), "uint32"), Register(u32(0), "uint32")
        with when(scope.thread < scope.parts):
            best.value, token.value = scope.found[scope.thread * 2], scope.found[scope.thread * 2 + 1]
        keys, ids = _best(scope, best.value, token.value)
        with when(scope.thread == 0):
            picked = let(to_int(ids[0]))
            behind = let(scope.chunk + to_int(scope.tables[State.PICKED]))
            store(scope.tokens, i32(0), picked)
            store(scope.tokens, behind, select(keys[0] == u32(_NAN), -1 - picked, picked))
            for word in (State.PICKED, State.APPENDED, State.ANGLE, State.POSITION):
                store(scope.tables, i32(word), scope.tables[word] + u32(1))

    writes = {"tables": "uint32", "tokens": "int32"}
    return build("edge_pick", THREADS, {"found": "uint32"}, writes, ["parts", "chunk"], body)


def _best(scope: Scope, key: Value, token: Value) -> tuple[Buffer, Buffer]:
    """Shared memory whose first elements are the workgroup's best key and its id."""
    keys, ids = scope.shared(THREADS, "uint32"), scope.shared(THREADS, "uint32")
    store(keys, scope.thread, key)
    store(ids, scope.thread, token)
    barrier()
    distance = THREADS // 2
    while distance:
        with when(scope.thread < distance):
            other = let(scope.thread + distance)
            with when(_before(keys[other], ids[other], keys[scope.thread], ids[scope.thread])):
                store(keys, scope.thread, keys[other])
                store(ids, scope.thread, ids[other])
        barrier()
        distance //= 2
    return keys, ids


def _top_logits() -> Built:
    """Find the `TOP` best of every `SORTED` logits of a row; `stride`: words of a row's part of `found`."""

    def body(scope: Scope) -> None:
        keys, ids = scope.shared(SORTED, "uint32"), scope.shared(SORTED, "uint32")
        with strided(scope, SORTED) as index:
            at = let(scope.group * SORTED + index)
            store(keys, index, u32(0))
            store(ids, index, to_word(at))
            with when(at < scope.vocab):
                store(keys, index, _key(let(scope.logits[scope.row * scope.vocab + at])))
        _sort(scope, keys, ids)
        _keep(scope, keys, ids, scope.row * scope.stride + scope.group * 2 * TOP)

    return build("edge_top_logits", THREADS, {"logits": "uint32"}, {"found": "uint32"}, ["vocab", "stride"], body)


def _top_pairs() -> Built:
    """Find the `TOP` best of every `SORTED` pairs at word `source` of a row's part, and write them to word `sink`."""

    def body(scope: Scope) -> None:
        keys, ids = scope.shared(SORTED, "uint32"), scope.shared(SORTED, "uint32")
        own = let(scope.row * scope.stride)
        source = let(own + scope.source)
        with strided(scope, SORTED) as index:
            at = let(scope.group * SORTED + index)
            store(keys, index, u32(0))
            store(ids, index, u32(0))
            with when(at < scope.pairs):
                store(keys, index, scope.found[source + 2 * at])
                store(ids, index, scope.found[source + 2 * at + 1])
        _sort(scope, keys, ids)
        _keep(scope, keys, ids, own + scope.sink + scope.group * 2 * TOP)

    return build("edge_top_pairs", THREADS, {}, {"found": "uint32"}, ["pairs", "stride", "source", "sink"], body)


def _sort(scope: Scope, keys: Buffer, ids: Buffer) -> None:
    """Sort pairs, best first, by a bitonic network (Batcher, 1968)."""
    barrier()
    with loop(0, SORTED.bit_length() - 1) as log, loop(0, log + 1) as phase:
        size = let(T.shift_left(i32(2), log))
        distance = let(T.shift_right(size, phase + 1))
        for half in range(SORTED // 2 // THREADS):
            number = let(half * THREADS + scope.thread)
            one = let(2 * number - T.bitwise_and(number, distance - 1))
            two = let(one + distance)
            descending = T.bitwise_and(one, size) == 0  # those of every other run ascend
            first, second = let(keys[one]), let(keys[two])
            its, others = let(ids[one]), let(ids[two])
            with when(_before(second, others, first, its) == descending):
                store(keys, one, second)
                store(keys, two, first)
                store(ids, one, others)
                store(ids, two, its)
        barrier()


def _keep(scope: Scope, keys: Buffer, ids: Buffer, at: Value) -> None:
    with strided(scope, TOP) as index:
        store(scope.found, at + 2 * index, keys[index])
        store(scope.found, at + 2 * index + 1, ids[index])
