"""Tuning on a remote device through TVM's RPC: candidates are compiled here, sent, and timed there.

The device runs TVM's RPC server and none of our code. Each measurement times one job of the pass, on TVM's threads
instead of the engine's, with the model's weights, which are sent once.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.tuning import CHUNK, Field, Values
from edge.backends.tvm import ENGINE
from edge.backends.tvm.cpu.arguments import LINE, LINES, POINTERS, Job
from edge.backends.tvm.cpu.memory import PassMemory
from edge.backends.tvm.cpu.table import fill_table
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.store import heads_of
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import open_weights
from edge.backends.tvm.sources import source_hash
from edge.backends.tvm.targets import Target, choose_target, target_named, with_tuning
from edge.backends.tvm.tuning.lookup import make_subject
from edge.backends.tvm.tuning.space import make_space
from edge.devices.output import work_folder
from edge.devices.records import Subject
from edge.errors import EngineError, InputError, MissingExtraError
from edge.formats.gguf import GGUFFile
from edge.lab.tuning.rig import ANSWER, Depths
from edge.lab.tuning.setting import Pool, Setting
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, IntArray

_STEPS = 8  # decode steps measured at once
_ANSWERS_S = 5.0  # within which a tracker takes a connection


def remote_setting(
    file: GGUFFile, spec: ModelSpec, device: str, kv_dtype: str, tracker: str, key: str, isa: str | None = None
) -> Setting:
    """The setting to tune on the device that has `key` at the tracker. isa: the name of its target, if not this
    machine's.

    Raises InputError if it cannot be reached, MissingExtraError without the packages that RPC needs.
    """
    target = _target(isa)
    session = _connect(tracker, key)
    depths, cores = Depths.of(spec.context), int(session.get_function("runtime.NumThreads")())
    space = make_space(target, kv_dtype, cores, depths.prompt)
    here = make_subject(spec, target, kv_dtype)
    name = key if device == "host" else device
    subject = Subject(name, name, cores, target.name, kv_dtype, here.shape)

    def open_remote(on_compile: Callable[[], None]) -> Remote:
        return Remote(session, file, spec, target, space, kv_dtype, cores, on_compile)

    return Setting(subject, space, f"{depths.about()}, by RPC", open_remote, source_hash("."), ENGINE.versions())


class Remote:
    """Candidates on the device, loaded on demand. `measure` is for `search`."""

    def __init__(
        self, session: Any, file: GGUFFile, spec: ModelSpec, target: Target, space: tuple[Field, ...], kv_dtype: str,
        cores: int, on_compile: Callable[[], None],
    ) -> None:  # fmt: skip
        self._session, self._device, self._target, self._space = session, session.cpu(0), target, space
        self._kv_dtype, self._cores, self._on_compile = kv_dtype, cores, on_compile
        self._spec, self._layout, self._depths = spec, make_layout(file, spec), Depths.of(spec.context)
        self._weights = self._send(open_weights(file, self._layout).bytes)
        self._candidates = Pool(space, self._load, lambda candidate: None)
        self._compiled = 0

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._candidates.close()

    def measure(self, values: Values, part: str) -> float:
        """Seconds of the prompt, or of the answer. Raises EngineError if the values do not compile."""
        candidate = self._candidates.get(values, part)
        if part == CHUNK:
            prompt, chunk = self._depths.prompt, candidate.chunk
            starts = range(0, prompt, chunk)
            return sum(candidate.seconds(Job.CHUNK, min(chunk, prompt - start), start, 1) for start in starts)
        depths = (self._depths.short, self._depths.long)
        return sum(candidate.seconds(Job.STEP, 1, rows, _STEPS) * ANSWER / 2 for rows in depths)

    def _load(self, values: Values) -> _Candidate:
        self._on_compile()
        tuning = {each.name: values[each.name] for each in self._space if each.compiled}
        target, shape = with_tuning(self._target, tuning), self._layout.shape
        threads, chunk = values.get("threads", self._cores), values.get("chunk", self._depths.prompt)
        module = self._compile(Design.of(self._layout, self._kv_dtype, target), threads)
        config = EngineConfig(self._depths.capacity, chunk, self._kv_dtype, threads)
        memory = PassMemory.of(self._spec, config, target)
        sizes = {name: memory.arrays[name] for name in POINTERS if name in memory.arrays}
        arrays = {name: np.zeros(array.size + array.spare, array.dtype) for name, array in sizes.items()}
        for name in (*memory.kv.arenas[0].stored(self._kv_dtype), "tokens"):
            arrays[name][:] = 1
        most, kinds = np.zeros_like(arrays["lengths"]), memory.kv.kinds
        parts = zip(memory.kv.regions(), ((kinds.whole, shape.attention), (kinds.ringed, shape.ringed)), strict=True)
        for regions, (layers, core) in parts:
            heads = heads_of(shape, core.row, layers)
            arrays["starts"][heads], most[heads] = regions.starts, regions.limits
        arrays |= {
            "job": np.zeros(len(Job.NAMES), np.int64), "lines": np.zeros(LINES * threads * LINE, np.int32),
            "table": np.array(fill_table(self._layout, memory), np.int64),
        }  # fmt: skip
        sent = {name: self._send(array) for name, array in arrays.items()}
        return _Candidate(module, self._device, sent | {"weights": self._weights}, threads, chunk, most)

    def _compile(self, design: Design, threads: int) -> Any:
        """The candidate as a library on the device."""
        import tvm
        from tvm.ir.transform import PassContext
        from tvm.support import cc

        from edge.backends.tvm.cpu.generator import run_job

        triple = design.target.llvm["mtriple"]
        native = triple.partition("-")[0] == platform.machine()
        compiler = (os.environ.get("CC") or "cc") if native else f"{triple}-gcc"
        try:
            with PassContext(config={"tirx.disable_storage_rewrite": True}):
                module = tvm.IRModule({"run_job": run_job(design, threads)})
                built = tvm.compile(module, target=tvm.target.Target(design.target.llvm))
            with work_folder() as folder:
                self._compiled += 1  # a new name, because the device has the others mapped
                library = folder / f"candidate{self._compiled}.so"
                built.export_library(str(library), fcompile=cc.cross_compiler(compiler))
                self._session.upload(str(library))
                return self._session.load_module(library.name)
        except Exception as error:  # TVM's and the linker's errors have no common type
            raise EngineError(f"a candidate does not compile: {str(error).splitlines()[-1][:200]}") from None

    def _send(self, array: AnyArray) -> Any:
        import tvm

        words = array.view(np.uint16) if array.dtype == np.float16 else array  # as kernels declare them
        return tvm.runtime.tensor(np.ascontiguousarray(words), self._device)


class _Candidate:
    """A compiled pass on the device, with its arrays. most: rows that each head may hold."""

    def __init__(
        self, module: Any, device: Any, arrays: dict[str, Any], threads: int, chunk: int, most: IntArray
    ) -> None:  # fmt: skip
        self.chunk, self._threads, self._most, self._device = chunk, threads, most, device
        self._module, self._arrays = module, arrays
        self._arguments = [arrays[name] for name in POINTERS]

    def seconds(self, kind: int, count: int, rows: int, number: int) -> float:
        """Mean seconds of one job with `rows` rows in the cache, over `number` runs."""
        job = {"kind": kind, "count": count, "position": rows, "wanted": 1}
        job |= {"threads": self._threads, "parts": self._threads}
        try:
            self._arrays["job"].copyfrom(np.array([job.get(name, 0) for name in Job.NAMES], np.int64))
            self._arrays["lengths"].copyfrom(np.minimum(rows, self._most - count).astype(np.int32))
            tokens = np.ones(self._arrays["tokens"].shape, np.int32)
            tokens[count : 2 * count] = np.arange(count)  # each sees those before it
            self._arrays["tokens"].copyfrom(tokens)
            timed = self._module.time_evaluator("run_job", self._device, number=number, repeat=1)
            return float(timed(*self._arguments).mean)
        except Exception as error:  # TVM's own: the device is gone, or the candidate crashed it
            raise EngineError(f"the device failed: {str(error).splitlines()[-1][:200]}") from None


def _connect(tracker: str, key: str) -> Any:
    host, _, port = tracker.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"--tracker takes HOST:PORT, not {tracker!r}")
    try:
        socket.create_connection((host, int(port)), _ANSWERS_S).close()  # TVM would try for a minute
    except (OSError, OverflowError) as error:
        raise InputError(f"there is no tracker at {tracker} ({error})") from None
    if not all(importlib.util.find_spec(name) for name in ("tornado", "cloudpickle")):
        raise MissingExtraError("tornado", "tracker")
    from tvm import rpc

    try:
        return rpc.connect_tracker(host, int(port)).request(key, session_timeout=0, max_retry=1)
    except Exception as error:  # sockets, and TVM's own
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"no device with key {key!r} at the tracker {tracker} ({why})") from None


def _target(name: str | None) -> Target:
    return choose_target() if name is None else target_named(name, f"--target {name!r} is unknown")
