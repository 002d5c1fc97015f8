"""Tasks in the manner of RULER, with the question last: what policies keep of a text at half of its rows' bytes.

    python benchmarks/ruler.py [--length 2000] [--texts 4] [--share 0.5] [--kv-dtype f16] [--policies …]

RULER (arXiv:2404.06654) asks about long texts; the words here are our own. `needles` hides eight numbers, each of
another person. `variables` gives numbers to four names, and the number of each to a second name, and asks for the
second. `common words` is a list in which ten words come thirty times each and others once. Each text is read once; then
each policy compresses its rows once, to as many as --share of the bytes of all rows in f16 has room for, its own tables
and scores included; only then the questions come.

Scores: of numbers, the digits found greedily, each given those before. Of words, of all pairs of a common and
a rare word, those whose common word is the likelier answer, less the others: 0 is chance. `full` is the model's score
with all rows; the mean of shares of it leaves out tasks in which that is below .1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from retention import DOCUMENTS, MODEL, NAMES, NEEDLE, QUESTION, Reader, planned_rows
from text import long_text

import edge
from edge.backends.kv_cache import KVState
from edge.budget import format_bytes
from edge.cli.measuring.evaluate_kv import split_policies
from edge.cli.terminal.show import table
from edge.kv import make_policy
from edge.lab.quality.retrieval import count_right, split_reply
from edge.types import IntArray

TASKS = ("needles", "variables", "common words")
POLICIES = "streaming,h2o,tova,snapkv,keydiff,knorm,kvzap"
LEAST = 0.1  # score with all rows, below which shares of it say nothing
ROOM = 64  # tokens of a question and its answer
VARIABLES = (("LIME", "ROOF"), ("DUSK", "CORN"), ("FERN", "MAST"), ("WOLF", "PINE"))
FIRST = "\n\nThe value of {0} is {1}. Remember: {0} is {1}.\n\n"
SECOND = "\n\nThe value of {0} is the value of {1}. Remember: {0} is {1}.\n\n"
VALUE = "\n\nThe value of {1} is"
LIST, MOST = "\n\nA list of words:", "\n\nThe word that comes most often in this list of words is the word"
OFTEN, COMMON = 30, 10  # times that each of so many words come


@dataclass(frozen=True)
class Asked:
    """A question behind a text. reply: its last token, and those of the answer; or of words, ids of `common` and
    `rare` ones, of which one comes next."""

    question: IntArray
    reply: IntArray
    common: IntArray
    rare: IntArray


@dataclass(frozen=True)
class Task:
    tokens: IntArray  # int32 [n]
    asked: list[Asked]


_NONE = np.zeros(0, np.int32)


def make_task(model: edge.Model, name: str, document: str, length: int, seed: int) -> Task:
    random = np.random.default_rng(seed)
    if name == "common words":
        return _words(model, length, random)
    filler = model.encode_prompt(long_text(document).read_text(encoding="utf-8"), raw=True)[:length]
    numbers = [str(each) for each in random.integers(10_000, 100_000, len(NAMES))]
    if name == "needles":
        hidden = [NEEDLE.format(*each) for each in zip(NAMES, numbers, strict=True)]
        questions = [QUESTION.format(each) for each in NAMES]
    else:
        firsts = [FIRST.format(one, number) for (one, _), number in zip(VARIABLES, numbers, strict=False)]
        hidden = [*firsts, *(SECOND.format(other, one) for one, other in VARIABLES)]
        questions = [VALUE.format(*each) for each in VARIABLES]
    inserted = [model.tokenizer.encode(each) for each in hidden]
    parts = list[IntArray]()
    around = np.array_split(filler[: length - sum(map(len, inserted))], len(hidden))
    for part, between in zip(around, inserted, strict=True):
        parts += [part[: part.size // 2], between, part[part.size // 2 :]]
    asked = [
        Asked(*split_reply(model.tokenizer, *each), _NONE, _NONE) for each in zip(questions, numbers, strict=False)
    ]
    return Task(np.concatenate(parts).astype(np.int32), asked)


def _words(model: edge.Model, length: int, random: np.random.Generator) -> Task:
    """Words of one token each. All others come once."""
    begins = model.encode_prompt(LIST, raw=True)
    known = [model.tokenizer.encode(f" {each}", start=False) for each in _nouns()]
    single = random.permutation(np.unique([each[0] for each in known if each.size == 1]))
    common, rare = single[:COMMON], single[COMMON:][: length - begins.size - COMMON * OFTEN]
    listed = random.permutation(np.concatenate([np.repeat(common, OFTEN), rare]))
    question = model.tokenizer.encode(MOST)
    return Task(np.concatenate([begins, listed]).astype(np.int32), [Asked(question, _NONE, common, rare)])


def _nouns() -> list[str]:
    """Words of the documents, in lower case."""
    words = " ".join(long_text(each).read_text(encoding="utf-8") for each in DOCUMENTS).split()
    return sorted({each for each in words if each.isascii() and each.isalpha() and each.islower() and len(each) > 3})


def score(reader: Reader, task: Task) -> float:
    """The share of what was asked that is right, with the rows that are there."""
    kv, found, length = reader.engine.kv, [], reader.engine.kv.length
    for each in task.asked:
        logits = reader.logits(np.concatenate([each.question, each.reply[:-1]]))
        kv.truncate(length)
        if each.common.size:
            likelier = logits[-1][each.common][:, None] > logits[-1][each.rare]
            found.append(2 * float(likelier.mean()) - 1)
        else:
            right = count_right(reader.model.tokenizer, logits[each.question.size :], each.reply)
            found.append(right / (each.reply.size - 1))
    return float(np.mean(found))


def row_of(reader: Reader, tasks: Sequence[tuple[Task, KVState]], policy: str, rows: int) -> list[float]:
    found = []
    for task, before in tasks:
        reader.compress(task.tokens, before, policy, rows)
        found.append(score(reader, task))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=2000, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=len(DOCUMENTS), help="of each task")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes of all rows in f16")
    parser.add_argument("--kv-dtype", default="f16")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--quest", action=argparse.BooleanOptionalAction, default=True, help="which keeps all rows")
    options = parser.parse_args()
    model, lines, dtype = edge.open_model(MODEL), list[list[str]](), options.kv_dtype
    memory = int(options.share * options.length * 2 * model.spec.kv_values_per_row)
    made = [
        make_task(model, name, document, options.length, seed)
        for name in TASKS for seed, document in enumerate(DOCUMENTS[: options.texts])
    ]  # fmt: skip
    full = list[float]()

    def say(policy: str, rows: str, found: list[float]) -> None:
        means = [float(np.mean(each)) for each in np.split(np.array(found), len(TASKS))]
        full[:] = full or means
        shares = [one / other for one, other in zip(means, full, strict=True) if other >= LEAST]
        whole = f"{np.mean(shares):.2f}" if shares else "–"
        lines.append([policy, rows, *(f"{each:.2f}" for each in means), whole])
        print(" ".join(lines[-1]), flush=True)

    reader = Reader(model, options.length + ROOM, dtype)
    states = [(each, reader.read(each.tokens)) for each in made]
    say("full", f"{options.length:,}", row_of(reader, states, "full", options.length))
    for policy in split_policies(options.policies):
        rows = planned_rows(model, policy, dtype, memory, options.length)
        say(policy, f"{rows:,}", row_of(reader, states, policy, rows))
    reader.engine.close()
    if options.quest:
        rows = int(options.share * options.length)
        policy = f"quest:rows={rows}"
        reader = Reader(model, options.length + ROOM, dtype, make_policy(policy).needs.reads)
        states = [(each, reader.read(each.tokens)) for each in made]
        say(policy, f"{options.length:,}", row_of(reader, states, policy, options.length))
        reader.engine.close()
    print(f"\n## {options.texts} texts of {options.length:,} tokens, {dtype} rows in {format_bytes(memory)}\n")
    print(table(["policy", "rows", *TASKS, "of full, mean"], lines, left=1))
    if out := [task for task, one in zip(TASKS, full, strict=True) if one < LEAST]:
        print(f"\nof full, mean: without {', '.join(out)}, in which full is below {LEAST}")


if __name__ == "__main__":
    main()
