"""Characters per second that the tokenizer of apps, in C, encodes beside Python's, and the size of its tables.

CPU time; rounds are interleaved, figures are medians. The text is the manual of Python, and a run of one letter. MODEL:
files or installed names. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from edge.cli.terminal.show import table
from edge.formats.gguf import read_gguf
from edge.model.names.catalog import find_model
from edge.model.tokens.tokenizer import Tokenizer

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "apps", "apps/text")]
from runtime_tokens import CTokenizer

TEXTS = {"manual": "\n".join(text for _, text in sorted(topics.items())), "one letter": "a" * 250_000}


def cpu_seconds(encode: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    encode(text)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("model", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    chosen = parser.parse_args()
    rows = []
    for model in chosen.model:
        python = Tokenizer(read_gguf(find_model(model)))
        c = CTokenizer(python)
        kib = sum(map(len, c.sections)) >> 10
        for name, text in TEXTS.items():
            if c.encode(text) != python.encode(text).tolist():
                sys.exit(f"{model}: the ids of {name} differ")
            rounds = [(cpu_seconds(python.encode, text), cpu_seconds(c.encode, text)) for _ in range(chosen.rounds)]
            ours, theirs = (len(text) / statistics.median(each) / 1e6 for each in zip(*rounds, strict=True))
            figures = [f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f} ×", str(kib)]
            rows.append([Path(model).stem, name, f"{len(text):,}", *figures])
    headings = ["model", "text", "characters", "C, million/s", "Python", "ratio", "KiB of tables"]
    print(table(headings, rows, left=2))
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    print(next((line for line in lines if line.startswith("Model name")), ""))


if __name__ == "__main__":
    main()
