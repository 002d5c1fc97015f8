"""Which of GGUF's pre-tokenizers a byte-level `tokenizer.json` has: GGUF knows them by name only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.tokenizer import GPT2_WORDS, LLAMA3_FAMILY, NORMALIZER, PRE_TOKENIZERS

# Names in the order in which they are tried: several stand for the same rule, and readers know these best.
_NAMES = ("llama-bpe", "smaug-bpe", "qwen2", "smollm", "gpt-2", "default")


def byte_level_fields(path: Path, said: Mapping[str, Any]) -> dict[str, Field]:
    """Model, pre-tokenizer and normalizer of a tokenizer.json. Raises UnsupportedError if GGUF has no name for them."""
    model = said["model"]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedError(f"{path}: a tokenizer with {key} is not supported")
    steps = _steps(said.get("pre_tokenizer"))
    names = [name for name in _NAMES if steps == _known_steps(name)]
    if not names:
        described = _described(said.get("pre_tokenizer"))
        raise UnsupportedError(f"{path}: its pre-tokenizer is none that GGUF has a name for here ({described})")
    whole_words = bool(model.get("ignore_merges"))  # a word of the vocabulary is not merged
    names = [name for name in names if (name in LLAMA3_FAMILY) == whole_words]
    if not names:
        raise UnsupportedError(f"{path}: no pre-tokenizer of GGUF with these words has ignore_merges {whole_words}")
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[0],
        "tokenizer.ggml.add_space_prefix": False,
    }
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


def _known_steps(name: str) -> list[Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    return _steps(json.loads(tokenizer.to_str())["pre_tokenizer"])


def _steps(said: Any) -> list[Any]:
    """A pre-tokenizer as a flat list of steps, the same for all spellings of the same rule."""
    if not isinstance(said, dict):
        return []
    kind = said.get("type")
    if kind == "Sequence":
        inner = said.get("pretokenizers")
        return [step for each in (inner if isinstance(inner, list) else []) for step in _steps(each)]
    if kind == "Digits":
        return [("digits", bool(said.get("individual_digits")))]
    if kind == "ByteLevel":
        words = [("split", GPT2_WORDS)] if said.get("use_regex", True) else []
        return [*(["space in front"] if said.get("add_prefix_space", True) else []), *words, "bytes"]
    if kind == "Split" and isinstance(said.get("pattern"), dict):
        # Removing the text between matches is the same as isolating them, since our patterns match all text.
        how = (said.get("behavior"), bool(said.get("invert")))
        if how in (("Isolated", False), ("Isolated", True), ("Removed", True)):
            return [("split", said["pattern"].get("Regex"))]
    return [json.dumps(said, sort_keys=True)]


def _described(said: Any) -> str:
    text = json.dumps(said, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"
