"""Map a byte-level `tokenizer.json` to the name of a GGUF pre-tokenizer: GGUF identifies them by name only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.tokens.pre_tokenizers import GPT2_WORDS, PRE_TOKENIZERS, PUBLISHED, PreTokenizer
from edge.model.tokens.tokenizer import NORMALIZER, WORDS


def byte_level_fields(path: Path, said: Mapping[str, Any]) -> dict[str, Field]:
    """Model, pre-tokenizer and normalizer of a tokenizer.json. Raises UnsupportedError if GGUF has no name for them."""
    model = said["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedError(f"{path}: a tokenizer with {key} is not supported")
    steps = _steps(said.get("pre_tokenizer"))
    # Of several names for the same rule, the first in the table is the one that readers know best.
    rules = [(name, rule) for rules in (PRE_TOKENIZERS, PUBLISHED) for name, rule in rules.items()]
    rules = [(name, rule) for name, rule in rules if steps == _steps_of(rule)]
    if not rules:
        described = _described(said.get("pre_tokenizer"))
        raise UnsupportedError(f"{path}: its pre-tokenizer is none that GGUF has a name for here ({described})")
    whole_words = bool(model.get("ignore_merges"))  # a word of the vocabulary is not merged
    rules = [(name, rule) for name, rule in rules if rule.whole_words == whole_words]
    if not rules:
        raise UnsupportedError(f"{path}: no pre-tokenizer of GGUF with these words has ignore_merges {whole_words}")
    name, rule = rules[0]
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if rule != PRE_TOKENIZERS[name]:
        fields[WORDS] = "published"
    return fields | _normalizer_field(path, said.get("normalizer"))


def _normalizer_field(path: Path, normalizer: Any) -> dict[str, Field]:
    if normalizer is None:
        return {}
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "NFC":
            return {NORMALIZER: "NFC"}
        if normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"):
            return {}
    raise UnsupportedError(f"{path}: its normalizer is not supported ({_described(normalizer)}): none and NFC are")


def _steps_of(rule: PreTokenizer) -> list[Any]:
    return [*(("split", regex) for regex in rule.splits), "bytes"]


def _steps(said: Any) -> list[Any]:
    """A pre-tokenizer as a flat list of steps, the same for all spellings of a rule."""
    if not isinstance(said, dict):
        return []
    kind = said.get("type")
    if kind == "Sequence":
        inner = said.get("pretokenizers")
        return [step for each in (inner if isinstance(inner, list) else []) for step in _steps(each)]
    if kind == "Digits":
        return [("split", r"\p{N}" if said.get("individual_digits") else r"\p{N}+")]
    if kind == "ByteLevel":
        words = [("split", GPT2_WORDS)] if said.get("use_regex", True) else []
        return [*(["space in front"] if said.get("add_prefix_space", True) else []), *words, "bytes"]
    if kind == "Split" and isinstance(said.get("pattern"), dict):
        how, regex = (said.get("behavior"), bool(said.get("invert"))), said["pattern"].get("Regex")
        # Removing the text between matches is the same as isolating them if the pattern matches all text.
        complete = isinstance(regex, str) and regex.endswith(r"|\s+")
        if how in (("Isolated", False), ("Isolated", True)) or (complete and how == ("Removed", True)):
            return [("split", regex)]
    return [json.dumps(said, sort_keys=True)]


def _described(said: Any) -> str:
    text = json.dumps(said, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"
