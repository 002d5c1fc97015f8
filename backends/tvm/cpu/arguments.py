"""The arguments of a compiled pass for CPUs: the job, the table of numbers, and the scratch memory.

TVM is not needed. `generator.POINTERS` lists the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.backends.ring import LayerKinds
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.packing.shape import (
    GROUPS,
    RoutedRows,
    Shape,
    groups_of,
    padded_head,
    round_up,
)
from edge.backends.tvm.targets import Target
from edge.model.layers import Attention, DeltaNet, Dense, Experts, PerLayerInput, ShortConvolution

LINE = 32  # int32 words between two threads' counters: two cache lines, since CPUs fetch neighbours together
_USUAL = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_MATRICES = (
    *_USUAL,
    "attn_q_gate",
    "attn_qkv",
    "attn_gate",
    "ssm_beta",
    "ssm_alpha",
    "ssm_conv1d",
    "ssm_out",
    "shortconv.in_proj",
    "shortconv.conv",
    "shortconv.out_proj",
    "inp_gate",
    "proj",
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
)
_NORMS = (
    "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "ssm_norm",
    "post_norm", "layer_output_scale",
)  # fmt: skip
_ROUTED = tuple(f"{name}.bias" for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
_VECTORS = (
    *_NORMS,
    *(f"{name}.bias" for name in ("attn_norm", "ffn_norm", *_USUAL)),
    "ssm_dt.bias",
    "ssm_a",
    "attn_sinks",
    "exp_probs_b.bias",
    *_ROUTED,
)
_ADAPTED = (
    *_USUAL, "attn_q_gate", "attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out", "shortconv.in_proj",
    "shortconv.out_proj",
)  # fmt: skip
_OF_INPUTS = ("per_layer_model_proj", "per_layer_proj_norm")
LORA_SLOTS = tuple(f"{name}.{part}" for name in _ADAPTED for part in ("lora_a", "lora_a.scales", "lora_b"))
_SEES_ALL = 1 << 30  # a window that no position is beyond

Blocks = tuple[int, int]  # of the packed file: the first one, and their number


class Job:
    """The next job of the threads: an int64 array that thread 0 fills before it wakes the others.

    angle: the row of the rotary table for the first token. wanted: rows of logits.
    observed: the number of last tokens whose attention is accumulated. votes: 1 to count instead how often a row gets
    more than the average.
    disk: 1 if streamed weights come from a disk (streaming.py).
    """

    NAMES = ("kind", "threads", "count", "position", "angle", "wanted", "observed", "votes", "disk")
    QUIT, STEP, CHUNK = 0, 1, 2

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)


class Table:
    """Numbers that a compiled pass reads from an int64 array: offsets that depend on the weights or on the run.

    The numbers of the layers are followed by four for each piece of streamed weights, one for each expert of every
    layer (how far its matrices lie from the first expert's), and reads of experts (slots.py).
    """

    NAMES = (
        "x", "normed", "queries", "query_rows", "mixed", "ffn", "work", "part_stride", "raw", "raw_stride", "normals",
        "temperatures", "gates", "channels", "steps", "layer_inputs",
        "routes", "scores", "shares", "ranks", "chosen", "members", "starts", "waves",  # phases/experts.py
        "experts_at_once", "fetch", "reads",  # of a wave; slots.py: a function and where its reads are, 0: none
        "words", "scales", "corrections", "sums", "half_corrections", "half_sums",
        "token_embd", "token_embd.scales", "position_embd", "position_embd.scales",
        "per_layer_model_proj", "per_layer_model_proj.scales", "per_layer_proj_norm",
        "output_norm", "output_norm.bias", "head", "head.scales",
        "block", "head_step", "head_parts",  # streaming.py
        "lora_rank", "lora", "lora_parts",  # of adapters: the padded rank, A x of rows, and of threads' columns
    )  # fmt: skip
    PER_LAYER = (
        *_MATRICES, *(f"{name}.scales" for name in _MATRICES), *_VECTORS,
        *GROUPS,  # the number of the layer's variant
        "form",  # the number of `Shape.forms`
        "state",  # where its fixed state begins
        "window",  # positions that a token sees
        "rows_of",  # the layer whose rows it reads
        "observed",  # 1 where policies look at attention: not to the rows of rings
        "expert_moves",  # where the numbers of its experts begin
        "angles",  # where the layer's table of rotary angles begins
        *LORA_SLOTS,  # of adapters, in their own memory; 0 for none
    )  # fmt: skip

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)

    @classmethod
    def layer_slot(cls, name: str) -> int:
        """Within a layer's slots."""
        return cls.PER_LAYER.index(name)

    @classmethod
    def place(cls, layer: Any, name: str) -> Any:
        """The slot of a layer's number; `layer` may be an expression of TVM."""
        return len(cls.NAMES) + layer * len(cls.PER_LAYER) + cls.layer_slot(name)

    @classmethod
    def first_piece(cls, layers: int) -> int:
        return len(cls.NAMES) + layers * len(cls.PER_LAYER)


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
    layout: PackedLayout, scratch: Scratch, rope_size: int, streams: Streams | None = None, more: int = 0
) -> list[int]:
    """The table of one run. rope_size: values of one table of angles. streams: None if all weights stay. more: zeros
    behind it."""
    values = dict(scratch.offsets) | {"head_step": layout.shape.padded_vocab // 16, "head_parts": 1}
    if streams:
        parts = len(streams.pieces) - layout.shape.layers - 1
        values |= {"head_step": streams.head_step, "head_parts": parts, "block": streams.block}
    for name in ("token_embd", "position_embd", *_OF_INPUTS, "output_norm", "output_norm.bias"):
        values |= _offsets(layout, name, name)
    values |= _offsets(layout, layout.head, "head")
    values["experts_at_once"] = max((each.number for each in layout.experts.values()), default=0)
    table = [values.get(name, 0) for name in Table.NAMES]
    pieces = streams.table if streams else [0] * 4 * (layout.shape.layers + 2)
    moves_at = Table.first_piece(layout.shape.layers) + len(pieces)
    moves: list[int] = []
    network = layout.network
    kinds, state = LayerKinds.of(network.windows, network.rowless), 0
    for layer, core in enumerate(network.attention):
        source = layer if core is None or core.rows_of is None else core.rows_of
        values = {
            "form": layout.forms[layer],
            "state": state,
            "window": network.windows[layer] or _SEES_ALL,
            "rows_of": source,
            "observed": int(source in kinds.whole),
            "angles": network.rope_of(layer) * rope_size,
            "expert_moves": moves_at + len(moves),
        }
        if layer in layout.experts:
            moves += layout.experts[layer].moves()
        state += network.fixed_values[layer]
        for name in (*_MATRICES, *_VECTORS):
            values |= _offsets(layout, f"blk.{layer}.{name}", name)
        types = layout.blocks_of(layer)
        for number in layout.shape.forms[layout.forms[layer]]:
            for group in groups_of(layout.shape.blocks[number].core):
                code = layout.shape.code(number, group)
                values[group] = layout.variants[code].index(types[code])
        table += [values.get(name, 0) for name in Table.PER_LAYER]
    return table + pieces + moves + [0] * more


def _offsets(layout: PackedLayout, tensor: str, name: str) -> dict[str, int]:
    """Offsets of matrices in bytes, of vectors in values; none if the model has no such tensor."""
    place = layout.places.get(tensor)
    if place is None:
        return {}
    return {name: place.quants // 4} if place.block is None else {name: place.quants, f"{name}.scales": place.scales}


@dataclass(frozen=True)
class Scratch:
    """Sizes in elements of the two arenas that a pass works in, of float32 and int32, and offsets within them."""

    floats: int
    integers: int
    offsets: dict[str, int]


def work_offsets(core: Attention, target: Target) -> dict[str, int]:
    """Offsets in a thread's memory for attention: outputs, maxima and sums of its query rows, and a block of scores."""
    lines, head = max(core.heads, target.score_rows), padded_head(core.head_dim)
    scores = round_up(lines * (head + 2), 16)
    return {
        "maxima": lines * head,
        "sums": lines * (head + 1),
        "scores": scores,
        "size": scores + target.score_rows * max(target.step_block, target.chunk_block) * 16,
    }


def make_scratch(
    shape: Shape, target: Target, chunk: int, threads: int, observed_rows: int = 0, lora_rank: int = 0
) -> Scratch:
    """Rows are the tokens of a chunk or, in a step, a copy for each thread.

    observed_rows: rows that one head may hold, in whole tiles, if attention is observed; else 0. lora_rank: padded.
    """
    tokens = round_up(chunk, target.gemm_tokens)
    rows = max(tokens, threads)
    attention = [block.core for block in shape.blocks if isinstance(block.core, Attention)]
    delta_nets = [block.core for block in shape.blocks if isinstance(block.core, DeltaNet)]
    query_rows = round_up(tokens * shape.group, target.score_rows) + target.score_rows
    delta_work = max((2 * core.size + core.value_size for core in delta_nets), default=0)
    part = max(round_up(delta_work, 16), *(work_offsets(core, target)["size"] for core in attention))
    experts = [block.core for block in shape.blocks if isinstance(block.core, Experts)]
    routed = [(core, RoutedRows.of(core)) for core in experts]
    activations = [rows * shape.widest, *(rows * each.places * round_up(core.width, 32) for core, each in routed)]
    values = max(activations)  # that are quantized at once
    blocks = values // 32
    floats = {
        "x": tokens * shape.padded_hidden,
        "normed": rows * shape.padded_hidden,
        "queries": shape.kv_heads * query_rows * shape.padded_head,
        "mixed": rows * max(map(shape.widths, (Attention, DeltaNet, ShortConvolution))),
        "ffn": tokens
        * max(
            [
                *map(shape.widths, (Dense, PerLayerInput)),
                *(each.places * round_up(core.width, 32) for core, each in routed),
            ]
        ),
        "work": threads * part,
        "raw": threads * observed_rows,
        "temperatures": tokens if shape.tempered else 0,
        "scales": blocks,
        "sums": blocks,
        "half_sums": 2 * blocks,
        "normals": shape.layers * shape.kv_heads * shape.padded_head,  # of reflections; zeros without any
        "gates": tokens * shape.padded_mixed if any(core.gated for core in attention) else 0,
        "channels": tokens
        * max([3 * shape.widths(ShortConvolution), *(core.mixed + core.width for core in delta_nets)]),
        "layer_inputs": tokens * shape.layers * shape.padded_inputs,
        "steps": tokens * 2 * max((round_up(core.heads, 16) for core in delta_nets), default=0),
        "routes": tokens * max((each.logits for _, each in routed), default=0),
        "scores": threads * max((each.experts for _, each in routed), default=0),
        "shares": rows * max((each.shares for _, each in routed), default=0),
        "lora": rows * shape.most_matrices * lora_rank,
        "lora_parts": threads * shape.most_matrices * lora_rank,
    }
    integers = {
        "words": values // 4,
        "corrections": blocks,
        "half_corrections": 2 * blocks,
        "ranks": threads * max((each.experts for _, each in routed), default=0),
        "chosen": rows * max((core.used for core in experts), default=0),
        "members": tokens * max((core.used for core in experts), default=0),
        "starts": max((core.number + 1 for core in experts), default=0),
        "waves": max((core.number + 2 for core in experts), default=0),
    }
    offsets = {"query_rows": query_rows, "part_stride": part, "raw_stride": observed_rows}
    totals = []
    for arena in (floats, integers):
        at = 0
        for name, count in arena.items():
            offsets[name] = at
            at = round_up(at + count, 16)
        totals.append(at + 64)  # kernels may read a little beyond the last rows
    return Scratch(totals[0], totals[1], offsets)
