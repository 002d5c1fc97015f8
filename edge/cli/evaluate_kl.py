"""`edge eval kl`: how far a model's predictions are from a reference's."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from edge.cli import options as o
from edge.cli import windowed
from edge.cli.show import print_json, progress, table
from edge.errors import InputError
from edge.options import Options


@o.command
def kl(
    model: o.ModelArgument,
    reference: Annotated[str, o.flag("--reference", help="What to compare with: a model with the same tokens.")],
    text: Annotated[Path, o.flag("--text", help="A UTF-8 text file.")],
    tokens: Annotated[int | None, o.flag("--tokens", min=2, help="Read only the first so many.")] = None,
    context: windowed.Context = 512,
    second_half: windowed.SecondHalf = False,
    reference_backend: Annotated[str, o.flag("--reference-backend", help="Engine of the reference.")] = "auto",
    reference_kv_dtype: Annotated[
        str | None, o.flag("--reference-kv-dtype", help="Of the reference, whose cache is full.")
    ] = None,
    *,
    options: Annotated[Options, o.without(*o.LIMITS, "provider", "prefill_step_size", kv_policy="full")],
    output: windowed.Output = None,
    resume: windowed.Resume = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """KL divergence of a model's predictions from a reference's, and what it does to perplexity.

    The text is read in windows, each from an empty cache; all predictions count but that of a window's first token.
    """
    from edge.cli.prompts import read_text
    from edge.model.model import open_model
    from edge.quality.perplexity import LOGITS_ROWS
    from edge.quality.windows import divergence
    from edge.run.session import load

    assert context is not None
    windowed.check_output(output, resume=resume)
    opened, base = open_model(model), open_model(reference)
    ids = opened.encode_prompt(read_text(text), raw=True, most=tokens)
    theirs = base.encode_prompt(read_text(text), raw=True, most=tokens)
    if opened.spec.vocab != base.spec.vocab or ids.size != theirs.size or (ids != theirs).any():
        raise InputError(f"{model} and {reference} have different vocabularies: their predictions cannot be compared")
    windows = windowed.windows_of(opened, ids, context, second_half=second_half)
    options = replace(options, expected_tokens=context, logits_rows=LOGITS_ROWS)
    whole = Options(
        memory=options.memory, kv_policy="full", kv_dtype=reference_kv_dtype, backend=reference_backend,
        threads=options.threads, expected_tokens=context, logits_rows=LOGITS_ROWS,
    )  # fmt: skip
    with (
        progress(enabled=not quiet) as shown,
        load(base, whole) as there,
        load(opened, options) as here,
    ):
        readers = {"model": windowed.reader_settings(here), "reference": windowed.reader_settings(there)}
        settings = {**windowed.text_settings(windows), **readers}
        result = divergence(
            there, here, windows, journal=windowed.journal_of(output), settings=settings, resume=resume,
            on_progress=shown.step("KL divergence"),
        )  # fmt: skip
    said = {**asdict(result), "settings": settings}
    windowed.write_output(output, said)
    if json:
        print_json(said)
        return
    rows = [
        ["KL mean", f"{result.kl_mean:.6f} ± {result.kl_stderr:.6f}"],
        ["KL median", f"{result.kl_median:.6f}"],
        ["KL p99", f"{result.kl_p99:.6f}"],
        ["KL max", f"{result.kl_max:.6f}"],
        ["same likeliest token", f"{100 * result.top1:.2f} % ± {100 * result.top1_stderr:.2f}"],
        ["perplexity", f"{result.perplexity:.4f}"],
        ["of the reference", f"{result.reference_perplexity:.4f}"],
        ["difference", f"{result.delta:+.4f} ± {result.delta_stderr:.4f}"],
        ["ratio", f"{result.ratio:.5f} ± {result.ratio_stderr:.5f}"],
    ]
    print(table([opened.spec.label, f"against {base.spec.label}"], rows))
    print(f"\nKL in nats, {result.tokens} predictions {windowed.window_words(windows)}; all measured")
