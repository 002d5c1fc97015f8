"""The sequences of a native engine: each with its own KV cache, and its own part of the table of angles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_lora, check_positions, check_tokens, check_whole_text, divide, places_of
from edge.backends.head_kv import HeadKV
from edge.backends.tvm import ENGINE
from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.cpu.two_stages import MOST_CANDIDATES, largest_of
from edge.backends.tvm.kv.pages import pages_read
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import NativeStore, append_rows
from edge.backends.tvm.packing.shape import ROPE_AHEAD
from edge.backends.tvm.passes import Angles, Passes
from edge.errors import UnsupportedError
from edge.model.adapters.lora import Lora
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import check_generates
from edge.types import FloatArray, IntArray

NativeKV = HeadKV[NativeStore[HostRows]]


class NativeSequence:
    """The Engine, HiddenEngine, ObservedEngine, VerifyingEngine and AdaptedEngine protocols for one sequence. number:
    among those of the engine. settings: the KV cache's without adapters."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(self, number: int, passes: Passes, config: EngineConfig, kv: NativeKV) -> None:
        self.number, self.spec, self.config, self.kv, self.passes = number, passes.spec, config, kv, passes
        self.settings, self._network, self._encoder = kv.settings, passes.layout.network, passes.layout.shape.encoder
        first = passes.memory.rope.ahead + number * ROPE_AHEAD
        self._angles = Angles(passes.angles, first) if config.sequences > 1 else passes.chunk_angles
        self.most_candidates = MOST_CANDIDATES if passes.stages else 0
        self.observed, self._votes, self._reads = 0, False, config.reads

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See ObservedEngine. 0 costs nothing.

        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self.observed, self._votes = queries, votes

    def choose_rows(self, *, on: bool) -> None:
        """See ChoosingEngine."""
        self._reads = self.config.reads if on else 0

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Other sequences keep theirs."""
        check_lora(lora, self.config)
        self.passes.check_open()
        self.kv.truncate(0)
        self.kv.settings = self.settings
        self.passes.adapters.hold(lora, self.number)
        if lora:
            self.kv.settings += f" {lora.key}"

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens, logits = self._checked(tokens, given), np.zeros((1, 0), np.float32)
        if tokens.size == 1 and places is None:
            self.kv.announce(1)
            return np.asarray(self.run(tokens, 1, given)[0])
        for part, own in divide("cpu", self.kv, self._network, tokens.size, self.config.chunk, places):
            logits = self.run(tokens[part], int(part.stop == tokens.size), given, own)
        return np.asarray(logits[0])

    def _checked(self, tokens: IntArray, given: GivenRows | None = None) -> IntArray:
        """The tokens of passes that make logits."""
        if self._encoder:
            check_generates(self.spec)
        return check_tokens(tokens, self.spec.vocab, self.kv.free, given)

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """See TopEngine. A single token reads only a part of the head."""
        if tokens.size != 1:
            return largest_of(self.forward(tokens), count)
        return self.verify_top(tokens, count)[0]

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens = self._checked(tokens, given)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = 1 if self._reads else min(self.config.logits_rows, self.config.chunk)  # single tokens choose rows
        for part, own in divide("cpu", self.kv, self._network, tokens.size, step, places):
            logits[part] = self.run(tokens[part], part.stop - part.start, given, own)
        return logits

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        append_rows(self.kv, rows, self.prepare)

    def hidden(self, tokens: IntArray, places: Places | None = None, given: GivenRows | None = None) -> FloatArray:
        """See HiddenEngine."""
        if self._encoder:
            check_whole_text(tokens, self.kv, self.config)
            places = places_of(self.kv, self._network, tokens.size, places)
        tokens, passes = check_tokens(tokens, self.spec.vocab, self.kv.free, given), self.passes
        self.kv.announce(tokens.size)
        found, chunk = np.empty((tokens.size, self.spec.hidden), np.float32), self.config.chunk
        for start in range(0, tokens.size, chunk):
            part = tokens[start : start + chunk]
            self.run(part, 0, given, places)
            states = passes.normed_states(part.size) if self._network.normed else passes.states[: part.size]
            found[start : start + part.size] = states
        return found

    def verify(self, tokens: IntArray) -> FloatArray:
        """See VerifyingEngine. Raises UnsupportedError for more tokens than `EngineConfig.drafts` has room for."""
        return self._verify(self._announce(tokens))

    def verify_top(self, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """See VerifyingEngine. Raises what `verify` raises."""
        tokens, stages = self._announce(tokens), self.passes.stages
        if stages is None or not stages.pays(count):
            return [largest_of(each, count) for each in self._verify(tokens)]
        self._verify(tokens, count)
        return self.passes.largest(tokens.size, count)

    def _announce(self, tokens: IntArray) -> IntArray:
        """The tokens that are verified together."""
        tokens = self._checked(tokens)
        if tokens.size > 1 + self.config.drafts:
            raise UnsupportedError(f"the engine can verify {self.config.drafts} drafts at once, not {tokens.size - 1}")
        tokens = tokens[: self.kv.at_once(tokens.size)]
        self.kv.announce(tokens.size)
        return tokens

    def _verify(self, tokens: IntArray, top: int = 0) -> FloatArray:
        """Run tokens as if each ran alone. Returns their logits. top: see `Passes.run`."""
        kv, passes, count = self.kv, self.passes, tokens.size
        if count == 1:
            return self.run(tokens, 1, top=top)
        check_positions(self.spec, kv.next_position + count)
        passes.begin(tokens, self.number)
        if passes.drafted:  # inputs of drafts are kept for the last pass alone
            passes.drafted.settle()
        self.prepare(count)
        kv.store.arena.follow(count)
        positions = kv.next_position + np.arange(count, dtype=np.int32)
        angle = self._angles.row(kv.rope.rotation, kv.next_rope_position, count)
        observed, numbers = np.zeros(count, np.int32), np.full(count, self.number, np.int32)
        passes.run_together(positions, observed, numbers, angle, top, Job.VERIFIED if kv.state else 0)
        kv.appended(count)
        passes.finish()
        if kv.state:
            kv.state.draft(count)
            passes.drafted = kv.state
        return passes.logits(count)

    def run(
        self, tokens: IntArray, wanted: int, given: GivenRows | None = None, places: Places | None = None, top: int = 0
    ) -> FloatArray:
        """Run tokens, at most a chunk. Returns the last `wanted` rows of logits. places: see GivenEngine. top: see
        `Passes.run`."""
        kv, passes, count, encoder = self.kv, self.passes, tokens.size, self._encoder
        passes.begin(tokens, self.number, given)
        position = kv.next_position
        check_positions(self.spec, position + count)
        self.prepare(count)
        added = given is not None and self._network.deepstack > 0  # chunks add parts of rows
        alone = count == 1 and not encoder and not added
        if encoder and places:
            columns = (places.sees, places.begins, places.numbers, places.types)
            for at, column in enumerate(columns, start=1):
                passes.tokens[at * count : (at + 1) * count] = 0 if column is None else column
        elif not alone:
            passes.tokens[count : 2 * count] = places.sees if places else np.arange(count)
        reads = self._reads if alone else 0
        if self.config.reads:
            passes.pages[:] = pages_read(reads), kv.store.bounded
        if places is None or places.consecutive or not self._network.ropes:
            angles = self._angles if count <= ROPE_AHEAD else passes.chunk_angles
            angle = angles.row(kv.rope.rotation, kv.next_rope_position, count)
        else:
            base = kv.next_rope_position - position
            angle = passes.chunk_angles.place(kv.rope.rotation, places.positions + base)
        passes.run(
            count, position, top, kind=Job.STEP if alone else Job.CHUNK, angle=angle, wanted=wanted,
            observed=min(count, self.observed), votes=int(self._votes), sequence=self.number, drafts=0,
        )  # fmt: skip
        kv.appended(count, None if encoder else places)
        if reads:
            kv.store.stepped(reads)
        passes.finish()
        return passes.logits(wanted)

    def close(self) -> None:
        """Does nothing: sequences are closed with their engine."""

    def prepare(self, count: int, place: int = 0) -> None:
        """Announce rows of the next pass, whose `place`-th sequence this is."""
        for store in self.kv.stores:
            store.place_in_pass = place
        self.kv.prepare(count)

    def at_place(self, place: int) -> int:
        """As `prepare` for a token of a batch, and copy its angles there. Returns whether it is observed: see `Job`."""
        kv, table = self.kv, self.passes.angles
        self.prepare(1, place)
        row = self._angles.row(kv.rope.rotation, kv.next_rope_position, 1)
        table[:, self.passes.memory.rope.together + place] = table[:, row]
        return 1 + self._votes if self.observed else 0


def run_batch(passes: Passes, tokens: IntArray, sequences: Sequence[NativeSequence]) -> FloatArray:
    """Run one token each of several sequences, which are checked and announced. Returns their logits."""
    if len(sequences) == 1:
        return sequences[0].run(tokens, 1)
    numbers = [each.number for each in sequences]
    passes.begin(tokens, numbers[0])
    observed = np.array([each.at_place(place) for place, each in enumerate(sequences)], np.int32)
    positions = np.array([each.kv.next_position for each in sequences], np.int32)
    passes.run_together(positions, observed, np.array(numbers, np.int32), passes.memory.rope.together)
    for each in sequences:
        each.kv.appended(1)
    passes.finish()
    return passes.logits(tokens.size)
