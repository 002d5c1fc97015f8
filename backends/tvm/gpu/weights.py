"""The layout of a model's weights in GPU buffers, and their packing, slice by slice. TVM is not needed.

A buffer concatenates tensors, in words of 32 bits. A matrix is row-major: first its quants, then their scales, each
[rows, words of a row]. Everything starts at a multiple of 16 bytes, the width of a load: a quad of words. Kernels work
on the 4 words of a quad at once, each on one of 4 consecutive values.

Quants are in planes of b bits. A quad holds 4 / b parts of 32 values (8 bits: half of one). Value 16h + 4j + i of part
p of a quad is in word i, from bit 8j + b · (2p + h) on: the values 4j + i are bytes j, as products of bytes need them.
Rows are padded to whole quads. Float16 numbers are in pairs, exponents in fours, padded to whole words in each row. Two
float16 or bfloat16 weights 4i + j and 4i + 4 + j are in word j of quad i / 2. Floats are padded to whole parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import BinaryIO

import numpy as np

from edge.backends.tvm.gpu import ENGINE
from edge.backends.tvm.packing.blocks import BLOCKS, PART, Block, FloatBlock, IntegerBlock
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import TABLE, TRANSPOSED
from edge.backends.tvm.packing.splits import bits_of
from edge.backends.tvm.packing.weights import transpose
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.cores import Tensor as Described
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.records import dataclass
from edge.types import AnyArray

_QUAD = 4  # words that are loaded at once
_SLICE = 2 << 20  # bytes of a tensor that are read at once, which limits the memory that packing takes
_WHOLE = (  # tensors of `WeightsLayout.rest`
    "output_norm", "output_norm.bias", "position_embd", "per_layer_model_proj", "per_layer_proj_norm",
)  # fmt: skip

Packed = tuple[str, int, AnyArray]  # a buffer's name, an offset in bytes, uint32 words


@dataclass(frozen=True)
class Vector:
    """Float32 values from word `at` on, zero-padded to a multiple of 32."""

    at: int
    size: int

    @property
    def words(self) -> int:
        return round_up(self.size, PART)


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer."""

    at: int  # its first word
    rows: int
    columns: int  # a multiple of 32
    kind: str  # block type

    @property
    def block(self) -> Block:
        return BLOCKS[self.kind]

    @property
    def parts(self) -> int:
        """Parts per row."""
        return self.columns // PART

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per value in each plane, which equal the words per part, padding aside."""
        block = self.block
        return block.planes if isinstance(block, IntegerBlock) else (8 * block.raw_bytes,)

    @property
    def plane_quads(self) -> tuple[int, ...]:
        """Quads per row in each plane."""
        return tuple(-(-self.parts * bits // _QUAD) for bits in self.planes)

    @property
    def number_words(self) -> int:
        """Words of a row's float16 numbers or exponents."""
        block = self.block
        if isinstance(block, FloatBlock):
            return 0
        return -(-self.columns // block.values * _number_bytes(block) // 4)

    @property
    def factor_words(self) -> int:
        """Words of a row's factors: two bytes for each part of a super-block."""
        return 0 if isinstance(self.block, FloatBlock) or not self.block.factored else self.parts // 2

    @property
    def row_words(self) -> tuple[int, ...]:
        """Words per row of each piece: of the planes, the numbers and the factors."""
        return (*(_QUAD * quads for quads in self.plane_quads), self.number_words, self.factor_words)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first word of each piece, and the end."""
        sizes = (round_up(self.rows * words, _QUAD) for words in self.row_words)
        return tuple(accumulate(sizes, initial=self.at))

    @property
    def plane_offsets(self) -> tuple[int, ...]:
        return self.offsets[: len(self.planes)]

    @property
    def numbers(self) -> int:
        """The first word of the numbers."""
        return self.offsets[-3]

    @property
    def factors(self) -> int:
        """The first word of the factors."""
        return self.offsets[-2]

    @property
    def words(self) -> int:
        return self.offsets[-1] - self.at


Tensor = Matrix | Vector


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of a buffer by name; a layer's without `blk.0.`."""

    tensors: tuple[tuple[str, Tensor], ...]

    def matrix(self, name: str) -> Matrix:
        """Find a matrix. Raises KeyError where there is none."""
        tensor = dict(self.tensors)[name]
        assert isinstance(tensor, Matrix)
        return tensor

    def vector(self, name: str) -> Vector | None:
        """Find a norm or a bias, if the model has it."""
        tensor = dict(self.tensors).get(name)
        assert not isinstance(tensor, Matrix)
        return tensor

    def bounds(self, name: str, end: str) -> tuple[Vector, Vector] | None:
        """The least and the greatest input or output (end) of a matrix, if the model has them."""
        low, high = (self.vector(f"{name}.{end}_{bound}") for bound in ("min", "max"))
        return (low, high) if low and high else None

    @property
    def nbytes(self) -> int:
        return 4 * max((tensor.at + tensor.words for _, tensor in self.tensors), default=0)


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix from `first_row` on, in a buffer of their own."""

    buffer: str
    first_row: int
    matrix: Matrix

    @property
    def rows(self) -> int:
        return self.matrix.rows


@dataclass(frozen=True)
class ExpertPiece:
    """Experts of a layer from number `first` on, one after the other, in a buffer of their own."""

    buffer: str
    first: int
    count: int
    layout: LayerLayout  # of each

    @property
    def stride(self) -> int:
        """Words of an expert."""
        return self.layout.nbytes // 4

    def place(self, tensor: Tensor, number: int) -> Tensor:
        """A tensor of the piece's `number`-th expert."""
        return replace(tensor, at=tensor.at + number * self.stride)


@dataclass(frozen=True)
class WeightsLayout:
    """The layout of all weights."""

    layers: tuple[LayerLayout, ...]  # one each; layers with the same block types share theirs
    embedding: tuple[Piece, ...]  # in row order
    head: tuple[Piece, ...]  # in row order; the embedding's if tied
    rest: LayerLayout  # final norms and learned positions
    experts: tuple[tuple[ExpertPiece, ...], ...]  # of each layer, in their order

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes by buffer name: layer.0 …, embed.0 …, head.0 …, experts.0.0 …, rest."""
        pieces = {piece.buffer: 4 * piece.matrix.words for piece in self.embedding + self.head}
        pieces |= {each.buffer: 4 * each.count * each.stride for pieces in self.experts for each in pieces}
        rest = {"rest": self.rest.nbytes} if self.rest.tensors else {}
        return {f"layer.{i}": each.nbytes for i, each in enumerate(self.layers)} | pieces | rest

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())


def make_weights(file: GGUFFile, spec: ModelSpec, binding_limit: int) -> WeightsLayout:
    """Lay out the weights from the header alone. binding_limit: bytes of a buffer that a kernel can access.

    Raises UnsupportedError for unknown tensors, block types without kernels, and layers beyond the limit.
    """
    ENGINE.shape_of(spec)  # which checks the layers
    network = find_network(spec)
    tensors = find_tensors(file, spec)
    find = _Finder(file, tensors)
    described = [[each for block in blocks for each in block.tensors(spec.hidden)] for blocks in network.layers]
    layers = tuple(
        find.layout((each for each in tensors if not each.experts), f"blk.{layer}.")
        for layer, tensors in enumerate(described)
    )
    experts = tuple(
        find.experts([each for each in tensors if each.experts], layer, binding_limit)
        for layer, tensors in enumerate(described)
    )
    largest = max(layer.nbytes for layer in layers)
    if largest > binding_limit:
        raise UnsupportedError(
            f"a layer has {largest >> 20} MiB of weights, kernels of this GPU see {binding_limit >> 20}: "
            "use --backend=cpu"
        )
    embedding = find.pieces("token_embd", "embed", binding_limit) if network.vocab else ()
    head = find.pieces("output", "head", binding_limit) if "output" in tensors else embedding
    rest = find.layout((tensor for name, tensor in network.tensors() if name in _WHOLE), "")
    return WeightsLayout(layers, embedding, head, rest, experts)


def packed_bytes(spec: ModelSpec) -> int:
    """An upper bound on the bytes of `make_weights`, from a model's spec alone."""
    in_file = {spec.table_type: spec.table_bytes} if find_network(spec).layer_inputs else {}
    sizes = {name: size - in_file.get(name, 0) for name, size in spec.type_bytes if name in BLOCKS}
    exact = sum(int(size * _growth(BLOCKS[name])) for name, size in sizes.items())
    blocks = [BLOCKS[name] for name, _ in spec.type_bytes if name in BLOCKS]
    tensors = [tensor for name, tensor in find_network(spec).tensors() if name != TABLE]
    padding = 0
    for tensor in tensors:
        count = max(1, tensor.experts)
        if tensor.columns and not tensor.exact:
            of_rows = tensor.rows * max(_row_padding(block, tensor.columns) for block in blocks)
            padding += count * (of_rows + 16 * _QUAD)
        else:
            padding += 4 * count * (-(tensor.rows * max(1, tensor.columns)) % PART)
    for core in find_network(spec).attention:
        if core and core.latent and core.latent.joined:  # half of whose matrix may become larger blocks
            values = core.heads * core.row.value * core.latent.plain
            exact += values // PART * BLOCKS[TRANSPOSED].raw_bytes
    return exact + padding + 16 * _QUAD


def _row_padding(block: Block, columns: int) -> int:
    """Bytes of padding per row: floats to whole parts, planes to quads, numbers to words."""
    if isinstance(block, FloatBlock):
        return -columns % PART * block.raw_bytes
    parts = columns // PART
    numbers = parts // block.parts * _number_bytes(block)
    return sum(4 * (-parts * bits % _QUAD) for bits in block.planes) + -numbers % 4


def _number_bytes(block: IntegerBlock) -> int:
    """Bytes of the numbers of a block."""
    return 1 if block.exponents else 2 * block.numbers


def _growth(block: Block) -> float:
    """Bytes on the device / bytes in the file, without padding."""
    if isinstance(block, FloatBlock):
        return 1.0
    factors = 2 * block.parts if block.factored else 0
    return (block.values * sum(block.planes) // 8 + _number_bytes(block) + factors) / block.raw_bytes


@dataclass(frozen=True)
class _Finder:
    file: GGUFFile
    tensors: dict[str, Source]

    def layout(self, described: Iterable[Described], prefix: str) -> LayerLayout:
        at, found = 0, []
        for each in described:
            tensor = self._tensor(self.tensors[prefix + each.name], at, each)
            found.append((each.name, tensor))
            at += tensor.words
        return LayerLayout(tuple(found))

    def experts(self, described: Sequence[Described], layer: int, limit: int) -> tuple[ExpertPiece, ...]:
        """The fewest pieces of whole experts within the limit."""
        if not described:
            return ()
        layout, number = self.layout(described, f"blk.{layer}."), described[0].experts
        most = limit // layout.nbytes
        if most < 1:
            raise UnsupportedError(
                f"an expert has {layout.nbytes >> 20} MiB of weights, kernels of this GPU see {limit >> 20}: "
                "use --backend=cpu"
            )
        return tuple(
            ExpertPiece(f"experts.{layer}.{at}", first, min(most, number - first), layout)
            for at, first in enumerate(range(0, number, most))
        )

    def pieces(self, name: str, buffer: str, limit: int) -> tuple[Piece, ...]:
        """The fewest pieces of whole rows within the limit."""
        whole = self._tensor(self.tensors[name], 0)
        assert isinstance(whole, Matrix)
        alignment = len(whole.row_words) * 4 * _QUAD
        most = (limit - alignment) // (4 * sum(whole.row_words))
        if most < 1:
            raise UnsupportedError(f"kernels of this GPU see {limit} bytes, less than a row of {name}")
        return tuple(
            Piece(f"{buffer}.{number}", first, Matrix(0, min(most, whole.rows - first), whole.columns, whole.kind))
            for number, first in enumerate(range(0, whole.rows, most))
        )

    def _tensor(self, source: Source, at: int, described: Described | None = None) -> Tensor:
        info = self.file.tensors[source.tensor]
        if info.type not in BLOCKS:
            raise UnsupportedError(
                f"the gpu engine has no kernels for {info.type} ({info.name}) yet: use --backend=llamacpp"
            )
        if described and (described.exact or not described.columns):
            return Vector(at, described.rows * max(1, described.columns))
        if described and source.transposed:
            kind = info.type if isinstance(BLOCKS[info.type], FloatBlock) else TRANSPOSED
            return Matrix(at, described.rows, round_up(described.columns, PART), kind)
        return Matrix(at, described.rows if described else source.rows, round_up(info.shape[0], PART), info.type)


def pack_weights(file: GGUFFile, spec: ModelSpec, weights: WeightsLayout) -> Iterator[Packed]:
    """Pack all words except padding, in slices of at most a few MiB; buffers must be zero before.

    Raises ModelFormatError if the file has become shorter.
    """
    tensors = find_tensors(file, spec)
    layouts = [(f"layer.{number}", f"blk.{number}.", each) for number, each in enumerate(weights.layers)]
    with open(file.path, "rb") as data:
        for buffer, prefix, layout in [*layouts, ("rest", "", weights.rest)]:
            for name, tensor in layout.tensors:
                source = tensors[prefix + name]
                pack = _pack_transposed if source.transposed else _pack
                yield from pack(data, file.tensors[source.tensor], source.runs, buffer, tensor)
        for number, experts in enumerate(weights.experts):
            yield from _pack_experts(data, file, tensors, f"blk.{number}.", experts)
        tables = [("token_embd", weights.embedding)] if weights.embedding else []
        if weights.head != weights.embedding:
            tables.append(("output", weights.head))
        for name, pieces in tables:
            source = tensors[name]
            for piece in pieces:
                runs = [(source.first + piece.first_row, piece.rows)]
                yield from _pack(data, file.tensors[source.tensor], runs, piece.buffer, piece.matrix)


def _pack_experts(
    data: BinaryIO, file: GGUFFile, tensors: dict[str, Source], prefix: str, pieces: Sequence[ExpertPiece]
) -> Iterator[Packed]:
    for piece in pieces:
        for index in range(piece.count):
            for name, tensor in piece.layout.tensors:
                expert, source = piece.first + index, tensors[prefix + name]
                info = file.tensors[source.tensor]
                rows = tensor.rows if isinstance(tensor, Matrix) else 1  # a bias is a row of the file's tensor
                runs = list(source.runs_of(expert * rows, rows))
                yield from _pack(data, info, runs, piece.buffer, piece.place(tensor, index))


def _pack(
    data: BinaryIO, info: TensorInfo, runs: Sequence[tuple[int, int]], buffer: str, tensor: Tensor
) -> Iterator[Packed]:
    """Pack rows of a tensor of the file. runs: each a first row and a number of rows."""
    if isinstance(tensor, Vector):
        raw = _read(data, info, 0, info.nbytes).reshape(1, -1)
        values = dequantize(raw, info.type).reshape(-1, tensor.size // sum(count for _, count in runs))
        chosen = np.concatenate([values[first : first + count] for first, count in runs])
        yield buffer, 4 * tensor.at, chosen.reshape(-1).view("<u4")
        return
    row_bytes, row = info.nbytes * info.shape[0] // info.elements, 0
    step = max(1, _SLICE // row_bytes)
    for first, total in runs:
        for start in range(0, total, step):
            count = min(step, total - start)
            raw = _read(data, info, (first + start) * row_bytes, count * row_bytes).reshape(count, -1)
            yield from _placed(buffer, tensor, row, pack_rows(tensor, raw, info.factor))
            row += count


def _pack_transposed(
    data: BinaryIO, info: TensorInfo, runs: Sequence[tuple[int, int]], buffer: str, tensor: Tensor
) -> Iterator[Packed]:
    """Pack heads' matrices, each a run, which the file has transposed. Blocks become `TRANSPOSED`."""
    assert isinstance(tensor, Matrix)
    row_bytes, rows = info.nbytes * info.shape[0] // info.elements, tensor.rows // len(runs)
    for head, (first, columns) in enumerate(runs):
        raw = _read(data, info, first * row_bytes, columns * row_bytes).reshape(columns, -1)
        yield from _placed(buffer, tensor, head * rows, pack_rows(tensor, transpose(raw, info.type, info.factor)))


def _placed(buffer: str, matrix: Matrix, row: int, pieces: Sequence[AnyArray]) -> Iterator[Packed]:
    """The places of packed rows from `row` on."""
    for at, words, piece in zip(matrix.offsets, matrix.row_words, pieces, strict=False):
        if words:
            yield buffer, 4 * (at + row * words), piece.reshape(-1)


def _read(data: BinaryIO, info: TensorInfo, start: int, count: int) -> AnyArray:
    data.seek(info.offset + start)
    raw = data.read(count)
    if len(raw) != count:
        raise ModelFormatError(f"tensor {info.name} ends before its {info.nbytes} bytes")
    return np.frombuffer(raw, np.uint8)


def pack_rows(matrix: Matrix, raw: AnyArray, factor: float = 1.0) -> list[AnyArray]:
    """Pack rows from the file, uint8 [rows, row bytes], to words [rows, n], in the order of `row_words`. factor: of all
    values."""
    rows, block = len(raw), matrix.block
    if isinstance(block, FloatBlock):
        return [pack_floats(raw, matrix.row_words[0], block)]
    split = block.split(raw.reshape(rows, -1, block.raw_bytes)).times(factor)
    ends = list(accumulate((4 * bits for bits in block.planes), initial=0))
    planes = [split.quants[:, :, start:stop] for start, stop in pairwise(ends)]
    pieces: list[AnyArray] = [_in_quads(plane, bits) for plane, bits in zip(planes, block.planes, strict=True)]
    pieces.append(split.numbers.reshape(rows, -1))
    if split.factors is not None:
        pieces.append(split.factors)
    return [_words(each, words) for each, words in zip(pieces, matrix.row_words, strict=False)]


def pack_floats(raw: AnyArray, row_words: int, block: Block) -> AnyArray:
    """Pack rows of floats, uint8 [rows, row bytes], to words [rows, row_words]."""
    words = _words(raw, row_words)
    return words if block.raw_bytes == 4 else _in_pairs(words)


def _in_pairs(words: AnyArray) -> AnyArray:
    """Reorder 16-bit values [rows, n · 8] into low and high halves of quads."""
    halves = words.view("<u2").reshape(len(words), -1, 2, 4)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).view("<u4").reshape(len(words), -1)


def _in_quads(plane: AnyArray, bits: int) -> AnyArray:
    """Convert a plane of `BlockParts`, [rows, parts, 4 · bits] bytes, to [rows, quads, 16] bytes."""
    rows, parts, _ = plane.shape
    if bits >= 4:  # bytes are the same, in another order
        bytes_of: AnyArray = plane.reshape(rows, -1, 4, 4).swapaxes(2, 3)
        return bytes_of
    values = bits_of(plane, bits, 4 * bits).reshape(rows, parts, 2, 4, 4)  # h, j, i
    together = 4 // bits
    padded = np.zeros((rows, round_up(parts, together), 2, 4, 4), np.uint8)
    padded[:, :parts] = values
    fields = padded.reshape(rows, -1, 2 * together, 4, 4).swapaxes(3, 4)  # 2p + h, i, j
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    packed: AnyArray = np.bitwise_or.reduce(fields << shifts, axis=2)
    return packed


def _words(values: AnyArray, count: int) -> AnyArray:
    """Convert [rows, …] of any type to uint32 [rows, count], zero-padded."""
    raw = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    if raw.shape[1] == 4 * count:
        return raw.view("<u4")
    padded = np.zeros((len(raw), 4 * count), np.uint8)
    padded[:, : raw.shape[1]] = raw
    return padded.view("<u4")
