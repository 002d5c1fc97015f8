"""The start of a command: the modules that it does without, and the files that a token passes."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
from test_cli import edge_here as run_edge

import edge
from edge.run.budgets import meters

MODEL = Path(__file__).parents[1] / "golden" / "llama-one-layer.gguf"

# Each takes 10 to 100 ms to import, or some MiB of every budget; or it serves options that the run does not use.
HEAVY = (
    "typer", "pydantic", "rich", "gguf", "onnx", "onnxruntime", "tvm", "tvm_ffi", "llama_cpp", "llguidance",
    "starlette", "uvicorn", "psutil", "asyncio", "http.client", "minijinja", "platformdirs", "subprocess", "tempfile",
    "difflib", "concurrent.futures", "hashlib", "edge.server", "edge.converters", "edge.apps", "edge.lab.quality",
    "edge.lab.tuning", "edge.lab.profiling", "edge.cli.chat", "edge.cli.making", "edge.cli.measuring", "edge.cli.serve",
    "edge.grammar.matcher", "edge.tools.parser", "edge.tools.use", "edge.prompt_cache.cache", "edge.run.batching.batch",
    "edge.run.decoding.beams", "edge.run.decoding.logprobs", "edge.run.sampling.constraint",
    "edge.model.architectures.qwen3", "edge.model.tokens.word_piece", "edge.backends.tvm.cpu.slots",
)  # fmt: skip
MODULES = 222  # of edge that a run imports, at most: 235 once

RUN = f"""
import sys
sys.argv[:] = ["edge", "run", sys.argv[1], "Hi", "-n", "1", "--raw", "-q"]
from edge.cli import run_command

def compiled_at_import(each):  # the standard library compiles a source
    shown = vars(each).get("__repr__")
    return shown and getattr(shown, "__wrapped__", shown).__code__.co_filename == "<string>"

code = run_command()
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "edge"]
known = {{each for module in ours for each in vars(module).values() if isinstance(each, type)}}
known = [each for each in known if hasattr(each, "__dataclass_fields__") and each.__module__.startswith("edge.")]
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
print([each.__qualname__ for each in known if compiled_at_import(each)], file=sys.stderr)
print(len(known) > 50, len(ours) <= {MODULES} or len(ours), file=sys.stderr)
sys.exit(code)
"""


def test_plain_run_imports_only_listed_modules() -> None:
    """Dataclasses must be those of `edge.records`: others take half a millisecond each."""
    run_edge("run", str(MODEL), "Hi", "-n", "1", "--raw", "-q")  # a first run compiles
    done = subprocess.run([sys.executable, "-c", RUN, str(MODEL)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-3:] == ["[]", "[]", "True True"]


def test_plan_names_the_least_memory_that_a_run_names() -> None:
    """Within the 2 MiB to which plans round a process, though it has imported more."""
    least = []
    for command in (("run", MODEL, "Hi", "-n", "1"), ("plan", MODEL)):
        line = [sys.executable, "-m", "edge", *command, "--memory", "20MiB", "--max-kv-size", "64"]
        said = subprocess.run(line, capture_output=True, text=True).stderr
        least += re.findall(r"--memory (\d+)MiB \(64 KV rows", said)
    one, other = map(int, least)
    assert abs(one - other) <= 2


FITS = """
import sys
from edge.cli import run_command
from edge.lab.prediction import fits

chosen = {name: fits.known_models()[name] for name in sys.argv[1:]}
fits.known_models = lambda: chosen
sys.argv[:] = ["edge", "models", "--fits", "--memory", "1GiB", "--backend", "cpu", "--json"]
sys.exit(run_command())
"""


def test_models_need_the_same_whatever_was_planned_before() -> None:
    """A plan takes some 6 MiB, which were part of the next one."""
    needs = []
    for names in (["smollm2:135m", "qwen3:0.6b"], ["qwen3:0.6b", "smollm2:135m"]):
        done = subprocess.run([sys.executable, "-c", FITS, *names], capture_output=True, text=True, check=True)
        found = {each["name"]: each["best"] for each in json.loads(done.stdout)["models"]}
        needs.append(found["smollm2:135m"]["memory"])
    assert abs(needs[0] - needs[1]) <= 2 << 20


def test_token_passes_through_files_that_contributing_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 15 files of edge/ run between two tokens of a plain greedy run, and what runs about once a second."""
    monkeypatch.setattr(meters, "PRESSURE_S", 0.0)
    monkeypatch.setattr(meters, "_COST", 0.0)
    root, files = Path(edge.__file__).resolve().parent, set[Path]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_file() and root in path.resolve().parents:
            files.add(path.resolve().relative_to(root))

    with edge.load(MODEL, backend="cpu", max_kv_size=64) as session:
        stream = session.stream("Hello", raw=True, max_tokens=12, ignore_eos=True)
        next(stream)
        gc.collect()  # files of what other tests left are not those of a token
        sys.setprofile(note)
        try:
            for _ in range(8):
                next(stream)
        finally:
            sys.setprofile(None)
    text = (root.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (path,) = re.findall(r"A token of `edge run`.*?traces them", text, re.S)
    named = {Path(each).name for each in re.findall(r"`([a-z_/]+\.py)`", path)}
    names = {each.name for each in files}
    assert names <= named
    assert 8 < len(names - {"reclaim.py"}) <= 15
    assert "reclaim.py" in names
