"""`edge run`: one prompt, one answer, inside the budget."""

from __future__ import annotations

import time as clock
from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import ThoughtView, note, print_json, progress, width
from edge.flags import PROMPT, SAMPLING
from edge.options import Options
from edge.sampling import SamplingParams


@o.command
def run(
    model: o.ModelArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt (default: stdin); - is stdin.")
    ] = None,
    prompt: Annotated[
        str | None, o.flag("-p", "--prompt", group=PROMPT, help="The same; piped text goes before it.")
    ] = None,
    file: Annotated[Path | None, o.flag("-f", "--file", group=PROMPT, help="Read the prompt from a file.")] = None,
    json_schema: Annotated[
        Path | None, o.flag("--json-schema", group=PROMPT, help="Answer in JSON, by the JSON schema in this file.")
    ] = None,
    grammar: Annotated[
        Path | None, o.flag("--grammar", group=PROMPT, help="Answer by the grammar in this file, in Lark's notation.")
    ] = None,
    regex: Annotated[str | None, o.flag("--regex", group=PROMPT, help="Answer so that this matches all of it.")] = None,
    beams: Annotated[
        int | None,
        o.flag("--beams", group=SAMPLING, help="Search the likeliest answer with this many beams; it comes at once."),
    ] = None,
    length_penalty: Annotated[
        float,
        o.flag("--length-penalty", group=SAMPLING, help="Of --beams: scores are divided by length to this power."),
    ] = 1.0,
    *,
    answer: o.Answer,
    options: Annotated[Options, o.without("sequences")],
    sampling: o.Sampling,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer one prompt. Text goes to stdout as it is generated; progress and the report go to stderr.

    \b
      edge run smollm2-135m "Why is the sky blue?" --memory 256MiB
      git diff | edge run smollm2-135m -p "Describe this change." -n 100
      edge run model.gguf -f letter.txt --energy 30J --time 1m --json
      edge run smollm2-135m "Describe a person." --json-schema person.json

    Options can be set in the environment, too: edge help environment.
    """
    from edge.cli.terminal.prompts import read_prompt

    said = read_prompt([each for each in (text, prompt) if each is not None], file)
    from edge.cli.pull import fetch_missing

    with progress(enabled=not quiet) as shown:
        fetch_missing(model, options, shown, quiet=quiet)
    started = clock.perf_counter()
    from edge.cli.hint import suggest_tuning
    from edge.cli.terminal.signals import Terminated, ended_by_signals
    from edge.cli.terminal.wrap import WordWrap
    from edge.devices.child import room_for_children
    from edge.devices.power import find_meter
    from edge.errors import BudgetError
    from edge.grammar.grammar import read_grammar
    from edge.model.spec import check_generates
    from edge.model.thinking import Think
    from edge.run.arguments import check_limit
    from edge.run.reporting import check_complete
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model
    from edge.storage.making import account

    limit, think = check_limit(answer.max_tokens), Think.parse(answer.think)
    form = read_grammar(json_schema=json_schema, lark=grammar, regex=regex)
    meter = find_meter()
    with (
        progress(enabled=not quiet) as shown,
        account(lambda: meter.read().joules) as made,
        room_for_children(options.memory),
    ):
        opened = open_model(model)
        check_generates(opened.spec)
        # A search draws nothing, so what the model's file recommends for drawing does not concern it.
        stated = {name: value for name, value in sampling.items() if value is not None}
        sampled = opened.sampling(**sampling) if beams is None else SamplingParams(**stated)
        if opened.template is None and not answer.raw and not quiet:
            note(f"{opened.name} has no chat template: it continues texts, and answers no questions (--raw: no note)")
        if form is not None:
            from edge.grammar.matcher import check_grammar

            check_grammar(form, opened)
        asked = opened.prompt(said, system=answer.system, raw=answer.raw, think=think)
        thoughts = ThoughtView(not quiet and not json, shown)
        shown.message("reading the prompt")
        # Enough of the prompt for the plan to see whether it fits; the rest of a longer one is read while it runs.
        while asked.waiting <= opened.spec.context and asked.read():
            spent = clock.perf_counter() - started
            if options.time is not None and spent > options.time:
                raise BudgetError(
                    f"no answer: --time {options.time:g}s was over after {spent:.2g} s, before the model was loaded"
                )
        expected = None if limit is None else asked.waiting + limit
        known = {"expected_tokens": expected, "expected_prompt": asked.waiting or None}

        def on_load(part: float, doing: str = "") -> None:
            shown.step(doing or f"loading {opened.name}")(part, 1.0)

        words = WordWrap(width)
        with load(opened, options, meter=meter, on_load=on_load, **known) as session:
            try:
                pieces = session.stream(
                    asked,
                    max_tokens=limit,
                    sampling=sampled,
                    stop=answer.stop or (),
                    ignore_eos=answer.ignore_eos,
                    think=think,
                    grammar=form,
                    beams=beams,
                    length_penalty=length_penalty,
                    time_spent=clock.perf_counter() - started,
                    energy_spent=max(0.0, meter.read().joules - made.joules),
                    keep_text=json,
                    on_prefill=shown.step(f"prefill, {asked.size} tokens"),
                    on_thought=thoughts.show,
                )
                with ended_by_signals(session):
                    for piece in pieces:
                        shown.clear()
                        thoughts.end()
                        if not json:
                            words.write(piece)
            finally:
                words.end()
                pieces.close()  # an interrupted run reports, too
                shown.clear()
                thoughts.end()
                if session.report is not None:
                    if json:
                        print_json(session.report.to_dict())
                    else:
                        print(flush=True)
                        if not quiet:
                            from edge.report.run import report_line, report_lines

                            note("\n".join(["", *(report_lines if verbose else report_line)(session.report)]))
                            suggest_tuning(model, session.spec, session.plan)
            if session.terminated:
                raise Terminated
            if session.report is not None and session.report.stop_reason == "interrupted":
                raise KeyboardInterrupt
            check_complete(session.report)
