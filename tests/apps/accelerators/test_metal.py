"""The pass of exported models on a GPU, by Metal: the answers of edge's own GPU engine, and of the CPU.

No Apple device is at hand: runtime/metal/framework.c stands in for the framework. It knows the selectors of metal.c
alone, and computes the kernels, which a C++ compiler compiles with a header of Metal's functions, in place of a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from bundles import model_of, write_tables
from conftest import CACHE, exhaustive
from ctypes_bundle import Bundle, open_bundle
from gpu_sessions import GREEDY, MODEL, PROMPT, ROWS, ask_both, check_lost_device, sessions, stand_in, variable
from runtime_library import C_FILES, GPU_FILES, PROGRAMS, build
from shared import FOLDER

from edge.apps import gpu_programs
from edge.apps.bundle import make_sections, prepare, with_gpu
from edge.apps.enums import Engine, Finish, Role
from edge.apps.sections.model_file import trusted_source, write_model
from edge.backends.tvm.compiler.exported import exported_objects, passes_source
from edge.backends.tvm.targets import choose_target
from edge.devices.profiles import HOST, find_profile
from edge.errors import BudgetError, UnsupportedError
from edge.options import Options
from edge.storage.fingerprint import fingerprint

if shutil.which("c++") is None:
    pytest.skip("no C++ compiler c++", allow_module_level=True)

HERE = PROGRAMS / "metal"
UNABLE = "A GPU cannot compile the bundle's kernels"


@lru_cache
def metal_bundle() -> tuple[Path, Path]:
    """The folder of model.edge with kernels for Metal, and a library for this machine whose GPU pass is Apple's."""
    isas = [choose_target().name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu_programs.HOSTS, "linux", gpu_programs.HOSTS["ios"])
        bundle = with_gpu(prepare(model_of(MODEL), find_profile(HOST), Options().updated(**ROWS), isas, gpu=True))
    folder = Path(mkdtemp(dir=FOLDER))
    sections = make_sections(bundle)
    file = bundle.model.file
    sha256 = bytes.fromhex(fingerprint(file.path).sha256)
    write_model(folder / "model.edge", sections, sha256, file, bundle.layout, gpu=bundle.gpu)
    tables = write_tables({"trusted.c": trusted_source(sections), "passes.c": passes_source(bundle.designs)})
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    kept = CACHE / "metal" / hashlib.sha256((compiler + (HERE / "metal_stdlib").read_text()).encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    flags = (
        "-O1", "-shared", "-fPIC", "-DEDGE_METAL", "-Ddlopen=driver_open", "-Ddlsym=driver_function",
        f'-DMETAL_CACHE="{kept}"', f'-DMETAL_INCLUDE="{HERE}"',
    )  # fmt: skip
    parts = [HERE / "framework.c", *C_FILES, *GPU_FILES, *tables, *exported_objects(bundle.designs)]
    return folder, build(parts, flags, ".so")


@pytest.fixture
def bundle() -> Iterator[Bundle]:
    """After the test, every message was one that Metal takes, and no object of a session is left."""
    with open_bundle(*metal_bundle()) as opened:
        yield opened
        for name, value in (("refuses", 0), ("fails_at", -1), ("cancels_at", -1)):
            variable(opened.library, name).value = value
        said = bytes((ctypes.c_char * 256).in_dll(opened.library, "driver_error").value).decode()
        assert (said, *(variable(opened.library, name).value for name in ("objects", "bytes"))) == ("", 0, 0)


def test_answers_are_those_of_the_gpu_engine_evictions_included(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "opencl", "wgpu")
    folder, library = metal_bundle()
    with sessions(MODEL, library, folder, **ROWS) as (python, exported):
        ask_both(python, exported, 60, temperature=0.0)
        ask_both(python, exported, 40, temperature=1.0, seed=7)
        use = exported.use()
        assert (use["engine"], use["gpu"], use["evicted"] > 20) == (Engine.GPU, "A GPU", True)


def test_weights_stay_where_the_file_is_mapped(bundle: Bundle) -> None:
    """Metal has memory of its own for the other buffers only; where it refuses, for copies of the weights, too."""
    taken = variable(bundle.library, "bytes")
    with bundle.session(engine=Engine.GPU, **GREEDY) as gpu:
        answer, own, counted = gpu.answer(PROMPT, Role.RAW), taken.value, gpu.use()["gpu_bytes"]
    variable(bundle.library, "refuses").value = 8
    with bundle.session(engine=Engine.GPU, **GREEDY) as gpu:
        assert gpu.answer(PROMPT, Role.RAW) == answer
        assert gpu.use()["gpu_bytes"] == counted == taken.value
    assert own < counted / 2


@pytest.mark.parametrize(("refuses", "error", "says"), [
    (1, UnsupportedError, "there is no Metal here"),
    exhaustive(2, UnsupportedError, "Metal has no GPU here"),
    exhaustive(3, UnsupportedError, "Metal's device cannot run the bundle (its buffers are too small)"),
    exhaustive(4, UnsupportedError, "Metal's device cannot run the bundle (its workgroups are too small)"),
    (5, UnsupportedError, f"{UNABLE} (Metal: program_source:1:1: error: not today)"),
    exhaustive(6, UnsupportedError, f"{UNABLE} (Metal: a kernel needs too many registers)"),
    exhaustive(7, BudgetError, "A GPU cannot hold the model"),
])  # fmt: skip
def test_refusals_are_statuses_and_the_cpu_answers(
    bundle: Bundle, refuses: int, error: type[Exception], says: str, tmp_path: Path
) -> None:
    variable(bundle.library, "refuses").value = refuses
    with pytest.raises(error) as raised:
        bundle.session(engine=Engine.GPU)
    assert str(raised.value) == f"{says}: set engine to cpu or auto"
    with bundle.session(engine=Engine.AUTO, cache=str(tmp_path), **GREEDY) as session:
        use = session.use()
        assert (use["engine"], use["engine_why"]) == (Engine.CPU, says.partition(":")[0])
        assert session.answer(PROMPT, Role.RAW)[2] == Finish.LENGTH


def test_lost_device_is_a_status(bundle: Bundle) -> None:
    check_lost_device(bundle, "Metal: Caused GPU Hang Error")
