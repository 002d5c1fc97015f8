"""The table of a compiled pass for CPUs: numbers that depend on the weights or on the run. TVM is not needed."""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.cpu.memory import PassMemory
from edge.backends.tvm.kv.pages import DENSE_LAYERS
from edge.backends.tvm.packing.cores import groups_of
from edge.backends.tvm.packing.layout import PackedLayout
from edge.model.structure.layers import Network
from edge.records import dataclass

_SEES_ALL = 1 << 30  # a window that no position is beyond

Blocks = tuple[int, int]  # of the packed file: the first one, and their number
_NORMS = ("token_embd_norm", "token_embd_norm.bias", "output_norm", "output_norm.bias")  # outside of layers
_OF_INPUTS = ("per_layer_model_proj", "per_layer_proj_norm")


@dataclass(frozen=True)
class Streams:
    """The blocks of the packed file that a pass evicts.

    pieces: two ranges each of blocks that are evicted together: one piece for every layer, one for every group of
    `head_step` tiles of the head, and one for the embeddings. kept: blocks that stay.
    """

    block: int  # bytes
    pieces: list[tuple[Blocks, Blocks]]
    kept: list[Blocks]
    head_step: int

    @property
    def table(self) -> list[int]:
        """Four numbers for each piece."""
        return [number for piece in self.pieces for blocks in piece for number in blocks]

    @property
    def resident(self) -> list[tuple[int, int]]:
        """The first byte and the length of the ranges that stay."""
        return [(first * self.block, count * self.block) for first, count in self.kept]


def fill_table(
    layout: PackedLayout, memory: PassMemory, streams: Streams | None = None, more: int = 0,
    balances: Sequence[int] = (),
) -> list[int]:  # fmt: skip
    """The table of one run. streams: None if all weights stay. more: zeros to append. balances: those of
    `find_balances`, if any. Where steps select pages of rows, the engine writes their number into the table."""
    scratch, kept, kinds = memory.scratch, memory.kept, memory.kv.kinds
    choose = memory.kv.config.reads > 0
    values = dict(scratch.offsets) | {"head_step": layout.shape.padded_vocab // 16, "head_parts": 1}
    if streams:
        parts = len(streams.pieces) - layout.shape.layers - 1
        values |= {"head_step": streams.head_step, "head_parts": parts, "block": streams.block}
    for name in ("token_embd", "position_embd", "token_types", *_OF_INPUTS, *_NORMS):
        values |= _offsets(layout, name, name)
    values |= _offsets(layout, layout.network.head, "head")
    values["experts_at_once"] = max((each.number for each in layout.experts.values()), default=0)
    values |= {"cross_rows": 1, "cross_stride": memory.cross_stride}
    values |= {"states": sum(layout.network.fixed_values), "copied": kept.copied}
    slots = Table.of(layout.shape)
    table = [values.get(name, 0) for name in slots.names]
    pieces = streams.table if streams else [0] * 4 * (layout.shape.layers + 2)
    moves_at = slots.first_piece + len(pieces)
    moves: list[int] = []
    network, state = layout.network, memory.copies
    for layer, core in enumerate(network.attention):
        source = layer if core is None or core.rows_of is None else network.foreign.get(layer, core.rows_of)
        values = {
            "form": layout.forms[layer],
            "state": state,
            "window": _window(network, layer),
            "rows_of": source,
            "chooses": int(choose and layer >= DENSE_LAYERS and not network.windows[layer]),
            "observed": int(source in kinds.whole),
            "cross": memory.cross_row(network, layer),
            "angles": network.rope_of(layer) * memory.table_of_angles,
            "balance": balances[layer] if balances else 0,
            "expert_moves": moves_at + len(moves),
            "tap": memory.kv.config.taps.index(layer) + 1 if layer in memory.kv.config.taps else 0,
        }
        for name, place in kept.places[layer].items():
            values[f"kept_{name}"] = scratch.offsets["kept"] + place - scratch.offsets[name]
        if layer in layout.experts:
            moves += layout.experts[layer].moves()
        state += network.fixed_values[layer]
        for name in slots.per_layer:
            values |= _offsets(layout, f"blk.{layer}.{name}", name)
        types = layout.blocks_of(layer)
        for number in layout.shape.forms[layout.forms[layer]]:
            for group in groups_of(layout.shape.blocks[number].core):
                code = layout.shape.code(number, group)
                values[group] = layout.variants[code].index(types[code])
        table += [values.get(name, 0) for name in slots.per_layer]
    return table + pieces + moves + [0] * more


def _window(network: Network, layer: int) -> int:
    """Positions up to its own that a token sees or, in encoders, on each side."""
    core = network.attention[layer]
    window = core.window if core else 0
    return (window // 2 if network.encoder else window) if window else _SEES_ALL


def _offsets(layout: PackedLayout, tensor: str, name: str) -> dict[str, int]:
    """Offsets of matrices in bytes, of vectors in values; none if the model has no such tensor."""
    place = layout.places.get(tensor)
    if place is None:
        return {}
    return {name: place.quants // 4} if place.block is None else {name: place.quants, f"{name}.scales": place.scales}
