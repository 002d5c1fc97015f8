"""The layout of the packed weights file: the place of each tensor. TVM is not needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache

from edge.backends.tvm.packing.blocks import BLOCKS, HALVED, PART, Block, IntegerBlock
from edge.backends.tvm.packing.cores import groups_of, round_up
from edge.backends.tvm.packing.shape import LAYER_INPUTS, Shape
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Experts, Rope, Tensor
from edge.model.structure.layers import Network
from edge.model.structure.mtp import SHARED
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.records import dataclass

ALIGNMENT = 64  # bytes, as the widest loads require
SECTOR = 4096  # bytes: reads that bypass the system's page cache are multiples of this
TABLE = "per_layer_token_embd"  # not packed: its rows are read from the model's file
TRANSPOSED = "Q8_0"  # blocks of matrices whose transpose the file has in blocks
_TILE = 16  # rows that are multiplied at once
_MOST_PARTS = 512  # of a row of the head: `cpu/phases/estimate.py` bounds rounding errors up to this number
_LEAST_SHARE = 0.5  # the head's, of the bytes that a token reads: at .3 (SmolLM2) one stage was as fast

_PER_HEAD = {"attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm"}  # heads, each rounded up to whole tiles
_LATENT = {"attn_q_b", "attn_kv_a_mqa"}  # of latent attention: rows that are rotated follow others
_ROTATED = _PER_HEAD - {"attn_v"}  # by RoPE; if it pairs halves of a head, rows are interleaved: pairs are neighbours


@dataclass(frozen=True)
class Place:
    """A tensor in the packed file."""

    source: Source
    rows: int  # padded
    columns: int
    quants: int  # offset in bytes
    scales: int  # offset in bytes; unused for vectors
    nbytes: int
    block: Block | None  # None: a vector of float32, `rows` long
    unit: int  # rows of the source that are padded to whole tiles together: those of a head, of an expert
    interleaved: tuple[int, ...]  # of each unit's first rows: numbers of rows whose halves are interleaved
    stride: int = 0  # of experts: bytes from one to the next; `quants` and `scales` are the first one's
    shared: bool = False  # it lies in the packed file of another model (`PackedLayout.beside`)

    @property
    def halved(self) -> bool:
        return isinstance(self.block, IntegerBlock) and bool(self.block.halves)


@dataclass(frozen=True)
class ExpertPlaces:
    """The experts of a layer, one after the other. An expert's matrices are adjacent, so that one read gets all."""

    at: int  # offset of the first
    stride: int
    number: int

    def moves(self) -> list[int]:
        """Each expert's offset from the first, in bytes."""
        return [index * self.stride for index in range(self.number)]


@dataclass(frozen=True)
class PackedLayout:
    """The places of all tensors in the packed file. The experts' matrices come last, so that a mapping can leave them
    out."""

    shape: Shape
    network: Network
    places: dict[str, Place]
    nbytes: int  # size of the file
    experts: dict[int, ExpertPlaces]  # by layer

    def beside(self, other: PackedLayout, at: int, others_at: int) -> PackedLayout:
        """The layout with the places of shared tensors, taken from `other`. at, others_at: offsets of the two mapped
        files from the address that places are relative to."""
        found = {}
        for name, own in self.places.items():
            place, moved = (other.places[name], others_at) if own.shared else (own, at)
            found[name] = replace(place, quants=place.quants + moved, scales=place.scales + moved)
        return replace(self, places=found)

    @cached_property
    def forms(self) -> list[int]:
        """The form of each layer, an index into `Shape.forms`."""
        return self.shape.forms_of(self.network)

    @cached_property
    def variants(self) -> dict[str, list[tuple[str, ...]]]:
        """The combinations of block types that occur in each group of matrices, by `Shape.code`."""
        found: dict[str, dict[tuple[str, ...], None]] = {}
        if place := self.places.get("per_layer_model_proj"):
            assert place.block is not None
            found["layer_inputs"] = {(place.block.name,): None}
        for layer in range(self.shape.layers):
            for code, blocks in self.blocks_of(layer).items():
                found.setdefault(code, {})[blocks] = None
        return {code: list(blocks) for code, blocks in found.items()}

    def blocks_of(self, layer: int) -> dict[str, tuple[str, ...]]:
        """The block types of a layer's matrices, by group as in `variants`."""
        found = {}
        for number in self.shape.forms[self.forms[layer]]:
            for group, names in groups_of(self.shape.blocks[number].core).items():
                blocks = (self.places[f"blk.{layer}.{name}"].block for name in names)
                found[self.shape.code(number, group)] = tuple(block.name for block in blocks if block is not None)
        return found

    @cached_property
    def experts_used(self) -> int:
        """Experts that a token uses in a layer."""
        return max((block.core.used for block in self.shape.blocks if isinstance(block.core, Experts)), default=0)

    @property
    def nbytes_without_experts(self) -> int:
        return min((each.at for each in self.experts.values()), default=self.nbytes)


