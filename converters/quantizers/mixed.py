"""Mixed types: more bits for the stages where rounding hurts most, for a file of a given size or quality.

A stage's cost is measured: the KL divergence of the model's predictions when this stage alone is rounded to the first
of the types. The cost of other types is taken to be proportional to the squared error of the stage's outputs, and costs
to add up. A greedy search starts from the smallest types and takes the step that saves most KL per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from edge.converters.calibrate import Walk, gram, rows_of, sequences
from edge.converters.quantizers.awq import output_error
from edge.converters.quantizers.rtn import nearest
from edge.errors import InputError
from edge.formats import blocks
from edge.formats.blocks import BLOCK, GRIDS, find_grid
from edge.formats.gguf import GGUFFile
from edge.likelihood import divergences
from edge.model.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import AnyArray, FloatArray, IntArray, Progress

TYPES = tuple(sorted(GRIDS))  # the smallest first
_TOKENS = 1024  # that KL is measured on
_SLICE = 32  # tokens whose logits are in memory
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


def measure(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, types: Sequence[str] = TYPES, progress: Progress | None = None
) -> list[Stage]:
    """The cost of each type in each stage. Stages whose rows are not whole blocks are left out.

    tokens: int32 [n]. types: the first is measured, the others are estimated. Raises InputError for too few tokens.
    """
    walk = Walk(file, spec, sequences(tokens[:_TOKENS]))
    before: list[FloatArray] = []
    errors: list[tuple[tuple[str, ...], dict[str, float]]] = []
    for layer in range(spec.layers):
        before.append(walk.hidden)
        for names, inputs in walk.layer(layer):
            weights, hessian = [walk.weights[name] for name in names], gram(rows_of(inputs))
            if weights[0].shape[1] % BLOCK == 0:
                errors.append((names, {kind: _error(weights, kind, hessian) for kind in types}))
    exact, found, sources = walk.finish(), [], find_tensors(file, spec)
    for done, (names, error) in enumerate(errors, start=1):
        cost = _divergence(walk, exact, _rounded(walk, spec, before, names, types[0]))
        tensors = tuple(dict.fromkeys(sources[name].tensor for name in names))
        nbytes = {kind: sum(blocks.nbytes(kind, prod(file.tensors[name].shape)) for name in tensors) for kind in types}
        least = error[types[0]] or 1.0
        found.append(Stage(tensors, nbytes, {kind: cost * error[kind] / least for kind in types}))
        if progress:
            progress(done / len(errors))
    return found


def allocate(stages: Sequence[Stage], *, nbytes: int | None = None, kl: float | None = None) -> Mixture:
    """Choose types for at most `nbytes` bytes, or for at most a loss of `kl` in as few bytes as possible.

    Raises InputError if that is impossible.
    """
    chosen = [min(stage.cost, key=lambda kind: (stage.nbytes[kind], stage.cost[kind])) for stage in stages]
    used = sum(stage.nbytes[kind] for stage, kind in zip(stages, chosen, strict=True))
    cost = sum(stage.cost[kind] for stage, kind in zip(stages, chosen, strict=True))
    if nbytes is not None and used > nbytes:
        raise InputError(
            f"the smallest types need {used:,} bytes for these tensors, {used - nbytes:,} more than there are"
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


def _error(weights: Sequence[FloatArray], kind: str, hessian: AnyArray) -> float:
    grid, cost = find_grid(kind), np.diag(hessian)
    return sum(
        output_error(weight, nearest(weight, grid, cost, shrinks=_SHRINKS).values, hessian) for weight in weights
    )


def _rounded(
    walk: Walk, spec: ModelSpec, before: Sequence[FloatArray], names: tuple[str, ...], kind: str
) -> FloatArray:
    """Final hidden states of the model with only these matrices rounded."""
    start = int(names[0].split(".")[1])
    walk.hidden = before[start]
    for layer in range(start, spec.layers):
        for stage, inputs in walk.layer(layer):
            if stage == names:
                rows = rows_of(inputs)
                cost = np.einsum("tc,tc->c", rows, rows)
                for name in names:
                    walk.weights[name] = nearest(walk.weights[name], find_grid(kind), cost, shrinks=_SHRINKS).values
    return walk.finish()


def _divergence(walk: Walk, exact: FloatArray, other: FloatArray) -> float:
    """Mean KL of the predictions from final states, a few tokens at a time since vocabularies are large."""
    total = 0.0
    for at in range(0, len(exact), _SLICE):
        logits = (walk.logits_of(part[at : at + _SLICE]) for part in (exact, other))
        total += float(divergences(*logits).sum())
    return total / len(exact)
