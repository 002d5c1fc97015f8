"""`edge rank`: texts by their relevance to a query."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import note, print_json, printable, progress
from edge.flags import PROMPT
from edge.options import Options


@o.command
def rank(
    model: o.ModelArgument,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Files whose lines are the texts (default: the lines of stdin)."),
    ] = None,
    whole: Annotated[bool, o.flag("--whole", group=PROMPT, help="Each file is one text.")] = False,
    top: Annotated[int | None, o.flag("--top", group=PROMPT, min=1, help="Print this many texts at most.")] = None,
    instruction: Annotated[
        str | None, o.flag("--instruction", group=PROMPT, help="The task, for rerankers that answer yes or no.")
    ] = None,
    as_json: o.Json = False,
    *,
    options: Annotated[Options, o.without(*o.LIMITS, "chat_template")],
    quiet: o.Quiet = False,
) -> None:
    """Print texts, the most relevant to a query first, with their relevance from 0 to 1.

    A reranker judges query and text together; other models rank by the cosine of embeddings.

    \b
      edge rank bge-reranker.gguf "How do I reset my password?" faq.txt
      edge rank minilm.gguf "battery life" notes/*.md --whole --top 3
      grep -rn password docs | edge rank qwen3-reranker.gguf "reset a password" --json
    """
    from edge.cli.terminal.fetching import fetch_missing
    from edge.cli.terminal.prompts import lines_of, read_text
    from edge.errors import InputError
    from edge.run.sequences.ranking import ranked
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    if whole and not files:
        raise InputError("--whole ranks files: name some")
    found = list[tuple[str, str]]()  # where a text comes from, and the text
    sources: list[Path | None] = [*files] if files else [None]
    for file in sources:
        if whole and file:
            found.append((str(file), "".join(read_text(file))))
        else:
            found += [(f"{file or '-'}:{number}", line) for number, line in enumerate(lines_of(file), start=1)]
    found = [(place, text) for place, text in found if text.strip()]
    if not found:
        raise InputError("there is no text: name FILES with some, or pipe them in")
    with progress(enabled=not quiet) as shown:
        fetch_missing(model, options, shown, quiet=quiet)
    with load(open_model(model), options) as session:
        scores = session.rank(query, [text for _, text in found], instruction=instruction)
    for number, score in ranked(scores, top):
        place, text = found[number]
        if as_json:
            print_json({"index": number, "score": round(score, 6), "place": place, "text": text})
        else:
            print(f"{score:.4f}  {place}" + ("" if whole else f"  {printable(text)}"), flush=True)
    if not quiet:
        note(f"({len(found)} texts)")
