"""Convert a WordPiece `tokenizer.json`, BERT's, into GGUF fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.tokens.word_piece import ACCENTS, LONGEST_WORD, LOWERCASE, REST
from edge.values import brief

_ROLES = {  # names in tokenizer_config.json and in GGUF
    "cls": ("bos", "cls"), "sep": ("eos", "seperator"), "mask": ("mask",), "unk": ("unknown",), "pad": ("padding",),
}  # fmt: skip


def word_piece_fields(path: Path, said: Mapping[str, Any]) -> dict[str, Field]:
    """The kind of tokenizer and its normalizer. Raises UnsupportedError for settings that `WordPiece` does not have."""
    model, normalizer, words = said["model"], said.get("normalizer"), said.get("pre_tokenizer")
    wanted = {"continuing_subword_prefix": REST, "max_input_chars_per_word": LONGEST_WORD}
    for key, usual in wanted.items():
        if model.get(key, usual) != usual:
            raise UnsupportedError(f"{path}: {key} is {brief(model[key])}, which is not supported")
    for name, part, kind in (
        ("normalizer", normalizer, "BertNormalizer"),
        ("pre_tokenizer", words, "BertPreTokenizer"),
    ):
        if not isinstance(part, dict) or part.get("type") != kind:
            raise UnsupportedError(f"{path}: its {name} is {brief(part)}: {kind} is supported")
    assert isinstance(normalizer, dict)
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key, True) is not True:
            raise UnsupportedError(f"{path}: {key} is {brief(normalizer[key])}, which is not supported")
    lowercase = normalizer.get("lowercase") is not False
    accents = normalizer.get("strip_accents")
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_bos_token": True,
        LOWERCASE: lowercase,
        ACCENTS: lowercase if accents is None else accents is True,
    }


def word_piece_roles(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Field]:
    """Fields for special tokens, which mostly have BERT's names. ids: of all texts."""
    fields: dict[str, Field] = {}
    for role, names in _ROLES.items():
        text = settings.get(f"{role}_token", f"[{role.upper()}]")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in ids:
            fields |= dict.fromkeys((f"tokenizer.ggml.{name}_token_id" for name in names), np.uint32(ids[text]))
    return fields
