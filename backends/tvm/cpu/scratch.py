"""The scratch memory of a pass for CPUs: activations of a chunk's tokens, or of a step's threads. TVM is not needed."""

from __future__ import annotations

import itertools

from edge.backends.tvm.cpu.arguments import LINE
from edge.backends.tvm.kv.regions import SPARE_TILES
from edge.backends.tvm.packing.cores import LANES, Sizes, kind_of, round_up, state_values
from edge.backends.tvm.packing.shape import Shape
from edge.backends.tvm.targets import Target
from edge.model.cores import Attention
from edge.model.structure.layers import Network
from edge.records import dataclass
from edge.types import AnyArray


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
class Scratch:
    """Sizes in elements of the two arenas that a pass works in, of float32 and int32; the arrays within them."""

    floats: int
    integers: int
    offsets: dict[str, int]  # of arrays, and strides, by the names of `Table`
    counts: dict[str, int]  # elements of each array

    def array(self, arena: AnyArray, name: str) -> AnyArray:
        """An array in its arena; empty if the pass has none of this name."""
        at = self.offsets.get(name, 0)
        return arena[at : at + self.counts.get(name, 0)]


def work_offsets(core: Attention, target: Target) -> dict[str, int]:
    """Offsets in a thread's memory for attention: outputs, maxima and sums of its query rows, and a block of scores,
    or a step's scores and its queries in integers."""
    lines, block = max(core.heads, target.score_rows), max(target.step_block, target.chunk_block)
    step = target.step_block * 16 + (core.row.padded(LANES).key // 2 if target.byte_rows else 0)
    return _offsets(_work(core, lines) | {"scores": target.score_rows * max(block * 16, step)})


def pair_offsets(core: Attention, target: Target) -> dict[str, int]:
    """As `work_offsets`, for a chunk in BF16: also of queries, keys and values, two in a float."""
    row, block = core.row.padded(LANES), target.chunk_block * 16
    return _offsets(_work(core, target.paired) | {
        "scores": target.score_rows * block, "queries": target.paired * row.key // 2,
        "keys": block * row.key // 2, "values": block * row.mixed // 2,
    })  # fmt: skip


def byte_groups(key: int) -> list[tuple[int, int]]:
    """The values of a key that share a scale where scores are products of 8 bits, in parts of 16: the first and their
    number, two if there are as many left."""
    return [(first, min(2, key // 16 - first)) for first in range(0, key // 16, 2)]


def byte_offsets(core: Attention, target: Target) -> dict[str, int]:
    """As `work_offsets`, for an encoder's chunk whose scores are products of 8 bits."""
    row, block, rows = core.row.padded(LANES), target.chunk_block * 16, target.quantized_rows
    groups = len(byte_groups(row.key))
    return _offsets(_work(core, rows) | {
        "scores": target.score_rows * block, "queries": rows * row.key // 4, "query_scales": rows * groups,
        "corrections": rows * groups, "keys": block * row.key // 4, "key_scales": block * groups,
        "values": block * row.mixed,
    })  # fmt: skip


EXPANDED_BLOCK = 8  # tiles of latent rows that are expanded at once


def expanded_offsets(core: Attention, target: Target) -> dict[str, int]:
    """As `pair_offsets`, for the expanded form of latent attention: a block's scores, rows, and a head's keys and
    values. `expanded_values` counts what follows, of each query row."""
    assert core.latent
    block, own = EXPANDED_BLOCK * 16, core.query
    return _offsets({
        "scores": target.score_rows * block, "rows": block * core.row.key // 2, "keys": block * own // 2,
        "values": block * core.latent.value // 2,
    })  # fmt: skip


def expanded_values(core: Attention) -> int:
    """A query row's maximum, sum, output and, two values in a float, query."""
    assert core.latent
    return 2 + core.latent.value + core.query // 2


def _work(core: Attention, lines: int) -> dict[str, int]:
    return {"out": lines * core.row.padded(LANES).mixed, "maxima": lines, "sums": lines}


def _offsets(sizes: dict[str, int]) -> dict[str, int]:
    """Where arrays of these sizes begin, one after the other, and their `size` together."""
    starts = [0, *itertools.accumulate(round_up(size, 16) for size in sizes.values())]
    return dict(zip([*sizes, "size"], starts, strict=True))


def make_scratch(
    shape: Shape, target: Target, chunk: int, threads: int, observed_rows: int = 0, lora_rank: int = 0,
    sequences: int = 1, kept: int = 0, pages: int = 0, *, estimates: int = 0, taps: int = 0, sources: int = 0,
) -> Scratch:  # fmt: skip
    """Lay out the scratch memory. Rows are the tokens of a chunk or, in a step, a copy for each thread.

    observed_rows: rows that one head may hold, in whole tiles, if attention is observed; else 0. lora_rank: padded.
    kept: `Kept.floats`. pages: the most that one head may hold, if steps select pages; else 0. estimates: tokens
    whose logits are bounded at once; 0 without a head in two stages. taps: layers whose inputs are kept. sources:
    layers of another model, whose rows are read.
    """
    tokens = round_up(max(chunk, sequences), target.gemm_tokens)
    rows = max(tokens, threads)
    cores = [block.core for block in shape.blocks]
    found: dict[str, int] = {}  # of cores, the most of each name
    for core in cores:
        for name, count in kind_of(core).scratch(core, Sizes(tokens, rows, threads)).items():
            found[name] = max(count, found.get(name, 0))
    query_rows = round_up(tokens * shape.group, target.score_rows) + target.score_rows
    attention = [core for core in cores if isinstance(core, Attention)]
    part = max([found.pop("work", 0), *(work_offsets(core, target)["size"] for core in attention)])
    shared = [pair_offsets] * (target.pair_rows > 0) + [byte_offsets] * (target.byte_rows > 0 and shape.encoder)
    pairs = max((offsets(core, target)["size"] for core in attention for offsets in shared), default=0)
    for core in (each for each in attention if each.latent and target.pair_rows):
        lines = round_up(round_up(tokens, target.score_rows), 16)
        pairs = max(pairs, expanded_offsets(core, target)["size"] + lines * expanded_values(core))
    values = max(rows * shape.widest, found.pop("quantized", 0))  # that are quantized at once
    blocks = values // 32
    parts = round_up(sequences, target.gemm_tokens) if sequences > 1 else 1
    page_stride = round_up(pages + SPARE_TILES + target.step_block, 16) if pages else 0
    floats = {
        "x": tokens * shape.padded_hidden,
        "normed": rows * shape.padded_hidden,
        "held": tokens * shape.padded_hidden * any(block.held for block in shape.blocks),
        "terms": tokens * shape.padded_hidden * shape.sums_experts,
        "queries": shape.kv_heads * query_rows * shape.padded_head,
        "work": sequences * threads * part,
        "pairs": threads * pairs,
        "raw": threads * observed_rows,
        "temperatures": tokens if shape.tempered else 0,
        "scales": blocks,
        "sums": blocks,
        "half_sums": 2 * blocks,
        "normals": max(shape.layers, sources) * shape.kv_heads * shape.padded_head,  # of reflections; zeros without any
        "layer_inputs": tokens * shape.layers * shape.padded_inputs,
        "deepstack": tokens * shape.deepstack * shape.padded_hidden,
        "lora": rows * shape.most_matrices * lora_rank,
        "lora_parts": parts * threads * shape.most_matrices * lora_rank,
        "kept": kept,
        "page_scores": shape.kv_heads * page_stride,
        "taps": tokens * taps * shape.padded_hidden,
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
    offsets = {
        "query_rows": query_rows,
        "part_stride": part,
        "pair_stride": pairs,
        "raw_stride": observed_rows,
        "page_stride": page_stride,
        "taps_each": taps,
    }
    totals = []
    for arena in (floats, integers):
        at = 0
        for name, count in arena.items():
            offsets[name] = at
            at = round_up(at + count, 16)
        totals.append(at + 64)  # kernels may read a little beyond the last rows
    return Scratch(totals[0], totals[1], offsets, floats | integers)