def _pays_in_two_stages(file: GGUFFile, spec: ModelSpec, network: Network, places: dict[str, Place]) -> bool:
    """Whether a head can be read in two stages, and is large enough for this to be faster.

    Scaling or capping may map different sums to equal logits, whose order would then depend on all of them.
    """
    if (place := places.get(network.head)) is None:
        return False
    plain = not network.encoder and not network.logit_cap and network.logit_scale == 1
    fits = place.block is BLOCKS["Q8_0"] and place.columns <= _MOST_PARTS * PART
    idle = spec.expert_bytes * (1 - spec.experts_read(1)) + spec.table_bytes
    read = spec.weight_bytes - idle - (0 if spec.tied_head else spec.embedding_bytes)
    return plain and fits and file.tensors[place.source.tensor].nbytes >= _LEAST_SHARE * read


@lru_cache(2)  # of the model, six times in a start, and of its layer for multi-token prediction
def make_layout(file: GGUFFile, spec: ModelSpec, *, halve: bool = False) -> PackedLayout:
    """Lay out a model's weights. halve: store the head in two planes if reading it in two stages is faster. Raises
    UnsupportedError for unknown tensors, and for cores and block types without kernels."""
    network = find_network(spec)
    shape, tensors = Shape.of(spec), find_tensors(file, spec)
    places: dict[str, Place] = {}
    at = 0
    of_experts: dict[int, dict[str, Place]] = {}
    for name, tensor in network.tensors():
        if name == TABLE:
            continue
        apart = tensor.experts and tensor.columns
        shared = spec.mtp_of is not None and name in SHARED
        start = 0 if apart or shared else at
        place = _place(file, tensor, tensors[name], start, *units_of(network, name, tensor), rounded=spec.rounded)
        if shared:
            places[name] = replace(place, shared=True)
            continue
        if apart:
            of_experts.setdefault(int(name.split(".")[1]), {})[name] = place
            continue
        places[name] = place
        at = round_up(place.quants + place.nbytes, ALIGNMENT)
    if halve and _pays_in_two_stages(file, spec.mtp_of or spec, network, places):
        places[network.head] = replace(places[network.head], block=HALVED)
    experts = {}
    for layer, found in of_experts.items():
        experts[layer] = each = _side_by_side(found, at, places)
        at += each.number * each.stride
    return PackedLayout(shape, network, places, round_up(at, SECTOR) if experts else at, experts)


def _side_by_side(found: dict[str, Place], start: int, places: dict[str, Place]) -> ExpertPlaces:
    """Add the places of a layer's experts, from byte `start` on."""
    at, sizes, numbers = start, {}, set[int]()
    for name, place in found.items():
        assert place.block is not None
        quants, scales = place.block.packed_bytes(round_up(place.unit, _TILE), place.columns)
        sizes[name] = at, round_up(at + quants, ALIGNMENT)
        at = round_up(sizes[name][1] + scales, ALIGNMENT)
        numbers.add(place.source.rows // place.unit)
    (number,), stride = numbers, at - start
    for name, (quants, scales) in sizes.items():
        places[name] = replace(found[name], quants=quants, scales=scales, stride=stride)
    return ExpertPlaces(start, stride, number)


def units_of(network: Network, name: str, tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """`Place.unit` and `Place.interleaved` of a tensor."""
    stem = tensor.name.removesuffix(".bias")
    core = network.attention[int(name.split(".")[1])] if stem in (_PER_HEAD | _LATENT) else None
    if core and stem in _PER_HEAD:  # Kimi Delta Attention has some of these names, too
        if core.latent:
            return core.latent.plain + core.rope.dim, _behind(core.latent.plain, core.rope)
        size = core.row.value if stem == "attn_v" else core.row.key
        sections = tuple(2 * pairs for pairs in core.rope.sections) if core.rope.apart else (core.rope.dim,)
        return size, sections if network.halves and stem in _ROTATED else ()
    if core and stem in _LATENT:
        assert core.latent is not None
        first = core.latent.plain if stem == "attn_q_b" else core.row.value
        return first + core.rope.dim, _behind(first, core.rope)
    if tensor.experts:
        return tensor.rows, ()
    return network.layer_inputs if name in LAYER_INPUTS["layer_inputs"] else _TILE, ()


def _behind(first: int, rope: Rope) -> tuple[int, ...]:
    """`Place.interleaved` of rows whose rotated ones begin at `first`. Two rows, interleaved, keep their order."""
    return (*[2] * (first // 2), rope.dim) if rope.halves else ()


def _place(
    file: GGUFFile, tensor: Tensor, source: Source, at: int, unit: int, interleaved: tuple[int, ...], *, rounded: bool
) -> Place:
    info = file.tensors[source.tensor]
    rows = -(-(tensor.rows if source.transposed else source.rows) // unit) * round_up(unit, _TILE)
    if not tensor.columns:
        rows = round_up(rows, 32)
        return Place(source, rows, 1, at, 0, 4 * rows, None, unit, interleaved)
    kind = info.type
    if rounded and not source.transposed:
        from edge.model.structure.rounding import ROUNDED, is_rounded  # here: encoders need it

        kind = ROUNDED if is_rounded(info) else kind
    block = BLOCKS.get(kind)
    if source.transposed and isinstance(block, IntegerBlock):
        block = BLOCKS[TRANSPOSED]
    if block is None:
        raise UnsupportedError(
            f"the cpu engine has no kernels for {info.type} ({info.name}) yet: use --backend=llamacpp"
        )
    quants, scales = block.packed_bytes(rows, tensor.columns)
    start = round_up(at + quants, ALIGNMENT)
    return Place(source, rows, tensor.columns, at, start, start - at + scales, block, unit, interleaved)
