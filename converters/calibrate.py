"""Calibration: run text through a model in NumPy, layer by layer, and observe the inputs of its matrices.

Memory holds one layer's weights at a time, the hidden states of all tokens, and the KV rows that later layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.reference.context import At
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.experts import activated, choose, expert_inputs, of_all, of_shared, shared_inner
from edge.backends.reference.per_layer_input import make_inputs
from edge.backends.reference.weights import read_rows, read_weights
from edge.devices.regular import check_text
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.cores import Attention, Core, Experts
from edge.model.parts.places import Places
from edge.model.structure.layers import TABLE, Block
from edge.model.structure.mtp import mtp_tensors
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.model.tokens.tokenizer import TokenizerLike
from edge.types import FloatArray, IntArray, Progress

OWN_TEXT = Path(__file__).with_name("calibration.txt")  # written for edge; read by default
TOKENS = 16384  # by default
SEQUENCE = 512  # tokens that see each other
LEAST = 128  # tokens; statistics of fewer say nothing
_CHARACTERS_PER_TOKEN = 16  # more than any text has: the rest is not tokenized
_SLICE = 4096  # rows that are multiplied at once


@dataclass(frozen=True)
class Routed:
    """Inputs of experts: for each the rows of tokens that were routed to it, [tokens, columns]."""

    parts: tuple[FloatArray, ...]

    @cached_property
    def whole(self) -> FloatArray:
        """The rows of all experts. A token is in them once for each expert that it chose."""
        return np.concatenate(self.parts)

    def of(self, expert: int) -> FloatArray:
        """The rows for an expert's statistics: those of all experts, if its own are too few."""
        return self.parts[expert] if len(self.parts[expert]) >= LEAST else self.whole

    @property
    def few(self) -> int:
        """Experts with too few rows of their own."""
        return sum(len(part) < LEAST for part in self.parts)


Inputs = FloatArray | Routed
FloatArrays = dict[str, FloatArray]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a matrix's inputs over the tokens, float32 [columns]."""

    largest: FloatArray  # max |x|
    mean: FloatArray  # mean |x|
    square: FloatArray  # mean x²


def check_texts(paths: Sequence[Path]) -> None:
    """Raise InputError for a text that cannot be read."""
    for path in paths:
        check_text(path)


def calibration_tokens(tokenizer: TokenizerLike, paths: Sequence[Path], count: int) -> IntArray:
    """Tokens of the beginnings of all texts, int32 [at most count]: as many from each text as from the others, unless
    it is too short.

    Raises InputError if a text cannot be read or is empty.
    """
    parts: list[IntArray] = []
    for number, path in enumerate(paths):
        share = (count - sum(part.size for part in parts)) // (len(paths) - number)
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_CHARACTERS_PER_TOKEN * share)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        ids = tokenizer.encode(text)[:share]
        if ids.size == 0:
            raise InputError(f"{path} is empty")
        parts.append(ids)
    return np.concatenate(parts)


