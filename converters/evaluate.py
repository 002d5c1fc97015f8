"""The cost of quantizing: predictions of the result against those of its source, on a text that neither has seen.

Both models run layer by layer in NumPy, one after the other: memory holds a layer, the embedding in float32, and the
first model's logits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import numpy as np

from edge.converters.calibrate import Walk
from edge.converters.held_out import TEXT
from edge.formats.gguf import GGUFFile
from edge.likelihood import Compared, Divergence, compare, summarize
from edge.model.model import make_tokenizer
from edge.model.reader import read_spec
from edge.types import FloatArray, IntArray, Progress

TOKENS = 256
_AT_ONCE = 32  # rows of logits


@dataclass(frozen=True)
class Evaluated:
    """The distance of a model's predictions from its source's, and the time of measuring it."""

    divergence: Divergence
    seconds: float


@np.errstate(all="ignore")
def evaluate(source: GGUFFile, made: GGUFFile, progress: Progress | None = None) -> Evaluated:
    """Compare predictions on `TOKENS` tokens of prose, code, lists and other languages.

    Raises UnsupportedError for a model that only other engines run, ModelFormatError and EngineError for states and
    predictions that are not finite.
    """
    began = time.monotonic()
    tokens = make_tokenizer(source).encode(TEXT)[: min(TOKENS, read_spec(source).context)]

    def half(first: float) -> Progress:
        return lambda part: progress(first + part / 2) if progress else None

    walk, final = _run(source, tokens, half(0))
    starts = range(0, tokens.size - 1, _AT_ONCE)  # for both: products of other shapes differ in their last bits
    expected = [walk.logits_of(final[at : at + _AT_ONCE]) for at in starts]
    del walk
    walk, final = _run(made, tokens, half(0.5))
    parts = [
        compare(ours, walk.logits_of(final[at : at + _AT_ONCE]), tokens[at + 1 :][:_AT_ONCE])
        for at, ours in zip(starts, expected, strict=True)
    ]
    joined = {each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Compared)}
    return Evaluated(summarize(Compared(**joined)), time.monotonic() - began)


def _run(file: GGUFFile, tokens: IntArray, progress: Progress) -> tuple[Walk, FloatArray]:
    """The walk, and the head's inputs after all tokens but the last, float32 [n − 1, hidden]."""
    spec = read_spec(file)
    walk = Walk(file, spec, tokens[None, :-1])
    for layer in range(spec.layers):
        for _ in walk.layer(layer):
            pass
        progress((layer + 1) / spec.layers)
    return walk, walk.finish()
