"""Quantize a GGUF file: choose the type of each tensor, and round one matrix after the other.

Methods that calibrate see a matrix's inputs in the model as rounded so far, so that later matrices compensate for the
errors of earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from math import prod
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from edge.converters.calibrate import LEAST, Routed, Walk, check_walk, gram, sequences, stages, statistics
from edge.converters.ggml import HAVE_NO_CHOICE
from edge.converters.outcome import again_notes, notes_on, trained_notes
from edge.converters.plain import check_encoded, check_finite, fields_as, rounded
from edge.converters.quantizers import lattice, mixed
from edge.converters.quantizers.awq import Folds, find_factors, makers
from edge.converters.quantizers.ggml_rows import K_QUANTS, quantize_rows
from edge.converters.quantizers.gptq import damping, diagonal_blocks, gptq, shift
from edge.converters.quantizers.hqq import hqq
from edge.converters.quantizers.mixed import Mixture
from edge.converters.quantizers.polish import polish
from edge.converters.quantizers.rtn import SHRINKS, nearest, quantize
from edge.errors import InputError, UnsupportedError
from edge.formats import blocks, nf4
from edge.formats.blocks import BLOCK, FLOATS, GRIDS, Grid, QuantizedMatrix, find_grid
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Planned, write_gguf
from edge.model.mixtures import EMBEDDINGS, bits_of, stays_exact
from edge.model.mtp import mtp_tensors
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray, Progress

Method = Literal["rtn", "hqq", "importance", "awq", "gptq", "best"]
METHODS: tuple[Method, ...] = get_args(Method)
CALIBRATED = METHODS[2:]
_FOLDING = ("awq", "best")
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
    embedding: str = "Q8_0"  # type of token_embd, and of a table of per-layer embeddings
    output: str = "Q8_0"  # type of an untied output head, and of matrices that want more bits than others
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
    multi-token prediction, which no engine runs, are always rounded plainly.

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
    types = {}
    for name, info in file.tensors.items():
        outside = {**dict.fromkeys(EMBEDDINGS, settings.embedding), "output.weight": settings.output}
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
    folding = tokens is not None and settings.method in _FOLDING
    share = 0.3 if folding else 0.0  # of the time, roughly
    folds = Folds()
    if folding and tokens is not None:
        folds = find_folds(file, spec, tokens, types, settings, lambda done: progress and progress(share * done))
    maker = _Maker(file, spec, types, settings, folds, tokens)
    planned = [Planned(name, file.tensors[name].shape, types[name]) for name in maker.order]
    write_gguf(target, fields_as(file, settings.type), planned, maker.data(),
               lambda done: progress and progress(share + (1 - share) * done))  # fmt: skip
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
    outside: bool = False,
    progress: Progress | None = None,
) -> tuple[Settings, Mixture]:
    """Settings with a type for each matrix, for a file of at most `nbytes`, or for at most a loss of `kl`.

    kinds: the types to choose from; the first is measured. outside: choose those of the embedding and the head, too.
    Raises InputError if that is impossible.
    """
    types = plan_types(file, spec, settings)

    def size_beside(chosen: Collection[str]) -> int:
        beside = [(types[name], each.elements) for name, each in file.tensors.items() if name not in chosen]
        return sum(blocks.nbytes(*each) for each in beside) + file.data_offset + 32 * len(file.tensors)  # with padding

    least = mixed.least_bytes(file, spec, kinds, outside=outside)
    smallest = size_beside(least) + sum(least.values())
    if nbytes is not None and nbytes < smallest:  # said before minutes of measuring
        fits = f"--target-size={-(-smallest // 2**20)}MiB"
        raise InputError(f"the smallest types make a file of {smallest:,} bytes: use {fits} or more")
    found = mixed.measure(file, spec, calibration, kinds, progress, outside=outside)
    room = None if nbytes is None else nbytes - size_beside({tensor for stage in found for tensor in stage.tensors})
    mixture = mixed.allocate(found, nbytes=room, kl=kl)
    return replace(settings, types={**settings.types, **mixture.types}), mixture


def find_folds(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, types: Mapping[str, str], settings: Settings,
    progress: Progress,
) -> Folds:  # fmt: skip
    """AWQ's factors of every stage whose matrices have a grid or are floats, but for weights of
    quantization-aware training, which factors would move. tokens: int32 [sequences, length].

    A stage of which a mixture gave a matrix a K-quant is left as it is: what folds gain is searched on grids.
    """
    folds, walk, sources = Folds(), Walk(file, spec, tokens), find_tensors(file, spec)
    for layer in range(spec.layers):
        at, made = f"blk.{layer}.", makers(find_network(spec).layers[layer])
        made_by = {at + matrices[0]: at + maker for maker, matrices in made.items()}
        for names, inputs in walk.layer(layer):
            kinds = {name: types[sources[name].tensor] for name in names}
            rounding, maker = [name for name, kind in kinds.items() if kind in GRIDS], made_by.get(names[0])
            if maker and rounding and all(kind in FLOATS for name, kind in kinds.items() if name not in rounding):
                grids = [find_grid(kinds[name]) for name in rounding]

                def factors(weights: list[FloatArray], rows: FloatArray, grids: list[Grid] = grids,
                            names: list[str] = rounding) -> FloatArray:  # fmt: skip
                    return find_factors(
                        names, weights, statistics(rows).mean, gram(rows), spec, grids, settings.group_size
                    )

                weights = [walk.weights[name] for name in rounding]
                on_lattice = (weight for weight, grid in zip(weights, grids, strict=True) if grid.kind == lattice.KIND)
                if any(map(lattice.is_trained, on_lattice)):
                    continue
                if isinstance(inputs, Routed):
                    apart = zip(*(np.split(weight, len(inputs.parts)) for weight in weights), strict=True)
                    scales = np.stack([factors([*each], inputs.of(expert)) for expert, each in enumerate(apart)])
                else:
                    scales = factors(weights, inputs)
                folds.add(names, maker, spec, scales)
        progress((layer + 1) / spec.layers)
    return folds


class _Maker:
    """Produces the bytes of tensors in `order`: first vectors and what is rounded plainly outside of layers, then the
    matrices of layers, then the head, or the table that serves as one, by the inputs that rounded layers give it.

    tokens: int32 [sequences, length] to calibrate on, or None.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        types: Mapping[str, str],
        settings: Settings,
        folds: Folds,
        tokens: IntArray | None,
    ) -> None:
        self._file, self._spec, self._types, self._settings, self._folds = file, spec, types, settings, folds
        self._tokens = tokens
        self.few = self.experts = 0  # matrices of experts that saw too few tokens, and all of them
        self._sources = find_tensors(file, spec)
        self._stages = [names for layer in range(spec.layers) for names in stages(spec, layer)]
        self._head = find_network(spec).head
        self._parts: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            self._parts.setdefault(source.tensor, []).append(name)
        late = [tensor for names in self._stages for tensor in self._tensors(names)]
        late += [self._sources[self._head].tensor] if self._rounds_head else []
        self._first = [name for name in file.tensors if name not in set(late)]
        self.order = self._first + late

    def data(self) -> Iterator[AnyArray]:
        """The tensors' bytes."""
        for tensor in self._first if not self._is_plain else self.order:
            yield self._outside(tensor)
        if self._is_plain:
            return
        for names, weights, inputs in self._stages_with_inputs():
            made = {name: self._round(name, weights[name], inputs) for name in names}
            for name, (_, values) in made.items():
                weights[name] = values
            for tensor in self._tensors(names):
                row_bytes = made[self._parts[tensor][0]][0].shape[1]
                data = np.empty((self._file.tensors[tensor].rows, row_bytes), np.uint8)
                for name in self._parts[tensor]:
                    data[self._sources[name].index] = made[name][0]
                yield data

    def _stages_with_inputs(self) -> Iterator[tuple[tuple[str, ...], dict[str, FloatArray], list[_Inputs]]]:
        """Iterate over stages: names, their weights, and their inputs' statistics, one for each expert or slab of the
        head; none without calibration."""
        if self._tokens is None:
            for names in self._stages:
                yield names, self._read(names), []
            return
        begin = partial(Walk, self._file, self._spec, self._tokens, self._folds.read)
        walk, exact = begin(), begin() if self._settings.method == "best" else None
        for layer in range(self._spec.layers):
            aims = exact.layer(layer) if exact else zip(stages(self._spec, layer), repeat(None), strict=False)
            for (names, wanted), (_, inputs) in zip(aims, walk.layer(layer), strict=True):
                if isinstance(inputs, Routed):
                    # Errors of earlier matrices send tokens to other experts, so that nothing compensates for them.
                    self.few, self.experts = self.few + inputs.few, self.experts + len(inputs.parts)
                    hessians = (gram(inputs.of(expert)) for expert in range(len(inputs.parts)))
                    yield names, walk.weights, [_Inputs(hessian, None) for hessian in hessians]
                    continue
                hessian, moved = gram(inputs), None
                if wanted is not None and not isinstance(wanted, Routed):
                    moved = shift(hessian, gram(inputs, wanted))
                yield names, walk.weights, [_Inputs(hessian, moved)]
        if self._rounds_head:
            slabs = -(-len(walk.weights[self._head]) // _SLAB)
            yield (self._head,), walk.weights, [_Inputs(gram(walk.finish()), None)] * slabs

    def _round(self, name: str, weight: FloatArray, inputs: Sequence[_Inputs]) -> tuple[AnyArray, FloatArray]:
        """Round a matrix, or those of experts, or slabs of rows: their bytes, uint8 [rows, bytes], and the values that
        they encode."""
        parts = np.array_split(weight, max(1, len(inputs)))
        rest = slice(0 if name == self._head else None)  # nothing reads the head's values
        made = [
            (data, values[rest])
            for data, values in (self._round_one(name, part, each) for part, each in zip_longest(parts, inputs))
        ]
        data, values = zip(*made, strict=True)
        return (*made[0],) if len(made) == 1 else (np.concatenate(data), np.concatenate(values))

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
            moved = weight if inputs.moved is None else weight @ inputs.moved
            data = quantize_rows(moved, kind, np.diag(inputs.hessian))
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
        """Whether the head is rounded by importance, whichever method rounds the layers: a table that serves as one is
        also read row by row, where no column can make good for another."""
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
    """Second moments of a matrix's inputs."""

    hessian: AnyArray  # XᵀX
    moved: FloatArray | None  # S of `shift`, which compensates for earlier errors


def _quantized(weight: FloatArray, grid: Grid, settings: Settings, inputs: _Inputs | None) -> QuantizedMatrix:
    group_size = settings.group_size
    if inputs is None or settings.method not in CALIBRATED:
        plain = (1.0,) if grid.uniform else SHRINKS  # as ggml, which searches for IQ4_NL alone
        if settings.method == "hqq":
            return hqq(weight, grid, group_size)
        return nearest(weight, grid, _ones(weight), group_size, plain)
    if settings.method == "importance":
        return nearest(weight, grid, np.diag(inputs.hessian), group_size)
    if settings.method == "awq":
        return nearest(weight, grid, diagonal_blocks(inputs.hessian), group_size)
    moved = weight if inputs.moved is None else weight @ inputs.moved
    quantized = gptq(moved, inputs.hessian, grid, act_order=settings.act_order, group_size=group_size)
    if settings.method == "gptq":
        return quantized
    return polish(moved, quantized, inputs.hessian + damping(inputs.hessian), group_size)


def _ones(weight: FloatArray) -> AnyArray:
    return np.ones(weight.shape[1])


def _check(settings: Settings) -> None:
    if settings.method not in METHODS:
        raise InputError(f"there is no method {settings.method}: choose from {', '.join(METHODS)}")
    if settings.group_size < BLOCK or settings.group_size % BLOCK:
        raise InputError(f"{settings.group_size} values cannot share a scale: a multiple of {BLOCK} can")
    mixed_in = [kind for kind in settings.types.values() if kind not in K_QUANTS]
    for kind in (settings.type, settings.embedding, settings.output, *mixed_in):
        if kind != NF4 and kind not in GRIDS and kind not in blocks.FLOATS:
            raise UnsupportedError(f"matrices cannot be {kind}: choose {', '.join([*GRIDS, *blocks.FLOATS, NF4])}")
