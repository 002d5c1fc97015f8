"""Encoders of pictures and sounds on GPUs: rows in, states out, in one submission. A layer's keys and values replace
those of the layer before it."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.counts import Footprint
from edge.backends.rope import find_rotation
from edge.backends.tvm.gpu import ENGINE, kernels_bytes
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import Design, RowForm, State, Tables, scratch_sizes
from edge.backends.tvm.gpu.hosts import choose_adapter, open_device
from edge.backends.tvm.gpu.weights import pack_weights, packed_bytes
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.shape import Shape
from edge.devices.power.estimate import gpu_work
from edge.errors import EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import FloatArray, IntArray

_FEWEST = 256  # patches of a program


class GPUEncoder:
    """The methods by which `edge.run.senses` encodes."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> None:
        self.spec, self.config, report = spec, config, progress or (lambda _part, _doing="": None)
        adapter = choose_adapter(config.adapter or None)
        design = self._design = Design.of(file, spec, for_program(config), adapter)
        sizes = row_buffers(design.shape, design.chunk, design.kv_dtype) | design.buffers(0)
        if max(sizes.values()) > adapter.limits.binding:
            raise UnsupportedError(
                f"{config.chunk} patches take a buffer of {max(sizes.values()) >> 20} MiB, kernels of this GPU see "
                f"{adapter.limits.binding >> 20}: use fewer --image-tokens, or --backend=cpu"
            )
        program = program_of(design, lambda part: report(0.3 * part, "making kernels for this GPU"))
        device = self._device = open_device(adapter)
        weakref.finalize(self, device.close)
        try:
            device.prepare(program.kernels, lambda part: report(0.3 + 0.2 * part, "compiling kernels for this GPU"))
            self._buffers = {name: device.create(size) for name, size in sizes.items()}
            for name, offset, words in pack_weights(file, spec, design.weights):
                device.write(self._buffers[name], offset, words)
            self._pass = device.record(program.dispatches("chunk"), self._buffers)
        except BaseException:
            device.close()
            raise
        network = find_network(spec)
        self._rotation, self._out = find_rotation(file, network, halves=network.halves), network.normed
        self._closed = False

    def hidden(self, tokens: IntArray, places: Places, given: GivenRows) -> FloatArray:
        """The states behind the last layer, float32 [n, hidden], of rows that are all given."""
        if self._closed:
            raise EngineError("the engine is closed")
        design, device, count = self._design, self._device, tokens.size
        padded, tables, begins = design.shape.padded_hidden, design.tables, places.begins
        assert begins is not None
        state = np.zeros(tables.angles, np.uint32)
        state[State.COUNT] = count
        starts = np.arange(design.shape.kv_heads) * round_up(design.chunk, TILE)
        state[tables.starts :][: starts.size * design.shape.layers] = np.tile(starts, design.shape.layers)
        seen = np.stack([begins, places.sees + 1 - begins], axis=1).astype(np.int32)
        rows = np.pad(given.rows(tokens), ((0, 0), (0, padded - self.spec.hidden)))
        with gpu_work(self.config.threads):
            device.write(self._buffers["tables"], 0, state)
            device.write(self._buffers["tables"], 4 * tables.texts, seen)
            for kind in range(len(self._rotation.angles)):
                angles = np.stack(self._rotation.tables(kind, places.positions), axis=1)
                if angles.size:
                    device.write(self._buffers["tables"], 4 * tables.angle_row(kind), angles)
            device.write(self._buffers["x"], 0, np.ascontiguousarray(rows, np.float32))
            device.run(self._pass, count)
            states = device.read(self._buffers["normed" if self._out else "x"], 0, 4 * padded * count)
        return states.view(np.float32).reshape(count, padded)[:, : self.spec.hidden]

    def rest(self) -> None:
        """See CrossEngine: buffers stay."""

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._closed = True
        self._device.close()


def for_program(config: EngineConfig) -> EngineConfig:
    """The passes of a program are as long as a power of two, so that pictures of many sizes share one."""
    chunk = max(_FEWEST, 1 << (config.chunk - 1).bit_length())
    return replace(config, chunk=chunk, capacity=chunk, logits_rows=0, observes=False, lora_rank=0)


def row_buffers(shape: Shape, chunk: int, kv_dtype: str) -> dict[str, int]:
    """Bytes of the buffers with keys and values of a layer."""
    form = RowForm.of(shape.attention, kv_dtype)
    rows = shape.kv_heads * round_up(chunk, TILE)
    found = {"keys": 4 * rows * form.words, "values": 4 * rows * form.words}
    return found | ({"row_scales": 8 * rows} if form.scaled else {})


def count_encoder(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Bytes for passes of a chunk's patches."""
    config, shape = for_program(config), ENGINE.shape_of(spec)
    tables = Tables.of(shape.layers, shape.kv_heads, 1, config.chunk, shape.head // 2, encoder=True)
    scratch = sum(scratch_sizes(shape, tables, config.chunk, 0, 0).values())
    weights, kv = packed_bytes(spec), sum(row_buffers(shape, config.chunk, config.kv_dtype).values())
    return Footprint(
        weights=weights, kv=kv, scratch=scratch, runtime=kernels_bytes(len(shape.blocks), config.kv_dtype), fixed_kv=0,
        gpu=weights + kv + scratch,
    )  # fmt: skip
