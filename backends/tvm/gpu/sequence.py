"""The sequences of a GPU engine: each with its own KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from edge.backends.checks import check_lora, check_tokens, divide
from edge.backends.tvm.gpu import ENGINE, picking
from edge.backends.tvm.gpu.design import PICKS, State
from edge.backends.tvm.gpu.hosts import Recording
from edge.backends.tvm.gpu.passes import DeviceKV, DevicePasses, Tokens, spans_of
from edge.backends.tvm.gpu.program import Dispatch
from edge.backends.tvm.kv.store import append_rows
from edge.devices.power.estimate import gpu_work
from edge.errors import NOT_FINITE, EngineError, UnsupportedError
from edge.model.adapters.lora import Lora
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.types import FloatArray, IntArray


class GPUSequence:
    """The ObservedEngine, PickingEngine, VerifyingEngine, GivenEngine and AdaptedEngine protocols for one sequence."""

    capabilities = ENGINE.CAPABILITIES
    most_candidates, most_banned = picking.TOP, State.MOST_BANS

    def __init__(self, passes: DevicePasses, kv: DeviceKV) -> None:
        self.spec, self.config, self.kv, self._passes = passes.spec, passes.config, kv, passes
        self._design, self._network = passes.design, passes.network
        self._observed, self._votes = 0, False

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See `ObservedEngine`. Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`."""
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed, self._votes = queries, votes

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine: there are no adapters where there are several sequences."""
        check_lora(lora, self.config)
        self._passes.check_open()
        self.kv.truncate(0)

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        with gpu_work(self.config.threads):
            self._forward(tokens, given, places)
            last: FloatArray = self._passes.logits(1)[0]
        return last

    def _forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> None:
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free, given)
        for part, own in self._divide(tokens, self.config.chunk, given, places):
            self._run(tokens[part], given, own, wanted=int(part.stop == tokens.size))

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free, given)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = min(self.config.logits_rows, self.config.chunk)
        with gpu_work(self.config.threads):
            for part, own in self._divide(tokens, step, given, places):
                self._run(tokens[part], given, own, wanted=part.stop - part.start)
                logits[part] = self._passes.logits(part.stop - part.start)
        return logits

    def _divide(
        self, tokens: IntArray, most: int, given: GivenRows | None, places: Places | None
    ) -> list[tuple[slice, Places | None]]:
        """Announce tokens, and divide them into passes of at most `most`. Raises UnsupportedError for rows and places
        that kernels do not know."""
        network = self._network
        if given and network.learned_positions and (tokens >= self.spec.vocab).any():
            raise UnsupportedError("the gpu engine gives rows no learned positions: use --backend=cpu")
        found = divide("gpu", self.kv, network, tokens.size, most, places)
        return [each for part, own in found for each in _single_spans(part, own)]

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        append_rows(self.kv, rows, self.kv.prepare)

    def run_greedy(self, token: int, count: int, banned: IntArray) -> IntArray:
        """See PickingEngine: all steps are one submission, in which each writes the next one's token."""
        kv, passes, chunk = self.kv, self._passes, self._design.chunk
        tokens = check_tokens(np.full(count, token), self.spec.vocab, kv.free)
        count, length = self._steps(count), kv.length
        kv.announce(count)
        passes.prepare(self._tokens(tokens[:1], wanted=1, rows=count), kv, banned.tolist())
        with gpu_work(self.config.threads):
            passes.device.run(self._pass("greedy"), times=count)
            kv.appended(count)
            picked = passes.device.read(passes.buffers["tokens"], 4 * chunk, 4 * count).view(np.int32)
        damaged = np.flatnonzero(picked < 0)
        if damaged.size == 0:
            return picked
        kv.truncate(length + max(1, int(damaged[0])))
        if damaged[0] == 0:
            raise EngineError(NOT_FINITE)
        return picked[: damaged[0]]

    def _steps(self, count: int) -> int:
        """The number of these tokens that can run step by step in one submission."""
        if self._network.temperature or self._design.shape.layer_inputs:  # the host computes inputs for each token
            return 1
        most = min(count, self._design.tables.angle_rows, PICKS, self.kv.at_once(count))
        if self._network.learned_positions:
            most = min(most, self.spec.context - self.kv.next_position)
        if (few := self._rows_until_long()) > 0:  # all of them run the same kernels as when they run one by one
            most = min(most, few)
        return max(1, most)

    def _rows_until_long(self) -> int:
        """Rows of the longest head that are to come before steps run as `long step`; 0 or less: they do."""
        if "long step" not in self._passes.recordings:
            return self.config.capacity
        return self._design.tuning.split_from - self.kv.length

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """See TopEngine."""
        passes = self._passes
        with gpu_work(self.config.threads):
            self._forward(tokens)
            passes.device.run(passes.recordings["top"])
            found = passes.device.read(passes.buffers["found"], picking.top_offset(self.spec.vocab), 8 * picking.TOP)
        return picking.candidates(found.view(np.uint32), min(count, self.spec.vocab))

    def verify(self, tokens: IntArray) -> FloatArray:
        """See VerifyingEngine. Raises UnsupportedError for more tokens than `EngineConfig.drafts` has room for."""
        with gpu_work(self.config.threads):
            return self._passes.logits(self._verify(tokens))

    def verify_top(self, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """See VerifyingEngine. Raises what `verify` raises."""
        passes, vocab = self._passes, self.spec.vocab
        stride, size = picking.found_bytes(vocab), 8 * picking.TOP
        with gpu_work(self.config.threads):
            ran = self._verify(tokens)
            passes.device.run(passes.recordings["top" if ran == 1 else "tops"], ran)
            read = passes.device.read(passes.buffers["found"], picking.top_offset(vocab), (ran - 1) * stride + size)
        starts = range(0, ran * stride, stride)
        return [picking.candidates(read[at:][:size].view(np.uint32), min(count, vocab)) for at in starts]

    def _verify(self, tokens: IntArray) -> int:
        """Run the first of these tokens as if each alone. Returns their number."""
        kv, passes = self.kv, self._passes
        tokens = check_tokens(tokens, self.spec.vocab, kv.free)
        if tokens.size > 1 + self.config.drafts:
            raise UnsupportedError(f"the engine can verify {self.config.drafts} drafts at once, not {tokens.size - 1}")
        tokens = tokens[: kv.at_once(tokens.size)]
        kv.announce(tokens.size)
        if tokens.size == 1:
            self._run(tokens, wanted=1)
            return 1
        passes.prepare_drafts(tokens, kv)
        passes.device.run(passes.recordings["batch"], tokens.size)
        kv.appended(tokens.size)
        return tokens.size

    def time_pass(self, tokens: IntArray) -> list[tuple[Dispatch, float]]:
        """Run `forward` and return the seconds of every dispatch."""
        passes, found = self._passes, list[tuple[Dispatch, float]]()
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free)
        for start in range(0, tokens.size, self.config.chunk):
            part = tokens[start : start + self.config.chunk]
            passes.prepare(self._tokens(part, 1, part.size), self.kv)
            names = [self._sized("step" if part.size == 1 else "chunk")]
            if part.size > 1 and start + part.size == tokens.size:
                names.append("last")
            for name in names:
                seconds = passes.device.time(passes.recordings[name], part.size)
                found += zip(passes.program.dispatches(name, passes.adapted), seconds, strict=True)
            self.kv.appended(part.size)
        return found

    def close(self) -> None:
        """Does nothing: sequences are closed with their engine."""

    def _run(
        self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None, *, wanted: int
    ) -> None:
        count, passes = tokens.size, self._passes
        beyond = np.flatnonzero(tokens >= self.spec.vocab)
        ids = np.where(tokens < self.spec.vocab, tokens, np.int32(-1))
        passes.prepare(self._tokens(ids, wanted, count, places), self.kv)
        added = given is not None and beyond.size > 0 and self._design.shape.deepstack > 0  # chunks add parts of rows
        if given is not None and beyond.size:
            passes.write_given(beyond.tolist(), given.parts(tokens))
        name = "step" if count == 1 and not added else "chunk"
        passes.device.run(self._pass(name), count)
        if name == "chunk" and wanted:
            passes.device.run(passes.recordings["last" if wanted == 1 else "rows"], wanted)
        self.kv.appended(count, places)

    def _tokens(self, ids: IntArray, wanted: int, rows: int, places: Places | None = None) -> Tokens:
        return Tokens(ids, wanted, rows, places, self._observed, self._votes)

    def _pass(self, name: str) -> Recording:
        """The recording of a pass, with accumulation of attention if requested."""
        name = self._sized(name)
        if not self._observed:
            return self._passes.recordings[name]
        self._passes.arena.rows.observed = True
        return self._passes.recordings[f"observed {name}"]

    def _sized(self, name: str) -> str:
        """The name of a pass, of steps behind so many rows."""
        return f"long {name}" if name in ("step", "greedy") and self._rows_until_long() <= 0 else name


def _single_spans(part: slice, places: Places | None) -> Iterator[tuple[slice, Places | None]]:
    """Divide a pass behind each of its spans but the last: kernels know one."""
    inner = (spans_of(places)[:-1] + 1).tolist() if places else []
    bounds = [0, *inner, part.stop - part.start]
    for start, stop in pairwise(bounds):
        own = None if places is None else places.part(slice(start, stop))
        yield slice(part.start + start, part.start + stop), own
