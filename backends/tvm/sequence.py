"""The sequences of a native engine: each with its own KV cache, and its own part of the table of angles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_free, check_tokens
from edge.backends.head_kv import HeadKV
from edge.backends.rope import Rotation
from edge.backends.tvm import ENGINE
from edge.backends.tvm.cpu.two_stages import MOST_CANDIDATES, largest_of
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import NativeStore
from edge.backends.tvm.packing.shape import ROPE_AHEAD
from edge.errors import UnsupportedError
from edge.model.given import GivenRows
from edge.model.lora import Lora
from edge.model.places import Places
from edge.model.spec import ModelSpec, check_generates
from edge.model.tensors import find_network
from edge.types import AnyArray, FloatArray, IntArray

NativeKV = HeadKV[NativeStore[HostRows]]


class Angles:
    """Rows of the table of rotary angles from `first` on, for consecutive positions, computed ahead.

    table: float32 [kinds of layers, rows, 2 · head].
    """

    def __init__(self, table: FloatArray, first: int = 0) -> None:
        self._table, self._first = table, first
        self._rotation: Rotation | None = None
        self._from = self._count = 0  # positions

    def row(self, rotation: Rotation, position: int, count: int) -> int:
        """The row of the table where the next `count` positions begin."""
        if self._rotation is not rotation:
            self._rotation, self._count = rotation, 0
        if not self._from <= position <= position + count <= self._from + self._count:
            self._from, self._count = position, max(count, ROPE_AHEAD)
            rows = slice(self._first, self._first + self._count)
            positions = np.arange(position, position + self._count)
            for kind, table in enumerate(self._table):
                table[rows] = _angle_table(rotation, kind, positions)
        return self._first + position - self._from

    def place(self, rotation: Rotation, positions: IntArray) -> int:
        """The row where the angles of these positions begin, [n] or [n, components]."""
        self._count = 0
        for kind, table in enumerate(self._table):
            table[self._first : self._first + len(positions)] = _angle_table(rotation, kind, positions)
        return self._first


class NativeSequence:
    """The Engine, ObservedEngine, VerifyingEngine and AdaptedEngine protocols for one sequence. number: among those of
    the engine.

    run: runs tokens, at most a chunk, and returns the last rows of logits, [wanted, vocab]. verify: runs tokens as if
    each ran alone. adapt: changes the adapters of sequences. adapters: the number of this sequence's (`adapters.py`).
    run_top: runs a token, or verifies several, and returns their largest logits.
    """

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, number: int, spec: ModelSpec, config: EngineConfig, kv: NativeKV, angles: Angles,
        run: Callable[[NativeSequence, IntArray, int, GivenRows | None, Places | None], FloatArray],
        verify: Callable[[NativeSequence, IntArray], FloatArray],
        adapt: Callable[[Sequence[NativeSequence], Lora | None], None],
        run_top: Callable[[NativeSequence, IntArray, int], list[tuple[IntArray, FloatArray]]] | None = None,
    ) -> None:  # fmt: skip
        self.number, self.spec, self.config, self.kv, self.angles = number, spec, config, kv, angles
        self._run, self._verify, self._adapt, self._run_top = run, verify, adapt, run_top
        self.most_candidates = MOST_CANDIDATES if run_top else 0
        self.observed, self.votes = 0, False
        self.reads = config.reads
        self.adapters: int | None = None

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See ObservedEngine. 0 costs nothing.

        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self.observed, self.votes = queries, votes

    def choose_rows(self, *, on: bool) -> None:
        """See ChoosingEngine."""
        self.reads = self.config.reads if on else 0

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Other sequences keep theirs."""
        self._adapt([self], lora)

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        check_generates(self.spec)
        tokens, logits = check_tokens(tokens, self.spec.vocab, self.kv.free, given), np.zeros((1, 0), np.float32)
        for part, own in self._passes(tokens.size, self.config.chunk, places):
            logits = self._run(self, tokens[part], int(part.stop == tokens.size), given, own)
        return np.asarray(logits[0])

    def _passes(self, count: int, most: int, places: Places | None) -> Iterator[tuple[slice, Places | None]]:
        """Announce tokens, and divide them into passes of at most `most`."""
        if places is None:
            self.kv.announce(count)
            yield from ((slice(at, min(at + most, count)), None) for at in range(0, count, most))
            return
        network = find_network(self.spec)
        places.check(count, self.kv.next_position, network.components)
        if not places.consecutive and (network.learned_positions or network.temperature or any(network.windows)):
            raise UnsupportedError("the cpu engine runs models with windows at consecutive positions only")
        self.kv.announce(places.next_position - self.kv.next_position)
        yield from ((part, places.part(part)) for part in list(places.passes(most)))

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """See TopEngine. A single token reads only a part of the head."""
        if self._run_top is None or tokens.size != 1:
            return largest_of(self.forward(tokens), count)
        check_generates(self.spec)
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free)
        self.kv.announce(1)
        return self._run_top(self, tokens, count)[0]

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        check_generates(self.spec)
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free, given)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = 1 if self.reads else min(self.config.logits_rows, self.config.chunk)  # single tokens choose rows
        for part, own in self._passes(tokens.size, step, places):
            logits[part] = self._run(self, tokens[part], part.stop - part.start, given, own)
        return logits

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        kv, store, count = self.kv, self.kv.store, rows.shape[3]
        check_free(count, kv.free)
        kv.announce(count)
        self.prepare(count)
        size = store.row.key
        padded = np.pad(rows, [(0, 0)] * 4 + [(0, size - rows.shape[4])])
        keys = np.stack([kv.rope.ordered(each, layer) for layer, each in enumerate(padded[0])])
        places = store.regions.rows(kv.length + np.arange(count))
        store.rows.set_keys(places, keys.reshape(-1, count, size), store.heads)
        store.rows.set_values(places, padded[1].reshape(-1, count, size))
        kv.appended(count)

    def verify(self, tokens: IntArray) -> FloatArray:
        """See VerifyingEngine. Raises UnsupportedError for more tokens than `EngineConfig.drafts` has room for."""
        tokens = self._announce(tokens)
        return self._run(self, tokens, 1, None, None) if tokens.size == 1 else self._verify(self, tokens)

    def verify_top(self, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """See VerifyingEngine. Raises what `verify` raises."""
        if self._run_top is None:
            return [largest_of(each, count) for each in self.verify(tokens)]
        return self._run_top(self, self._announce(tokens), count)

    def _announce(self, tokens: IntArray) -> IntArray:
        """The tokens that are verified together."""
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free)
        if tokens.size > 1 + self.config.drafts:
            raise UnsupportedError(f"the engine can verify {self.config.drafts} drafts at once, not {tokens.size - 1}")
        tokens = tokens[: self.kv.at_once(tokens.size)]
        self.kv.announce(tokens.size)
        return tokens

    def close(self) -> None:
        """Does nothing: sequences are closed with their engine."""

    def prepare(self, count: int, place: int = 0) -> None:
        """Announce rows of the next pass, whose `place`-th sequence this is."""
        for store in self.kv.stores:
            store.place_in_pass = place
        self.kv.prepare(count)


def _angle_table(rotation: Rotation, kind: int, positions: AnyArray) -> FloatArray:
    """float32 [positions, 2 · head] for kernels: the cosines of all dimensions, then −sin and +sin of each pair."""
    cos, sin = rotation.tables(kind, positions)
    pairs = np.stack([-sin, sin], axis=-1).reshape(len(sin), -1)
    return np.concatenate([np.repeat(cos, 2, axis=1), pairs], axis=1)
