"""Families × targets: the largest error of a logit against transformers, on the golden models.

    python benchmarks/families.py [NAME …] [--targets reference,cpu,gpu,onnx,llamacpp,library,page]
    python benchmarks/families.py --towers    # encoders of pictures

NAME: a golden model; without names, one of each family that has a core beyond plain attention, and Llama, Gemma 3 and
Qwen3. Weights and rows are floats, so errors are those of formulas, except MXFP4 experts (gpt-oss), which engines
multiply by activations of 8 bits; transformers' logits are rounded to 1.2e-4. EDGE_GPU chooses the GPU, by default a
software adapter of wgpu. The C library of an exported app and the
module of a page (in Node) hand out no logits: they are asked for the next token behind 8 beginnings of the text, and
the table says how many are transformers' choice. Of encoders, it is the largest error of a row's value, over the
largest value, on the engines that encode. A refusal is given in its own words, behind the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from edge.apps.enums import Role
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.cli.terminal.show import table
from edge.errors import EdgeError
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), *map(str, TESTS.glob("**/"))]

NAMES = (
    "llama-gqa-tied", "gemma3", "qwen3", "gemma4", "gemma4moe", "gpt-oss", "qwen35", "lfm2", "qwen3moe", "qwen35moe",
    "lfm2moe", "granitehybrid", "nemotron_h", "falcon-h1",
)  # fmt: skip
ENGINES = ("reference", "cpu", "gpu", "onnx", "llamacpp")
APPS = ("library", "page")
TOWERS = ("smolvlm", "gemma3", "qwen3vl", "gemma4", "lfm2", "qwen25vl")
ENCODERS = ("reference", "cpu", "onnx", "onnx@cpu-static")
CHUNK, BEGINNINGS, ISA = 24, 8, "simd"
OPTIONS: dict[str, Any] = {"kv_dtype": "f32", "max_kv_size": 128, "prefill_step_size": 16}
GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": 1, "threads": 1}


def of_engine(model: Model, target: str, tokens: IntArray, expected: FloatArray) -> str:
    """The larger of the errors of chunks and of single tokens."""
    backend = engine_named(target)
    backend.check_supported(model.file, model.spec)
    config = EngineConfig(tokens.size + 1, CHUNK, "f32", 1, logits_rows=CHUNK)
    worst = 0.0
    with closing(backend.load(model.file, model.spec, config)) as engine:
        for size in (tokens.size, 1):
            engine.kv.truncate(0)
            parts = np.split(tokens, range(size, tokens.size, size))
            found = np.concatenate([engine.forward_all(part).copy() for part in parts])
            worst = max(worst, float(np.abs(found[-len(expected) :] - expected).max()))
    return f"{worst:.1e}"


def of_tower(name: str, target: str) -> str:
    """The largest error of a value, over the largest value of the golden rows."""
    from edge.formats.gguf import read_gguf
    from edge.model.towers import read_tower
    from edge.run.senses.sight import Encoder

    golden, (engine, _, provider) = TESTS / "golden" / "towers", target.partition("@")
    with np.load(golden / f"{name}.npz") as arrays:
        picture, expected = arrays["picture"], arrays["rows"]
    tower: Any = read_tower(read_gguf(golden / f"{name}.gguf"))
    encoder = Encoder(tower, engine_named(engine), 1, "f32", provider=provider or "cpu")
    found = np.concatenate(encoder.encode(picture, tower.layout(picture.shape[1], picture.shape[0])))
    return f"{np.abs(found - expected).max() / np.abs(expected).max():.1e}"


def of_app(ask: Callable[[list[int]], int | None], tokens: IntArray, expected: FloatArray) -> str:
    """ask: the next token behind some others."""
    lengths = range(tokens.size - min(BEGINNINGS, len(expected)) + 1, tokens.size + 1)
    choices = [int(row.argmax()) for row in expected[-len(lengths) :]]
    right = [ask(tokens[:length].tolist()) == choice for length, choice in zip(lengths, choices, strict=True)]
    return f"{sum(right)}/{len(right)}"


def of_library(name: str, tokens: IntArray, expected: FloatArray) -> str:
    from bundles import bundle_of
    from ctypes_bundle import Bundle

    with Bundle(bundle_of(name, **OPTIONS)) as bundle, bundle.session(**GREEDY) as session:
        return of_app(lambda ids: next_token(session, ids), tokens, expected)


def of_page(name: str, tokens: IntArray, expected: FloatArray) -> str:
    from web_module import modules_of, opened

    with opened(modules_of(name, ISA, **OPTIONS), ISA, **GREEDY) as module:
        return of_app(lambda ids: next_token(module, ids), tokens, expected)


def next_token(session: Any, ids: list[int]) -> int | None:
    session.rewind()
    found: list[int] = session.answer(ids, Role.IDS)[0]
    return found[0] if found else None


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("names", nargs="*", default=NAMES)
    options.add_argument("--targets", default=",".join((*ENGINES, *APPS)))
    options.add_argument("--towers", action="store_true")
    chosen = options.parse_args()
    if chosen.towers:
        rows = [[name, *(of_tower(name, target) for target in ENCODERS)] for name in TOWERS]
        print(f"## Encoders of pictures, {machine()['cpu']}\n\n{table(['family', *ENCODERS], rows)}")
        return
    os.environ.setdefault("EDGE_GPU", "wgpu:0")
    targets, notes, rows = chosen.targets.split(","), dict[str, int](), []
    for name in chosen.names:
        model, cells = open_model(TESTS / "golden" / f"{name}.gguf"), [name]
        with np.load(TESTS / "golden" / f"{name}.npz") as arrays:
            tokens, expected = arrays["tokens"].astype(np.int32), arrays["logits"]
        for target in targets:
            try:
                if target in ENGINES:
                    cells.append(of_engine(model, target, tokens, expected))
                else:
                    cells.append((of_library if target == "library" else of_page)(name, tokens, expected))
            except EdgeError as error:
                reason = str(error).replace(f"{model.path}: ", "")
                cells.append(f"no ({notes.setdefault(reason, len(notes) + 1)})")
            print(".", end="", file=sys.stderr, flush=True)
        rows.append(cells)
    print(file=sys.stderr)
    print(f"## Families, {machine()['cpu']}\n")
    print(table(["family", *targets], rows))
    for reason, number in notes.items():
        print(f"\n({number}) {reason}")


if __name__ == "__main__":
    main()
