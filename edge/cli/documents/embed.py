"""`edge embed`: vectors of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import note, print_json, progress
from edge.flags import PROMPT
from edge.options import Options

_AT_ONCE = 64  # texts between two lines of output


@o.command
def embed(
    model: o.ModelArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts (default: the lines of stdin).")
    ] = None,
    file: Annotated[Path | None, o.flag("-f", "--file", group=PROMPT, help="Embed each line of a file.")] = None,
    pooling: Annotated[
        str | None,
        o.flag("--pooling", group=PROMPT, help="mean of all tokens' states, or that of the last or the first (cls)."),
    ] = None,
    truncate: Annotated[
        bool, o.flag("--truncate", group=PROMPT, help="Leave out the end of a text that is longer than the KV cache.")
    ] = False,
    prompt_name: Annotated[
        str | None,
        o.flag("--prompt-name", group=PROMPT, help="The model's prompt before each text, such as query or document."),
    ] = None,
    dimensions: Annotated[
        int | None, o.flag("--dimensions", group=PROMPT, help="Print only the first values of vectors, scaled anew.")
    ] = None,
    raw: Annotated[bool, o.flag("--unscaled", group=PROMPT, help="Do not scale vectors to length 1.")] = False,
    *,
    options: Annotated[Options, o.without(*o.LIMITS, "chat_template")],
    quiet: o.Quiet = False,
) -> None:
    """Print a vector for each text, as JSON, a line each: by an encoder, or of a decoder's last hidden states.

    \b
      edge embed minilm.gguf "The sky is blue."
      edge embed smollm2-135m "The sky is blue." "Il cielo è blu."
      edge embed smollm2-135m -f lines.txt > vectors.jsonl
    """
    from edge.cli.terminal.fetching import fetch_missing
    from edge.cli.terminal.prompts import lines_of
    from edge.documents.encoder import MINILM, open_encoder
    from edge.errors import InputError, several
    from edge.run.sequences.embedding import check_pooling
    from edge.run.starting.loading import load

    pooled = check_pooling(pooling)
    given = [*(texts or ()), *(lines_of(file) if file or not texts else ())]
    lines = [line for line in given if line.strip()]
    if not lines:
        raise InputError("there is no text: name some, or -f FILE")
    if model.lower() != MINILM:
        with progress(enabled=not quiet) as shown:
            fetch_missing(model, options, shown, quiet=quiet)
    opened = open_encoder(model, options)
    with load(opened, options) as session:
        rows, long = session.engine.kv.capacity, 0
        for start in range(0, len(lines), _AT_ONCE):
            texts = [opened.prompted(text, prompt_name) for text in lines[start : start + _AT_ONCE]]
            encoded = [opened.encode_text(text, embedded=True) for text in texts]
            long += sum(tokens.size > rows for tokens in encoded)
            for vector in session.embed(
                encoded, pooling=pooled, normalize=not raw, truncate=truncate, dimensions=dimensions
            ):
                print_json(vector.tolist())
        if not quiet:
            blank = f"; {several(left, 'blank text')} left out" if (left := len(given) - len(lines)) else ""
            note(f"({several(len(lines), 'vector')} of {dimensions or opened.tail.size} numbers{blank})")
            if long:
                done = "their ends were left out" if truncate else f"{session.plan.kv_policy} evicted rows"
                note(f"({long} of the texts had more than {rows} tokens: {done})")
