"""The C runtime's tokenizer: the ids and texts of edge.model.tokenizer."""

from __future__ import annotations

from functools import lru_cache

import pytest
from conftest import examples
from embed_tokens import CTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pre_tokenizers import SEPARATING, mixed_texts
from test_tokenizer import MANUAL, SPM, TEXTS, TORTURE

from edge.formats.gguf import read_gguf
from edge.model.catalog import find_model
from edge.model.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "gemma3-270m", str(SPM))


@lru_cache
def both(model: str) -> tuple[Tokenizer, CTokenizer]:
    tokenizer = Tokenizer(read_gguf(find_model(model)))
    return tokenizer, CTokenizer(tokenizer)


def differing(python: Tokenizer, c: CTokenizer, texts: list[str]) -> list[str]:
    """Texts whose ids differ, or what the ids say."""
    wrong = []
    for text in texts:
        for special, start in ((False, True), (True, False)):
            ids = python.encode(text, special=special, start=start).tolist()
            if c.encode(text, special, start) != ids or c.decode(ids) != python.decode(ids):
                wrong.append(text)
    return wrong


@pytest.mark.parametrize("model", MODELS)
def test_ids_and_text_of_models(model: str) -> None:
    assert differing(*both(model), TEXTS + SEPARATING + mixed_texts(1, examples(300)) + [MANUAL[:50_000]]) == []


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=examples(40), deadline=None)
@given(text=TORTURE)
def test_any_text(model: str, text: str) -> None:
    assert differing(*both(model), [text]) == []


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([*range(0x100), 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0x80, 0x9F, 0xA0, 0xBF]), max_size=30))
def test_bytes_that_are_no_text_are_replaced(data: list[int]) -> None:
    python, c = both(str(SPM))
    text = bytes(data).decode(errors="replace")
    assert c.encode(bytes(data)) == python.encode(text).tolist()
    byte_tokens = [python.vocabulary.find(f"<0x{byte:02X}>") for byte in data]
    assert c.decode([token for token in byte_tokens if token is not None]) == text
