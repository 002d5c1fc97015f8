"""Quantize a GGUF file: choose the type of each tensor, and round one matrix after the other.

Methods that calibrate see a matrix's inputs in the model as rounded so far, so that later matrices compensate for the
errors of earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from edge.converters.calibrate import (
    LEAST,
    Inputs,
    Routed,
    Walk,
    check_walk,
    crossed,
    gram,
    sequences,
    stages,
    statistics,
)  # fmt: skip
from edge.converters.gguf.ggml import HAVE_NO_CHOICE
from edge.converters.gguf.outcome import again_notes, notes_on, trained_notes
from edge.converters.gguf.plain import check_encoded, check_finite, fields_as, rounded
from edge.converters.quantizers import lattice, mixed
from edge.converters.quantizers.awq import Folds, find_factors, makers
from edge.converters.quantizers.ggml_rows import K_QUANTS, quantize_rows
from edge.converters.quantizers.gptq import Prepared, damped, diagonal_blocks, gptq, prepare, shift
from edge.converters.quantizers.hqq import hqq
from edge.converters.quantizers.mixed import Mixture
from edge.converters.quantizers.polish import polish
from edge.converters.quantizers.rtn import SHRINKS, nearest, quantize
from edge.errors import InputError, UnsupportedError
from edge.formats import blocks, nf4
from edge.formats.blocks import BLOCK, FLOATS, GRIDS, Grid, QuantizedMatrix, find_grid
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Planned, write_gguf
from edge.model.mixtures import bits_of, stays_exact
from edge.model.structure.layers import TABLE
from edge.model.structure.mtp import mtp_tensors
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray, Progress

Method = Literal["rtn", "hqq", "importance", "awq", "gptq", "best"]
METHODS: tuple[Method, ...] = get_args(Method)
CALIBRATED = METHODS[2:]
_FOLDING = ("awq", "best")
_FOLDED = 2048  # tokens, or more, on which factors are searched
_SLAB = 4096  # rows of a head that are rounded at once
NF4 = "NF4"


@dataclass(frozen=True)
class Settings:
    """How to quantize a model.

    type: of the matrices within layers: one of GRIDS, a float type, or NF4 (whose values are stored
    as F16). method: rtn and hqq need no calibration. importance: rounding, errors weighted by mean x². best: AWQ's
    factors, weights that compensate for earlier errors, GPTQ, and a final refinement.
    """

    type: str = "Q4_0"
    method: Method = "best"
    embedding: str = "Q8_0"  # type of token_embd
    table: str = ""  # type of a table of per-layer embeddings; nothing: as the embedding, or as mixing finds
    output: str = "Q8_0"  # type of an untied output head, and of matrices that need more bits than others
    group_size: int = BLOCK  # values that share a scale, 32 or a multiple
    act_order: bool = True
    types: Mapping[str, str] = field(default_factory=dict)  # exceptions, by tensor of the file


@dataclass(frozen=True)
class Report:
    """The result of quantizing."""

    types: dict[str, str]  # of every tensor of the file
    nbytes: int
    parameters: int
    notes: tuple[str, ...]  # surprises for the user, a line each

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters


def plan_types(file: GGUFFile, spec: ModelSpec, settings: Settings) -> dict[str, str]:
    """Choose the type of every tensor: F16 where rows are not whole blocks of the type in the settings. Layers for
    multi-token prediction, which calibration does not run, are always rounded plainly.

    Raises UnsupportedError for unknown types and architectures, InputError for other bad settings.
    """
    _check(settings)
    if settings.method in CALIBRATED:
        check_walk(spec)
    quantized = {name for name, tensor in find_network(spec).tensors() if tensor.columns and not tensor.exact}
    found = find_tensors(file, spec).items()
    bits = bits_of(file, spec)
    matrices = {source.tensor for name, source in found if name in quantized and name.startswith("blk.")}
    matrices = {name for name in matrices if bits[name] != "all"}
    matrices |= {name for name in mtp_tensors(file) if not stays_exact(name)}
    more = settings.output if settings.type in GRIDS else settings.type
    outside = {
        "token_embd.weight": settings.embedding, f"{TABLE}.weight": settings.table or settings.embedding,
        "output.weight": settings.output,
    }  # fmt: skip
    types = {}
    for name, info in file.tensors.items():
        wanted = outside.get(name, info.type)
        if name in matrices and len(info.shape) > 1:
            wanted = more if bits.get(name) == "more" else settings.type
        wanted = settings.types.get(name, wanted)
        wanted = "F16" if wanted == NF4 else wanted
        if blocks.block_size(wanted) > 1 and info.shape[0] % blocks.block_size(wanted):
            wanted = "F16"
        types[name] = wanted
    return types


def quantize_gguf(
    file: GGUFFile,
    spec: ModelSpec,
    target: Path,
    settings: Settings,
    calibration: IntArray | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the quantized model. calibration: tokens, int32 [n], for the methods of CALIBRATED and for K-quants.

    Raises InputError for missing or too few tokens and for files that cannot be written, ModelFormatError if weights or
    activations are not finite, and the errors of `plan_types`.
    """
    types = plan_types(file, spec, settings)
    by_text = settings.method in CALIBRATED
    if by_text and calibration is None:
        raise InputError(f"{settings.method} needs a calibration text")
    if not by_text and not any(kind in K_QUANTS for kind in settings.types.values()):
        calibration = None
    tokens = None if calibration is None else sequences(calibration)
    maker = _Maker(file, spec, types, settings, tokens)
    planned = [Planned(name, file.tensors[name].shape, types[name]) for name in maker.order]
    write_gguf(target, fields_as(file, settings.type), planned, maker.data(), progress)
    nbytes = sum(each.nbytes for each in planned)
    notes = (*quantizing_notes(file, spec, settings, planned), *trained_notes(file, planned, settings.group_size))
    if maker.few:
        often = f"{maker.few} of {maker.experts} times, an expert saw fewer than {LEAST} tokens of the calibration text"
        notes = (*notes, f"{often}, and was rounded by what all experts of its layer saw: a longer text is better")
    return Report(types, nbytes, sum(prod(each.shape) for each in planned), notes)


