"""Model files to measure, made once in the cache folder, and figures of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from machine import say

from edge.formats.gguf import read_gguf

WORKERS = Path(__file__).with_name("peers")


def make_file(target: Path, kind: str, source: Path, *shape: int) -> Path:
    """A model file in the cache folder, written by `make_file.py` if it does not exist yet."""
    if not target.exists():
        say(f"writing {target} ...")
        command = [sys.executable, WORKERS / "make_file.py", kind, source, target, *shape]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{target} could not be written: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return target


def pure_file(cache: Path, source: Path) -> Path:
    """The model with all matrices in Q4_0, through llama.cpp's own quantizer."""
    return make_file(cache / f"{source.stem}.{source.stat().st_size}.pure-Q4_0.gguf", "pure", source)


def large_file(cache: Path, source: Path, shape: tuple[int, int, int]) -> Path:
    """A Llama of random weights and this shape: hidden, layers, FFN."""
    return make_file(cache / f"random-llama-{'x'.join(map(str, shape))}.gguf", "random", source, *shape)


def bytes_per_token(model: Path) -> int:
    """Bytes of all tensors that a token needs: an embedding with a separate head is only looked up."""
    tensors = read_gguf(model).tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    return sum(info.nbytes for name, info in tensors.items() if name not in looked_up)


def vocabulary(model: Path) -> int:
    """Entries of the vocabulary; a folder that OpenVINO wrote stands for the GGUF file it contains a link to."""
    (file,) = model.glob("*.gguf") if model.is_dir() else [model]
    return read_gguf(file).tensors["token_embd.weight"].shape[1]
