"""Decoding with drafts from repeated text and without: the same answer, faster where it repeats its context.

Two sessions of one process take turns at each prompt. Kinds of text: an edit of code and a correction of prose, which
copy most of their context; a retrieval, which copies some records of many; a summary, which quotes; a story and a list,
which repeat themselves or nothing. Answers end where the model ends them, and go on behind that, where small models
repeat themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from functools import partial
from itertools import product
from typing import Any

from machine import machine, say

import edge
from edge.cli.terminal.show import table

_CODE = '''def mean(values):
    """The arithmetic mean of a list of numbers."""
    if not values:
        raise ValueError("no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    """The mean of the squared distances from the mean."""
    middle = mean(values)
    total = 0.0
    for value in values:
        total += (value - middle) ** 2
    return total / len(values)
'''
_PROSE = (
    "The harbour of the old town was built in 1612, when the river still reached the walls. Ships from the north "
    "brought timber and salt, and left with wine, wool and glass. In 1743 a storm destroyed the eastern pier, and the "
    "merchants paid for a new one of stone, which stands today. The lighthouse was added in 1821; its keeper, Anna "
    "Lindqvist, lived there for forty-one years and kept a diary of the weather."
)
_RECORDS = "\n".join(
    f"order {number}: {count} boxes of {goods}, shipped from {town} on {day} May, signed by {name}"
    for number, count, goods, town, day, name in (
        (4107, 12, "green tea", "Osaka", 3, "M. Ito"), (4108, 3, "door hinges", "Porto", 3, "A. Reis"),
        (4109, 40, "copper wire", "Lima", 4, "J. Quispe"), (4110, 7, "violin strings", "Cremona", 9, "L. Amati"),
        (4111, 18, "dried figs", "Izmir", 9, "E. Kaya"), (4112, 2, "brass lamps", "Fez", 12, "S. Alaoui"),
        (4113, 25, "wool yarn", "Bergen", 15, "K. Lie"), (4114, 6, "chess sets", "Tbilisi", 18, "N. Beridze"),
    )
)  # fmt: skip
PROMPTS = {
    "edit of code": f"Repeat this code, but call the function `mean` `average` instead:\n\n{_CODE}",
    "correction": f"Repeat this text word by word and correct its spelling:\n\n{_PROSE}",
    "retrieval": f"{_RECORDS}\n\nCopy the lines of the orders 4109, 4111 and 4113, word by word.",
    "summary": f"Summarize this text in five sentences, with its own words:\n\n{_PROSE}",
    "story": "Write a short story about a fox who learns to swim.",
    "list": "List the planets of the solar system with one fact about each.",
}


def answer(session: Any, prompt: str, tokens: int, *, ignore_eos: bool) -> Any:
    if session._sequence.ahead.most:  # or the same answer of the round before would be copied
        session._sequence.ahead.drafts.clear()
    session.generate(prompt, max_tokens=tokens, ignore_eos=ignore_eos)
    return session.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--draft", help="a small model that drafts, too")
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("-n", "--tokens", type=int, default=160)
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for model in arguments.model:
        rows = []
        with edge.load(model, draft=arguments.draft) as drafting, edge.load(model, speculate="off") as plain:
            for (kind, prompt), ignore_eos in product(PROMPTS.items(), (False, True)):
                ask = partial(answer, prompt=prompt, tokens=arguments.tokens, ignore_eos=ignore_eos)
                ask(drafting), ask(plain)
                pairs = []
                for number in range(arguments.rounds):
                    say(f"{model}, {kind}: round {number + 1} of {arguments.rounds}")
                    pairs.append([ask(drafting), ask(plain)])
                speeds = [[report.timings.decode_tok_s or math.nan for report in pair] for pair in pairs]
                drafted = pairs[-1][0].drafted
                joules = statistics.median(one.energy.per_token / other.energy.per_token for one, other in pairs)
                rows.append([
                    f"{kind}, goes on" if ignore_eos else kind, f"{pairs[0][0].tokens.generated:,}",
                    *(f"{statistics.median(each):,.0f}" for each in zip(*speeds, strict=True)),
                    f"{statistics.median(one / other for one, other in speeds):.2f}",
                    f"{drafted.accepted:,} of {drafted.tokens:,}", f"{joules:.2f}",
                    "yes" if all(one.text == other.text for one, other in pairs) else "NO",
                ])  # fmt: skip
        name = f"{model} with {arguments.draft}" if arguments.draft else model
        print(f"\n## {name}, {arguments.tokens} tokens, greedy, {arguments.rounds} rounds, medians\n")
        headings = ["text", "tokens", "drafts, tok/s", "off, tok/s", "ratio", "right", "joules, ratio", "same answer"]
        print(table(headings, rows))


if __name__ == "__main__":
    main()
