"""The arguments of a compiled pass for CPUs: the job, the table of numbers, and the scratch memory.

TVM is not needed. `generator.POINTERS` lists the arguments.
"""

from __future__ import annotations

from typing import Any

from edge.backends.ring import LayerKinds
from edge.backends.tvm.kv.pages import DENSE_LAYERS
from edge.backends.tvm.kv.regions import SPARE_TILES
from edge.backends.tvm.packing.cores import LANES, Sizes, groups_of, kind_of, round_up, state_values
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.packing.shape import Shape
from edge.backends.tvm.targets import Target
from edge.model.cores import Attention
from edge.model.layers import Network
from edge.records import dataclass

LINE = 32  # int32 words between two threads' counters: two cache lines, since CPUs fetch neighbours together
LINES = 3  # of each thread: its arrivals, the jobs that it was given, its notes
MANY_STALLS = 3  # in a pass; another program's time slice, or a stop of the process, makes one or two
STALLS, PASSES = 0, 1  # words of notes: stalls in this pass, and passes in which the thread was the last of the team
_SEES_ALL = 1 << 30  # a window that no position is beyond

Blocks = tuple[int, int]  # of the packed file: the first one, and their number


class Job:
    """The next job of the threads: an int64 array that thread 0 fills before it wakes the others.

    parts: the threads of the engine, into which sums are divided, so that no result depends on who is busy. threads:
    those that take part in this job, and share out all else (`kernels/team.py` decides). fixed: 1 if all always do.
    failed: 1 once the system has ended one of them. first: arrivals of thread 0 before the job.
    angle: the row of the rotary table for the first token. wanted: rows of logits.
    observed: the number of last tokens whose attention is accumulated. votes: 1 to count instead how often a row gets
    more than the average.
    kind: BATCH and higher numbers are passes of one token each of several sequences (`Design.batches`). The `count`
    tokens are then followed by their positions, by numbers that say whether each is observed (0, 1, or 2 for votes),
    and by the numbers of their sequences. Token t has the t-th lengths and starts of all heads.
    disk: 1 if streamed weights come from a disk (streaming.py).
    sequence: the sequence whose fixed state a step, a chunk or drafts change.
    drafts: VERIFIED for a batch of tokens of one sequence that may be forgotten: inputs of fixed states are kept, and
    the states stay. An APPLY job with APPLIED then adds the first `count` of these tokens to the states.
    The tokens of a chunk are followed by the index of the last one that each sees (`model/places.py`).
    wanted: ESTIMATED if a step or a batch bounds the logits of all tokens instead. A RESCORE job then computes those of
    `count` tiles, for `wanted` rows (phases/estimate.py).
    """

    NAMES = (
        "kind", "threads", "count", "position", "angle", "wanted", "observed", "votes", "disk", "sequence", "drafts",
        "parts", "fixed", "failed", "first",
        "team", "began", "worked", "lost", "scarce", "changed", "grow_at", "patience",  # of `kernels/team.py`
    )  # fmt: skip
    QUIT, STEP, CHUNK, APPLY, BATCH = range(5)
    APPLIED, VERIFIED = 1, 2  # values of `drafts`
    RESCORE = -1
    ESTIMATED = -1  # a value of `wanted`

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)


@dataclass(frozen=True)
class Table:
    """Numbers that a compiled pass reads from an int64 array: offsets that depend on the weights or on the run.

    The numbers of the layers, all slots for each layer, are followed by four for each piece of streamed weights, one
    for each expert of every layer (the offset of its matrices from the first expert's), and reads of experts
    (slots.py).
    """

    layers: int
    names: tuple[str, ...]
    per_layer: tuple[str, ...]
    lora: tuple[str, ...]  # those of `per_layer` for adapters, in their own memory; 0 for none

    @classmethod
    def of(cls, shape: Shape) -> Table:
        tensors = [tensor for block in shape.blocks for tensor in block.tensors(shape.hidden)]
        matrices = [f"{tensor.name}.scales" for tensor in tensors if tensor.columns]
        groups = {name: names for block in shape.blocks for name, names in groups_of(block.core).items()}
        adapted = [name for block in shape.blocks for names in groups_of(block.core).values() for name in names]
        lora = [f"{name}.{part}" for name in adapted for part in ("lora_a", "lora_a.scales", "lora_b")]
        own = [name for block in shape.blocks for name in kind_of(block.core).scratch(block.core, Sizes(1, 1, 1))]
        # The number of the layer's variant has the name of the group.
        per_layer = (*_PER_LAYER, *(tensor.name for tensor in tensors), *matrices, *groups, *lora)
        return cls(shape.layers, *(tuple(dict.fromkeys(names)) for names in ((*_NAMES, *own), per_layer, lora)))

    def slot(self, name: str) -> int:
        return self.names.index(name)

    def place(self, layer: Any, name: str) -> Any:
        """The slot of a layer's number; `layer` may be an expression of TVM."""
        return len(self.names) + layer * len(self.per_layer) + self.per_layer.index(name)

    @property
    def first_piece(self) -> int:
        return len(self.names) + self.layers * len(self.per_layer)


