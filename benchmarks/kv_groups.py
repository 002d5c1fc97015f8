"""What KIVI's and GEAR's forms of rows lose, at the bytes that they take, beside rows that are rounded one by one.

    python benchmarks/kv_groups.py [--prompt 1024] [--tokens 256] [--texts 4]

The reference engine, SmolLM2-135M. The rows of a prompt are rounded at once, as both papers do. The tokens behind it
are predicted from them in exact arithmetic, and their own rows are exact for all forms.

KIVI (arXiv:2402.02750): keys are rounded by channel in groups of 32 rows, values by row in groups of 32 channels, with
a scale and a minimum in float16 each. GEAR (arXiv:2403.05527): 2 % of the values are kept as float16 with an index of
16 bits, the others are rounded as KIVI does, and a matrix of rank 4 for each head approximates the error. Types of
`benchmarks/kv_types.py` are rows that can be evicted one by one; 4r/4r is int4.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
from kv_types import HEAD, MODEL, find_reflections, nbytes, rounding
from text import HELD_OUT, long_text

import edge
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.tvm.kv.householder import reflect
from edge.cli.terminal.show import table
from edge.likelihood import Compared, compare, summarize
from edge.types import FloatArray

CHUNK, GROUP, RANK, OUTLIERS = 256, 32, 4, 0.02
FORMS = ("8/8", "6r/6r", "5r/4r", "4r/4r", "3r/3r", "3r/2r", "kivi-4", "kivi-2", "gear-4", "gear-2")


def by_groups(rows: FloatArray, bits: int, axis: int) -> FloatArray:
    """Rounded in groups of 32 along an axis of [heads, rows, channels]."""
    moved = np.moveaxis(rows, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, GROUP)
    least = groups.min(axis=-1, keepdims=True)
    scale = (groups.max(axis=-1, keepdims=True) - least) / (2**bits - 1)
    least, scale = (each.astype(np.float16).astype(np.float32) for each in (least, scale))
    codes = np.rint(np.divide(groups - least, scale, out=np.zeros_like(groups), where=scale > 0))
    rounded = codes.clip(0, 2**bits - 1) * scale + least
    return np.moveaxis(rounded.reshape(moved.shape), -1, axis)


def kivi(rows: FloatArray, bits: int, *, keys: bool) -> FloatArray:
    return by_groups(rows, bits, axis=1 if keys else 2)


def gear(rows: FloatArray, bits: int, *, keys: bool) -> FloatArray:
    axis = 1 if keys else 2  # outliers of a channel of keys, of a row of values
    low, high = np.quantile(rows, (OUTLIERS / 2, 1 - OUTLIERS / 2), axis=axis, keepdims=True)
    sparse = (rows < low) | (rows > high)
    dense = np.clip(rows, low, high)
    rounded = kivi(dense, bits, keys=keys)
    u, s, v = np.linalg.svd(dense - rounded, full_matrices=False)
    low_rank = (u[..., :RANK] * s[:, None, :RANK]).astype(np.float16).astype(np.float32) @ v[:, :RANK].astype(
        np.float16
    )
    return np.where(sparse, rows.astype(np.float16), rounded + low_rank).astype(np.float32)


def bytes_of(form: str, prompt: int) -> float:
    """Of a row of one head, the mean of keys and values."""
    if "/" in form:
        return sum(map(nbytes, form.split("/"))) / 2
    name, bits = form.split("-")
    found = HEAD * int(bits) / 8 + 4 * HEAD / GROUP
    if name == "gear":
        found += 4 * OUTLIERS * HEAD + 2 * RANK * (prompt + HEAD) / prompt
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", type=int, default=1024, help="rows that are rounded, a multiple of 32")
    parser.add_argument("--tokens", type=int, default=256, help="predicted behind each prompt")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--forms", default=",".join(FORMS))
    options = parser.parse_args()
    model, forms, prompt = edge.open_model(MODEL), options.forms.split(","), options.prompt
    config = EngineConfig(prompt + options.tokens, CHUNK, "f32", threads=1, logits_rows=CHUNK)
    engine: Any = engine_named("reference").load(model.file, model.spec, config)
    normals = find_reflections(engine)
    found: dict[str, list[Compared]] = {each: [] for each in forms}
    for document in HELD_OUT["anarchism"][: options.texts]:
        text = long_text(document).read_text(encoding="utf-8")
        tokens = model.encode_prompt(text, raw=True)[: prompt + options.tokens + 1]
        engine.kv.truncate(0)
        engine.forward(tokens[:prompt])
        stored = [np.stack(rows)[:, :, :prompt].copy() for rows in (engine.kv.keys, engine.kv.values)]

        def logits(form: str, stored: Any = stored, tokens: Any = tokens) -> FloatArray:
            for rows, exact, is_key in ((engine.kv.keys, stored[0], True), (engine.kv.values, stored[1], False)):
                for layer, own in enumerate(exact):
                    rows[layer][:, :prompt] = rounded(form, own, normals[layer], keys=is_key)
            engine.kv.truncate(prompt)
            return engine.forward_all(tokens[prompt:-1])  # type: ignore[no-any-return]

        exact = logits("")
        for form in forms:
            found[form].append(compare(exact, logits(form), tokens[prompt + 1 :]))
            part = summarize(found[form][-1])
            print(document, form, f"KL {part.kl_mean:.4f}, perplexity × {part.ratio:.4f}", flush=True)
    lines = []
    for form in forms:
        names = ("kl", "nll", "reference_nll", "same")
        whole = summarize(Compared(*(np.concatenate([getattr(each, name) for each in found[form]]) for name in names)))
        lines.append([form, f"{bytes_of(form, prompt):.1f}", f"{whole.kl_mean:.4f} ± {whole.kl_stderr:.4f}",
                      f"{whole.ratio:.4f} ± {whole.ratio_stderr:.4f}"])  # fmt: skip
    print(f"\n## {options.texts} × {options.tokens} tokens behind {prompt} rounded rows, against exact rows\n")
    print(table(["form", "bytes", "KL", "perplexity ×"], lines, left=1))


def rounded(form: str, rows: FloatArray, normals: FloatArray, *, keys: bool) -> FloatArray:
    if not form:
        return rows
    if "/" in form:
        reflection = partial(reflect, normals=normals) if keys else np.asarray
        return rounding(form.split("/")[not keys])(rows, reflection)
    name, bits = form.split("-")
    return {"kivi": kivi, "gear": gear}[name](rows, int(bits), keys=keys)


if __name__ == "__main__":
    main()
