"""The memory of a pass on CPUs, counted once: engines allocate what plans, exports and measurements add up.

    weights, table   by the packed layout (packing/layout.py, arguments.py): not here
    floats           scratch: activations of a chunk's tokens, or of a step's threads ┐ offsets: `Scratch`, which the
    integers         scratch: quantized activations, lists of experts, pages, tiles   ┘ table has, too
    rope             [kinds of RoPE, rows, 2 · head]: cosines and sines of a chunk │ of each sequence's next steps │ of
                     the tokens of a batch
    states           copies of threads, for drafts │ the fixed states of sequence 0 │ of sequence 1 │ …
    tokens, logits   of a pass
    lora             adapters, side by side
    keys, values, …  of rows, and what tells where they are: kv/memory.py

Names are those of the arguments of compiled passes (`arguments.POINTERS`). TVM is not needed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.tvm.cpu.arguments import CROSS, cross_dtype
from edge.backends.tvm.cpu.scratch import Kept, Scratch, make_scratch
from edge.backends.tvm.kv.memory import KVMemory
from edge.backends.tvm.kv.pages import pages_held
from edge.backends.tvm.kv.regions import SPARE_ROWS, TILE
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.memory import Array
from edge.backends.tvm.packing.cores import LANES, round_up
from edge.backends.tvm.packing.low_rank import adapter_bytes, padded_rank
from edge.backends.tvm.packing.shape import ROPE_AHEAD, Shape
from edge.backends.tvm.targets import Target
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.types import AnyArray

_shape_of = lru_cache(maxsize=4)(Shape.of)  # most of the time of a count, and a plan makes hundreds


@dataclass(frozen=True)
class RopeRows:
    """Rows of a table of angles: of consecutive positions, then the rows of sequences, then those of a batch."""

    chunk: int  # of a chunk, in whole batches
    excess: int  # more for single steps ahead, and for reads beyond a chunk's last batch
    sequences: int  # of each sequence's steps ahead; 0 for a single sequence, which has the chunk's
    batch: int

    @classmethod
    def of(cls, tokens: int, gemm_tokens: int, sequences: int) -> RopeRows:
        several = sequences > 1
        excess = max(ROPE_AHEAD - tokens, 0) + gemm_tokens
        return cls(tokens, excess, several * sequences * ROPE_AHEAD, several * round_up(sequences, gemm_tokens))

    @property
    def ahead(self) -> int:
        """The first row of the first sequence's."""
        return self.chunk + self.excess

    @property
    def together(self) -> int:
        """The first row of a batch's."""
        return self.ahead + self.sequences

    @property
    def number(self) -> int:
        return self.together + self.batch


@dataclass(frozen=True)
class PassMemory:
    """The arrays of a pass, by name, before they are allocated. temporaries: bytes of other memory, by purpose."""

    arrays: dict[str, Array]
    temporaries: dict[str, int]
    kv: KVMemory
    scratch: Scratch
    kept: Kept
    rope: RopeRows
    tokens: int  # of a chunk, in whole batches
    copies: int  # values of the threads' copies of states
    cross_stride: int  # rows of memory of a head that cross attention reads

    @classmethod
    def of(cls, spec: ModelSpec, config: EngineConfig, target: Target, estimates: int = 0) -> PassMemory:
        """estimates: tokens whose logits are bounded at once by a head in two stages; 0 without one. Raises
        UnsupportedError for models without kernels."""
        shape, network = _shape_of(spec), find_network(spec)
        kv = KVMemory.of(shape, LayerKinds.of(network.windows, network.rowless), config, spec.context)
        rank, observed = padded_rank(config.lora_rank), round_up(kv.longest, TILE) if config.observes else 0
        kept = Kept.of(network, target.gemm_tokens, config.drafts)
        if config.kv_dtype == "f32":  # the exact mode
            target = replace(target, pair_rows=0, byte_rows=0)
        scratch = make_scratch(
            shape, target, config.chunk, config.threads, observed, rank, config.together, kept.floats,
            pages_held(config), estimates=estimates, taps=len(config.taps),
            sources=1 + max(network.foreign.values(), default=-1),
        )  # fmt: skip
        tokens, copies = round_up(config.chunk, target.gemm_tokens), config.threads * kept.copied
        rope = RopeRows.of(tokens, target.gemm_tokens, config.sequences)
        kinds, head = max(1, len(network.ropes)), 2 * shape.padded_head
        angles = kinds * (rope.number - rope.excess) * head
        logits = max(config.logits_rows, config.together), shape.padded_vocab
        fixed, lora = (
            config.sequences * sum(network.fixed_values),
            adapter_bytes(network, rank, exact=config.kv_dtype == "f32"),
        )
        arrays = {
            "floats": Array((scratch.floats,), "float32", scratch=scratch.floats),
            "integers": Array((scratch.integers,), "int32", scratch=scratch.integers),
            "tokens": Array((max((5 if shape.encoder else 2) * tokens, 4 * config.together),), "int32"),  # see `Job`
            "logits": Array(logits, "float32", scratch=logits[0] * logits[1]),
            "rope": Array((kinds, rope.number, head), "float32", scratch=angles),
            "states": Array((copies + fixed,), "float32", fixed=fixed, scratch=copies),
            "lora": Array((config.loras, lora), "uint8", lora=config.loras * lora),
        }
        stride = round_up(max(1, config.crossed), TILE)
        if network.crossings:
            row = shape.attention.row.padded(LANES)
            count, form = len(network.crossings) * row.heads * stride, FORMATS[cross_dtype(config.kv_dtype)].memory
            for name, width in zip(CROSS, (row.key, row.value), strict=True):
                arrays[name] = Array((count, width), form, fixed=count * width, spare=SPARE_ROWS * width)
        for arena in kv.arenas:
            arrays |= {arena.prefix + name: array for name, array in arena.stored(config.kv_dtype).items()}
        temporaries = {
            "logits": arrays["logits"].bytes("scratch"),  # a copy, which the caller has
            "angles": 2 * arrays["rope"].bytes("scratch"),  # of which tables are made
        } | kv.temporaries()
        return cls(arrays | kv.bookkeeping(), temporaries, kv, scratch, kept, rope, tokens, copies, stride)

    def cross_row(self, network: Network, layer: int) -> int:
        """The first row that a layer's cross attention reads."""
        before = (core.kv_heads for core in network.attention[:layer] if core and core.across)
        return sum(before) * self.cross_stride

    @property
    def table_of_angles(self) -> int:
        """Values of one kind's table in `rope`."""
        return self.rope.number * self.arrays["rope"].shape[-1]

    def bytes(self, part: str) -> int:
        """Bytes of kv, fixed, scratch or lora: see `Array`."""
        return sum(array.bytes(part) for array in self.arrays.values())

    def allocate(self) -> dict[str, AnyArray]:
        return {name: array.zeros() for name, array in self.arrays.items()}