_NORMS = ("token_embd_norm", "token_embd_norm.bias", "output_norm", "output_norm.bias")  # outside of layers
_OF_INPUTS = ("per_layer_model_proj", "per_layer_proj_norm")
_NAMES = (
    "x", "normed", "queries", "query_rows", "work", "part_stride", "raw", "raw_stride", "normals", "temperatures",
    "layer_inputs", "words", "scales", "corrections", "sums", "half_corrections", "half_sums",
    "token_embd", "token_embd.scales", "position_embd", "position_embd.scales", "token_types", "token_types.scales",
    "token_embd_norm", "token_embd_norm.bias",
    "per_layer_model_proj", "per_layer_model_proj.scales", "per_layer_proj_norm",
    "output_norm", "output_norm.bias", "head", "head.scales",
    "head_upper", "head_lower", "head_tiles", "head_bounds", "head_exact",  # of a head in two stages
    "block", "head_step", "head_parts",  # streaming.py
    "experts_at_once", "fetch", "reads",  # of a wave; slots.py: a function and where its reads are, 0: none
    "states",  # values of all fixed states of one sequence
    "copied",  # values of a thread's copy of a head's state, before the states
    "pages", "bounded",  # of a step, adjacent: the most pages that a head reads, and those with bounds (kv/pages.py)
    "page_scores", "page_list", "page_stride",  # of a KV head; of a thread; of both
    "lora_rank", "lora", "lora_parts",  # of adapters: the padded rank, A x of rows, and of tokens by threads' columns
)  # fmt: skip
_PER_LAYER = (
    "form",  # the number of `Shape.forms`
    "state",  # where its fixed state begins
    "window",  # positions that a token sees
    "rows_of",  # the layer whose rows it reads
    "chooses",  # 1 where a step may read some of the pages
    "observed",  # 1 where policies look at attention: not to the rows of rings
    "expert_moves",  # where the numbers of its experts begin
    "angles",  # where the layer's table of rotary angles begins
    "kept_channels", "kept_steps",  # offsets from a pass's scratch rows to the layer's rows that are kept for drafts
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """Inputs of drafted tokens, kept for the fixed states of all layers until it is known which tokens stay.

    floats: values in all. places: offsets of each layer's arrays. copied: values of a thread's copy of a head's state.
    """

    floats: int
    places: list[dict[str, int]]
    copied: int

    @classmethod
    def of(cls, network: Network, gemm_tokens: int, drafts: int) -> Kept:
        """gemm_tokens: of the target. drafts: tokens that are verified beside the next one; 0: nothing is kept."""
        sizes, floats, places = Sizes(round_up(1 + drafts, gemm_tokens), 1, 1), 0, []
        cores = [[each.core for each in layer if drafts and each.core.fixed_values] for layer in network.layers]
        for layer in cores:
            found = {}
            for core in layer:
                for name, count in kind_of(core).scratch(core, sizes).items():
                    if name in ("channels", "steps"):
                        found[name], floats = floats, floats + round_up(count, 16)
            places.append(found)
        return cls(floats, places, max((state_values(core) for layer in cores for core in layer), default=0))


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
    layout: PackedLayout, scratch: Scratch, rope_size: int, streams: Streams | None = None, more: int = 0,
    kept: Kept | None = None, states: int = 0, *, choose: bool = False,
) -> list[int]:  # fmt: skip
    """The table of one run. rope_size: values of one table of angles. streams: None if all weights stay. more: zeros to
    append. kept: None without drafts. states: where the fixed states begin. choose: steps select pages of rows, whose
    number the engine writes into the table."""
    values = dict(scratch.offsets) | {"head_step": layout.shape.padded_vocab // 16, "head_parts": 1}
    if streams:
        parts = len(streams.pieces) - layout.shape.layers - 1
        values |= {"head_step": streams.head_step, "head_parts": parts, "block": streams.block}
    for name in ("token_embd", "position_embd", "token_types", *_OF_INPUTS, *_NORMS):
        values |= _offsets(layout, name, name)
    values |= _offsets(layout, layout.network.head, "head")
    values["experts_at_once"] = max((each.number for each in layout.experts.values()), default=0)
    values |= {"states": sum(layout.network.fixed_values), "copied": kept.copied if kept else 0}
    slots = Table.of(layout.shape)
    table = [values.get(name, 0) for name in slots.names]
    pieces = streams.table if streams else [0] * 4 * (layout.shape.layers + 2)
    moves_at = slots.first_piece + len(pieces)
    moves: list[int] = []
    network = layout.network
    kinds, state = LayerKinds.of(network.windows, network.rowless), states
    for layer, core in enumerate(network.attention):
        source = layer if core is None or core.rows_of is None else core.rows_of
        values = {
            "form": layout.forms[layer],
            "state": state,
            "window": network.windows[layer] or _SEES_ALL,
            "rows_of": source,
            "chooses": int(choose and layer >= DENSE_LAYERS and not network.windows[layer]),
            "observed": int(source in kinds.whole),
            "angles": network.rope_of(layer) * rope_size,
            "expert_moves": moves_at + len(moves),
        }
        for name, place in (kept.places[layer] if kept else {}).items():
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
    lines, value = max(core.heads, target.score_rows), core.row.padded(LANES).value
    scores = round_up(lines * (value + 2), 16)
    return {
        "maxima": lines * value,
        "sums": lines * (value + 1),
        "scores": scores,
        "size": scores + target.score_rows * max(target.step_block, target.chunk_block) * 16,
    }


def make_scratch(
    shape: Shape, target: Target, chunk: int, threads: int, observed_rows: int = 0, lora_rank: int = 0,
    sequences: int = 1, kept: int = 0, pages: int = 0, *, estimates: int = 0,
) -> Scratch:  # fmt: skip
    """Lay out the scratch memory. Rows are the tokens of a chunk or, in a step, a copy for each thread.

    observed_rows: rows that one head may hold, in whole tiles, if attention is observed; else 0. lora_rank: padded.
    kept: `Kept.floats`. pages: the most that one head may hold, if steps select pages; else 0. estimates: tokens
    whose logits are bounded at once; 0 without a head in two stages.
    """
    tokens = round_up(max(chunk, sequences), target.gemm_tokens)
    rows = max(tokens, threads)
    cores = [block.core for block in shape.blocks]
    found: dict[str, int] = {}  # of cores, the most of each name
    for core in cores:
        for name, count in kind_of(core).scratch(core, Sizes(tokens, rows, threads)).items():
            found[name] = max(count, found.get(name, 0))
    query_rows = round_up(tokens * shape.group, target.score_rows) + target.score_rows
    attention = [work_offsets(core, target)["size"] for core in cores if isinstance(core, Attention)]
    part = max(found.pop("work", 0), *attention)
    values = max(rows * shape.widest, found.pop("quantized", 0))  # that are quantized at once
    blocks = values // 32
    parts = round_up(sequences, target.gemm_tokens) if sequences > 1 else 1
    page_stride = round_up(pages + SPARE_TILES + target.step_block, 16) if pages else 0
    floats = {
        "x": tokens * shape.padded_hidden,
        "normed": rows * shape.padded_hidden,
        "queries": shape.kv_heads * query_rows * shape.padded_head,
        "work": sequences * threads * part,
        "raw": threads * observed_rows,
        "temperatures": tokens if shape.tempered else 0,
        "scales": blocks,
        "sums": blocks,
        "half_sums": 2 * blocks,
        "normals": shape.layers * shape.kv_heads * shape.padded_head,  # of reflections; zeros without any
        "layer_inputs": tokens * shape.layers * shape.padded_inputs,
        "lora": rows * shape.most_matrices * lora_rank,
        "lora_parts": parts * threads * shape.most_matrices * lora_rank,
        "kept": kept,
        "page_scores": shape.kv_heads * page_stride,
    }
    choosing = threads if estimates else 0  # each thread finds the blocks whose low bits it reads
    floats |= {
        "head_upper": estimates * shape.padded_vocab // 16,
        "head_lower": estimates * shape.padded_vocab // 16,
        "head_bounds": (choosing + estimates) * round_up(shape.hidden // 32, LINE),
    }
    integers = {
        "words": values // 4, "corrections": blocks, "half_corrections": 2 * blocks,
        "page_list": threads * page_stride,
        "head_tiles": shape.padded_vocab // 16 if estimates else 0, "head_exact": choosing * LINE,
    }  # fmt: skip
    of_integers = {name for core in cores for name in kind_of(core).integers(core, Sizes(1, 1, 1))}
    for name, count in found.items():
        (integers if name in of_integers else floats)[name] = count
    offsets = {"query_rows": query_rows, "part_stride": part, "raw_stride": observed_rows, "page_stride": page_stride}
    totals = []
    for arena in (floats, integers):
        at = 0
        for name, count in arena.items():
            offsets[name] = at
            at = round_up(at + count, 16)
        totals.append(at + 64)  # kernels may read a little beyond the last rows
    return Scratch(totals[0], totals[1], offsets)
