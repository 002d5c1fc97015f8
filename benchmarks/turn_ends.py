"""Whether a model still ends its answers where the model it was made from ends them: for benchmarks/quantizers.py.

The exact model answers greedily. Each model then reads these answers, and says at each place whether it would end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge.backends.base import Engine
from edge.model.model import Model
from edge.types import FloatArray, IntArray

PROMPTS = (
    "What is the capital of Italy?", "Name three fruits.", "How many days has a leap year?", "Say hello in Spanish.",
    "Write a sentence about rain.", "What is 12 times 3?", "Why do leaves fall in autumn?", "What does a baker do?",
    "Give me a short tip for better sleep.", "Translate 'good morning' to French.", "Who wrote Hamlet?",
    "List two uses of vinegar.", "What is a noun?", "Describe the colour red in one sentence.",
    "Is ice lighter than water?", "Suggest a name for a black cat.", "What is the opposite of early?",
    "Write a short thank-you note to a neighbour.",
    "Explain in two sentences what a battery is.", "Which planet is the largest?", "What is bread made of?",
    "Give an example of a mammal.", "Finish the proverb: practice makes", "How do bees make honey?",
)  # fmt: skip
LONGEST = 200  # tokens of an answer


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer, which ends: int32 [n]; the answer's tokens begin at `start`."""

    tokens: IntArray
    start: int


@dataclass(frozen=True)
class Ends:
    """Of answers: how many a model would end at their end, and earlier; and its chance of ending at the end, as the
    geometric mean of the ratios to the exact model's."""

    there: int
    earlier: int
    chance: float


def answers(model: Model, exact: Engine, rows: int) -> list[Answer]:
    """Those that the exact model ends within the rows of its cache."""
    found = []
    for prompt in PROMPTS:
        tokens = model.encode_prompt(prompt).tolist()
        start = len(tokens)
        most = min(rows, start + LONGEST)
        exact.kv.truncate(0)
        logits = exact.forward_all(np.array(tokens, np.int32))[-1]
        while (token := int(logits.argmax())) not in model.tokenizer.end_ids and len(tokens) < most:
            tokens.append(token)
            logits = exact.forward_all(np.array([token], np.int32))[-1]
        if token in model.tokenizer.end_ids:
            found.append(Answer(np.array(tokens, np.int32), start))
    return found


def ends_of(model: Model, exact: Engine, others: Mapping[str, Engine], texts: Sequence[Answer]) -> dict[str, Ends]:
    """By the names of `others`."""
    ends = sorted(model.tokenizer.end_ids)
    found = {name: np.zeros(3) for name in others}
    for text in texts:
        wanted = _chance(_read(exact, text)[-1], ends)
        for name, engine in others.items():
            logits = _read(engine, text)
            would_end = np.isin(logits.argmax(axis=-1), ends)
            found[name] += (would_end[-1], would_end[:-1].any(), _chance(logits[-1], ends) - wanted)
    return {name: Ends(int(a), int(b), float(np.exp(c / len(texts)))) for name, (a, b, c) in found.items()}


def _read(engine: Engine, text: Answer) -> FloatArray:
    """Logits at each place of the answer, the last of them behind it."""
    engine.kv.truncate(0)
    return engine.forward_all(text.tokens)[text.start - 1 :]


def _chance(logits: FloatArray, ends: Sequence[int]) -> float:
    """ln p of ending."""
    wide = logits.astype(np.float64)
    return float(np.logaddexp.reduce(wide[ends]) - np.logaddexp.reduce(wide))
