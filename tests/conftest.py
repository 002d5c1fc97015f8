"""What several test files share: the golden models, a real model, and children whose memory is measured."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

# Two threads of OpenBLAS in each of two workers wait for each other: small products take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of llama.cpp that wait for each other would keep the cores busy that the other worker's tests want.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# TVM as the processes that compile import it. On a machine with an NVIDIA GPU it would also compile CUDA by itself.
os.environ["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"

# Programs that Python packages bring, such as Node; those of the system come first.
os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)

import numpy as np
import pytest
from cost import Cost
from fork_server import fork_servers
from hypothesis import HealthCheck, settings
from wings import Wings

from edge.backends import find_backend
from edge.backends.base import AdaptedEngine, Engine, EngineConfig
from edge.backends.kv_cache import KVCache, KVState
from edge.backends.tvm.compiler.child import evict_library
from edge.backends.tvm.gpu.hosts import all_adapters
from edge.devices.host import logical_cores
from edge.devices.memory.pressure import Pressure, read_pressure
from edge.errors import speaking
from edge.model.lora import Lora
from edge.model.model import Model, open_model
from edge.storage import cache
from edge.storage.completion import record_path
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from browser import Page

    from edge.run.session import Session

GOLDEN = Path(__file__).parent / "golden"
CACHE = Path(os.environ.get("EDGE_TEST_CACHE") or Path(__file__).parents[1] / "build" / "test-cache").absolute()
GOLDEN_MODELS = ("llama-gqa-tied", "llama-gqa-untied", "llama-one-layer", "llama-rope-scaled")
SOME_GPU = os.environ.get("EDGE_TEST_GPU", "wgpu:0")  # what most tests of the gpu engine run on, as EDGE_GPU names it
GPU_HOST = SOME_GPU.partition(":")[0]
NEEDS_WASM = pytest.mark.skipif(
    not find_spec("tvm") or not find_spec("ziglang"), reason="no TVM, or no linker for WebAssembly"
)
CHUNK, CAPACITY, SINKS = 8, 32, 4  # how the streaming answers were made, see golden/make.py

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = 50  # of a property, in make test
SHARED_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # for properties that use a fixture
settings.register_profile(
    "test",
    max_examples=EXAMPLES,
    deadline=None,  # tests never judge speed
    suppress_health_check=[HealthCheck.too_slow],  # nor a loaded machine's
    print_blob=True,
    derandomize=os.environ.get("CI") == "true",  # a change is judged by what it does; developers' runs explore
)
settings.register_profile("all", settings.get_profile("test"), max_examples=10 * EXAMPLES)
settings.load_profile("test")

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
) -> Engine:
    """An engine on one thread, without a plan or a session around it. backend: such as `cpu`, `gpu@wgpu:0` or
    `onnx@qnn`, a provider."""
    name, _, place = backend.partition("@")
    if place == "qnn":
        find_adapters()
    with on_gpu(place) if name == "gpu" and place else nullcontext():
        module = find_backend(name, model.file, model.spec)
        config = EngineConfig(
            capacity, chunk, kv_dtype, threads=1, logits_rows=min(logits_rows, chunk), observes=observes,
            provider=place if name == "onnx" and place else "cpu", lora_rank=lora.size.rank if lora else 0,
        )  # fmt: skip
        engine = module.load(model.file, model.spec, config)
        if lora:
            cast(AdaptedEngine, engine).set_lora(lora)
        return engine


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


@lru_cache
def find_adapters() -> list[str]:
    """Places of all GPUs. Vulkan's software driver finds none once QNN's emulator is loaded, so ask before."""
    return [adapter.place for adapter in all_adapters()]


def bring_back(kv: KVCache, state: KVState) -> None:
    """Make the cache what it was when all of it was saved."""
    kv.truncate(0)
    kv.append(state)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", default="no", metavar="no|all|K/N",
        help="tests marked exhaustive: none of them (the default), all, or only these: the K-th of N shares",
    )  # fmt: skip
    parser.addoption("--wings", action="store_true", help="list which files of tests, and parts of them, did not run")


def pytest_configure(config: pytest.Config) -> None:
    """Forget what earlier runs remembered in the cache, before any worker starts."""
    if config.getoption("exhaustive") == "no":  # LLVM's optimizations are most of what software drivers' compilers do
        os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
        os.environ.setdefault("GALLIVM_PERF", "nopt")
    config.pluginmanager.register(Cost(whole=config.getoption("wings") and not hasattr(config, "workerinput")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Wings(whole=config.getoption("wings")))
        for folder in ("hashes", "history"):
            shutil.rmtree(CACHE / folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what --exhaustive leaves out. A test's share depends on its name alone, so workers agree."""
    chosen = config.getoption("exhaustive")
    arguments = config.invocation_params.args
    named = tuple(each.partition("::")[2] for each in arguments if "::" in each)  # they run, whatever their marks

    def is_wanted(item: pytest.Item) -> bool:
        if any(item.get_closest_marker(name) and config.option.markexpr != name for name in ("train", "evaluations")):
            return False
        exhaustive = item.get_closest_marker("exhaustive") is not None
        if chosen in ("no", "all"):
            return chosen == "all" or not exhaustive or item.nodeid.partition("::")[2].startswith(named)
        share, shares = map(int, chosen.split("/"))
        return exhaustive and zlib.crc32(item.nodeid.encode()) % shares == share - 1

    kept = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def examples(count: int) -> int:
    """max_examples of a property test that has `count` in make test; make test-all runs more."""
    return count * settings.default.max_examples // EXAMPLES


