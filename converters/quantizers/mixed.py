"""Mixed types: more bits for the tensors where rounding hurts most, for a file of a given size or quality.

The cost of a layer is measured: the KL divergence of the model's predictions when this layer alone is rounded to the
first of the types. It is divided among the layer's tensors in proportion to how far each of them alone moves the
layer's output. The cost of other types is assumed to be proportional to the squared error of the tensor's outputs, and
costs are assumed to add up. A greedy search starts from the smallest types and takes the step that saves most KL per
byte.

Predictions are measured on pieces from the whole calibration text, so that no part of it decides alone. Memory holds
the embedding twice in float32, a layer twice, and the hidden states of the pieces for every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from edge.backends.llamacpp.library import is_installed
from edge.backends.reference.weights import read_rows, read_weights
from edge.converters.calibrate import FloatArrays, State, Walk, gram, rows_of, sequences, stages
from edge.converters.quantizers.awq import output_error
from edge.converters.quantizers.ggml_rows import K_QUANTS, quantize_rows
from edge.converters.quantizers.rtn import nearest, quantize
from edge.errors import InputError
from edge.formats import blocks
from edge.formats.blocks import GRIDS, find_grid
from edge.formats.gguf import GGUFFile
from edge.likelihood import divergences
from edge.model.mixtures import bits_of
from edge.model.structure.layers import TABLE
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray, Progress

TYPES = tuple(sorted(GRIDS))  # the smallest first
AROUND = ("token_embd", "output", TABLE)  # outside of layers
_PIECE = 128  # tokens that see each other
_PIECES = 4  # of the calibration text, on which KL is measured
_SLICE = 32  # tokens whose logits are in memory
_TOGETHER = 8  # models that are run through a layer at once
_ROWS = 128  # rows of a matrix, at least, on which types are compared
_SLAB = 4096  # rows of an embedding that are rounded at once
_SHRINKS = (1.0, 0.9, 0.8)  # enough to compare types


@dataclass(frozen=True)
class Stage:
    """Tensors that get the same type."""

    tensors: tuple[str, ...]
    nbytes: Mapping[str, int]  # by type
    cost: Mapping[str, float]  # by type: estimated KL


@dataclass(frozen=True)
class Mixture:
    """A choice of types."""

    types: dict[str, str]  # by tensor
    kl: float  # estimated, in nats per token
    nbytes: int  # of these tensors


def types_of_gguf() -> tuple[str, ...]:
    """Types to choose from in a GGUF file: K-quants, too, where llama.cpp is installed, which rounds to them."""
    return (*TYPES, *K_QUANTS) if is_installed() else TYPES


def measure(
    file: GGUFFile,
    spec: ModelSpec,
    tokens: IntArray,
    types: Sequence[str] = TYPES,
    progress: Progress | None = None,
    *,
    outside: Collection[str] = (),
) -> list[Stage]:
    """The cost of each type in each tensor within layers; outside: in these of `AROUND`, too.

    Tensors whose rows are not whole blocks of the first type are left out, as are tensors that need more bits than
    others. tokens: int32 [n]. types: the first is measured, the others are estimated. Raises InputError for too few
    tokens.
    """
    pieces = _pieces(tokens)
    walk, head = Walk(file, spec, pieces), find_network(spec).head
    choices = _choices(file, spec, types, outside=outside)
    around = [name for name in AROUND if f"{name}.weight" in choices]
    layers: list[list[_Rounded]] = []
    states: list[State] = []  # of models in which one of these layers is rounded
    for layer in range(spec.layers):
        before, tensors = walk.state, _round_layer(walk, file, spec, layer, choices)
        after = walk.state
        for each in tensors:
            moved = _run(walk, layer, before, each.values).hidden - after.hidden
            each.share = float((np.square(moved).sum(axis=1) / np.square(after.hidden).sum(axis=1)).mean())
        states = _run_all(walk, layer, states)
        if tensors:
            rounded = {name: values for each in tensors for name, values in each.values.items()}
            states.append(_run(walk, layer, before, rounded))
            layers.append(tensors)
        for each in tensors:
            each.values.clear()
        walk.state = after
        if progress:
            progress((layer + 1) / (spec.layers + len(around)))
    exact, found = walk.finish(), []
    others = [(walk, _counted(_finish(walk, each))) for each in states]
    costs = _divergences(walk, _counted(exact), others)
    for tensors, cost in zip(layers, costs, strict=True):
        whole = sum(each.share for each in tensors) or 1.0
        found += [_stage(file, each.tensor, cost * each.share / whole, each.errors) for each in tensors]
    for done, name in enumerate(around, start=1):
        tensor = f"{name}.weight"
        hessian = gram(exact) if name == head else None  # rows that are only looked up have no inputs
        errors = _errors(walk.weights[name], choices[tensor], hessian)  # of the table: of the pieces' rows
        options: dict[str, Any] = {"name": name, "kind": types[0], "cost": _cost(hessian)}
        reader, table = partial(_read_rounded, **options), partial(_rounded_rows, **options)
        other = Walk(file, spec, pieces, reader, table)
        for layer in range(spec.layers):
            _run(other, layer, other.state, {})
        (cost,) = _divergences(walk, _counted(exact), [(other, _counted(other.finish()))])
        found.append(_stage(file, tensor, cost, errors))
        if progress:
            progress((spec.layers + done) / (spec.layers + len(around)))
    return found


def least_bytes(file: GGUFFile, spec: ModelSpec, types: Sequence[str], *, outside: Collection[str]) -> dict[str, int]:
    """The bytes, in its smallest type, of each tensor for which `measure` finds a stage."""
    choices = _choices(file, spec, types, outside=outside).items()
    return {name: min(blocks.nbytes(kind, file.tensors[name].elements) for kind in kinds) for name, kinds in choices}


def allocate(stages: Sequence[Stage], *, nbytes: int | None = None, kl: float | None = None) -> Mixture:
    """Choose types for at most `nbytes` bytes, or for a loss of at most `kl`, in nats, with as few bytes as possible.

    Raises InputError if that is impossible.
    """
    chosen = [min(stage.cost, key=lambda kind: (stage.nbytes[kind], stage.cost[kind])) for stage in stages]
    used = sum(stage.nbytes[kind] for stage, kind in zip(stages, chosen, strict=True))
    cost = sum(stage.cost[kind] for stage, kind in zip(stages, chosen, strict=True))
    if nbytes is not None and used > nbytes:
        raise InputError(
            f"the smallest types need {used:,} bytes for these tensors: allow {used - nbytes:,} bytes more for the file"
        )
    while kl is None or cost > kl:
        steps = [
            ((stage.cost[now] - stage.cost[kind]) / (stage.nbytes[kind] - stage.nbytes[now]), -index, kind)
            for index, (stage, now) in enumerate(zip(stages, chosen, strict=True))
            for kind in stage.cost
            if stage.nbytes[kind] > stage.nbytes[now] and stage.cost[kind] < stage.cost[now]
            and (nbytes is None or used - stage.nbytes[now] + stage.nbytes[kind] <= nbytes)
        ]  # fmt: skip
        if not steps:
            break
        _, index, kind = max(steps)
        stage, now = stages[-index], chosen[-index]
        used, cost = used + stage.nbytes[kind] - stage.nbytes[now], cost + stage.cost[kind] - stage.cost[now]
        chosen[-index] = kind
    if kl is not None and cost > kl:
        raise InputError(f"the largest types reach an estimated KL of {cost:.4f}, not {kl:g}")
    types = {tensor: kind for stage, kind in zip(stages, chosen, strict=True) for tensor in stage.tensors}
    return Mixture(types, cost, used)


def _pieces(tokens: IntArray) -> IntArray:
    """Pieces at equal distances of the calibration text, int32 [n, length]."""
    found = sequences(tokens, _PIECE)
    return found[:: max(1, len(found) // _PIECES)][:_PIECES]


def _choices(
    file: GGUFFile, spec: ModelSpec, types: Sequence[str], *, outside: Collection[str]
) -> dict[str, list[str]]:
    """By tensor, the types whose blocks divide its rows; without tensors that the first type does not fit, or that need
    more bits."""
    sources, bits = find_tensors(file, spec), bits_of(file, spec)
    within = [sources[name].tensor for layer in range(spec.layers) for stage in stages(spec, layer) for name in stage]
    names = [name for name in within if bits.get(name, "usual") == "usual"]
    names += [f"{name}.weight" for name in outside if name in sources]
    found = {}
    for name in dict.fromkeys(names):
        columns = file.tensors[name].shape[0]
        if columns % blocks.block_size(types[0]) == 0:
            found[name] = [kind for kind in types if columns % blocks.block_size(kind) == 0]
    return found


def _stage(file: GGUFFile, tensor: str, cost: float, error: Mapping[str, float]) -> Stage:
    """A stage of one tensor. cost: of the first type of `error`."""
    nbytes = {kind: blocks.nbytes(kind, prod(file.tensors[tensor].shape)) for kind in error}
    least = next(iter(error.values())) or 1.0
    return Stage((tensor,), nbytes, {kind: cost * each / least for kind, each in error.items()})


@dataclass
class _Rounded:
    """A tensor of a layer in the first of the types."""

    tensor: str
    values: dict[str, FloatArray]  # by the names of `find_tensors`
    errors: dict[str, float]  # of its outputs, by type
    share: float = 0.0  # mean squared change of the layer's output, relative to its own square


def _round_layer(
    walk: Walk, file: GGUFFile, spec: ModelSpec, layer: int, choices: Mapping[str, Sequence[str]]
) -> list[_Rounded]:
    """Run a layer as it is, and round each of its tensors that has a choice of types to the first."""
    sources, found = find_tensors(file, spec), []
    for stage, inputs in walk.layer(layer):
        hessian = gram(rows_of(inputs))
        for tensor in dict.fromkeys(sources[name].tensor for name in stage):
            if kinds := choices.get(tensor):
                weights = {name: walk.weights[name] for name in stage if sources[name].tensor == tensor}
                values = {name: _nearest(each, kinds[0], np.diag(hessian)) for name, each in weights.items()}
                found.append(_Rounded(tensor, values, _errors(np.concatenate([*weights.values()]), kinds, hessian)))
    return found


def _run(walk: Walk, layer: int, state: State, weights: Mapping[str, FloatArray]) -> State:
    """The state after a layer in which `weights` replace some of its own."""
    walk.state, exact = state, FloatArrays()
    for names, _ in walk.layer(layer):
        exact |= {name: walk.weights[name] for name in names if name in weights}
        walk.weights.update({name: weights[name] for name in names if name in weights})
    walk.weights.update(exact)
    return walk.state


def _run_all(walk: Walk, layer: int, states: Sequence[State]) -> list[State]:
    """Run the states of several models through a layer that they share."""
    found: list[State] = []
    for at in range(0, len(states), _TOGETHER):
        some = states[at : at + _TOGETHER]
        found += _run(walk, layer, State.joined(some), {}).split(len(some))
    return found


def _finish(walk: Walk, state: State) -> FloatArray:
    walk.state = state
    return walk.finish()


def _errors(weight: FloatArray, kinds: Sequence[str], hessian: FloatArray | None) -> dict[str, float]:
    """The squared error of some rows' outputs, by type; without a hessian, of the rows themselves."""
    rows = weight[:: max(1, len(weight) // _ROWS)]
    rounded = {kind: _nearest(rows, kind, _cost(hessian)) for kind in kinds}
    if hessian is None:
        return {kind: float(np.square(each - rows).sum()) for kind, each in rounded.items()}
    return {kind: output_error(rows, each, hessian) for kind, each in rounded.items()}


def _cost(hessian: FloatArray | None) -> AnyArray | None:
    return None if hessian is None else np.diag(hessian)


def _nearest(weight: FloatArray, kind: str, cost: AnyArray | None) -> FloatArray:
    """The weights after rounding to a type. cost: the weight of errors in each column; None: the same in all."""
    if cost is None:
        return blocks.dequantize(quantize(weight, kind), kind)
    if kind in K_QUANTS:
        return blocks.dequantize(quantize_rows(weight, kind, cost), kind)
    return nearest(weight, find_grid(kind), cost, shrinks=_SHRINKS).values


def _read_rounded(
    file: GGUFFile, sources: Mapping[str, Source], *, name: str, kind: str, cost: AnyArray | None
) -> FloatArrays:
    """Read weights, one matrix rounded."""
    weights = read_weights(file, sources)
    if name in weights:
        for at in range(0, len(weights[name]), _SLAB):
            weights[name][at : at + _SLAB] = _nearest(weights[name][at : at + _SLAB], kind, cost)
    return weights


def _rounded_rows(
    file: GGUFFile, tensor: str, rows: IntArray, *, name: str, kind: str, cost: AnyArray | None
) -> FloatArray:
    """Read rows of the table of per-layer embeddings, rounded if it is the tensor of this name."""
    values = read_rows(file, tensor, rows)
    return _nearest(values, kind, cost) if name == TABLE else values


def _counted(final: FloatArray) -> FloatArray:
    """A copy of every second final state: logits cost as much as layers do."""
    return np.array(final[1::2])


def _divergences(walk: Walk, exact: FloatArray, others: Sequence[tuple[Walk, FloatArray]]) -> list[float]:
    """Mean KL of the predictions from other final states, a few tokens at a time since vocabularies are large."""
    totals = [0.0] * len(others)
    for at in range(0, len(exact), _SLICE):
        logits = walk.logits_of(exact[at : at + _SLICE])
        for index, (other, final) in enumerate(others):
            totals[index] += float(divergences(logits, other.logits_of(final[at : at + _SLICE])).sum())
    return [total / len(exact) for total in totals]
