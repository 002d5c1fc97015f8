"""Recall after one compression of the cache, before the question is known: policies at equal bytes.

Eight pass keys of five digits are hidden in each text. The text is read once per dtype; then every policy compresses
those rows to as many as --kv-memory has room for, the policy's own tables and scores included. Digits: the share
that is found, greedily, each given the correct ones before it. KL, perplexity: of the 256 tokens that follow the text,
against the full cache in the first dtype.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from text import long_text

import edge
from edge.backends.base import EngineConfig
from edge.backends.calibration_text import TEXT
from edge.backends.kv_cache import KVState
from edge.backends.reference import learned
from edge.backends.tvm.engine import NativeEngine
from edge.budget import format_bytes, parse_bytes
from edge.cli.measuring.evaluate_kv import split_policies
from edge.cli.terminal.show import table
from edge.kv import make_policy
from edge.kv.policy import EVERY
from edge.lab.quality.perplexity import token_loss
from edge.lab.quality.retrieval import count_right, split_reply
from edge.likelihood import divergences
from edge.options import Options
from edge.plan.engines import plan_here
from edge.run.sequences.eviction import view_for
from edge.types import FloatArray, IntArray

MODEL, DOCUMENTS = "smollm2-135m", ("secI8.html", "secJ3.html", "secI5.html", "secJ5.html")
CHUNK, OBSERVED, AFTER = 64, 32, 256  # tokens: of a pass; that a policy of the last queries sees at most; behind a text
NAMES = ("Anna", "Boris", "Clara", "David", "Erik", "Fiona", "Georg", "Helen")
NEEDLE, QUESTION = "\n\nThe pass key of {0} is {1}. Remember: {0}, {1}.\n\n", "\n\nThe pass key of {0} is"


@dataclass(frozen=True)
class Text:
    """tokens: with the keys, int32 [n]. keys: question and reply of each. after: what follows the text."""

    tokens: IntArray
    keys: list[tuple[IntArray, IntArray]]
    after: IntArray


@dataclass
class Kept:
    """Found after a compression: correct digits of all, logits of the tokens after the text."""

    right: int
    digits: int
    logits: FloatArray
    losses: list[float]


def make_text(model: edge.Model, document: str, length: int, seed: int) -> Text:
    words = model.encode_prompt(long_text(document).read_text(encoding="utf-8"), raw=True)[: length + AFTER + 1]
    random, parts, keys = np.random.default_rng(seed), list[IntArray](), list[tuple[IntArray, IntArray]]()
    for name, part in zip(NAMES, np.array_split(words[:length], len(NAMES)), strict=True):
        key = str(random.integers(10_000, 100_000))
        parts += [part[: part.size // 2], model.tokenizer.encode(NEEDLE.format(name, key)), part[part.size // 2 :]]
        keys.append(split_reply(model.tokenizer, QUESTION.format(name), key))
    return Text(np.concatenate(parts).astype(np.int32), keys, words[length:])


class Reader:
    """An engine with room for a text and what follows; reads the text once, and compresses it again and again."""

    def __init__(self, model: edge.Model, room: int, dtype: str, reads: int = 0) -> None:
        """room: rows. reads: that a token behind the text reads at most (policy `quest`); 0: all."""
        looks = not reads
        config = EngineConfig(
            room, CHUNK, dtype, 1, logits_rows=CHUNK, observes=looks, per_head=looks, uneven=looks, reads=reads
        )
        self.model, self.engine = model, NativeEngine(model.file, model.spec, config)

    def read(self, tokens: IntArray) -> KVState:
        """Read all but the last `OBSERVED` tokens."""
        self.engine.kv.truncate(0)
        self._run(tokens[:-OBSERVED])
        return self.engine.kv.save()

    def compress(self, tokens: IntArray, before: KVState, policy: str, rows: int) -> None:
        """Leave the rows that a policy keeps of `tokens`, whose beginning `before` has."""
        made, kv = make_policy(policy), self.engine.kv
        kv.truncate(0)
        kv.clear_attention()
        if made.needs.queries == EVERY:
            self._run(tokens, observe=True)
        else:
            kv.append(before)
            self._run(tokens[-OBSERVED:], observe=bool(made.needs.queries), votes=made.needs.votes)
        if made.evicts and kv.length > rows:
            known = None
            if made.needs.ranks:
                known = learned.find(self.model.file, self.model.spec, self.model.tokenizer.encode(TEXT))
            kept = made.rows_to_keep(view_for(kv, made.needs, kv.capacity - rows, known), rows)
            if isinstance(kept, np.ndarray):
                kv.keep(kept, close_gaps=made.close_gaps)
            else:
                kv.keep_heads(kept)

    def measure(self, text: Text, before: KVState, policy: str, rows: int) -> Kept:
        self.compress(text.tokens, before, policy, rows)
        kv = self.engine.kv
        found, length = Kept(0, 0, np.zeros(0, np.float32), []), kv.length
        for question, reply in text.keys:
            logits = self.logits(np.concatenate([question, reply[:-1]]))[question.size :]
            found.right += count_right(self.model.tokenizer, logits, reply)
            found.digits += reply.size - 1
            kv.truncate(length)
        found.logits = self.logits(text.after[:-1])
        found.losses = [token_loss(*each) for each in zip(found.logits, text.after[1:].tolist(), strict=True)]
        return found

    def _run(self, tokens: IntArray, *, observe: bool = False, votes: bool = False) -> None:
        for start in range(0, tokens.size, CHUNK):
            part = tokens[start : start + CHUNK]
            self.engine.observe(part.size if observe else 0, votes=votes)
            self.engine.forward(part)

    def logits(self, tokens: IntArray) -> FloatArray:
        """After every token, float32 [n, vocab]. Only a token alone chooses the rows that it reads."""
        step = 1 if self.engine.config.reads else CHUNK
        self.engine.observe(0)
        return np.concatenate([
            np.array(self.engine.forward_all(tokens[start : start + step])) for start in range(0, tokens.size, step)
        ])  # fmt: skip


def planned_rows(model: edge.Model, policy: str, dtype: str, memory: int, tokens: int) -> int:
    options = Options(backend="cpu", kv_policy=policy, kv_dtype=dtype, kv_memory=memory, prefill_step_size=CHUNK,
                      expected_tokens=tokens)  # fmt: skip
    return plan_here(model.file, model.spec, options)[1].config.capacity


def measured(
    model: edge.Model, texts: list[Text], policies: list[str], dtypes: list[str], sizes: list[int]
) -> Iterator[list[str]]:
    """Lines of the table."""
    exact = list[Kept]()
    for dtype in dtypes:
        reader = Reader(model, max(each.tokens.size for each in texts) + AFTER + 1, dtype)
        states = [reader.read(text.tokens) for text in texts]
        tokens = max(text.tokens.size for text in texts)
        cells = [(0, "full"), *((size, policy) for size in sizes for policy in policies)]
        for size, policy in cells:
            rows = planned_rows(model, policy, dtype, size, tokens) if size else tokens
            found = [reader.measure(*each, policy, rows) for each in zip(texts, states, strict=True)]
            exact = exact or found
            kl = np.concatenate(
                [divergences(one.logits, other.logits) for one, other in zip(exact, found, strict=True)]
            )
            loss, least = (np.array([each for kept in kept for each in kept.losses]) for kept in (found, exact))
            right = np.array([each.right / each.digits for each in found])
            yield [
                policy, dtype, format_bytes(size) if size else "", f"{rows:,}",
                f"{right.mean():.2f}", f"{kl.mean():.3f}", f"{math.exp(float((loss - least).mean())):.3f}",
            ]  # fmt: skip
        reader.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", default="streaming,h2o,tova,snapkv,adakv,keydiff,knorm,kvzap")
    parser.add_argument("--kv-dtype", default="f16,int8,int4")
    parser.add_argument("--kv-memory", default="5760KiB")
    parser.add_argument("--length", type=int, default=1400, help="tokens of each text, without its keys")
    parser.add_argument("--texts", type=int, default=len(DOCUMENTS))
    options = parser.parse_args()
    model = edge.open_model(MODEL)
    texts = [make_text(model, each, options.length, seed) for seed, each in enumerate(DOCUMENTS[: options.texts])]
    lines, sizes = [], [parse_bytes(each) for each in options.kv_memory.split(",")]
    for line in measured(model, texts, split_policies(options.policies), options.kv_dtype.split(","), sizes):
        lines.append(line)
        print(" ".join(line), flush=True)
    print(f"\n## {40 * len(texts)} digits asked for after one compression, and {AFTER} tokens that follow\n")
    print(table(["policy", "KV", "bytes", "rows", "digits found", "KL", "perplexity, × full"], lines, left=2))


if __name__ == "__main__":
    main()
