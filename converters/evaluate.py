"""The cost of quantizing: predictions of the result against those of its source, on a text that neither has seen.

Both models run layer by layer in NumPy, one after the other: memory holds a layer, the embedding in float32, and the
first model's logits. A model in ONNX runs in ONNX Runtime, with the activations that it rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.converters.calibrate import Walk
from edge.converters.held_out import TEXT
from edge.devices.host import usable_cores
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

    expected = list(_logits(source, tokens, half(0)))
    found = _logits(made, tokens, half(0.5))
    parts = [
        compare(ours, theirs, tokens[number * _AT_ONCE + 1 :][:_AT_ONCE])
        for number, (ours, theirs) in enumerate(zip(expected, found, strict=True))
    ]
    joined = {each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Compared)}
    return Evaluated(summarize(Compared(**joined)), time.monotonic() - began)


def _logits(file: GGUFFile, tokens: IntArray, progress: Progress) -> Iterator[FloatArray]:
    """Logits after all tokens but the last, float32 [n, vocab], `_AT_ONCE` rows at a time: products of other shapes
    differ in their last bits."""
    starts = range(0, tokens.size - 1, _AT_ONCE)
    if file.folder is not None:
        yield from _logits_of_onnx(file, tokens[:-1], starts, progress)
        return
    spec = read_spec(file)
    walk = Walk(file, spec, tokens[None, :-1])
    for layer in range(spec.layers):
        for _ in walk.layer(layer):
            pass
        progress((layer + 1) / spec.layers)
    final = walk.finish()
    for at in starts:
        yield walk.logits_of(final[at : at + _AT_ONCE])


def _logits_of_onnx(file: GGUFFile, tokens: IntArray, starts: range, progress: Progress) -> Iterator[FloatArray]:
    spec = read_spec(file)
    config = EngineConfig(tokens.size, _AT_ONCE, "f32", usable_cores(), logits_rows=_AT_ONCE)
    engine = find_backend("onnx", file, spec).load(file, spec, config)
    try:
        for at in starts:
            yield engine.forward_all(tokens[at : at + _AT_ONCE])
            progress(min(1.0, (at + _AT_ONCE) / tokens.size))
    finally:
        engine.close()
