"""The tasks that come with edge, on two models in F16, Q8_0, Q4_K_M and IQ4_NL by `best`: what quantizing costs there.

    python benchmarks/tasks.py [--models smollm2-135m] [--types F16,Q8_0] [--calibration-tokens 2048]

In F16 stand SmolLM2's twin (twin.py), whose weights lie on no grid, and Gemma 3 270M's own Q4_K_M, dequantized. Needs
lm-eval (pip install 'edge-runtime[eval]'). Files are kept in the cache folder. Errors are those of single figures; all
models answer the same questions, so that differences are more certain than they say.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from machine import files_folder
from twin import write_twin

import edge
from edge.cli.terminal.show import table
from edge.converters.calibrate import OWN_TEXT, calibration_tokens
from edge.converters.gguf.ggml import quantize_file
from edge.converters.gguf.quantize import Settings, quantize_gguf
from edge.formats.gguf import read_gguf
from edge.lab.quality.perplexity import LOGITS_ROWS
from edge.lab.quality.tasks import LONGEST, open_tasks
from edge.model.model import make_tokenizer
from edge.model.reader import read_spec

MODELS = ("smollm2-135m", "gemma3-270m")
TYPES = ("F16", "Q8_0", "Q4_K_M", "best")


def make_files(name: str, types: Sequence[str], cache: Path, tokens: int) -> Iterator[tuple[str, Path]]:
    """The model in each of these types, of which F16, that the others are made of, comes first."""
    source = cache / f"tasks.{name}.F16.gguf"
    for kind in types:
        target = cache / f"tasks.{name}.{kind}.gguf" if kind != "best" else cache / f"tasks.{name}.{kind}-{tokens}.gguf"
        if not target.exists():
            model = edge.open_model(name if kind == "F16" else source)
            if kind == "F16" and model.spec.architecture == "llama":
                write_twin(model, target)
            elif kind == "best":
                file = read_gguf(source)
                ids = calibration_tokens(make_tokenizer(file), [OWN_TEXT], tokens)
                quantize_gguf(file, read_spec(file), target, Settings("IQ4_NL", "best"), ids)
            else:
                quantize_file(model.file, target, kind)
        yield kind, target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--cache", type=Path, default=files_folder())
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    rows, headings, types = [], ["model", "type", "MB"], options.types.split(",")
    for name in options.models.split(","):
        for kind, path in make_files(name, types, options.cache, options.calibration_tokens):
            whole = {"kv_policy": "full", "expected_tokens": LONGEST, "logits_rows": LOGITS_ROWS}
            with edge.load(path, **whole) as session:
                scores = edge.eval_tasks(session, open_tasks()).scores
            headings[3:] = [f"{each.task} {each.metric}" for each in scores]
            rows.append([name, kind, f"{path.stat().st_size / 1e6:.0f}",
                         *(" ± ".join("–" if of is None else f"{of:.3f}" for of in (each.value, each.stderr))
                           for each in scores)])  # fmt: skip
            print("  ".join(rows[-1]), flush=True)
    print(table(headings, rows, left=2))


if __name__ == "__main__":
    main()
