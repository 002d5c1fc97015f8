"""Checks that engines and caches share. Each raises an error that names the problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.kv_cache import CapacityError, KVCache, KVState
from edge.errors import EngineError, InputError, UnsupportedError
from edge.model.adapters.lora import Lora
from edge.model.cores import (
    Attention,
    Core,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Mamba,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import IntArray

ENCODERS = "encoders"  # their name in refusals
CROSS = "rows of an encoder"
UNEQUAL = "values of another size than keys"


def check_cores(what: str, spec: ModelSpec, supports: Callable[[Core], str | None]) -> Network:
    """The model's layers, if `what`, such as "onnx engine", can run them. Raises UnsupportedError."""
    network = find_network(spec)
    for reason in filter(None, map(supports, network.cores)):
        other = "cpu" if network.encoder or network.crossings else "llamacpp"
        raise UnsupportedError(f"the {what} does not run {reason} yet: use --backend={other}")
    return network


def usual_cores(core: Core) -> str | None:
    """The `Backend.supports` of engines that run only attention and feed-forward networks."""
    if isinstance(core, Attention):
        if not core.causal:
            return ENCODERS
        kinds = {
            "latent rows": core.latent is not None,
            "an output gate": core.gated,
            "sinks": core.sinks,
            "rows of an earlier layer": core.rows_of is not None,
            CROSS: core.across,
            UNEQUAL: core.row.value != core.row.key,
            "unrotated values first": core.rope.first > 0,
        }
        kinds |= {"normalised values": core.unit_values}
        return next((f"attention with {kind}" for kind, has_it in kinds.items() if has_it), None)
    return None if isinstance(core, Dense) else core.kind


def hybrid_cores(core: Core) -> str | None:
    """As `usual_cores`, for engines that also run output gates and the recurrent cores of hybrid models."""
    if isinstance(core, DeltaNet | KimiDelta | Mamba | SelectiveScan | ShortConvolution):
        return None
    return usual_cores(replace(core, gated=False) if isinstance(core, Attention) else core)


def app_cores(core: Core) -> str | None:
    """As `hybrid_cores`, for apps' C runtime, which also runs experts, per-layer inputs and all attention. A new core
    is refused until exported passes have it."""
    if isinstance(core, Experts | PerLayerInput | Attention):
        return None
    return hybrid_cores(core)


def check_tokens(tokens: IntArray, vocab: int, free: int, given: GivenRows | None = None) -> IntArray:
    """The tokens as contiguous int32 [n], n ≥ 1. Raises InputError if they are not ids of the vocabulary, or of given
    rows, CapacityError if there are more than `free`."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InputError(f"tokens must be a non-empty list of ids, not {array.dtype} of shape {array.shape}")
    if int(array.min()) < 0 or (given is None and int(array.max()) >= vocab):
        raise InputError(f"token ids must be from 0 to {vocab - 1}")
    if given is not None:
        given.check(array)
    check_free(array.size, free)
    return np.ascontiguousarray(array, dtype=np.int32)


def check_batch(spec: ModelSpec, tokens: IntArray, sequences: Sequence[int], caches: Sequence[KVCache]) -> IntArray:
    """The tokens of `BatchedEngine.forward_batch`, each announced to the cache of its sequence. Raises its errors."""
    if len(set(sequences)) != len(caches):
        raise InputError(f"sequences must be different, not {list(sequences)!r:.60}")
    tokens = check_tokens(tokens, spec.vocab, len(caches))
    if tokens.size != len(caches):
        raise InputError(f"{tokens.size} tokens for {len(caches)} sequences")
    for token, kv in zip(tokens, caches, strict=True):
        check_tokens(token[None], spec.vocab, kv.free)
        check_positions(spec, kv.next_position + 1)
        kv.announce(1)
    return tokens


def check_free(count: int, free: int) -> None:
    """Raise CapacityError for more rows than free ones."""
    if count > free:
        raise CapacityError(f"{count} tokens, but only {free} free rows in the KV cache")


def check_whole(path: str | Path, size: int, mapped: int) -> None:
    """Raise EngineError if a mapped file has shrunk: reading beyond its end would kill the process."""
    if size < mapped:
        raise EngineError(f"{path} was cut short while it was in use: restore it, and load the model again")


def check_whole_text(tokens: IntArray, kv: KVCache, config: EngineConfig) -> None:
    """Empty the cache for a text that an encoder runs in one pass. Raises CapacityError for a text that is too long."""
    kv.truncate(0)
    most = min(config.chunk, kv.capacity)
    if len(tokens) > most:
        raise CapacityError(f"the text has {len(tokens)} tokens, and {most} are the most that are run at once")


def places_of(kv: KVCache, network: Network, count: int, places: Places | None) -> Places:
    """The places of `count` tokens behind those in the cache: these, if they are given. Raises InputError."""
    if places is None:
        return Places.after(kv.next_position, count, causal=not network.encoder)
    places.check(count, kv.next_position, network.components)
    check_spans(network, places)
    return places


def divide(
    engine: str, kv: KVCache, network: Network, count: int, most: int, places: Places | None, *, whole: bool = True
) -> list[tuple[slice, Places | None]]:
    """Announce tokens, and divide them into passes of at most `most`, with the places of each if they are given. whole:
    the engine runs spans that see all of themselves. Raises InputError, UnsupportedError."""
    if places is None:
        kv.announce(count)
        return [(slice(at, min(at + most, count)), None) for at in range(0, count, most)]
    places_of(kv, network, count, places)
    if not whole and has_spans(places):
        raise UnsupportedError(f"the {engine} engine runs no pictures that see all of themselves: use --backend=cpu")
    if not places.consecutive and (network.learned_positions or network.temperature or any(network.windows)):
        raise UnsupportedError(f"the {engine} engine runs models with windows at consecutive positions only")
    kv.announce(places.next_position - kv.next_position)
    return [(part, places.part(part)) for part in places.passes(most)]


def has_spans(places: Places) -> bool:
    """Whether some tokens see later ones."""
    return bool((places.sees != np.arange(places.sees.size)).any())


def check_spans(network: Network, places: Places) -> None:
    """Refuse spans that reach out of a model's windows. Raises UnsupportedError."""
    window, longest = min(filter(None, network.windows), default=0), int(np.bincount(places.sees).max())
    if 0 < window < longest:
        raise UnsupportedError(f"a span of {longest} tokens is longer than this model's windows, of {window}")


