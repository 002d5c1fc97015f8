"""The GPU engine: tokens in, logits out, all kernels of a pass in one submission to the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.checks import check_batch, check_lora
from edge.backends.kv_cache import state_key
from edge.backends.rope import CacheRope
from edge.backends.tvm.gpu import ENGINE, picking
from edge.backends.tvm.gpu.adapters import Adapted, pack_adapters
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.crossing import CrossRows
from edge.backends.tvm.gpu.design import Design, State
from edge.backends.tvm.gpu.hosts import card_of, choose_adapter, open_device
from edge.backends.tvm.gpu.passes import DeviceKV, DevicePasses
from edge.backends.tvm.gpu.sequence import GPUSequence
from edge.backends.tvm.gpu.weights import pack_weights
from edge.backends.tvm.kv.store import choose_normals, make_kv
from edge.backends.tvm.sources import source_hash
from edge.devices.power.estimate import gpu_work
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import FloatArray, IntArray

_COMPILED, _PREPARED = 0.3, 0.5  # of the time of loading


class GPUEngine:
    """The BatchedEngine, VerifyingEngine, ObservedEngine, PickingEngine, AdaptedEngine and CrossEngine protocols over a
    program on a device. All memory is allocated at load."""

    capabilities = ENGINE.CAPABILITIES
    most_candidates, most_banned = picking.TOP, State.MOST_BANS

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> None:
        self.spec, self.config, self._file = spec, config, file
        report = progress or (lambda _part, _doing="": None)
        adapter = choose_adapter(config.adapter or None)
        self.card = card_of(adapter)
        design = self.design = Design.of(file, spec, config, adapter)
        program = program_of(design, lambda part: report(_COMPILED * part, "making kernels for this GPU"))
        device = open_device(adapter)
        weakref.finalize(self, device.close)
        try:
            device.prepare(
                program.kernels,
                lambda part: report(_COMPILED + (_PREPARED - _COMPILED) * part, "compiling kernels for this GPU"),
            )
            self.passes = passes = DevicePasses(file, spec, config, design, device, program)
            self._key = state_key(f"{ENGINE.NAME} {source_hash('gpu', 'kv')}", file, spec, config.kv_dtype)
            self._sequences = [GPUSequence(passes, self._make_cache(each)) for each in range(config.sequences)]
            first = self._sequences[0]  # the engine's own cache and passes
            self.kv, self.append_rows, self.observe = first.kv, first.append_rows, first.observe
            self.forward, self.forward_all, self.forward_top = first.forward, first.forward_all, first.forward_top
            self.run_greedy, self.time_pass = first.run_greedy, first.time_pass
            self.verify, self.verify_top = first.verify, first.verify_top
            done = 0
            for name, offset, words in pack_weights(file, spec, design.weights):
                device.write(passes.buffers[name], offset, words)
                done += words.nbytes
                report(_PREPARED + (1 - _PREPARED) * done / design.weights.nbytes)
            passes.record()
            self._warm_up()
        except BaseException:
            device.close()
            raise

    def _make_cache(self, sequence: int) -> DeviceKV:
        passes, config, network = self.passes, self.config, self.passes.network
        positions = self.spec.context if config.per_head else config.capacity  # gaps stay open while the context allows
        rope, kv = CacheRope(self._file, network, positions, halves=network.halves), passes.memory.kv
        regions = kv.regions(sequence)
        return make_kv(passes.arena, kv.kinds, *regions, rope, self._key, config, passes.state, passes.rings)

    def _warm_up(self) -> None:
        """Run every decode kernel once: some drivers compile on the first run, whose time, energy and memory belong to
        loading. If adapters are supported, they are zero here. Then choose the normals of the keys' reflections."""
        passes, kv = self.passes, self.kv
        if passes.across:
            self.set_crossed(np.zeros((1, self.spec.hidden), np.float32))
        for count in sorted({1, min(2, self.config.chunk, kv.free)}):
            self.forward(np.zeros(count, np.int32))
            if count == 1 and "long step" in passes.recordings:
                passes.device.run(passes.recordings["long step"])
            kv.truncate(0)
        for name in sorted(passes.recordings.keys() & {"batch", "picked", "top", "tops"}):
            passes.device.run(passes.recordings[name])
        passes.device.read(passes.buffers["tokens"], 0, 4)
        if passes.adapted:
            passes.adapted = frozenset()
            passes.record()
        if passes.normals.size:
            choose_normals(kv, self.forward, self.spec.vocab)
            self._key = kv.settings
            for each in self._sequences:
                each.kv.settings = self._key
            passes.write("tables", passes.normals, self.design.tables.normals)

    def sequence(self, number: int) -> GPUSequence:
        """See BatchedEngine. Raises InputError for a number that it was not loaded for."""
        if not 0 <= number < len(self._sequences):
            raise InputError(f"the engine was loaded for {len(self._sequences)} sequences: there is no {number}")
        return self._sequences[number]

    def forward_batch(self, tokens: IntArray, sequences: Sequence[int]) -> FloatArray:
        """See BatchedEngine."""
        found, passes = [self.sequence(number) for number in sequences], self.passes
        tokens = check_batch(self.spec, tokens, sequences, [each.kv for each in found])
        if len(found) == 1:
            return found[0].forward(tokens)[None]
        passes.prepare_batch(tokens, [each.kv for each in found])
        with gpu_work(self.config.threads):
            passes.device.run(passes.recordings["batch"], tokens.size)
            for each in found:
                each.kv.appended(1)
            return passes.logits(tokens.size)

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Products that no adapter changes run the kernels without adapters."""
        passes = self.passes
        check_lora(lora, self.config)
        passes.check_open()
        for each in self._sequences:
            each.kv.truncate(0)
            each.kv.settings = self._key
        passes.adapted = frozenset()
        try:
            if lora:
                passes.adapted = self._write_adapters(lora)
                self.kv.settings += f" {lora.key}"
        finally:
            passes.record()

    def _write_adapters(self, lora: Lora) -> Adapted:
        """Upload adapters; returns the matrices that they change."""
        tensors, design, changed = find_tensors(self._file, self.spec), self.design, Adapted()
        for (name, offset, words), more in pack_adapters(lora, tensors, design.weights, design.adapters):
            self.passes.device.write(self.passes.buffers[name], offset, words)
            changed |= more
        return changed

    def set_crossed(self, states: FloatArray) -> None:
        """See CrossEngine."""
        across, passes = self._open_across(), self.passes

        def run(part: FloatArray) -> None:
            passes.prepare_states(part)
            passes.device.run(passes.recordings["cross"], len(part))

        with gpu_work(self.config.threads):
            across.fill(states, run)

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """See CrossEngine."""
        return self._open_across().read(layer)

    def rest(self) -> None:
        """See CrossEngine: buffers stay."""

    def _open_across(self) -> CrossRows:
        self.passes.check_open()
        assert self.passes.across
        return self.passes.across

    def close(self) -> None:
        """Free everything; safe to call twice."""
        for each in self._sequences:
            each.kv.closed = True
        self.passes.close()