def pytest_sessionstart(session: pytest.Session) -> None:
    """Peaks of compilers are measured: those of a library that was just installed depend on who else has mapped it."""
    if not hasattr(session.config, "workerinput"):
        evict_library()


def pytest_unconfigure() -> None:
    """llama-cpp-python leaves /dev/null open twice, of which Python would warn at exit."""
    if null := sys.modules.get("llama_cpp._utils"):
        null.outnull_file.close()
        null.errnull_file.close()


@contextmanager
def chromium(folder: Path, *flags: Sequence[str]) -> Iterator[Page]:
    """A page of Chromium; skips the test where there is none. Arguments as of `browser`."""
    from browser import browser, find_chromium

    if (program := find_chromium()) is None:
        pytest.skip("no Chromium")
    with browser(program, folder, *flags) as page:
        yield page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def open_session() -> Iterator[Callable[..., Session]]:
    """Loads sessions of a golden model, in the reference engine if no other is named, and closes them."""
    from edge.run.starting.loading import load

    with ExitStack() as opened:

        def make(name: str = "llama-gqa-tied", **options: Any) -> Session:
            options = {"backend": "reference", "max_kv_size": 500, "threads": 1, **options}
            return opened.enter_context(load(GOLDEN / f"{name}.gguf", **options))

        yield make


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as the cores whose time a container grants."""
    return logical_cores()


@pytest.fixture(scope="session", autouse=True)
def in_flags() -> Iterator[None]:
    """Tests quote errors as the command line words them; `test_arguments.py` compares that with the words for Python,
    which children of tests read."""
    importlib.import_module("edge.options")  # whose flags errors name
    with speaking("flags"):
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels and packed weights are kept in build/, apart from the user's; children inherit the setting.

    All workers and later runs share them: keys hash the sources, so a changed kernel is compiled anew.
    EDGE_TEST_CACHE names another folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_CACHE", str(CACHE))
        patch.setenv("EDGE_CACHE_LIMIT", "4GiB")
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # children would compile all modules again
        patch.setenv("EDGE_TUNING", str(tmp_path_factory.mktemp("tuning")))
        patch.setenv("EDGE_DEVICES", str(tmp_path_factory.mktemp("devices")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, fork_servers(patch):
        yield


@pytest.fixture
def never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose caller is slow are not kept in the history; on a loaded machine a test may be such a caller."""
    monkeypatch.setattr("edge.run.generation._MOST_HELD", math.inf)


def mean_kl(exact: FloatArray, found: FloatArray) -> float:
    """KL divergence of the predictions that logits [tokens, vocab] give, mean over tokens, in nats."""
    p, q = (_log_softmax(each.astype(np.float64)) for each in (exact, found))
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def _log_softmax(logits: AnyArray) -> AnyArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def copy_kernels(folder: Path) -> None:
    """Put the compiled passes that were used last into another cache folder: to compile them again takes long."""
    (folder / "kernels").mkdir(parents=True, mode=0o700)
    for entry in cache.entries("kernels")[:10]:
        for path in (entry.path, record_path(entry.path)):
            shutil.copy2(path, folder / "kernels")


@pytest.fixture
def engines() -> Iterator[Callable[[Engine], Engine]]:
    """Pass an engine through this to have it closed after the test."""
    with ExitStack() as stack:
        yield lambda engine: stack.enter_context(closing(engine))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M-Instruct: the `demo` extra, which the tests need, brings it."""
    return open_model("smollm2-135m")


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


@pytest.fixture(scope="session", autouse=True)
def calm() -> Iterator[None]:
    """This machine's memory pressure, which tests raise together, must not shorten caches of theirs. Fake systems
    keep their own."""

    def read(root: Path) -> Pressure:
        found = read_pressure(root)
        return replace(found, stalled=None) if root == Path("/") else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.run.budgets.meters.read_pressure", read)
        yield
