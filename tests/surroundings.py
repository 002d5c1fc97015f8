"""The surroundings of all tests: variables set before libraries load, Hypothesis' profiles, folders, forks.

conftest.py imports this file first.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two threads of OpenBLAS in each of two workers wait for each other: small products take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of llama.cpp that wait for each other would keep the cores busy that the other worker's tests want.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# TVM as the processes that compile import it. On a machine with an NVIDIA GPU it would also compile CUDA by itself.
os.environ["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"

# Programs that Python packages bring, such as Node; those of the system come first.
os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)

import pytest
from fork_server import fork_servers, read_calmly, two_cores
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from objects import OBJECTS, share_objects
from quick_code import QUICK, shorten_kernels
from shared import FOLDER  # noqa: F401  (which workers inherit)

from edge.cli.terminal import show
from edge.errors import speaking

# LLVM's optimizations are two thirds of what compiling a small model costs: `make test` does without, `make test-all`
# has the code that users have. Workers inherit the choice.
os.environ.setdefault(QUICK, str(int(not any(each.startswith("--exhaustive") for each in sys.argv))))
_FOLDER = Path(__file__).parents[1] / "build" / ("test-cache" if os.environ[QUICK] == "1" else "test-cache-all")
CACHE = Path(os.environ.get("EDGE_TEST_CACHE") or _FOLDER).absolute()
os.environ[OBJECTS] = str(CACHE / "objects")  # children inherit it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SILENT_S, show.SILENT_S = show.SILENT_S, 600.0  # no lines of progress in what commands print on slow machines

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
if os.environ[QUICK] == "1":  # constants of our modules, which a twentieth of values are, take two seconds to collect
    providers._get_local_constants = lambda: providers._local_constants


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """A parameter for which only make test-all runs a test."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)


def examples(count: int) -> int:
    """max_examples of a property test that has `count` in make test; make test-all runs more."""
    return count * settings.default.max_examples // EXAMPLES


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
    share_objects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_CACHE", str(CACHE))
        patch.setenv("EDGE_CACHE_LIMIT", "4GiB")
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # children would compile all modules again
        patch.setenv("EDGE_TUNING", str(tmp_path_factory.mktemp("tuning")))
        patch.setenv("EDGE_INDEXES", str(tmp_path_factory.mktemp("indexes")))
        patch.setenv("EDGE_DEVICES", str(tmp_path_factory.mktemp("devices")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, fork_servers(patch):
        shorten_kernels(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def calm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.run.budgets.meters.read_pressure", read_calmly)
        patch.setattr("edge.plan.checks.logical_cores", two_cores)
        yield
