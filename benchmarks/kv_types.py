"""What rows with different types of keys and values lose: KL and perplexity against exact rows, and bytes.

    python benchmarks/kv_types.py [--tokens 1000] [--texts 2]

The reference engine, SmolLM2-135M, a full cache whose rows are rounded when they are stored, in exact arithmetic. A
type is its bits: 8 is int8, with a float32 scale per row of a head; the others have a scale and a minimum in float16.
`r`: rows are multiplied by the orthonormal Hadamard matrix before, keys by a Householder reflection, too, so that 4r/4r
is int4. A head of 64 values is counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from text import long_text

import edge
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.tvm.kv.householder import find_normals, reflect, sample_runs
from edge.backends.tvm.kv.row_formats import decode, encode, hadamard
from edge.cli.terminal.show import table
from edge.likelihood import compare, summarize
from edge.types import AnyArray, FloatArray

MODEL, DOCUMENTS, CHUNK, HEAD = "smollm2-135m", ("secI8.html", "secJ3.html"), 250, 64
TYPES = ("8/8", "8/4r", "4r/8", "6r/4r", "5r/5r", "5r/4r", "4r/4r", "4/4")  # keys/values
Reflection = Callable[[FloatArray], FloatArray]  # its own inverse
Rounding = Callable[[FloatArray, Reflection], FloatArray]


class Rounded:
    """A layer's keys or values, rounded when they are stored."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows
        self.rounding = rounding("")
        self.reflection: Reflection = np.asarray

    def __setitem__(self, index: Any, rows: FloatArray) -> None:
        self._rows[index] = self.rounding(rows, self.reflection)

    def __getitem__(self, index: Any) -> FloatArray:
        return self._rows[index]


def rounding(name: str) -> Rounding:
    """Of rows, float32 [..., head]; an empty name changes nothing."""
    if not name:
        return lambda x, _: x
    if name == "8":
        return lambda x, _: decode("int8", *encode("int8", x))
    bits, rotated = int(name.removesuffix("r")), name.endswith("r")

    def rounded(x: FloatArray, reflection: Reflection) -> FloatArray:
        x = hadamard(reflection(x)) if rotated else x
        least = x.min(axis=-1, keepdims=True)
        scale = (x.max(axis=-1, keepdims=True) - least) / (2**bits - 1)
        least, scale = (each.astype(np.float16).astype(np.float32) for each in (least, scale))
        codes = np.divide(x - least, scale, out=np.zeros_like(x), where=scale > 0)
        codes = np.rint(codes).clip(0, 2**bits - 1) * scale + least
        return reflection(hadamard(codes)) if rotated else codes

    return rounded


def find_reflections(engine: Any) -> FloatArray:
    """As the native engine finds them, float32 [layers, heads, head]."""
    runs = []
    for tokens in sample_runs(engine.kv.capacity, engine.spec.vocab):
        engine.kv.truncate(0)
        engine.forward(tokens)
        runs.append(np.concatenate([keys[:, : tokens.size] for keys in engine.kv.keys]))
    normals = find_normals(runs, engine.kv.rope.rotation.of(range(len(engine.kv.keys))))
    return normals.reshape(len(engine.kv.keys), -1, normals.shape[-1])


def nbytes(name: str) -> int:
    """Of a row of one head: codes, and two float16 or a float32."""
    return HEAD * int(name.removesuffix("r")) // 8 + 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000, help="of each text")
    parser.add_argument("--texts", type=int, default=len(DOCUMENTS))
    parser.add_argument("--types", default=",".join(TYPES))
    options = parser.parse_args()
    model, types = edge.open_model(MODEL), options.types.split(",")
    config = EngineConfig(options.tokens, CHUNK, "f32", threads=1, logits_rows=CHUNK)
    engine: Any = engine_named("reference").load(model.file, model.spec, config)
    normals = find_reflections(engine)
    for rows in (engine.kv.keys, engine.kv.values):
        rows[:] = map(Rounded, rows)
    for layer, own in zip(engine.kv.keys, normals, strict=True):
        layer.reflection = partial(reflect, normals=own)
    found: dict[str, list[Any]] = {each: [] for each in types}
    for document in DOCUMENTS[: options.texts]:
        text = long_text(document).read_text(encoding="utf-8")
        tokens = model.encode_prompt(text, raw=True)[: options.tokens + 1]

        def logits(keys: str, values: str, tokens: AnyArray = tokens) -> FloatArray:
            for rows, how in ((engine.kv.keys, keys), (engine.kv.values, values)):
                for layer in rows:
                    layer.rounding = rounding(how)
            engine.kv.truncate(0)
            parts = [engine.forward_all(tokens[at : at + CHUNK]) for at in range(0, options.tokens, CHUNK)]
            return np.concatenate(parts)[: options.tokens]

        exact = logits("", "")
        for each in types:
            found[each].append(compare(exact, logits(*each.split("/")), tokens[1:]))
            print(each, f"{found[each][-1].kl.mean():.4f}", flush=True)
    lines = []
    for each in types:
        whole = summarize(type(found[each][0])(*(
            np.concatenate([getattr(part, name) for part in found[each]])
            for name in ("kl", "nll", "reference_nll", "same")
        )))  # fmt: skip
        size = sum(nbytes(part) for part in each.split("/")) / 2
        lines.append([each, f"{size:.0f}", f"{whole.kl_mean:.4f} ± {whole.kl_stderr:.4f}",
                      f"{whole.ratio:.4f} ± {whole.ratio_stderr:.4f}"])  # fmt: skip
    print(f"\n## Rows of {len(found[types[0]])} × {options.tokens} tokens against exact ones\n")
    print(table(["keys/values", "bytes", "KL", "perplexity ×"], lines, left=1))


if __name__ == "__main__":
    main()
