"""What llama.cpp's own quantizer makes of a model at about 4.5 bits: rivals for the table of methods.

    python benchmarks/llamacpp_mixes.py twin.gguf FOLDER [--tokens 32768]

Q4_0, IQ4_NL and Q4_K_S, with and without importance: the mean x² of every matrix's input columns over a calibration
text (anarchism, sections A to H), which is what llama-imatrix collects. `pure` files have one type in all matrices;
the others are llama.cpp's mixtures. Embedding and head keep 16 bits, so that only the matrices between them differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from text import long_text

import edge
from edge.backends.tensors import find_tensors
from edge.cli.show import table
from edge.converters.calibrate import collect
from edge.converters.ggml import quantize_with_llamacpp
from edge.converters.writers.gguf import Planned
from edge.opened import Model
from edge.types import FloatArray, IntArray

CALIBRATION = ("secA2.html", "secB2.html", "secC2.html", "secD5.html", "secE3.html", "secF8.html", "secG1.html",
               "secH3.html")  # fmt: skip
_VOCABULARY = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Mix:
    """A way to ask llama-quantize for a file."""

    name: str
    ftype: str
    pure: bool = False
    importance: bool = True


MIXES = (
    Mix("Q4_0", "Q4_0", pure=True, importance=False),
    Mix("Q4_0 imatrix", "Q4_0", pure=True),
    Mix("Q4_0 imatrix mixture", "Q4_0"),
    Mix("IQ4_NL imatrix", "IQ4_NL", pure=True),
    Mix("IQ4_NL imatrix mixture", "IQ4_NL"),
    Mix("Q4_K_S imatrix mixture", "Q4_K_S"),
    Mix("IQ4_XS imatrix mixture", "IQ4_XS"),
)


def calibration_tokens(model: Model, count: int) -> IntArray:
    """As many from every section."""
    texts = [model.encode_prompt(long_text(name).read_text(encoding="utf-8"), raw=True) for name in CALIBRATION]
    return np.concatenate([text[: count // len(texts)] for text in texts])


def importance_of(
    model: Model, tokens: IntArray, progress: Callable[[float], None] | None = None
) -> dict[str, FloatArray]:
    """Mean x² of every matrix's input columns, by the names of the file's tensors, without embedding and head."""
    found = collect(model.file, model.spec, tokens, progress)
    sources = find_tensors(model.file, model.spec)
    tensors = {sources[name].tensor: each.square for name, each in found.items() if name in sources}
    return {name: square for name, square in tensors.items() if name not in _VOCABULARY}


def write_mixes(source: Path, folder: Path, importance: Mapping[str, FloatArray]) -> Iterator[tuple[Mix, Path, float]]:
    """Each mixture, its file, and the bits per weight of what lies between embedding and head."""
    folder.mkdir(parents=True, exist_ok=True)
    for mix in MIXES:
        target = folder / f"{mix.name.replace(' ', '-')}.gguf"
        weights = importance if mix.importance else None
        tensors = quantize_with_llamacpp(
            source, target, mix.ftype, pure=mix.pure, importance=weights, embedding="F16", head="F16"
        )
        yield mix, target, body_bits(tensors)


def body_bits(tensors: list[Planned]) -> float:
    body = [each for each in tensors if len(each.shape) > 1 and each.name not in _VOCABULARY]
    return 8 * sum(each.nbytes for each in body) / sum(int(np.prod(each.shape)) for each in body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    options = parser.parse_args()
    model = edge.open_model(options.source)
    importance = importance_of(model, calibration_tokens(model, options.tokens))
    rows = [
        [mix.name, str(target), f"{bits:.3f}"]
        for mix, target, bits in write_mixes(model.path, options.folder, importance)
    ]
    print(table(["mixture", "file", "bits/weight of the body"], rows, left=2))


if __name__ == "__main__":
    main()
