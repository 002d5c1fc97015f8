"""The tables of tokens and merges: the ids of the `tokenizers` library, in little memory, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_child
from test_gguf_file import ARRAY, F32, STRING, small

from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.tokens.vocabulary import open_vocabulary


def file_of(folder: Path, tokens: list[str], **lists: tuple[int, list[object]]) -> GGUFFile:
    file = small()
    file.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, tokens))
    file.metadata |= {f"tokenizer.ggml.{name}": (ARRAY, items) for name, items in lists.items()}
    return read_gguf(file.write(folder / "vocabulary.gguf"))


_OPEN = """
import json, os, sys
import numpy, edge.model.tokens.tokenizer
from edge.devices.memory import memory_use, release_free_memory
from edge.formats.gguf import read_gguf
from edge.model.tokens.vocabulary import open_vocabulary

file = read_gguf(sys.argv[1])
release_free_memory()
before = memory_use().rss
vocabulary = open_vocabulary(file, "llama")
release_free_memory()
print(json.dumps([memory_use().rss - before, memory_use().peak - before, vocabulary.find("word77777")]))
"""


def test_large_vocabulary_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three times the bytes of its fields, with the file of its tables mapped whole."""
    tokens = ["<unk>", *(f"word{index}" for index in range(80_000)), *"wordabcdef0123456789"[4:]]
    file = file_of(tmp_path, tokens, scores=(F32, [float(-index) for index in range(len(tokens))]))
    size = sum(end - start for start, end in file.spans.values())
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    made, mapped = (run_child(_OPEN, file.path).output for _ in range(2))
    assert made[2] == mapped[2] == tokens.index("word77777")
    assert mapped[0] < 3 * size
    assert mapped[1] < 4 * size
    assert made[1] < 20 * size  # once; as Python's objects they took 60 times their size


def test_without_cache_folder_tables_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "file"))
    vocabulary = open_vocabulary(file_of(tmp_path, ["a", "b", "ab"], merges=(STRING, ["a b"])), "gpt2")
    assert vocabulary.merge([0, 1, 1]) == [2, 1]
