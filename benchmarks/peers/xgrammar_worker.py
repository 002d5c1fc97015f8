"""Masks of xgrammar, measured in an environment of its own: reads one JSON object from stdin, writes one to stdout.

In: `vocab` (base64 of each token's bytes), `stops` (ids that end a turn), `schemas` by name, `answers` by name: token
ids of valid answers. Out: `version`, and by name `compile` (seconds), `masks` (seconds of each: finding tokens that
are allowed, and writing −∞ over the logits of the others), `accepted` (tokens, up to a refused one), or the `error`.
Seconds are CPU time.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
import xgrammar

torch.set_num_threads(1)


def measure(compiler: xgrammar.GrammarCompiler, vocab: int, schema: Any, answers: list[list[int]]) -> dict[str, Any]:
    started = time.thread_time()
    compiled = compiler.compile_json_schema(schema, strict_mode=False)
    seconds, masks, accepted = time.thread_time() - started, list[float](), 0
    bits, logits = xgrammar.allocate_token_bitmask(1, vocab), torch.zeros(1, vocab)
    for answer in answers:
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in answer:
            logits.zero_()
            started = time.thread_time()
            matcher.fill_next_token_bitmask(bits)
            xgrammar.apply_token_bitmask_inplace(logits, bits)
            masks.append(time.thread_time() - started)
            if not matcher.accept_token(token):
                break
            accepted += 1
    return {"compile": seconds, "masks": masks, "accepted": accepted}


def main() -> None:
    asked = json.load(sys.stdin)
    vocab = [base64.b64decode(each) for each in asked["vocab"]]
    info = xgrammar.TokenizerInfo(vocab, xgrammar.VocabType.RAW, stop_token_ids=asked["stops"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    found = {}
    for name, schema in asked["schemas"].items():
        try:
            found[name] = measure(compiler, len(vocab), schema, asked["answers"][name])
        except Exception as error:  # whatever it says of a schema
            found[name] = {"error": " ".join(str(error).split())[:80]}
    json.dump({"version": version("xgrammar"), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
