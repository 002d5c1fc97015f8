"""The golden models, engines on them, a meter, and children whose memory is measured."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edge.backends import find_backend
from edge.backends.base import AdaptedEngine, Engine, EngineConfig
from edge.backends.kv_cache import KVCache, KVState
from edge.backends.llamacpp.library import is_installed
from edge.backends.tvm.gpu.hosts import Adapter, all_adapters, host_named
from edge.devices.power.base import Reading
from edge.model.adapters.lora import Lora
from edge.model.model import Model, open_model
from edge.storage import cache
from edge.storage.completion import record_path
from edge.types import AnyArray, FloatArray, IntArray

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_MODELS = ("llama-gqa-tied", "llama-gqa-untied", "llama-one-layer", "llama-rope-scaled")
SOME_GPU = os.environ.get("EDGE_TEST_GPU", "wgpu:0")  # what most tests of the gpu engine run on, as EDGE_GPU names it
GPU_HOST = SOME_GPU.partition(":")[0]
Engines = Callable[[Engine], Engine]
"""The fixture `engines`, which closes what is passed through it after the test."""
CHUNK, CAPACITY, SINKS = 8, 32, 4  # how the streaming answers were made, see golden/make.py

# Starts the program given as arguments and prints its exit status and its peak resident set in KiB. It stands
# between us and the child because Linux hands a process's peak down to the program that it becomes: a direct child
# of pytest would report pytest's own peak.
_LAUNCHER = """
import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


@dataclass(frozen=True)
class Golden:
    """A tiny random Llama and what transformers answers for it; the arrays are described in golden/make.py."""

    model: Model
    tokens: IntArray
    logits: FloatArray
    stream_logits: FloatArray
    gaps_logits: FloatArray
    keep_rows: IntArray
    keep_logits: FloatArray


@lru_cache
def open_golden(name: str) -> Golden:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return Golden(open_model(GOLDEN / f"{name}.gguf"), **arrays)


def load_engine(
    model: Model,
    backend: str,
    kv_dtype: str,
    *,
    capacity: int = 128,
    chunk: int = CHUNK,
    logits_rows: int = 8,
    observes: bool = False,
    lora: Lora | None = None,
    threads: int = 1,
    tuning: dict[str, int] | None = None,
    sequences: int = 1,
    drafts: int = 0,
) -> Engine:
    """An engine without a plan or a session around it. backend: such as `cpu`, `gpu@wgpu:0` or `onnx@qnn`, a provider.
    Skips the test where it is not installed."""
    name, _, place = backend.partition("@")
    require(name)
    if place == "qnn":
        find_adapters()
    with on_gpu(place) if name == "gpu" and place else nullcontext():
        module = find_backend(name, model.file, model.spec)
        config = EngineConfig(
            capacity, chunk, kv_dtype, threads, logits_rows=min(logits_rows, chunk), observes=observes,
            provider=place if name == "onnx" and place else "cpu", lora_rank=lora.size.rank if lora else 0,
            lora_bytes=lora.size.nbytes if lora else 0, tuning=tuning or {}, sequences=sequences,
            drafts=drafts,
        )  # fmt: skip
        engine = module.load(model.file, model.spec, config)
        if lora:
            cast(AdaptedEngine, engine).set_lora(lora)
        return engine


def all_logits(model: Model, tokens: IntArray, backend: str = "reference", dtype: str = "f32", **options: Any) -> Any:
    """Logits after each of these tokens, in an engine of their own. options: of `load_engine`."""
    with closing(load_engine(model, backend, dtype, **options)) as engine:
        return engine.forward_all(tokens).copy()


def require(backend: str) -> None:
    """Skips the test where an engine is not installed, or does not run."""
    if backend == "cpu":
        require_native()
    elif backend == "llamacpp" and not is_installed():
        pytest.skip("needs llama-cpp-python")
    elif backend == "onnx":
        pytest.importorskip("onnxruntime")


def require_native() -> None:
    pytest.importorskip("tvm_ffi")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the native engine runs on x86-64")


def some_tokens(count: int, seed: int = 1) -> IntArray:
    return np.random.default_rng(seed).integers(3, 200, count).astype(np.int32)


@contextmanager
def on_gpu(place: str) -> Iterator[None]:
    """Engines that are loaded meanwhile run on this adapter. Skips the test where there is none."""
    if place not in find_adapters():
        pytest.skip(f"no adapter {place}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_GPU", place)
        yield


@contextmanager
def engine_here(backend: str) -> Iterator[None]:
    """Engines of this backend can be loaded meanwhile, those of the gpu backend on SOME_GPU. Skips the test where it is
    not installed."""
    require(backend)
    with on_gpu(SOME_GPU) if backend == "gpu" else nullcontext():
        yield


@lru_cache
def find_adapters() -> list[str]:
    """Places of all GPUs. Vulkan's software driver finds none once QNN's emulator is loaded, so ask before."""
    return [adapter.place for adapter in all_adapters()]


def first_adapter(host: str) -> Adapter:
    """Skips the test where the driver has none."""
    if not (found := host_named(host).adapters()):
        pytest.skip(f"no adapter through {host}")
    return found[0]


def bring_back(kv: KVCache, state: KVState) -> None:
    """Make the cache what it was when all of it was saved."""
    kv.truncate(0)
    kv.append(state)


def mean_kl(exact: FloatArray, found: FloatArray) -> float:
    """KL divergence of the predictions that logits [tokens, vocab] give, mean over tokens, in nats."""
    p, q = map(log_softmax, (exact, found))
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def log_softmax(logits: AnyArray) -> AnyArray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@dataclass
class FakeMeter:
    """An energy meter: joules of each pass, of each byte that is read, and of each reading."""

    per_pass: float = 0.0
    per_byte: float = 0.0
    per_reading: float = 0.0
    joules: float = 0.0

    def add_bytes(self, count: float) -> None:
        self.joules += self.per_pass + self.per_byte * count

    def read(self) -> Reading:
        self.joules += self.per_reading
        return Reading(self.joules, None, "test", "counter", "process", int(self.joules))


def copy_kernels(folder: Path) -> None:
    """Put the compiled passes that were used last into another cache folder: to compile them again takes long."""
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    for entry in cache.entries("kernels")[:10]:
        for path in (entry.path, record_path(entry.path)):
            shutil.copy2(path, folder / "kernels")


@dataclass(frozen=True)
class Child:
    """A Python process that has ended. Sizes are bytes."""

    status: int
    output: Any  # the JSON of the last line that it printed
    errors: str
    peak: int  # its peak resident set, as the kernel counted it


def run_child(code: str, *arguments: object) -> Child:
    """Run Python code in a process of its own; `arguments` are its sys.argv[1:]. It may import this file."""
    program = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("OPENBLAS_NUM_THREADS", None)  # memory is that of a user's process
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, *program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *printed, account = done.stdout.splitlines()
    status, peak = map(int, account.split())
    return Child(status, json.loads(printed[-1]) if printed else None, done.stderr, peak * 1024)
