"""`edge ask`: questions to an index of the user's own documents."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli import options as o
from edge.cli.documents.index import waiting_line
from edge.cli.groups import Output
from edge.cli.terminal.show import note, print_json, printable, progress, width
from edge.flags import PROMPT, flags_of
from edge.options import Options

if TYPE_CHECKING:
    from edge.run.report import Cited


_ALONE = {"name", "question", "model", "top", "by", "reranker", "memory", "threads", "backend", "time"}
"""Options that hold without a model, beside those of output."""


@o.command
def ask(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The index: edge index lists them.")],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question.")],
    model: Annotated[
        str | None,
        o.flag("--model", "-m", metavar="MODEL", help="The model that answers (default: none, print the passages)."),
    ] = None,
    top: Annotated[int, o.flag("--top", group=PROMPT, min=1, max=100, help="Passages, at most.")] = 5,
    by: Annotated[str, o.flag("--by", group=PROMPT, help="Search by words, by vectors or by both.")] = "both",
    reranker: Annotated[
        str | None,
        o.flag("--reranker", group=PROMPT, metavar="MODEL", help="Rank what was found by this model (edge rank)."),
    ] = None,
    prune: Annotated[
        str | None,
        o.flag(
            "--prune",
            group=PROMPT,
            metavar="0.4|auto",
            help="Keep this part of the passages at most, by whole sentences, but the best sentence always; "
            "auto: what there is room for. The reranker ranks them, else BM25.",
        ),
    ] = None,
    *,
    answer: Annotated[o.AnswerOptions, o.without("raw")],
    options: Annotated[Options, o.without("sequences", "mmproj", "image_tokens")],
    sampling: o.Sampling,
    output: Output,
) -> None:
    """Answer a question by your documents, with the passages that the answer is from. Without a model, print these.

    \b
      edge index manuals ~/manuals
      edge ask manuals "How is a disk encrypted?" --model smollm2-135m

    The encoder and then the model are loaded, each within --memory. As many passages go into the prompt as fit into the
    KV rows beside the answer, and as leave half of --time and --energy to it.
    """
    from edge.cli.pruning import pruned_line
    from edge.devices.child import room_for_children
    from edge.devices.power import find_meter
    from edge.documents.documents import Documents
    from edge.documents.encoder import needed_by
    from edge.documents.packing import source_of
    from edge.documents.searching import check_by
    from edge.errors import InputError

    if model is None and (stated := o.stated(context, but={*_ALONE, *flags_of(Output)})):
        raise InputError(f"{stated} needs --model")
    started, meter = clock.perf_counter(), find_meter()
    from edge.storage.making import account

    with (
        progress(enabled=not output.quiet) as shown,
        account(lambda: meter.read().joules) as made,
        Documents(name, by=check_by(by), top=top, reranker=reranker, prune=prune, options=options) as documents,
    ):
        with room_for_children(options.memory, None if options.time is None else started + options.time):
            shown.message("searching")
            found = documents.search(question)
        planned = documents.peaks
        documents.release()  # the model has all of the memory
        shown.clear()
        if documents.waiting and by != "words" and not output.quiet:
            note(waiting_line(name, documents.waiting))
        if model is None:
            sources = [source_of(number, each, each.passage.text) for number, each in enumerate(found, 1)]
            if output.json:
                print_json([asdict(each) for each in sources])
            elif not sources:
                note("(no passage was found)")
            else:
                print("\n\n".join(f"{line}\n{printable(each.text)}" for line, each in zip(lines(sources), sources,
                                                                                          strict=True)))  # fmt: skip
            return
        from edge.budget import format_bytes
        from edge.cli.terminal.fetching import fetch_missing
        from edge.cli.terminal.signals import Terminated, ended_by_signals
        from edge.cli.terminal.wrap import WordWrap
        from edge.model.chat.thinking import Think
        from edge.model.structure.spec import check_generates
        from edge.run.arguments import check_limit
        from edge.run.reporting import check_complete, check_memory
        from edge.run.starting.loading import load
        from edge.run.starting.opening import open_model

        limit, think = check_limit(answer.max_tokens), Think.parse(answer.think)
        fetch_missing(model, options, shown, quiet=output.quiet)
        opened = open_model(model).with_template(options.chat_template)
        check_generates(opened.spec)
        tokens = sum(opened.tokenizer.encode(each.passage.text).size + 32 for each in found) + 128
        words = WordWrap(width)
        with needed_by(f"the language model {opened.name}"):
            loaded = load(
                opened, options, meter=meter, on_load=lambda part, doing="": shown.step(doing or "loading")(part, 1.0),
                expected_tokens=None if limit is None else min(opened.spec.context, tokens + limit),
            )  # fmt: skip
        with loaded as session:
            spent = clock.perf_counter() - started, max(0.0, meter.read().joules - made.joules)
            pieces = session.stream(
                question, documents=documents, system=answer.system, max_tokens=limit, think=think,
                sampling=opened.sampling(**sampling), stop=answer.stop or (), ignore_eos=answer.ignore_eos,
                time_spent=spent[0], energy_spent=spent[1], on_prefill=shown.step("reading the passages"),
            )  # fmt: skip
            try:
                with ended_by_signals(session):
                    for piece in pieces:
                        shown.clear()
                        if not output.json:
                            words.write(piece)
            finally:
                words.end()
                pieces.close()
                shown.clear()
            report = session.report
            if report is None:
                return
            if output.json:
                print_json(report.to_dict())
            else:
                print("\n\n" + "\n".join(lines(report.sources)) if report.sources else "", flush=True)
                if not report.sources:
                    note(_lacking(len(found), options))
                if not output.quiet:
                    if report.pruned is not None:
                        note(pruned_line(report.pruned))
                    from edge.lab.report.run import report_line, report_lines

                    note("\n".join(["", *(report_lines if output.verbose else report_line)(report)]))
                    note("; ".join(f"{each}: {format_bytes(peak)} planned, before the model"
                                   for each, peak in planned.items()))  # fmt: skip
            if session.terminated:
                raise Terminated
            if report.stop_reason == "interrupted":
                raise KeyboardInterrupt
            check_complete(report)
            check_memory(report)


def _lacking(found: int, options: Options) -> str:
    """Why an answer is by no passage."""
    if not found:
        return "(no passage was found)"
    more = [f"a larger {flag}" for flag, value in (("--time", options.time), ("--energy", options.energy)) if value]
    wanted = " or ".join(["a larger --max-kv-size", *more, "a smaller -n"])
    passages = "1 passage was" if found == 1 else f"{found} passages were"
    return f"({passages} found, but there is no room for {'it' if found == 1 else 'any'}: state {wanted})"


def lines(sources: Sequence[Cited]) -> list[str]:
    """A line for each passage: its number, title, headings and place."""
    return [f"[{each.number}] {printable(each.label)}  {printable(each.where)}" for each in sources]
