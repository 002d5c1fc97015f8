"""`edge eval`: `perplexity` and `kl`, how well a model predicts a text, alone and against a reference."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.cli import options as o
from edge.cli.measuring.evaluate_kv import kv
from edge.cli.measuring.evaluate_tasks import tasks
from edge.cli.terminal.help import Command, Group
from edge.cli.terminal.show import print_json, progress, table
from edge.errors import InputError
from edge.options import Options

if TYPE_CHECKING:
    from edge.lab.quality.windows import Windows
    from edge.model.model import Model
    from edge.types import IntArray

evaluate = typer.Typer(cls=Group, help="Measure a model's quality.", invoke_without_command=True)


@evaluate.callback()
def show(context: typer.Context) -> None:
    """Measure a model's quality: perplexity, divergence from a reference, the loss through a small KV cache, tasks."""
    if context.invoked_subcommand is None:
        print(context.get_help())


_Context = Annotated[
    int | None, o.flag("--context", min=2, help="Tokens in a window; each window starts with an empty cache.")
]
_SecondHalf = Annotated[
    bool, o.flag("--second-half", help="Score the second half of every window only, as llama.cpp does.")
]
_Output = Annotated[Path | None, o.flag("-o", "--output", help="Write the figures there: .json.")]
_Resume = Annotated[
    bool, o.flag("--resume", help="Go on with OUTPUT.jsonl, where an interrupted run left its figures.")
]


