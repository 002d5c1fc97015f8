"""The arguments of a compiled pass for CPUs: the job, and the names of the table's numbers (`table.py` fills it).

TVM is not needed. `generator.pointers_of` lists a design's arguments.
"""

from __future__ import annotations

from typing import Any

from edge.backends.tvm.packing.cores import Sizes, groups_of, kind_of
from edge.backends.tvm.packing.shape import Shape
from edge.records import dataclass

LINE = 32  # int32 words between two threads' counters: two cache lines, since CPUs fetch neighbours together
LINES = 3  # of each thread: its arrivals, the jobs that it was given, its notes
MANY_STALLS = 3  # in a pass; another program's time slice, or a stop of the process, makes one or two
STALLS, PASSES = 0, 1  # words of notes: stalls in this pass, and passes in which the thread was the last of the team


POINTERS = {  # the arguments of `run`, and the types that they point to
    "job": "int64", "lines": "int32",
    "weights": "uint8", "table": "int64", "floats": "float32", "integers": "int32",
    "keys": "", "values": "", "key_scales": "", "value_scales": "",  # types of the KV dtype
    "lengths": "int32",  # rows in use, [tokens of a batch, layers, KV heads]: heads may keep different numbers
    "positions": "int32",  # of every row, for sliding windows
    "tokens": "int32", "logits": "float32", "rope": "float32",
    "attention": "float32",  # that rows received from observed queries
    "starts": "int32",  # the first row of each head, likewise
}  # fmt: skip
STATES = {"states": "float32"}  # one more argument of models with fixed states
RINGS = ("keys", "values", "key_scales", "value_scales", "positions")  # again, as `ring_…`, if rings have an arena
TIMES = {"times": "int64"}  # one more argument of a timed pass: `cpu/timing.py`
LORA = {"lora": "uint8"}  # one more argument of a pass with adapters
CROSS = {"cross_keys": "", "cross_values": ""}  # two more of models with cross attention: its rows
PAGES = {"bounds": "uint16"}  # one more argument of a pass that chooses pages: their bounds, in float16


def cross_dtype(kv_dtype: str) -> str:
    """The form of the rows of cross attention, beside others of a KV dtype."""
    return "f32" if kv_dtype == "f32" else "f16"


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
    The tokens of a chunk are followed by the index of the last one that each sees (`model/places.py`); an encoder's
    then by those of the first ones, by positions, and by rows of the table of token types.
    before, behind: layers at the first and the last end that a job leaves out, of exported models that encode or hear.
    A CROSS job makes the rows of cross attention, in all layers from row `position` on, of `count` states of an
    encoder, which stand in the place of embeddings.
    An EMBED job of an exported decoder looks up the embeddings of `count` tokens, and runs no layer.
    wanted: ESTIMATED if a step or a batch bounds the logits of all tokens instead. A RESCORE job then computes those of
    `count` tiles, for `wanted` rows (phases/estimate.py).
    """

    NAMES = (
        "kind", "threads", "count", "position", "angle", "wanted", "observed", "votes", "disk", "sequence", "drafts",
        "parts", "fixed", "failed", "first",
        "before", "behind",
        "team", "began", "worked", "lost", "scarce", "changed", "grow_at", "patience",  # of `kernels/team.py`
    )  # fmt: skip
    QUIT, STEP, CHUNK, APPLY, BATCH = range(5)
    APPLIED, VERIFIED = 1, 2  # values of `drafts`
    RESCORE = -1
    CROSS = -2
    EMBED = -3
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


_NAMES = (
    "x", "normed", "held", "terms", "queries", "query_rows", "work", "part_stride", "pairs", "pair_stride", "raw",
    "raw_stride", "normals", "temperatures", "layer_inputs", "deepstack",
    "words", "scales", "corrections", "sums", "half_corrections", "half_sums",
    "token_embd", "token_embd.scales", "position_embd", "position_embd.scales", "token_types", "token_types.scales",
    "token_embd_norm", "token_embd_norm.bias",
    "per_layer_model_proj", "per_layer_model_proj.scales", "per_layer_proj_norm",
    "output_norm", "output_norm.bias", "head", "head.scales",
    "head_upper", "head_lower", "head_tiles", "head_bounds", "head_exact",  # of a head in two stages
    "block", "head_step", "head_parts",  # streaming.py
    "experts_at_once", "fetch", "reads",  # of a wave; slots.py: a function and where its reads are, 0: none
    "cross_rows", "cross_stride",  # that cross attention reads; rows of memory of a head
    "states",  # values of all fixed states of one sequence
    "copied",  # values of a thread's copy of a head's state, before the states
    "pages", "bounded",  # of a step, adjacent: the most pages that a head reads, and those with bounds (kv/pages.py)
    "page_scores", "page_list", "page_stride",  # of a KV head; of a thread; of both
    "lora_rank", "lora", "lora_parts",  # of adapters: the padded rank, A x of rows, and of tokens by threads' columns
    "taps", "taps_each",  # inputs of layers that are kept, and their number
    "fuses",  # 1 if a head's next pass reads features
)  # fmt: skip
_PER_LAYER = (
    "form",  # the number of `Shape.forms`
    "state",  # where its fixed state begins
    "window",  # positions up to its own that a token sees; in encoders, positions on each side
    "rows_of",  # the layer whose rows it reads
    "cross",  # the first row that its cross attention reads
    "chooses",  # 1 where a step may read some of the pages
    "observed",  # 1 where policies look at attention: not to the rows of rings
    "expert_moves",  # where the numbers of its experts begin
    "angles",  # where the layer's table of rotary angles begins
    "balance",  # of latent rows' parts (kv/balance.py)
    "tap",  # 1 and more: the place of its input among those that are kept
    "kept_channels", "kept_steps",  # offsets from a pass's scratch rows to the layer's rows that are kept for drafts
)  # fmt: skip
