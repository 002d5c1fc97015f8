"""A file that is cut short while an engine has mapped it is an error, not the end of the process (SIGBUS)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import GOLDEN, run_child

CODE = """
import json, os, shutil, sys
import edge
from edge.errors import EngineError
path, backend = sys.argv[1:]
cut = path
if backend == "onnx":  # converted weights, in a cache folder of its own
    os.environ["EDGE_CACHE"] = os.path.dirname(path)
if backend == "cpu":  # its own copy of the packed weights
    from edge.backends.tvm.packing import weights
    cut = path + ".bin"
    mapped = lambda source, mode: source.suffix == ".bin" and mode == "rb"
    weights.open = lambda source, mode: open(shutil.copy(source, cut) if mapped(source, mode) else source, mode)
said = []
with edge.load(path, backend=backend, max_kv_size=64, threads=1) as session:
    session.generate("x", raw=True, max_tokens=2, ignore_eos=True)
    if backend == "onnx":
        cut, *_ = (line.split()[-1] for line in open("/proc/self/maps") if ".onnx.data" in line)
    os.truncate(cut, 0)
    for again in range(2):
        try:
            session.generate("x", raw=True, max_tokens=2, ignore_eos=True)
        except EngineError as error:
            said.append(str(error))
print(json.dumps([cut, said]))
"""


@pytest.mark.parametrize("backend", ["cpu", "llamacpp", "onnx"])
def test_file_that_is_cut_short_is_an_error(backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"cpu": "tvm_ffi", "llamacpp": "llama_cpp", "onnx": "onnxruntime"}[backend])
    path = tmp_path / "model.gguf"
    shutil.copy(GOLDEN / "llama-gqa-tied.gguf", path)
    child = run_child(CODE, path, backend)
    assert child.status == 0, child.errors
    cut, said = child.output
    name = "a file of packed weights in the cache folder" if backend == "cpu" else cut
    assert said == [f"{name} was cut short while it was in use: restore it, and load the model again"] * 2
