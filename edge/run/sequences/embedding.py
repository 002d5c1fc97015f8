"""Embeddings of texts from a loaded encoder or decoder: its last hidden states, pooled."""

from __future__ import annotations

from typing import cast, get_args

import numpy as np

from edge.backends.base import HiddenEngine
from edge.errors import MEMORY_SHORT, BudgetError, EngineError, InputError, UnsupportedError
from edge.model.layers import Pooling
from edge.model.tensors import find_network
from edge.run.sequences.sequence import TokenSequence
from edge.types import FloatArray, IntArray


def check_pooling(pooling: object) -> Pooling | None:
    """Return the pooling; None: the model's own. Raises InputError for an unknown one."""
    if pooling is not None and pooling not in get_args(Pooling):
        raise InputError(f"--pooling must be one of {', '.join(get_args(Pooling))}, not {pooling!r:.40}")
    return cast(Pooling | None, pooling)


def embed(
    sequence: TokenSequence,
    tokens: IntArray,
    pooling: Pooling | None,
    end: int | None,
    *,
    normalize: bool,
    truncate: bool,
) -> FloatArray:
    """As `Session.embed`, for token ids, int [n]. end: the token that ends texts, which truncating keeps."""
    engine, kv, chunk = sequence.engine, sequence.engine.kv, sequence.plan.config.chunk
    if not engine.capabilities.hidden:
        name = sequence.plan.backend
        raise UnsupportedError(f"the {name} engine hands out no hidden states to embed by: use --backend=cpu")
    if not tokens.size:
        raise InputError("the text is empty")
    pooling, encoder = pooling or find_network(engine.spec).pooling, engine.spec.encoder
    if truncate and tokens.size > kv.capacity:
        last = tokens[-1:] if tokens[-1] == end else tokens[:0]
        tokens = np.concatenate([tokens[: kv.capacity - last.size], last])
    if encoder and tokens.size > kv.capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but this encoder sees {kv.capacity}: split it, or use --truncate"
        )
    if not sequence.policy.evicts and tokens.size > kv.capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but --kv-policy={sequence.policy.name} has {kv.capacity} KV rows: "
            "raise --max-kv-size or use --kv-policy=streaming"
        )
    sequence.reset()
    kv.announce(tokens.size)
    total = np.zeros(engine.spec.hidden, np.float64)
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
    found = total / tokens.size if pooling == "mean" else total
    length = float(np.linalg.norm(found))
    if not np.isfinite(length):
        raise EngineError("the model produced NaN: its weights are damaged or overflow")
    return (found / (length or 1.0) if normalize else found).astype(np.float32)
