"""`edge eval tasks`: accuracy on tasks of EleutherAI's lm-eval."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from edge.cli import options as o
from edge.cli.measuring.evaluate_kv import split_names
from edge.cli.terminal.show import note, print_json, progress, table
from edge.options import Options


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
    options: Annotated[Options, o.without(*o.LIMITS, "provider", "chat_template", kv_policy="full")],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Accuracy on tasks of EleutherAI's lm-eval, on edge's own engine, with standard errors.

    Tasks that come with edge need no network; lm-eval's own (lm-eval ls tasks) fetch their questions from the Hub.
    """
    from edge.lab.quality.material import reader_settings
    from edge.lab.quality.perplexity import LOGITS_ROWS
    from edge.lab.quality.tasks import LONGEST, OWN, eval_tasks, open_tasks
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    opened, names = open_model(model), [OWN] if tasks is None else split_names(tasks, "--tasks")
    expected = min(LONGEST, opened.spec.context)
    with progress(enabled=not quiet) as shown:
        shown.message("reading tasks")
        found = open_tasks(names, include, num_fewshot)
        shown.clear()
        with load(opened, options, expected_tokens=expected, logits_rows=LOGITS_ROWS) as session:
            scored = eval_tasks(session, found, limit=limit, on_progress=shown.step("tasks"))
            settings = {**reader_settings(session), "limit": limit}
    if json:
        print_json({**asdict(scored), "settings": settings})
        return
    rows = [
        [each.task, each.metric, "not finite" if each.value is None else f"{each.value:.4f}",
         "" if each.stderr is None else f"± {each.stderr:.4f}", f"{each.questions:,}"] for each in scored.scores
    ]  # fmt: skip
    print(table(["task", "metric", "value", "stderr", "questions"], rows, left=2))
    version, taken = scored.versions["lm_eval"], scored.seconds
    print(f"\nlm-eval {version}, {opened.spec.label}, in {taken:.0f} s; all measured")
    if scored.shortened and not quiet:
        note(
            f"{scored.shortened:,} requests lost their beginning, since the KV cache has {settings['kv_capacity']:,} "
            "rows: raise --max-kv-size"
        )