def sequences(tokens: IntArray, length: int = SEQUENCE) -> IntArray:
    """Cut calibration tokens into sequences, int32 [n, length]; the rest is dropped.

    Raises InputError if there are fewer than LEAST tokens.
    """
    if tokens.size < LEAST:
        raise InputError(f"calibration needs at least {LEAST} tokens, and the text has {tokens.size}")
    length = min(length, tokens.size)
    return tokens[: tokens.size // length * length].reshape(-1, length)


def collect(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, progress: Progress | None = None
) -> dict[str, Statistics]:
    """Statistics of the inputs of every matrix, by the names of `find_tensors` (`blk.0.attn_q`; the head's is `output`,
    tied or not). tokens: int32 [n].

    Raises InputError for too few tokens, UnsupportedError for architectures without a network, ModelFormatError if
    activations are not finite.
    """
    walk = Walk(file, spec, sequences(tokens))
    found: dict[str, Statistics] = {}
    for layer in range(spec.layers):
        for names, inputs in walk.layer(layer):
            found |= dict.fromkeys(names, _of_experts(inputs) if isinstance(inputs, Routed) else statistics(inputs))
        if progress:
            progress((layer + 1) / spec.layers)
    return found | {"output": statistics(walk.finish())}


@np.errstate(all="ignore")  # states of damaged weights are refused in one line
def column_importance(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, progress: Progress | None = None
) -> dict[str, FloatArray]:
    """llama.cpp's importance matrix: mean x² of each column's input, float32 [columns], by the names of the file's
    tensors; for experts, one expert's columns after another's. Layers that are not run (`structure/mtp.py`) have
    columns of equal importance.

    Raises the errors of `collect`.
    """
    sources = find_tensors(file, spec)
    found = collect(file, spec, tokens, progress)
    sources["output"] = sources[find_network(spec).head]
    return any_importance(mtp_tensors(file)) | {
        sources[name].tensor: each.square.reshape(-1) for name, each in found.items()
    }


def any_importance(tensors: Mapping[str, TensorInfo]) -> dict[str, FloatArray]:
    """An importance matrix of a file's tensors in which all columns have the same importance."""
    return {info.name: np.ones(info.elements // info.shape[1], np.float32)
            for info in tensors.values() if len(info.shape) > 1}  # fmt: skip


def stages(spec: ModelSpec, layer: int) -> tuple[tuple[str, ...], ...]:
    """The matrices of a layer in the order of the pass, grouped by shared input."""
    cores = (block.core for block in find_network(spec).layers[layer])
    groups = (names for core in cores for names in _groups(core) if names)
    return tuple(tuple(f"blk.{layer}.{name}" for name in names) for names in groups)


def _groups(core: Core) -> tuple[tuple[str, ...], ...]:
    if isinstance(core, Experts):  # the experts that tokens choose, then the shared one
        return core.inputs[:2], core.inputs[2:], core.outputs[:1], core.outputs[1:]
    return core.inputs, (core.output,)


def _of_experts(inputs: Routed) -> Statistics:
    """Statistics of every expert, [experts, columns]."""
    found = [statistics(inputs.of(expert)) for expert in range(len(inputs.parts))]
    largest, mean, square = (np.stack([getattr(each, key) for each in found]) for key in ("largest", "mean", "square"))
    return Statistics(largest, mean, square)


def rows_of(inputs: Inputs) -> FloatArray:
    return inputs.whole if isinstance(inputs, Routed) else inputs


def statistics(inputs: FloatArray) -> Statistics:
    """Statistics of inputs [tokens, columns]."""
    sizes = np.abs(inputs)
    squares = np.einsum("tc,tc->c", inputs, inputs) / np.float32(len(inputs))
    return Statistics(sizes.max(axis=0), sizes.mean(axis=0), squares)


def gram(inputs: FloatArray) -> FloatArray:
    """XᵀX / tokens of float32 [tokens, columns]: float32 [columns, columns], summed in slices."""
    total = np.zeros((inputs.shape[1], inputs.shape[1]), np.float32)
    for at in range(0, len(inputs), _SLICE):
        part = inputs[at : at + _SLICE]
        total += part.T @ part
    return np.asarray(total / np.float32(len(inputs)))


def crossed(inputs: FloatArray, exact: FloatArray, factors: FloatArray | None = None) -> FloatArray:
    """Xᵀ(Y / factors − X) / tokens, in the form of `gram`, with the exact model's inputs Y."""
    total = np.zeros((inputs.shape[1], inputs.shape[1]), np.float32)
    for at in range(0, len(inputs), _SLICE):
        part, wanted = inputs[at : at + _SLICE], exact[at : at + _SLICE]
        total += part.T @ ((wanted if factors is None else wanted / factors) - part)
    return np.asarray(total / np.float32(len(inputs)))


def check_walk(spec: ModelSpec) -> None:
    """Refuse encoders. Raises UnsupportedError."""
    if spec.encoder:
        raise UnsupportedError("encoders cannot be calibrated yet: use --method=rtn or --method=hqq")
    find_network(spec)


@dataclass(frozen=True)
class State:
    """The result of a walk's layers so far, from which it can go on.

    hidden: float32 [tokens, hidden]. rows: rotated keys, and values, that later layers read, by layer, [KV heads,
    tokens, size].
    """

    hidden: FloatArray
    rows: Mapping[int, tuple[FloatArray, FloatArray]]

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        rows = {
            layer: (np.concatenate([state.rows[layer][0] for state in states], axis=1),
                    np.concatenate([state.rows[layer][1] for state in states], axis=1))
            for layer in states[0].rows
        }  # fmt: skip
        return cls(np.concatenate([state.hidden for state in states]), rows)

    def split(self, number: int) -> list[State]:
        """The parts of `joined`, all of the same size."""
        size = len(self.hidden) // number
        return [self._part(slice(at, at + size)) for at in range(0, number * size, size)]

    def _part(self, tokens: slice) -> State:
        rows = {layer: (keys[:, tokens], values[:, tokens]) for layer, (keys, values) in self.rows.items()}
        return State(self.hidden[tokens], rows)


class Walk:
    """A layer-by-layer pass of token sequences, int32 [n, length], through a model.

    state: the result of the layers so far; callers may put another of the same layers in its place. weights: the
    weights that the pass uses, by the names of `find_tensors`; callers may change those of a layer until they request
    the next item of `layer`. read: an alternative reader of weights. read_table: one of rows of the table of per-layer
    embeddings.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        tokens: IntArray,
        read: Callable[[GGUFFile, Mapping[str, Source]], FloatArrays] = read_weights,
        read_table: Callable[[GGUFFile, str, IntArray], FloatArray] = read_rows,
    ) -> None:
        check_walk(spec)
        self._file, self._spec, self._read_weights = file, spec, read
        self._sources = find_tensors(file, spec)
        count, self._length = tokens.shape
        self._layer = -1  # the layer whose weights are in memory
        self.weights = self._read("")
        self._engine = ReferenceEngine(file, spec, EngineConfig(self._length, self._length, "f32", 1), self.weights)
        positions = np.arange(self._length, dtype=np.int32)
        self._embedded = np.concatenate([self._engine.embed(tokens[at], positions) for at in range(count)])
        self.state = State(self._embedded, {})
        self._tokens = tokens.reshape(-1)
        if self._engine.network.layer_inputs:  # the table may be larger than the memory
            used, places = np.unique(self._tokens, return_inverse=True)
            self._tokens = places.astype(np.int32)
            self.weights[TABLE] = self._checked(read_table(file, self._sources[TABLE].tensor, used), TABLE)
        self._inputs = np.zeros((0, 0), np.float32)  # the tokens' vectors for the layer in memory (`PerLayerInput`)
        attention = self._engine.network.attention
        self._shared = {core.rows_of for core in attention if core and core.rows_of is not None}

    @property
    def hidden(self) -> FloatArray:
        """Hidden states, float32 [n · length, hidden]."""
        return self.state.hidden

    def layer(self, layer: int) -> Iterator[tuple[tuple[str, ...], Inputs]]:
        """Iterate over the stages of a layer: names of matrices that share inputs, and the inputs [tokens, columns].
        The rows of one expert's matrix follow those of another's.

        Must be exhausted: only then does `hidden` hold the states after the layer. Weights are read once if the same
        layer is run again. Raises ModelFormatError if states are not finite.
        """
        at, engine, names = f"blk.{layer}.", self._engine, iter(stages(self._spec, layer))
        if layer != self._layer:
            self.free()
            self.weights |= self._read(at)
            self._layer = layer
            self._inputs = make_inputs(engine, engine.network, self._tokens, self._embedded, slice(layer, layer + 1))[
                :, 0
            ]
        for block in engine.network.layers[layer]:
            if not block.beside:
                normed = engine.norm(self.hidden, f"{at}{block.norm}") if block.norm else self.hidden
                self._checked(normed, at)
            if isinstance(block.core, Experts):
                x = yield from self._experts(block.core, At(layer), names, normed)
            else:
                yield next(names), normed
                x = self._checked(self._run(block, layer, normed), at)
                yield next(names), x
            self.state = replace(self.state, hidden=engine.add(self.hidden, block, At(layer), x))

    def free(self) -> None:
        """Free the weights of the layer that was run last."""
        for name in [name for name in self.weights if name.startswith("blk.")]:
            del self.weights[name]
        self._layer = -1

    def drop(self, *names: str) -> None:
        """Free tables outside of layers: all are read before the first layer, and only `logits` needs them again."""
        for name in names:
            self.weights.pop(name, None)

    def finish(self) -> FloatArray:
        """The head's input, float32 [tokens, hidden]."""
        return self._checked(self._engine.norm(self.hidden, "output_norm"), "output_norm")

    def logits_of(self, final: FloatArray) -> FloatArray:
        """Logits, float32 [n, vocab], for rows of the head's input, [n, hidden], from `finish`."""
        return self._engine.logits(final)

    def logits(self, tokens: slice) -> FloatArray:
        """Logits after each of these tokens, float32 [n, vocab]; call it after the last layer."""
        return self._engine.head(self.hidden[tokens])

    def _experts(
        self, core: Experts, at: At, names: Iterator[tuple[str, ...]], x: FloatArray
    ) -> Generator[tuple[tuple[str, ...], Inputs], None, FloatArray]:
        """The stages of a mixture. Returns its output, which is added to the hidden states."""
        engine = self._engine
        chosen, shares = choose(engine, core, at, x)
        x = expert_inputs(engine, core, at, x)
        places = [np.nonzero(chosen == expert) for expert in range(core.number)]
        yield next(names), Routed(tuple(x[tokens] for tokens, _ in places))
        if core.shared:
            yield next(names), x
        (gate, of_gate), (up, of_up) = (of_all(engine, core, at, name) for name in core.inputs[:2])
        inner = tuple(
            activated(core, x[tokens] @ gate[expert].T + of_gate[expert], x[tokens] @ up[expert].T + of_up[expert])
            for expert, (tokens, _) in enumerate(places)
        )
        for each in inner:
            self._checked(each, at.name(core.output))
        yield next(names), Routed(inner)
        if core.shared:
            beside = shared_inner(engine, core, at, x)
            yield next(names), beside
        down, of_down = of_all(engine, core, at, core.output)
        out = of_shared(engine, core, at, x, beside) if core.shared else np.zeros_like(x)
        for expert, (tokens, ranks) in enumerate(places):
            out[tokens] += shares[tokens, ranks, None] * (inner[expert] @ down[expert].T + of_down[expert])
        return out

    def _run(self, block: Block, layer: int, x: FloatArray) -> FloatArray:
        """Run a block sequence by sequence. x may have the tokens of several states (`State.joined`)."""
        kv, core = self._engine.kv, block.core
        source = core.rows_of if isinstance(core, Attention) else None
        made, rows = list[FloatArray](), list[State]()
        for first in range(0, len(x), self._length):
            part = x[first : first + self._length]
            kv.truncate(0)
            kv.announce(len(part))
            places, known = Places.after(0, len(part)), first % len(self._inputs)
            at = At(layer, kv.reserve(places), places.positions, places.sees, self._inputs[known : known + len(part)])
            if source is not None:
                for stored, own in zip((kv.keys, kv.values), self.state.rows[source], strict=True):
                    stored[source][:, at.rows] = own[:, first : first + len(part)]
            made.append(self._engine.run_core(block, at, part))
            if isinstance(core, Attention) and layer in self._shared:
                rows.append(
                    State(part, {layer: (kv.keys[layer][:, at.rows].copy(), kv.values[layer][:, at.rows].copy())})
                )
        if rows:
            self.state = replace(self.state, rows={**self.state.rows, **State.joined(rows).rows})
        return np.concatenate(made)

    def _checked(self, x: FloatArray, at: str) -> FloatArray:
        if not np.isfinite(x).all():
            raise ModelFormatError(f"{self._file.path}: {at.rstrip('.')} is not finite: the file is damaged")
        return x

    def _read(self, at: str) -> FloatArrays:
        """Read the weights of a layer, or those outside of layers."""
        wanted = {
            name: each for name, each in self._sources.items()
            if name.startswith(at or "blk.") == bool(at) and name != TABLE
        }  # fmt: skip
        weights = self._read_weights(self._file, wanted)
        for name, each in weights.items():
            self._checked(each, name)
        return weights
