"""`edge run --prune`: the text before a question, without the sentences that say least about it."""

from __future__ import annotations

from collections.abc import Iterator

from edge.documents.pruning import AUTO, parse_prune, part_that_fits, prune_texts
from edge.errors import InputError
from edge.model.model import Model
from edge.options import Options
from edge.run.report import Pruned

_MOST = 2_000_000  # characters


def pruned_prompt(
    said: str | Iterator[str], question: str | None, keep: str, model: Model, options: Options, answer: int | None
) -> tuple[str, Pruned]:
    """The prompt and what left it. said: a text and then the question. answer: tokens of the answer.

    Raises InputError for a prompt without text before its question, and a text that is too long to be held.
    """
    part, whole = parse_prune(keep), ""
    for block in [said] if isinstance(said, str) else said:
        whole += block
        if len(whole) > _MOST:
            raise InputError(f"--prune takes texts of {_MOST:,} characters at most: leave it out")
    text = whole.removesuffix(question or "").rstrip("\n")
    if not question or not text:
        raise InputError("--prune shortens a text before a question: -f FILE -p QUESTION, or pipe the text in")

    def count(some: str) -> int:
        return int(model.tokenizer.encode(some).size)

    if part == AUTO:
        part = _fitting(count(text), count(question), model, options, answer)
    [kept], pruned = prune_texts([text], question, float(part or 1.0), count)
    return f"{kept}\n\n{question}", pruned


def pruned_line(pruned: Pruned) -> str:
    """One line about the parts that were removed."""
    number = len(pruned.left)
    out = "1 sentence was" if number == 1 else f"{number or 'no'} sentences were"
    return f"(--prune: {pruned.before:,} tokens became {pruned.after:,}: {out} taken out)"


def _fitting(text: int, question: int, model: Model, options: Options, answer: int | None) -> float:
    """The part of a text that budgets leave room for: the KV rows if they are stated, else the context, less the
    answer; and half of --time and --energy."""
    from edge.documents.pace import affordable

    rows = min(options.max_kv_size or model.spec.context, model.spec.context)
    rooms = [rows - min(answer or rows // 4, rows // 2), affordable(model, options)]
    room = min(each for each in rooms if each is not None) - question - model.system_rows()
    return part_that_fits(text, room)
