"""Writer of `tokenizer.json` for the `tokenizers` library, which then gives the ids of edge's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge.model.tokens.tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, target: Path) -> None:
    """Write the file. Raises OSError."""
    target.write_text(json.dumps(tokenizer_json(tokenizer), ensure_ascii=False), encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of the file. Control tokens match in any text, as users of the library expect."""
    said: dict[str, Any] = json.loads(tokenizer.library_form().to_str())
    model = said["model"]
    model["vocab"] = {tokenizer.text(index): index for index in range(tokenizer.size)}
    special = tokenizer.special_tokens()
    said["added_tokens"] = [
        {"id": index, "content": text, "single_word": index in tokenizer.alone, "lstrip": index in tokenizer.lstripping,
         "rstrip": index in tokenizer.swallowing, "normalized": False, "special": control}
        for text, (index, control) in sorted(special.items(), key=lambda item: item[1])
    ]  # fmt: skip
    if tokenizer.kind == "gpt2":
        said["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    else:
        said["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if tokenizer.space_prefix else []),
            ],
        }
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        if tokenizer.space_prefix and tokenizer.spaces:
            scheme = {"prepend_scheme": tokenizer.spaces, "split": False}
            said["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", **scheme}
            said["normalizer"] = None
        else:
            prefix = [{"type": "Prepend", "prepend": "▁"}] if tokenizer.space_prefix else []
            said["normalizer"] = {"type": "Sequence", "normalizers": [*prefix, replace]}
    return said