def quantizing_notes(
    file: GGUFFile, spec: ModelSpec, settings: Settings, planned: Sequence[Planned]
) -> tuple[str, ...]:
    asked = "F16" if settings.type == NF4 else settings.type
    return (*again_notes(spec, asked), *notes_on(file, planned, asked))


def mix_types(
    file: GGUFFile,
    spec: ModelSpec,
    settings: Settings,
    calibration: IntArray,
    *,
    nbytes: int | None = None,
    kl: float | None = None,
    kinds: Sequence[str] = mixed.TYPES,
    outside: Collection[str] = (),
    progress: Progress | None = None,
) -> tuple[Settings, Mixture]:
    """Settings with a type for each matrix, for a file of at most `nbytes`, or for a loss of at most `kl`, in nats.

    kinds: the types to choose from; the first is measured. outside: those of `mixed.AROUND` to choose, too.
    Raises InputError if that is impossible.
    """
    types = plan_types(file, spec, settings)

    def size_beside(chosen: Collection[str]) -> int:
        beside = [(types[name], each.elements) for name, each in file.tensors.items() if name not in chosen]
        return sum(blocks.nbytes(*each) for each in beside) + file.data_offset + 32 * len(file.tensors)  # with padding

    least = mixed.least_bytes(file, spec, kinds, outside=outside)
    smallest = size_beside(least) + sum(least.values())
    if nbytes is not None and nbytes < smallest:  # refused before minutes of measuring
        fits = f"--target-size={-(-smallest // 2**20)}MiB"
        raise InputError(f"the smallest types make a file of {smallest:,} bytes: use {fits} or more")
    found = mixed.measure(file, spec, calibration, kinds, progress, outside=outside)
    room = None if nbytes is None else nbytes - size_beside({tensor for stage in found for tensor in stage.tensors})
    mixture = mixed.allocate(found, nbytes=room, kl=kl)
    return replace(settings, types={**settings.types, **mixture.types}), mixture