@evaluate.command(cls=Command)
@o.command
def kl(
    model: o.ModelArgument,
    reference: Annotated[str, o.flag("--reference", help="What to compare with: a model with the same tokens.")],
    text: Annotated[Path, o.flag("--text", help="A UTF-8 text file.")],
    tokens: Annotated[int | None, o.flag("--tokens", min=2, help="Read only this number of tokens.")] = None,
    context: _Context = 512,
    second_half: _SecondHalf = False,
    reference_backend: Annotated[str, o.flag("--reference-backend", help="Engine of the reference.")] = "auto",
    reference_kv_dtype: Annotated[
        str | None, o.flag("--reference-kv-dtype", help="Of the reference, whose cache is full.")
    ] = None,
    *,
    options: Annotated[
        Options, o.without(*o.LIMITS, "provider", "chat_template", "prefill_step_size", kv_policy="full")
    ],
    output: _Output = None,
    resume: _Resume = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """KL divergence of a model's predictions from a reference's, and its effect on perplexity.

    The text is read in windows, each from an empty cache; all predictions count but that of a window's first token.
    """
    from edge.cli.terminal.prompts import read_text
    from edge.lab.quality.material import reader_settings
    from edge.lab.quality.perplexity import LOGITS_ROWS
    from edge.lab.quality.windows import divergence
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    assert context is not None
    journal = _journal(output, resume=resume)
    opened, base = open_model(model), open_model(reference)
    ids = opened.encode_text(read_text(text), most=tokens)
    theirs = base.encode_text(read_text(text), most=tokens)
    if opened.spec.vocab != base.spec.vocab or ids.size != theirs.size or (ids != theirs).any():
        raise InputError(f"{model} and {reference} have different vocabularies: their predictions cannot be compared")
    windows = _windows(opened, ids, context, second_half=second_half)
    options = replace(options, expected_tokens=context, logits_rows=LOGITS_ROWS)
    whole = Options(
        memory=options.memory, kv_policy="full", kv_dtype=reference_kv_dtype, backend=reference_backend,
        threads=options.threads, expected_tokens=context, logits_rows=LOGITS_ROWS,
    )  # fmt: skip
    with progress(enabled=not quiet) as shown, load(base, whole) as there, load(opened, options) as here:
        settings = {**windows.settings, "model": reader_settings(here), "reference": reader_settings(there)}
        bar = shown.step("KL divergence")
        found = divergence(there, here, windows, journal=journal, settings=settings, resume=resume, on_progress=bar)
    if _publish({**asdict(found), "settings": settings}, output, json=json):
        return
    rows = [
        ["KL mean", f"{found.kl_mean:.6f} ± {found.kl_stderr:.6f}"],
        ["KL median", f"{found.kl_median:.6f}"],
        ["KL p99", f"{found.kl_p99:.6f}"],
        ["KL p99.9", f"{found.kl_p999:.6f}"],
        ["KL max", f"{found.kl_max:.6f}"],
        ["same likeliest token", f"{100 * found.top1:.2f} % ± {100 * found.top1_stderr:.2f}"],
        ["perplexity", f"{found.perplexity:.4f}"],
        ["of the reference", f"{found.reference_perplexity:.4f}"],
        ["difference", f"{found.delta:+.4f} ± {found.delta_stderr:.4f}"],
        ["ratio", f"{found.ratio:.5f} ± {found.ratio_stderr:.5f}"],
    ]
    print(table([opened.spec.label, f"against {base.spec.label}"], rows))
    print(f"\nKL in nats, {found.tokens:,} predictions {windows.words}; all measured")


evaluate.command(cls=Command)(kv)


@evaluate.command(cls=Command)
@o.command
def perplexity(
    model: o.ModelArgument,
    text: Annotated[Path, o.flag("--text", help="A UTF-8 text file.")],
    tokens: Annotated[int | None, o.flag("--tokens", min=1, help="Score only this number of tokens.")] = None,
    context: _Context = None,
    second_half: _SecondHalf = False,
    *,
    options: Annotated[Options, o.MEASURED],
    output: _Output = None,
    resume: _Resume = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Perplexity of a text, streamed through the KV cache under its policy. Lower is better.

    With --context, in windows instead, each from an empty cache; then it can be resumed.
    """
    from edge.cli.terminal.prompts import read_text
    from edge.lab.quality.material import reader_settings
    from edge.lab.quality.perplexity import LOGITS_ROWS
    from edge.lab.quality.perplexity import perplexity as streamed
    from edge.lab.quality.windows import windowed_perplexity
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    journal = _journal(output, resume=resume)
    if context is None and (second_half or output is not None):
        raise InputError("--second-half and -o go with --context: a text in one stream cannot be taken up again")
    opened = open_model(model)
    most = None if tokens is None else tokens + (context is None)
    ids = opened.encode_text(read_text(text), most=most)
    windows = None if context is None else _windows(opened, ids, context, second_half=second_half)
    with (
        progress(enabled=not quiet) as shown,
        load(opened, options, expected_tokens=context or ids.size, logits_rows=LOGITS_ROWS) as session,
    ):
        bar = shown.step("perplexity")
        capacity, kv_policy = session.plan.config.capacity, session.plan.kv_policy
        if windows is None:
            settings = {"model": opened.spec.label, "kv_policy": kv_policy, "kv_capacity": capacity}
            found = streamed(session, ids, on_progress=bar)
        else:
            settings = {**windows.settings, **reader_settings(session)}
            found = windowed_perplexity(
                session, windows, journal=journal, settings=settings, resume=resume, on_progress=bar
            )
    if not _publish({**asdict(found), **settings}, output, json=json):
        where = "" if windows is None else f" {windows.words}"
        print(
            f"perplexity {found.perplexity:.4f} (nll {found.nll:.5f} ± {found.stderr:.5f}) "
            f"over {found.tokens:,} tokens{where}, KV {kv_policy}, {capacity:,} rows"
        )


evaluate.command(cls=Command)(tasks)


def _journal(output: Path | None, *, resume: bool) -> Path | None:
    """The file that keeps every window's figures. Raises InputError for an output that cannot be written."""
    if output is None:
        if resume:
            raise InputError("--resume goes with -o FILE: figures are kept beside it")
        return None
    from edge.devices.output import check_writable

    if output.suffix != ".json":
        raise InputError(f"{output}: figures are written as .json")
    check_writable(output)
    return Path(f"{output}.jsonl")


def _windows(model: Model, ids: IntArray, context: int, *, second_half: bool) -> Windows:
    from edge.lab.quality.windows import Windows

    if context > model.spec.context:
        raise InputError(f"--context must be at most {model.spec.context}, which is what the model knows positions for")
    return Windows(ids, context, second_half, model.tokenizer.bos_id if model.tokenizer.add_bos else None)


def _publish(figures: dict[str, Any], output: Path | None, *, json: bool) -> bool:
    """Write figures to the output, if any, and print them as JSON, if requested; returns whether it printed."""
    import json as format

    from edge.devices.output import write_whole

    if output is not None:
        write_whole(output, format.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n")
    if json:
        print_json(figures)
    return json
