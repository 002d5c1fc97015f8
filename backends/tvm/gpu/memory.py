"""The memory of a pass on GPUs, counted once: engines create the buffers that plans add up, besides those of weights
and adapters (weights.py, adapters.py).

    tables                  the state of a pass, angles, positions: `Tables`
    keys, values, …         rows of all heads (kv/memory.py) │ staging rows, through which the host reads and writes
    cross_keys, …           of an encoder's states (crossing.py) │ staging rows
    states                  fixed states
    x, normed, qkv, …       activations of a chunk
    logits, tokens, found   results
"""

from __future__ import annotations

from dataclasses import replace

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.tvm.cpu.arguments import cross_dtype
from edge.backends.tvm.gpu import ENGINE
from edge.backends.tvm.gpu.adapters import Adapters
from edge.backends.tvm.gpu.crossing import cross_rows
from edge.backends.tvm.gpu.design import CROSS, RowForm, Tables, Tuning, normal_values, scratch_sizes, tokens_of
from edge.backends.tvm.gpu.kv import arena_buffers
from edge.backends.tvm.kv.memory import KVMemory
from edge.backends.tvm.memory import Array
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass


@dataclass(frozen=True)
class DeviceMemory:
    """Buffers on the device and arrays in main memory, by name. temporaries: see `PassMemory`."""

    buffers: dict[str, Array]
    arrays: dict[str, Array]
    temporaries: dict[str, int]
    kv: KVMemory

    @classmethod
    def of(cls, spec: ModelSpec, config: EngineConfig, tables: Tables | None = None) -> DeviceMemory:
        """tables: of the design; None: the largest of models with this spec."""
        shape, network = ENGINE.shape_of(spec), find_network(spec)
        config = replace(config, reads=0)
        kv = KVMemory.of(shape, LayerKinds.of(network.windows, network.rowless), config, spec.context)
        if tables is None:
            normal, kinds = normal_values(shape, config.kv_dtype), max(1, len(network.ropes))
            tables = Tables.of(
                shape.layers, shape.kv_heads, kinds, tokens_of(config), shape.head // 2, normal,
                together=config.together,
            )  # fmt: skip
        arrays = {name: replace(array, kv=0, fixed=0) for name, array in kv.bookkeeping().items()}
        arrays["attention"] = replace(arrays["attention"], scratch=arrays["attention"].size)
        rows = max(config.logits_rows, config.together)
        arrays["logits"] = Array((rows, shape.vocab), "float32", scratch=rows * shape.vocab)
        positions = kv.bookkeeping()[f"{kv.arenas[-1].prefix}positions"]
        rank = Adapters.of(config.lora_rank, config.kv_dtype).rank
        splits = Tuning().chosen(config).row_splits  # software adapters split nothing by default
        scratch = scratch_sizes(
            shape, tables, tokens_of(config), config.logits_rows, positions.size, rank, splits, config.together
        )
        buffers = {name: Array((size // 4,), "uint32", scratch=size // 4) for name, size in scratch.items()}
        unused = positions.size - positions.kv - positions.fixed
        buffers["tables"] = replace(buffers["tables"], scratch=buffers["tables"].size - unused)
        for arena in kv.arenas:
            observes = config.observes and not arena.prefix
            form = RowForm.of(arena.core, config.kv_dtype)
            found = arena_buffers(arena.whole, arena.ringed, form, observes=observes)
            buffers |= {arena.prefix + name: array for name, array in found.items()}
        if crossed := cross_rows(network, config):
            found = arena_buffers(0, crossed, RowForm.of(shape.attention, cross_dtype(config.kv_dtype)))
            buffers |= {CROSS + name: array for name, array in found.items()}
        if fixed := sum(network.fixed_values):
            buffers["states"] = Array((fixed,), "float32", fixed=fixed)
        return cls(buffers, arrays, kv.temporaries(), kv)

    def bytes(self, part: str) -> int:
        """Bytes of buffers for kv, fixed or scratch: see `Array`."""
        return sum(buffer.bytes(part) for buffer in self.buffers.values())

    @property
    def on_host(self) -> int:
        """Bytes of scratch in main memory."""
        return sum(array.bytes("scratch") for array in self.arrays.values()) + sum(self.temporaries.values())
