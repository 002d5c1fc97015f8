"""Damaged model.edge files, by the hundred thousand: an error of one line, never an access outside the file.

python tests/program.py fuzz_model_file 1000000 [SEED]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import bundle_sources
from runtime_library import C_FILES, CHECKED, build
from test_assistant import pair  # noqa: F401
from test_draft_model import LARGE, OTHER
from test_eagle import head  # noqa: F401
from test_mtp_drafts import MODEL as PREDICTS
from test_runtime_assistant import EAGER

PROGRAM = Path(__file__).parent / "runtime" / "model_fuzz.c"
OPENING = (
    "error.c", "model.c", "open.c", "trust.c", "hash.c", "chat.c", "vocabulary.c", "tokenizer.c", "words.c",
    "letters.c", "utf8.c", "cpu.c", "posix.c", "linux.c",
)  # fmt: skip
# Byte-level words with a chat template, SentencePiece, a fixed state, a table that is not in memory.
MODELS = ("llama-gqa-tied", "spm", "qwen35", "gemma4")


def fuzz(name: str, count: int, seed: int, *, sessions: bool, **options: str) -> tuple[int, int]:
    """How many of `count` damaged files opened. sessions: some of these answer, too; an assistant drafts always."""
    model, parts = bundle_sources(name, max_kv_size=64, **options)
    if sessions:
        runtime = [path for path in C_FILES if path.name not in ("platform.c", "drafts.c")]
        program = build([*runtime, PROGRAM, EAGER if options else "drafts.c", *parts], (*CHECKED, "-DWITH_SESSIONS"))
    else:
        trusted = [path for path in parts if path.name == "trusted.c"]
        program = build(
            [*OPENING, PROGRAM, *trusted], (*CHECKED, "-Wl,--defsym=edge_json_calls=0")
        )  # which answers call
    done = subprocess.run([program, model, str(count), str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}, seed {seed}: {done.stderr[-3000:]}"
    found = re.fullmatch(r"(\d+) of (\d+)\n", done.stdout)
    assert found
    return int(found[1]), int(found[2])


def test_damaged_files_are_errors() -> None:
    opened, count = fuzz(MODELS[0], 3000, 1, sessions=False)
    assert count == 3000
    assert 300 < opened < 2700  # many are refused, and many checksums were repaired


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_damaged_files_are_errors_in_sessions_too(name: str) -> None:
    opened, count = fuzz(name, 50_000, 2, sessions=True)
    assert count == 50_000
    assert 0.1 * count < opened < 0.9 * count


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["assistant", "layer", "head", "model"])
def test_damaged_drafts_are_errors(by: str, pair: tuple[Path, Path], head: Path) -> None:  # noqa: F811
    """Bytes of the file inside model.edge that drafts are damaged, and bytes around it."""
    model, count, options = {
        "assistant": (pair[0], 50_000, {"draft": str(pair[1])}), "layer": (PREDICTS, 6000, {"kv_policy": "streaming"}),
        "head": (PREDICTS, 6000, {"draft": str(head)}), "model": (LARGE, 6000, {"draft": str(OTHER)}),
    }[by]  # fmt: skip
    opened, _ = fuzz(str(model), count, 3, sessions=True, **options)
    assert 0.1 * count < opened < 0.9 * count


if __name__ == "__main__":
    wanted, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for each in MODELS:
        print(each, *fuzz(each, wanted // len(MODELS), first, sessions=True))
