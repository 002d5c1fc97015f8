"""The largest logits alone, by a head in two stages (`cpu/phases/ranking.py`): when it pays, and its sketch.

Its gain is counted in bytes of the head, from the tiles that the second stage has to read: nothing depends on time. A
head that saves nothing is left out for some passes, more each time, so that trials cost less than a hundredth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from edge.backends.tvm.packing.blocks import HALVES, TILE, Bytes
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.packing.sketch import DIRECTIONS, SketchLayout, find_directions, make_sketch
from edge.backends.tvm.packing.weights import read_rows
from edge.backends.tvm.sources import source_hash
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.types import AnyArray, FloatArray, IntArray

_LEAST_SHARE = 1 / 2  # of a model's bytes that the head must be: at a third (SmolLM2), nothing was gained
_ROWS = 512  # of the head, from which the sketch is made at once
_RUNS, _RUN = 16, 64  # random tokens, whose hidden states give the directions
_LOSS = 1.0  # heads that may be read in vain before a pause
_PAUSE, _LONGEST = 128, 2048  # passes


def can_rank(spec: ModelSpec) -> bool:
    """Whether a head in two stages is possible: tied to embeddings in Q8_0, with logits as the product gives them."""
    network = spec.network
    if network is None or not spec.tied_head or network.logit_cap or network.logit_scale != 1:
        return False
    in_q8 = spec.embedding_bytes == spec.vocab * spec.hidden // HALVES.values * HALVES.raw_bytes
    return in_q8 and spec.vocab % TILE == 0 and spec.hidden % HALVES.values == 0 and spec.hidden > DIRECTIONS


def is_worth_ranking(spec: ModelSpec) -> bool:
    return can_rank(spec) and spec.embedding_bytes > _LEAST_SHARE * spec.weight_bytes


def sketch_layout(spec: ModelSpec) -> SketchLayout:
    return SketchLayout(spec.vocab, spec.hidden)


def fill_sketch(
    file: GGUFFile, layout: PackedLayout, spec: ModelSpec, out: Bytes, capacity: int,
    hidden: Callable[[IntArray], FloatArray],
) -> None:  # fmt: skip
    """Read the sketch from the cache folder, which gets it first if it has none.

    hidden: returns the hidden states of tokens, for an empty cache of `capacity` rows.
    """

    def write(target: object) -> None:
        place, (run, count) = layout.places["token_embd"], (min(_RUN, capacity), _RUNS)
        tokens = np.random.default_rng(0).integers(0, spec.vocab, (count, run)).astype(np.int32)
        directions = find_directions(np.concatenate([hidden(each) for each in tokens]))
        info, row_bytes = file.tensors[place.source.tensor], spec.hidden // HALVES.values * HALVES.raw_bytes

        def slices() -> Iterator[AnyArray]:
            with open(file.path, "rb") as source:
                for first in range(0, spec.vocab, _ROWS):
                    raw = read_rows(source, info.offset, row_bytes, place.source, first, min(_ROWS, spec.vocab - first))
                    yield raw.reshape(len(raw), -1, HALVES.raw_bytes)

        make_sketch(slices(), directions, spec.vocab).tofile(str(target))

    depends = source_hash("packing", "ranking.py"), fingerprint(file.path, None).sha256, capacity < _RUN
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:32]
    path = cache.find_or_make("weights", key, ".sketch", write, about=file.path.name, expected=out.nbytes)
    out[:] = np.fromfile(path, np.uint8)


@dataclass
class Account:
    """When to rank: the bytes that it saved, in heads, and the passes until the next trial.

    cost: of the first stage, in heads.
    """

    cost: float
    passes: int = 0  # in two stages
    last: float | None = None  # the share of tiles that the second stage of the last pass read; None: it had one
    _saved: float = 0.0
    _wait: int = 0
    _pause: int = _PAUSE

    def ranks_next(self) -> bool:
        """Whether the next pass has two stages."""
        if self._wait:
            self._wait, self.last = self._wait - 1, None
            return False
        return True

    def note(self, read: float) -> None:
        """A pass has had two stages."""
        self.passes, self.last = self.passes + 1, read
        self._saved = min(self._saved + 1 - self.cost - read, 2 * _LOSS)
        if self._saved >= _LOSS:
            self._pause = _PAUSE
        elif self._saved <= -_LOSS:
            self._saved, self._wait, self._pause = 0.0, self._pause, min(2 * self._pause, _LONGEST)


def first_stage(spec: ModelSpec) -> float:
    """Bytes that the first stage reads of the head, as a share of the head's."""
    quants, scales = HALVES.packed_bytes(TILE, spec.hidden)
    return (quants / 2 + scales + SketchLayout.record) / (quants + scales)