def check_lora(lora: Lora | None, config: EngineConfig) -> None:
    """Refuse adapters that an engine was not loaded for. Raises InputError."""
    if lora is not None and lora.size.rank > config.lora_rank:
        raise InputError(f"adapters of rank {lora.size.rank}: the engine was loaded for {config.lora_rank} at most")


def check_positions(spec: ModelSpec, last: int) -> None:
    """Refuse positions beyond a table of learned ones. last: the last position plus one. Raises CapacityError."""
    if last > spec.context and spec.network and spec.network.learned_positions:
        raise CapacityError(f"position {last - 1} is beyond the {spec.context} that this model has learned")


def check_rows(rows: IntArray, length: int) -> IntArray:
    """The rows as int32 [n], strictly increasing and below `length`. Raises InputError for others."""
    array = np.asarray(rows)
    numbers = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    if not numbers or (array.size and (array[0] < 0 or array[-1] >= length or bool((np.diff(array) <= 0).any()))):
        raise InputError(f"rows to keep must be strictly increasing numbers from 0 to {length - 1}")
    return np.ascontiguousarray(array, dtype=np.int32)


def check_capacity(capacity: int, kv: KVCache) -> None:
    """Refuse to `shrink` a cache below its rows in use. Raises InputError."""
    if capacity < max(1, kv.capacity - kv.free):
        raise InputError(f"{kv.capacity - kv.free} rows are in use, and do not fit into {capacity}")


def check_range(first: int, last: int | None, length: int) -> int:
    """Check 0 ≤ first ≤ last ≤ length, and return `last`, by default `length`. Raises InputError."""
    end = length if last is None else last
    if not 0 <= first <= end <= length:
        raise InputError(f"rows {first} to {end} are not among the {length} of the cache")
    return end


def check_state(state: KVState, kv: KVCache, next_position: int) -> None:
    """Refuse saved rows that do not continue those of `kv`. Raises InputError, CapacityError."""
    positions = state.positions
    if state.key != kv.key:
        raise InputError("the saved KV rows belong to another model, engine or KV dtype")
    if positions.size and (positions[0] < 0 or positions[-1] >= state.next_position or (np.diff(positions) < 0).any()):
        raise InputError("the saved KV rows are not in order")
    first = positions[0] + 1 if positions.size else state.next_position  # a picture may go on at its last position
    if kv.length and first < next_position:
        raise InputError("the saved KV rows do not come after those in use")
    if positions.size > kv.free:
        raise CapacityError(f"{positions.size} saved rows, but only {kv.free} free ones")
