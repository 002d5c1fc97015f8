"""Compiled passes on this machine: found in the cache folder or compiled, loaded, and called.

The warm path needs TVM's small runtime only (threads, and a loader of object files): no compiler, no linker.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge import cache
from edge.backends.tvm.design import Design
from edge.backends.tvm.sources import source_hash
from edge.devices.host import usable_cores
from edge.errors import EngineError

_PACKAGES = ("tvm", "tvm_ffi", "tvm_ffi_orcjit")
_USUAL_COMPILE_S = 12.0  # for the progress bar only
_COMPILE_TIMEOUT_S = 600.0
_BIG_CORES = 1  # an affinity mode of TVM: without effect, as binding is off
_SPINS = "20000"  # how often an idle worker yields before it sleeps: some milliseconds

Progress = Callable[[float], None]


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in _PACKAGES)


def compiled(design: Design, progress: Progress | None = None) -> Any:
    """The module with the design's functions, compiled in a child process if it is not in the cache.

    Raises EngineError if TVM's compiler fails, EdgeError if the cache folder cannot be written.
    """
    text = design.to_json()
    compiler = _tvm_library("compiler").stat()  # stands for its version, which takes 20 ms to look up
    key = hashlib.sha256(f"{text}\n{source_hash('.')}\n{compiler.st_size}".encode()).hexdigest()[:32]
    about = f"{design.shape.layers} layers, {design.kv_dtype} KV, {design.target.name}"
    path = cache.find_or_make("kernels", key, ".o", lambda out: _compile(text, out, progress), about=about)
    return _load(path)


def _compile(design: str, out: Path, progress: Progress | None) -> None:
    # Isolated from the user's folder: a tvm.py there must not be imported.
    child = subprocess.Popen(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-E", "-m", "edge.backends.tvm.compile", str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with _ended(child), _ticking(progress):
        try:
            _, errors = child.communicate(design, timeout=_COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"TVM's compiler took more than {_COMPILE_TIMEOUT_S:.0f} s") from None
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or [f"status {child.returncode}"]
        raise EngineError(f"TVM's compiler failed ({last[0][:300]}): use --backend llamacpp")


@contextmanager
def _ended(child: subprocess.Popen[str]) -> Any:
    """Whatever happens, the child does not outlive us."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


@contextmanager
def _ticking(progress: Progress | None) -> Any:
    """Show that time passes: the compiler says nothing of how far it is."""
    if progress is None:
        yield
        return
    done, started = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(0.2):
            progress(min(0.95, (time.monotonic() - started) / _USUAL_COMPILE_S))

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


@lru_cache
def _libraries() -> Any:
    """TVM's runtime, loaded once: its library must be there before any object that calls it."""
    # Threads bound to cores would sit beside other programs' threads while another core is free.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_NUM_THREADS", str(usable_cores()))
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPINS)
    import tvm_ffi

    ctypes.CDLL(str(_tvm_library("runtime")), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi


def _tvm_library(name: str) -> Path:
    """A library of TVM's package, found without importing the package, which would load the compiler."""
    spec = importlib.util.find_spec("tvm")
    assert spec and spec.origin
    return Path(spec.origin).parent / "lib" / f"libtvm_{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"


@lru_cache
def _load(path: Path) -> Any:
    _libraries()
    # The loader asks $CXX for its runtime library, which our objects do not use: spare the two processes.
    before = os.environ.get("CXX")
    os.environ["CXX"] = "/nonexistent"
    try:
        import tvm_ffi_orcjit

        return tvm_ffi_orcjit.default_session().load_module(str(path))
    finally:
        if before is None:
            del os.environ["CXX"]
        else:
            os.environ["CXX"] = before


def use_threads(count: int) -> None:
    """Let parallel launches of the calling thread use `count` threads, or as many as there are cores."""
    if getattr(_local, "threads", None) != count:
        _libraries().get_global_func("runtime.config_threadpool")(_BIG_CORES, count)
        _local.threads = count


_local = threading.local()
