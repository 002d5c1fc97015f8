"""The native engine on Windows: in Windows' own Python under Wine (`windows_python.py`), compiled there or here."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, open_golden
from test_cli import edge_json
from wine import command, windows_path

pytest.importorskip("tvm_ffi")

from edge.backends.base import EngineConfig
from edge.backends.tvm import targets
from edge.backends.tvm.compiler.compiled import compile_design
from edge.backends.tvm.design import Design
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import open_weights
from edge.devices.cpuid import _FLAGS
from edge.devices.host import cpu_flags
from edge.devices.output import write_whole

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "windows" / "python.exe"
MODEL = "llama-one-layer"
RUN = ("-p", "Hello", "-n", "6", "--temp", "0", "--ignore-eos", "--max-kv-size", "64", "--backend", "cpu")

if platform.machine() != "x86_64":
    pytest.skip("Wine runs programs for x86-64 on x86-64", allow_module_level=True)
if not PYTHON.exists():
    pytest.skip("no Python for Windows: make", allow_module_level=True)

# The engine with an image and weights that were made elsewhere.
ENGINE = """
import sys
from pathlib import Path
import numpy as np
from edge.backends.base import EngineConfig
from edge.backends.tvm import engine
from edge.backends.tvm.cpu.elf import Image
from edge.devices.host import cpu_flags
from edge.model.model import open_model

model, image, weights, out = map(Path, sys.argv[1:5])
opened, logits = open_model(model), []
engine.compiled = lambda *_, **__: Image(image)
engine.is_compiled = lambda _: True
engine.open_weights = lambda *_, **__: engine.PackedWeights(weights, np.fromfile(weights, np.uint8))
for threads in (1, 2):
    native = engine.NativeEngine(opened.file, opened.spec, EngineConfig(64, 16, "f16", threads))
    logits += [native.forward(np.arange(5, 35)), *(native.forward(np.array([token])) for token in (7, 9, 11))]
    native.close()
np.array(logits).tofile(out)
print(*cpu_flags())
"""


@lru_cache
def installed() -> Path:
    """A folder in which edge is a package, as it installs."""
    folder = ROOT / "build" / "windows" / "edge"
    about = folder / "edge_runtime-0.1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    write_whole(about / "METADATA", "Metadata-Version: 2.1\nName: edge-runtime\nVersion: 0.1.0\n")  # workers share it
    (folder / "edge").mkdir(exist_ok=True)
    for each in [*(ROOT / "edge").iterdir(), *(ROOT / name for name in ("backends", "converters", "devices"))]:
        link = folder / "edge" / each.name
        with suppress(FileExistsError):
            link.symlink_to(each)
    return folder


def start(*words: str, cache: Path) -> subprocess.Popen[str]:
    """Windows' Python with these arguments, in a folder of drive C: Z: has Linux's /proc."""
    how = command(PYTHON, *words)
    how["env"] = how["env"] | {
        "PYTHONPATH": windows_path(installed()), "EDGE_CACHE": windows_path(cache), "PYTHONUTF8": "1",
        "WINEDLLOVERRIDES": "winedbg.exe=d",
    }  # fmt: skip
    folder = Path(how["env"]["WINEPREFIX"]) / "drive_c"
    pipe = subprocess.PIPE
    return subprocess.Popen(**how, cwd=folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)


def run(*words: str, cache: Path) -> tuple[int, str, str]:
    with start(*words, cache=cache) as process:
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out.replace("\r\n", "\n"), err.replace("\r\n", "\n")


@pytest.fixture
def design(monkeypatch: pytest.MonkeyPatch) -> Design:
    """Of MODEL, for this CPU under Windows."""
    model = open_golden(MODEL).model
    monkeypatch.setattr(targets.platform, "system", lambda: "Windows")
    monkeypatch.setattr(targets.platform, "machine", lambda: "AMD64")
    made = Design.of(make_layout(model.file, model.spec), "f16", targets.choose_target())
    monkeypatch.undo()
    return made


@pytest.mark.wing("Windows' own Python")
@pytest.mark.slow
def test_logits_are_those_of_linux(tmp_path: Path, design: Design) -> None:
    """Bit by bit, by one thread and by two, which wait for each other. The CPU is asked for its instruction sets."""
    model = open_golden(MODEL).model
    image, program, out = (tmp_path / name for name in ("run.img", "program.py", "logits"))
    compile_design(design, image)
    weights = open_weights(model.file, make_layout(model.file, model.spec)).path
    program.write_text(ENGINE)
    paths = (GOLDEN / f"{MODEL}.gguf", image, weights, out)
    status, said, error = run(windows_path(program), *map(windows_path, paths), cache=tmp_path / "cache")
    assert status == 0, error
    logits = []
    for threads in (1, 2):
        engine = NativeEngine(model.file, model.spec, EngineConfig(64, 16, "f16", threads))
        logits += [engine.forward(np.arange(5, 35)), *(engine.forward(np.array([token])) for token in (7, 9, 11))]
        engine.close()
    np.testing.assert_array_equal(np.fromfile(out, np.float32).reshape(8, -1), np.array(logits))
    flags = set(said.split())
    assert {name for name in _FLAGS if name in cpu_flags()} <= flags  # Linux may be told to hide some
    assert "avx2" in flags or targets.choose_target().name == "generic"


@pytest.mark.exhaustive
def test_model_is_compiled_and_runs(tmp_path: Path) -> None:
    """By TVM for Windows. Memory is what Windows says of the process."""
    model = GOLDEN / f"{MODEL}.gguf"
    words = ("-m", "edge", "run", windows_path(model), *RUN)
    status, said, error = run(*words, "--json", cache=tmp_path)
    assert status == 0, error
    found, here = json.loads(said), edge_json("run", str(model), *RUN, "--json")
    assert found["text"] == here["text"]
    assert found["memory"]["anonymous"] is None
    assert found["memory"]["peak_rss"] > 40 << 20
    status, said, error = run(*words, "--memory", "16MiB", cache=tmp_path)
    assert (status, said) == (3, "")
    assert re.fullmatch(r"edge: needs .*, the memory budget is 16 MiB: the smallest that fits is --memory .*\n", error)
    smallest = re.search(r"--memory (\d+MiB)", error)
    assert smallest
    status, said, error = run(*words, "--memory", smallest[1], "--json", cache=tmp_path)
    assert status == 0, error
    assert json.loads(said)["memory"]["peak_rss"] <= json.loads(said)["memory"]["budget"]
