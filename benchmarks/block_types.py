"""The native engine against llama.cpp in every block type: speed and perplexity on the same files.

    python benchmarks/block_types.py [--types Q4_K_M,Q6_K] [--rounds 11] [--tokens 2048]

Two files per type, made once by llama.cpp's own quantizer: SmolLM2 in the mixture of types that llama.cpp chooses (its
576 columns are no multiple of 256, so that most tensors of a K-quant are in other types), and a Llama of random
weights, hidden 768, 12 layers, FFN 2048, with this type alone. Speeds are medians, engines in turns, ratios edge over
llama.cpp: decode of 64 tokens into an empty cache, prefill of 512. Perplexity: ratio cpu over llama.cpp, f16 KV.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from machine import files_folder, machine
from model_files import make_file
from quality import DOCUMENTS, perplexity_of
from turns import EDGE, LLAMA, Row, Setting, Sizes, Team

from edge.cli.terminal.show import table
from edge.converters.gguf.ggml import NEED_IMPORTANCE, quantize_with_llamacpp
from edge.devices.host import logical_cores
from edge.formats.gguf import read_gguf
from edge.model.model import open_model
from edge.model.names.catalog import find_model

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ3_S",
    "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0", "Q2_0", "Q1_0",
)  # fmt: skip
SHAPE = (768, 12, 2048)  # of the random Llama: hidden, layers, FFN
STEPS, PREFILL = 64, 512


def file_of(kind: str, origin: Path, target: Path, *, pure: bool) -> Path:
    """The model in this type. Types that need an importance matrix get one in which all columns count alike."""
    if not target.exists():
        importance = {
            name: np.ones(info.shape[0], np.float32)
            for name, info in read_gguf(origin).tensors.items() if len(info.shape) == 2
        }  # fmt: skip
        needed = importance if kind.startswith(NEED_IMPORTANCE) else None
        quantize_with_llamacpp(origin, target, kind, pure=pure, importance=needed)
    return target


def types_in(path: Path) -> str:
    """The block types that hold most of the bytes, with their shares."""
    sizes: Counter[str] = Counter()
    for info in read_gguf(path).tensors.values():
        sizes[info.type] += info.nbytes
    return ", ".join(f"{name} {size / sizes.total():.0%}" for name, size in sizes.most_common(3))


def speed_cells(row: Row) -> list[str]:
    ratio = row.ratio(LLAMA)
    figures = [row.median(engine) for engine in (EDGE, LLAMA)]
    return [*("–" if each is None else f"{each:,.0f}" for each in figures), "–" if ratio is None else f"{ratio:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", default=",".join(TYPES), help="some of them, with commas")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=2048, help="of each document, for perplexity; 0 measures none")
    parser.add_argument("--cache", type=Path, default=files_folder())
    options = parser.parse_args()
    sizes = Sizes(steps=STEPS, deep=0, prefills=(PREFILL,))
    setting = Setting("cpu", None, options.threads, None, options.cache.absolute(), sizes, options.rounds, 0, ())
    source = find_model("smollm2-135m").absolute()
    name = f"random-llama-{'x'.join(map(str, SHAPE))}"
    random = make_file(setting.cache / f"{name}.gguf", "random", source, *SHAPE)
    lines = []
    for kind in options.types.split(","):
        for mixture, origin in (("mixed", source), ("pure", random)):
            target = setting.cache / f"{origin.stem}.{mixture}-{kind}.gguf"
            model = file_of(kind, origin, target, pure=mixture == "pure")
            with Team(setting, model, model.stem) as team:
                decode = team.speeds(f"{model.stem}: decode", STEPS, op="decode", depth=0)
                prefill = team.speeds(f"{model.stem}: prefill", PREFILL, op="prefill")
            quality = "–"
            if origin == source and options.tokens:
                opened = open_model(model)
                ours, theirs = (
                    perplexity_of(opened, backend, "f16", DOCUMENTS[:2], options.tokens)[0]
                    for backend in ("cpu", "llamacpp")
                )
                quality = f"{ours / theirs:.4f}"
            line = [kind, "SmolLM2" if origin == source else "random", types_in(model)]
            lines.append([*line, *speed_cells(decode), *speed_cells(prefill), quality])
    print(f"\n## Block types, {machine()['cpu']}, {options.threads} threads\n")
    heads = [f"{what}{each}" for what in ("decode ", "prefill ") for each in ("edge", "llama.cpp", "ratio")]
    print(table(["type", "model", "tensors", *heads, "perplexity"], lines, left=3))
    for what, why in setting.skipped.items():
        print(f"\nNot measured: {what}: {why}")


if __name__ == "__main__":
    main()