def fold_layer(
    folds: Folds, exact: Walk, layer: int, inputs: Mapping[tuple[str, ...], Inputs], spec: ModelSpec,
    kinds: Mapping[str, str], group_size: int = BLOCK,
) -> None:  # fmt: skip
    """Add AWQ's factors for a layer's stages whose matrices have a grid or are floats, except for weights of
    quantization-aware training, which factors would move off their steps.

    exact: a walk that has just run this layer, with these inputs of its stages. kinds: the types of matrices, by the
    names of `find_tensors`. A stage with a matrix that a mixture made a K-quant gets no factors, since their gain is
    searched on grids.
    """
    at = f"blk.{layer}."
    made_by = {at + matrices[0]: at + maker for maker, matrices in makers(find_network(spec).layers[layer]).items()}
    for names, found in inputs.items():
        rounding, maker = [name for name in names if kinds[name] in GRIDS], made_by.get(names[0])
        others = [kinds[name] for name in names if name not in rounding]
        if not (maker and rounding and all(kind in FLOATS for kind in others)):
            continue
        grids, weights = [find_grid(kinds[name]) for name in rounding], [exact.weights[name] for name in rounding]
        on_lattice = (weight for weight, grid in zip(weights, grids, strict=True) if grid.kind == lattice.KIND)
        if any(map(lattice.is_trained, on_lattice)):
            continue
        parts = [found.of(expert) for expert in range(len(found.parts))] if isinstance(found, Routed) else [found]
        scales = []
        for rows, *apart in zip(parts, *(np.split(weight, len(parts)) for weight in weights), strict=True):
            hessian = gram(rows[:: max(1, len(rows) // _FOLDED)])
            scales.append(find_factors(rounding, apart, statistics(rows).mean, hessian, spec, grids, group_size))
        folds.add(names, maker, spec, np.stack(scales) if isinstance(found, Routed) else scales[0])


class _Maker:
    """Produces the bytes of tensors in `order`. First come the matrices of layers, then the head, or the table that
    serves as one, rounded for its inputs from the rounded layers. Last come vectors, which may contain folded factors,
    and plainly rounded tensors outside of layers.

    tokens: int32 [sequences, length] to calibrate on, or None.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        types: Mapping[str, str],
        settings: Settings,
        tokens: IntArray | None,
    ) -> None:
        self._file, self._spec, self._types, self._settings = file, spec, types, settings
        self._folds, self._tokens = Folds(), tokens
        self.few = self.experts = 0  # matrices of experts that saw too few tokens, and all of them
        self._sources = find_tensors(file, spec)
        self._stages = [names for layer in range(spec.layers) for names in stages(spec, layer)]
        self._head = find_network(spec).head
        self._parts: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            self._parts.setdefault(source.tensor, []).append(name)
        late = [tensor for names in self._stages for tensor in self._tensors(names)]
        late += [self._sources[self._head].tensor] if self._rounds_head else []
        self._last = [name for name in file.tensors if name not in set(late)]
        self.order = late + self._last

    def data(self) -> Iterator[AnyArray]:
        """The tensors' bytes."""
        for names, weights, inputs in self._stages_with_inputs() if not self._is_plain else ():
            made = self._round(names, weights, inputs)
            for name, (_, values) in made.items():
                weights[name] = values
            for tensor in self._tensors(names):
                row_bytes = made[self._parts[tensor][0]][0].shape[1]
                data = np.empty((self._file.tensors[tensor].rows, row_bytes), np.uint8)
                for name in self._parts[tensor]:
                    data[self._sources[name].index] = made[name][0]
                yield data
        for tensor in self._last if not self._is_plain else self.order:
            yield self._outside(tensor)

    def _stages_with_inputs(self) -> Iterator[tuple[tuple[str, ...], dict[str, FloatArray], list[_Inputs]]]:
        """Iterate over stages: names, their weights, and their inputs' statistics, one for each expert or slab of the
        head; none without calibration."""
        if self._tokens is None:
            for names in self._stages:
                yield names, self._read(names), []
            return
        settings, spec = self._settings, self._spec
        exact = Walk(self._file, spec, self._tokens) if settings.method in _FOLDING else None
        if exact:
            exact.drop("token_embd", "output")
        walk = Walk(self._file, spec, self._tokens, self._folds.read)
        walk.drop(*{"token_embd", "output"} - {self._head if self._rounds_head else ""})
        kinds = {name: self._types[source.tensor] for name, source in self._sources.items()}
        for layer in range(spec.layers):
            aims = dict(exact.layer(layer)) if exact else {}
            if exact:
                fold_layer(self._folds, exact, layer, aims, spec, kinds, settings.group_size)
                exact.free()
            for names, inputs in walk.layer(layer):
                aim = aims.pop(names, None)
                if isinstance(inputs, Routed):
                    # Errors of earlier matrices send tokens to other experts, so nothing can compensate for them.
                    self.few, self.experts = self.few + inputs.few, self.experts + len(inputs.parts)
                    yield names, walk.weights, [_Inputs(inputs.of(each), settings) for each in range(len(inputs.parts))]
                    continue
                wanted = aim if settings.method == "best" and not isinstance(aim, Routed) else None
                yield names, walk.weights, [_Inputs(inputs, settings, wanted, self._folds.columns.get(names[0]))]
            walk.free()
        if self._rounds_head:
            slabs = -(-len(walk.weights[self._head]) // _SLAB)
            yield (self._head,), walk.weights, [_Inputs(walk.finish(), settings)] * slabs

    def _round(
        self, names: Sequence[str], weights: Mapping[str, FloatArray], inputs: list[_Inputs]
    ) -> dict[str, tuple[AnyArray, FloatArray]]:
        """Round matrices that share inputs, one expert or slab of rows after the other. Returns their bytes, uint8
        [rows, bytes], and the values that these encode. Removes inputs from the list, since their statistics are large.
        """
        parts = [np.array_split(weights[name], max(1, len(inputs))) for name in names]
        made: list[list[tuple[AnyArray, FloatArray]]] = [[] for _ in names]
        for each in zip(*parts, strict=True):
            shared = inputs.pop(0) if inputs else None
            for name, part, found in zip(names, each, made, strict=True):
                data, values = self._round_one(name, part, shared)
                found.append((data, values[:0] if name == self._head else values))  # nothing reads the head's values
        return {
            name: found[0]
            if len(found) == 1
            else (np.concatenate([data for data, _ in found]), np.concatenate([values for _, values in found]))
            for name, found in zip(names, made, strict=True)
        }

    def _round_one(self, name: str, weight: FloatArray, inputs: _Inputs | None) -> tuple[AnyArray, FloatArray]:
        check_finite(self._file, name, weight)
        kind, settings = self._types[self._sources[name].tensor], self._settings
        if name == self._head:
            settings = Settings(kind, "importance")
        if settings.types.get(self._sources[name].tensor, settings.type) == NF4:
            weight = nf4.dequantize(*nf4.quantize(weight))
        by_blocks = self._settings.group_size == BLOCK and kind == lattice.KIND
        codes = lattice.trained_codes(weight) if by_blocks else None
        if kind in K_QUANTS and inputs is not None:  # rounded by importance, whichever method rounds the others
            data = quantize_rows(inputs.moved(weight), kind, inputs.square)
            values = blocks.dequantize(data, kind)
        elif codes or kind not in GRIDS:
            data = quantize(weight, kind, codes)
            values = blocks.dequantize(data, kind)
        else:
            quantized = _quantized(weight, find_grid(kind), settings, inputs)
            data, values = quantized.data, quantized.values
        check_encoded(self._file, name, values, kind)
        return data, values

    @property
    def _rounds_head(self) -> bool:
        """Whether the head is rounded by importance, whichever method rounds the layers. A table that serves as the
        head is also read row by row, where no column can compensate for another."""
        if self._tokens is None:
            return False
        info = self._file.tensors[self._sources[self._head].tensor]
        kind, by_text = self._types[info.name], self._settings.method in CALIBRATED
        has_choice = kind in K_QUANTS or (by_text and kind in GRIDS and kind not in HAVE_NO_CHOICE)
        return has_choice and info.type != kind

    @property
    def _is_plain(self) -> bool:
        """Whether each weight is rounded alone, so that slabs of rows suffice."""
        if self._tokens is not None:
            return False
        kinds = (self._settings.type, *self._settings.types.values())
        return self._settings.method == "rtn" and self._settings.group_size == BLOCK and NF4 not in kinds

    def _outside(self, tensor: str) -> AnyArray:
        """The bytes of a plainly rounded tensor; norms may contain folded factors."""
        info, kind = self._file.tensors[tensor], self._types[tensor]
        if len(info.shape) > 1 or self._is_plain or tensor not in self._parts:
            return rounded(self._file, info, kind)
        values = np.concatenate(list(self._read(self._parts[tensor]).values()))
        check_finite(self._file, tensor, values)
        data = quantize(values.reshape(1, -1), kind)
        check_encoded(self._file, tensor, blocks.dequantize(data, kind), kind)
        return data

    def _read(self, names: tuple[str, ...] | list[str]) -> dict[str, FloatArray]:
        return self._folds.read(self._file, {name: self._sources[name] for name in names})

    def _tensors(self, names: tuple[str, ...]) -> list[str]:
        """The file's tensors of these names, each once."""
        return list(dict.fromkeys(self._sources[name].tensor for name in names))


@dataclass(frozen=True)
class _Inputs:
    """Inputs that several matrices share, and quantities derived from them, each computed once."""

    rows: FloatArray  # [tokens, columns]
    settings: Settings
    wanted: FloatArray | None = None  # the exact model's inputs, for compensating for earlier errors
    factors: FloatArray | None = None  # AWQ's, by which `wanted` is yet to be divided

    @cached_property
    def square(self) -> FloatArray:
        return statistics(self.rows).square

    @cached_property
    def diagonal_blocks(self) -> AnyArray:
        """The diagonal blocks of XᵀX, undamped, for rounding that compensates for no error of another block."""
        return diagonal_blocks(gram(self.rows))

    @cached_property
    def hessian(self) -> FloatArray:
        return damped(gram(self.rows), len(self.rows))

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.hessian, act_order=self.settings.act_order, group_size=self.settings.group_size)

    @cached_property
    def _shift(self) -> FloatArray | None:
        return None if self.wanted is None else shift(self.hessian, crossed(self.rows, self.wanted, self.factors))

    def moved(self, weight: FloatArray) -> FloatArray:
        """The weights that compensate for earlier errors."""
        return weight if self._shift is None else weight @ self._shift


def _quantized(weight: FloatArray, grid: Grid, settings: Settings, inputs: _Inputs | None) -> QuantizedMatrix:
    group_size = settings.group_size
    if inputs is None or settings.method not in CALIBRATED:
        plain = (1.0,) if grid.uniform else SHRINKS  # like ggml, which searches scales for IQ4_NL only
        if settings.method == "hqq":
            return hqq(weight, grid, group_size)
        return nearest(weight, grid, _ones(weight), group_size, plain)
    if settings.method == "importance":
        return nearest(weight, grid, inputs.square, group_size)
    if settings.method == "awq":
        return nearest(weight, grid, inputs.diagonal_blocks, group_size)
    moved = inputs.moved(weight)
    quantized = gptq(moved, inputs.prepared, grid)
    return quantized if settings.method == "gptq" else polish(moved, quantized, inputs.hessian, group_size)


def _ones(weight: FloatArray) -> AnyArray:
    return np.ones(weight.shape[1])


def _check(settings: Settings) -> None:
    if settings.method not in METHODS:
        raise InputError(f"there is no method {settings.method}: choose from {', '.join(METHODS)}")
    if settings.group_size < BLOCK or settings.group_size % BLOCK:
        raise InputError(f"{settings.group_size} values cannot share a scale: a multiple of {BLOCK} can")
    mixed_in = [kind for kind in settings.types.values() if kind not in K_QUANTS]
    for kind in (settings.type, settings.embedding, settings.table or settings.embedding, settings.output, *mixed_in):
        if kind != NF4 and kind not in GRIDS and kind not in blocks.FLOATS:
            raise UnsupportedError(f"matrices cannot be {kind}: choose {', '.join([*GRIDS, *blocks.FLOATS, NF4])}")
