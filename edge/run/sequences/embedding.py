"""Embeddings of texts from a loaded encoder or decoder: its last hidden states, pooled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast, get_args

import numpy as np

from edge.backends.base import HiddenEngine
from edge.errors import MEMORY_SHORT, BudgetError, EngineError, InputError, UnsupportedError
from edge.model.model import Model
from edge.model.parts.places import Places
from edge.model.structure.layers import Pooling
from edge.model.tensors import find_network
from edge.run.sequences.sequence import TokenSequence
from edge.types import AnyArray, FloatArray, IntArray

TOGETHER = 256  # tokens of texts that run in one pass; beyond that, passes gain nothing and leave the caches of CPUs


def check_pooling(pooling: object) -> Pooling | None:
    """Return the pooling; None: the model's own. Raises InputError for an unknown one."""
    if pooling is not None and pooling not in get_args(Pooling):
        raise InputError(f"--pooling must be one of {', '.join(get_args(Pooling))}, not {pooling!r:.40}")
    return cast(Pooling | None, pooling)


def embed(
    sequence: TokenSequence,
    model: Model,
    texts: Sequence[IntArray],
    pooling: Pooling | None,
    *,
    normalize: bool,
    truncate: bool,
    dimensions: int | None = None,
) -> FloatArray:
    """The embeddings of texts as token ids, int [n] each: float32 [texts, size]. Arguments and errors are those of
    `Session.embed`."""
    size = check_dimensions(dimensions, model.tail.size)
    texts = [fitted(sequence, tokens, model.text_end, truncate=truncate) for tokens in texts]
    found = np.empty((len(texts), size), np.float32)
    for row, pooled in zip(found, pool(sequence, texts, pooling), strict=True):
        values = model.tail.embed(pooled)[:size]
        length = float(np.linalg.norm(values))
        if not np.isfinite(length):
            raise EngineError("the model produced NaN: its weights are damaged or overflow")
        row[:] = values / (length or 1.0) if normalize else values
    return found


def check_dimensions(wanted: int | None, size: int) -> int:
    """The number of values of embeddings; None: all. Raises InputError for more than there are."""
    if wanted is not None and (not isinstance(wanted, int) or not 1 <= wanted <= size):
        raise InputError(f"--dimensions must be from 1 to {size}, the model's own, not {wanted!r:.40}")
    return wanted or size


def fitted(sequence: TokenSequence, tokens: IntArray, end: int | None, *, truncate: bool) -> IntArray:
    """The text, cut if it may be, but for the token `end`. Raises InputError for an empty one, or one that does not
    fit."""
    kv = sequence.engine.kv
    if not tokens.size:
        raise InputError("the text is empty")
    if truncate and tokens.size > kv.capacity:
        last = tokens[-1:] if tokens[-1] == end else tokens[:0]
        tokens = np.concatenate([tokens[: kv.capacity - last.size], last])
    if sequence.engine.spec.encoder and tokens.size > kv.capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but this encoder sees {kv.capacity}: split it, or use --truncate"
        )
    if not sequence.policy.evicts and tokens.size > kv.capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but --kv-policy={sequence.policy.name} has {kv.capacity} KV rows: "
            "raise --max-kv-size or use --kv-policy=streaming"
        )
    return tokens


def pool(
    sequence: TokenSequence, texts: Sequence[IntArray], pooling: Pooling | None = None,
    types: Sequence[IntArray] | None = None,
) -> Iterator[AnyArray]:  # fmt: skip
    """Yield the pooled states of each text, float64 [hidden]. Short texts of an encoder run side by side in one pass.

    types: of an encoder's tokens, the rows of its table of token types. Raises UnsupportedError where an engine has no
    hidden states, BudgetError.
    """
    engine = sequence.engine
    if not engine.capabilities.hidden:
        name = sequence.plan.backend
        raise UnsupportedError(f"the {name} engine hands out no hidden states to embed by: use --backend=cpu")
    pooling = pooling or find_network(engine.spec).pooling
    if not engine.spec.encoder:
        for tokens in texts:
            yield _pool_decoder(sequence, tokens, pooling)
        return
    for group in _groups([tokens.size for tokens in texts], min(TOGETHER, sequence.plan.config.chunk)):
        of_tokens = None if types is None else np.concatenate(types[group])
        sizes = [tokens.size for tokens in texts[group]]
        places = Places.of_texts(sizes, of_tokens)
        sequence.reset()
        states = sequence.hidden(cast(HiddenEngine, engine), np.concatenate(texts[group]).astype(np.int32), places)
        ends = np.cumsum(sizes, dtype=np.int64)
        starts: AnyArray = ends - np.array(sizes, np.int64)
        if pooling == "mean":
            yield from np.add.reduceat(states, starts, axis=0, dtype=np.float64) / np.array(sizes)[:, None]
        else:
            yield from states[starts if pooling == "cls" else ends - 1].astype(np.float64)
    sequence.reset()


def _groups(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of texts with at most `most` tokens together, or of a single text."""
    start = tokens = 0
    for number, size in enumerate(sizes):
        if tokens and tokens + size > most:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _pool_decoder(sequence: TokenSequence, tokens: IntArray, pooling: Pooling) -> AnyArray:
    engine, chunk = sequence.engine, sequence.plan.config.chunk
    sequence.reset()
    engine.kv.announce(tokens.size)
    total: AnyArray = np.zeros(engine.spec.hidden, np.float64)
    for start in range(0, tokens.size, chunk):
        part = tokens[start : start + chunk].astype(np.int32)
        if not sequence.rows.make_room(part.size):
            raise BudgetError(MEMORY_SHORT)
        states = sequence.hidden(cast(HiddenEngine, engine), part)
        if pooling == "mean":
            total += states.sum(axis=0, dtype=np.float64)
        elif pooling == "last" or start == 0:
            total = states[0 if pooling == "cls" else -1].astype(np.float64)
    sequence.reset()
    return total / tokens.size if pooling == "mean" else total
