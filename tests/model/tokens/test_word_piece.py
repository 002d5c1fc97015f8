"""WordPiece ids against those of the tokenizers of Hugging Face (tests/golden/encoders.py)."""

from __future__ import annotations

import json

import pytest
from conftest import GOLDEN

from edge.formats.gguf import read_gguf
from edge.model.model import open_model
from edge.model.tokens.word_piece import WordPiece, to_stored

ENCODERS = GOLDEN / "encoders"
CASES = json.loads((ENCODERS / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["bert", "bert-cased"])
def test_ids_match_library(name: str) -> None:
    model = open_model(ENCODERS / f"{name}.gguf")
    for case in CASES:
        if case["text"]:  # nothing is embedded
            assert model.encode_text(case["text"]).tolist() == case[name], repr(case["text"])


def test_special_tokens_and_decoding() -> None:
    tokenizer = WordPiece(read_gguf(ENCODERS / "bert.gguf"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 3)
    assert tokenizer.encode("a [SEP] b", special=True).tolist().count(3) == 1
    assert 3 not in tokenizer.encode("a [SEP] b")  # a text of users holds no control tokens
    assert tokenizer.decode(tokenizer.encode("The sky is blue")) == "the sky is blue"
    for token in range(tokenizer.size):
        text = tokenizer.text(token)
        stored = to_stored(text)
        assert stored == text if text.startswith("[") and len(text) > 1 else stored in (f"▁{text}", text[2:])
