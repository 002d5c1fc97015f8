"""`edge eval`: quality figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli import windowed
from edge.cli.evaluate_kl import kl
from edge.cli.evaluate_kv import kv
from edge.cli.help import Command
from edge.cli.show import print_json, progress
from edge.errors import InputError
from edge.options import Options

evaluate = typer.Typer(help="Measure a model's quality.")
for command in (kl, kv):
    evaluate.command(cls=Command)(command)


@evaluate.command(cls=Command)
@o.command
def perplexity(
    model: o.ModelArgument,
    text: Annotated[Path, o.flag("--text", help="A UTF-8 text file.")],
    tokens: Annotated[int | None, o.flag("--tokens", min=1, help="Score only the first so many.")] = None,
    context: windowed.Context = None,
    second_half: windowed.SecondHalf = False,
    *,
    options: Annotated[Options, o.MEASURED],
    output: windowed.Output = None,
    resume: windowed.Resume = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Perplexity of a text, streamed through the KV cache under its policy. Lower is better.

    With --context, in windows instead, each from an empty cache; then it can be resumed.
    """
    from edge.cli.prompts import read_text
    from edge.model.model import open_model
    from edge.quality.perplexity import LOGITS_ROWS
    from edge.quality.perplexity import perplexity as measure
    from edge.quality.windows import windowed_perplexity
    from edge.run.session import load

    windowed.check_output(output, resume=resume)
    if context is None and (second_half or output is not None):
        raise InputError("--second-half and -o go with --context: a text in one stream cannot be taken up again")
    opened = open_model(model)
    most = None if tokens is None else tokens + (context is None)
    ids = opened.encode_prompt(read_text(text), raw=True, most=most)
    windows = None if context is None else windowed.windows_of(opened, ids, context, second_half=second_half)
    with (
        progress(enabled=not quiet) as shown,
        load(opened, options, expected_tokens=context or ids.size, logits_rows=LOGITS_ROWS) as session,
    ):
        bar = shown.step("perplexity")
        capacity, kv_policy = session.plan.config.capacity, session.plan.kv_policy
        settings = {"model": opened.spec.label, "kv_policy": kv_policy, "kv_capacity": capacity}
        if windows is None:
            result = measure(session, ids, on_progress=bar)
        else:
            settings = {**windowed.text_settings(windows), **windowed.reader_settings(session)}
            result = windowed_perplexity(
                session, windows, journal=windowed.journal_of(output), settings=settings, resume=resume, on_progress=bar
            )
    said = {**asdict(result), **settings}
    windowed.write_output(output, said)
    if json:
        print_json(said)
        return
    print(
        f"perplexity {result.perplexity:.4f} (nll {result.nll:.5f} ± {result.stderr:.5f}) "
        f"over {result.tokens} tokens{'' if windows is None else ' ' + windowed.window_words(windows)}, "
        f"KV {kv_policy}, {capacity} rows"
    )
