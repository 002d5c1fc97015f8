"""What pytest does with the tests: options, shares, wings and costs; fixtures that several files use.

`surroundings.py` has what is set before tests run, `golden_models.py` models, engines and children.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surroundings import (  # noqa: F401
    CACHE,
    EXAMPLES,
    SHARED_FIXTURES,
    calm,
    examples,
    exhaustive,
    forked,
    in_flags,
    own_cache,
)

# isort: split
import pytest
from cost import Cost
from golden_models import (  # noqa: F401
    CAPACITY,
    CHUNK,
    GOLDEN,
    GOLDEN_MODELS,
    GPU_HOST,
    SINKS,
    SOME_GPU,
    Child,
    Engines,
    FakeMeter,
    Golden,
    all_logits,
    bring_back,
    copy_kernels,
    engine_here,
    find_adapters,
    first_adapter,
    load_engine,
    log_softmax,
    mean_kl,
    on_gpu,
    open_golden,
    require,
    run_child,
    some_tokens,
)
from shares import Share
from wings import Wings, mark_wings

from edge.backends.tvm.compiler.child import evict_library
from edge.devices.host import logical_cores
from edge.model.model import Model, open_model

if TYPE_CHECKING:
    from browser import Page

    from edge.run.session import Session

NEEDS_WASM = pytest.mark.skipif(
    not find_spec("tvm") or not find_spec("ziglang"), reason="no TVM, or no linker for WebAssembly"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", default="no", metavar="no|all|MINUTES",
        help="tests marked exhaustive: none of them (the default), all, or only these, as many as begin in MINUTES",
    )  # fmt: skip
    parser.addoption("--wings", action="store_true", help="list which files of tests, and parts of them, did not run")


def pytest_configure(config: pytest.Config) -> None:
    """Forget what earlier runs remembered in the cache, before any worker starts."""
    if config.getoption("exhaustive") == "no":  # LLVM's optimizations are most of what software drivers' compilers do
        os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
        os.environ.setdefault("GALLIVM_PERF", "nopt")
    if (chosen := config.getoption("exhaustive")) not in ("no", "all"):
        config.pluginmanager.register(Share(float(chosen), hasattr(config, "workerinput")), "share")
    config.pluginmanager.register(Cost(whole=config.getoption("wings") and not hasattr(config, "workerinput")))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Wings(whole=config.getoption("wings")))
        for folder in ("hashes", "history"):
            shutil.rmtree(CACHE / folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules and items stay to the end: garbage is not looked for among them, an eighth of collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what --exhaustive leaves out."""
    chosen, share = config.getoption("exhaustive"), config.pluginmanager.get_plugin("share")
    arguments = config.invocation_params.args
    named = tuple(each.partition("::")[2] for each in arguments if "::" in each)  # they run, whatever their marks

    def is_wanted(item: pytest.Item) -> bool:
        if any(item.get_closest_marker(name) and config.option.markexpr != name for name in ("train", "evaluations")):
            return False
        seldom = item.get_closest_marker("exhaustive") is not None
        if chosen in ("no", "all"):
            return chosen == "all" or not seldom or item.nodeid.partition("::")[2].startswith(named)
        return seldom and not share.is_done(item)

    wanted = [is_wanted(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, is_kept in zip(items, wanted, strict=True) if not is_kept])
    items[:] = compress(items, wanted)
    mark_wings(items)


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
    """Loads sessions of a model, golden ones by name, in the reference engine if no other is named, and closes them."""
    from edge.run.starting.loading import load

    with ExitStack() as opened:

        def make(model: Model | str = "llama-gqa-tied", **options: Any) -> Session:
            found = GOLDEN / f"{model}.gguf" if isinstance(model, str) else model
            options = {"backend": "reference", "max_kv_size": 500, "threads": 1, **options}
            return opened.enter_context(load(found, **options))

        yield make


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as the cores whose time a container grants."""
    return logical_cores()


@pytest.fixture
def never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose caller is slow are not kept in the history; on a loaded machine a test may be such a caller. And
    predictions are those of a quiet machine."""
    monkeypatch.setattr("edge.run.decoding.generation._MOST_HELD", math.inf)
    monkeypatch.setattr("edge.lab.prediction.forecast.neighbours", lambda: 0.0)


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Pass an engine through this to have it closed after the test."""
    with ExitStack() as stack:
        yield lambda engine: stack.enter_context(closing(engine))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M-Instruct: the `demo` extra, which the tests need, brings it."""
    return open_model("smollm2-135m")
