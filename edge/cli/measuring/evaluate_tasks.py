"""`edge eval tasks`: accuracy on tasks of EleutherAI's lm-eval."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from edge.cli import options as o
from edge.cli.measuring.evaluate_kv import split_names
from edge.cli.terminal.show import note, print_json, progress, table
from edge.errors import InputError
from edge.options import Options

_LEFT_OUT = [each for each in o.LIMITS if each not in ("mmproj", "image_tokens")]


@o.command
def tasks(
    model: o.ModelArgument,
    tasks: Annotated[
        str | None,
        o.flag("--tasks", help="Names of tasks, groups or tags with commas between (default: edge, its own three)."),
    ] = None,
    include: Annotated[
        Path | None,
        o.flag("--include", metavar="DIR", help="A folder of further task files, .yaml; Python in it is run."),
    ] = None,
    limit: Annotated[int | None, o.flag("--limit", min=1, help="Ask only the first questions of each task.")] = None,
    num_fewshot: Annotated[
        int | None, o.flag("--num-fewshot", min=0, help="Solved examples before each question (default: the task's).")
    ] = None,
    *,
    options: Annotated[Options, o.without(*_LEFT_OUT, "provider", "chat_template", kv_policy="full")],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Accuracy on tasks of EleutherAI's lm-eval, on edge's own engine, with standard errors.

    Tasks that come with edge need no network; lm-eval's own (lm-eval ls tasks) fetch their questions from the Hub. The
    task drawings asks models that see about shapes, colours, digits and numbers; it needs no lm-eval.
    """
    from edge.lab.quality.drawings import NAME as DRAWINGS
    from edge.lab.quality.drawings import eval_drawings
    from edge.lab.quality.material import reader_settings
    from edge.lab.quality.perplexity import LOGITS_ROWS
    from edge.lab.quality.tasks import LONGEST, OWN, eval_tasks, open_tasks
    from edge.model.structure.spec import check_generates
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    opened, names = open_model(model), [OWN] if tasks is None else split_names(tasks, "--tasks")
    check_generates(opened.spec)
    expected = min(LONGEST, opened.spec.context)
    if DRAWINGS in names and len(names) > 1:
        raise InputError(f"--tasks {DRAWINGS} goes alone: it is no task of lm-eval")
    for flag, value in (("--num-fewshot", num_fewshot), ("--include", include)):
        if DRAWINGS in names and value is not None:
            raise InputError(f"{flag} is of lm-eval's tasks: {DRAWINGS} has no solved examples, and no files")
    with progress(enabled=not quiet) as shown:
        shown.message("reading tasks")
        found = None if names == [DRAWINGS] else open_tasks(names, include, num_fewshot)
        shown.clear()
        with load(opened, options, expected_tokens=expected, logits_rows=LOGITS_ROWS) as session:
            step = shown.step("tasks")
            scored = (
                eval_drawings(session, limit=limit, on_progress=step)
                if found is None
                else eval_tasks(session, found, limit=limit, on_progress=step)
            )
            settings = {**reader_settings(session), "limit": limit}
    if json:
        print_json({**asdict(scored), "settings": settings})
        return
    rows = [
        [each.task, each.metric, "not finite" if each.value is None else f"{each.value:.4f}",
         "" if each.stderr is None else f"± {each.stderr:.4f}", f"{each.questions:,}"] for each in scored.scores
    ]  # fmt: skip
    print(table(["task", "metric", "value", "stderr", "questions"], rows, left=2))
    judge = "its own judge" if found is None else f"lm-eval {scored.versions['lm_eval']}"
    print(f"\n{judge}, {opened.spec.label}, in {scored.seconds:.0f} s; all measured")
    if scored.shortened and not quiet:
        note(
            f"{scored.shortened:,} requests lost their beginning, since the KV cache has {settings['kv_capacity']:,} "
            "rows: raise --max-kv-size"
        )
