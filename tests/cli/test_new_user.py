"""Mistakes of new users: files in other forms, and a function of logits that makes NaN, each answered in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from hf_folders import complaint, copy_folder, edit_json

import edge
from edge.converters.huggingface.reader import open_folder
from edge.errors import InputError
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import fields_of, write_outline
from edge.grammar.grammar import read_grammar

TINY = GOLDEN / "llama-gqa-tied.gguf"


def test_processor_that_makes_nan_is_named() -> None:
    def spoil(tokens: Any, logits: Any) -> None:
        logits[:] = np.nan

    with edge.load(TINY, backend="reference", max_kv_size=64) as session, pytest.raises(InputError, match="NaN"):
        session.generate("Hi", raw=True, max_tokens=2, logits_processor=spoil)


def test_byte_order_marks_are_read_and_renamed_parts_explained(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(b"\xef\xbb\xbf" + json.dumps({"type": "integer"}).encode())
    assert read_grammar(json_schema=schema, lark=None, regex=None).json_schema == '{"type": "integer"}'

    part, file = tmp_path / "renamed.gguf", read_gguf(TINY)
    said = complaint(lambda: write_outline(part, fields_of(file) | {"split.count": np.uint16(3)}, []))
    assert "NAME-00001-of-00003.gguf" in said  # it reads what it wrote


def test_gemma_3_may_have_fewer_layers_than_its_period(tmp_path: Path) -> None:
    folder = copy_folder("gemma3_text", tmp_path / "gemma3")
    edit_json(folder / "config.json", lambda said: said.update(layer_types=["sliding_attention"] * 4))
    assert open_folder(folder).parts
    edit_json(folder / "config.json", lambda said: said.update(layer_types=["full_attention"] * 4))
    assert "every 6th, as in gemma3" in complaint(lambda: open_folder(folder))
