"""The work of `edge run`, for arguments that have been read."""

from __future__ import annotations

import time as clock
from dataclasses import replace
from typing import Any

from edge.cli.groups import AnswerOptions, Output, PromptOptions
from edge.cli.terminal.show import ThoughtView, note, print_json, progress, width
from edge.errors import MissingExtraError
from edge.options import NO_EYES, Options
from edge.sampling import SamplingParams


def answer_prompt(
    model: str, text: str | None, question: PromptOptions, answer: AnswerOptions, options: Options,
    sampling: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Answer one prompt. sampling: fields of SamplingParams, None for those that the model's file may set."""
    from edge.cli.terminal.prompts import read_media, read_prompt

    try:
        media = read_media(question.image or (), question.audio or ())
    except MissingExtraError:
        if question.image:
            _check_sees(model, options)
        raise
    texts = [each for each in (text, question.prompt) if each is not None]
    said = read_prompt(texts, question.file, alone="-" in (*(question.image or ()), *(question.audio or ())))
    from edge.cli.terminal.fetching import fetch_missing

    with progress(enabled=not output.quiet) as shown:
        fetch_missing(model, options, shown, quiet=output.quiet)
    started = clock.perf_counter()
    from edge.cli.terminal.signals import Terminated, ended_by_signals
    from edge.cli.terminal.wrap import WordWrap
    from edge.devices.child import room_for_children
    from edge.devices.power import find_meter
    from edge.errors import BudgetError, InputError
    from edge.model.chat.thinking import Think
    from edge.model.structure.spec import check_generates
    from edge.run.arguments import check_limit
    from edge.run.hooks import Hooks
    from edge.run.reporting import check_complete, check_memory
    from edge.run.request import Request, user_message
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model
    from edge.storage.making import account

    limit, think = check_limit(answer.max_tokens), Think.parse(answer.think)
    form = None
    if question.json_schema or question.grammar or question.regex is not None:
        from edge.grammar.grammar import read_grammar

        form = read_grammar(json_schema=question.json_schema, lark=question.grammar, regex=question.regex)

    def check_time(when: str) -> None:
        spent = clock.perf_counter() - started
        if options.time is not None and spent > options.time:
            raise BudgetError(f"no answer: --time {options.time:g}s was over after {spent:.2g} s, {when}")

    meter = find_meter()
    with (
        progress(enabled=not output.quiet) as shown,
        account(lambda: meter.read().joules) as made,
        room_for_children(options.memory, None if options.time is None else started + options.time),
    ):
        opened = open_model(model).with_template(options.chat_template)
        check_generates(opened.spec)
        # A search draws nothing, so what the model's file recommends for drawing does not concern it.
        stated = {name: value for name, value in sampling.items() if value is not None}
        sampled = opened.sampling(**sampling) if question.beams is None else SamplingParams(**stated)
        if question.beams is not None and options.draft is not None:
            raise InputError("--beams goes without --draft: a search drafts nothing")
        if question.outline:
            if media:
                raise InputError("--outline takes a question of text: leave --image and --audio out")
            said = said if isinstance(said, str) else "".join(said)
        pruned = None
        if question.prune is not None:
            from edge.cli.pruning import pruned_line, pruned_prompt

            asked_for = next((each for each in texts if each != "-"), None)
            said, pruned = pruned_prompt(said, asked_for, question.prune, opened, options, limit)
            if not output.quiet:
                note(pruned_line(pruned))
        if opened.template is None and not answer.raw and not output.quiet:
            note(f"{opened.name} has no chat template: it continues texts, and answers no questions (--raw: no note)")
        if media:
            from edge.run.starting.senses import open_senses, options_that_see

            if answer.raw:
                raise InputError(
                    f"{'--image' if media[0].kind == 'picture' else '--audio'} goes through the chat template: leave "
                    "--raw out"
                )
            options, said = options_that_see(options, opened), said if isinstance(said, str) else "".join(said)
            kinds = {each.kind for each in media}
            if "picture" in kinds and (options.time is not None or options.energy is not None):
                from edge.lab.prediction.looks import auto_tokens

                tokens = auto_tokens(
                    opened, options, [each for each in media if each.kind == "picture"], len(said) // 3
                )
                options = options if tokens is None else options.updated(image_tokens=tokens)
            senses = open_senses(opened, options, kinds, eager=True, meter=meter, tell=shown.message)
            system = [] if answer.system is None else [{"role": "system", "content": answer.system}]
            asked = opened.with_senses(senses).chat_prompt([*system, user_message(said, media)], think=think)
        else:
            if options.mmproj not in (None, NO_EYES):
                from edge.run.starting.senses import with_senses

                with_senses(opened, options)  # refuses what is no encoder of this model
            asked = opened.prompt(said, system=answer.system, raw=answer.raw, think=think)
        options = replace(options, mmproj=NO_EYES)  # pictures and sounds, if any, have been perceived
        thoughts = ThoughtView(not output.quiet and not output.json, shown)
        shown.message("reading the prompt")
        # Enough of the prompt for the plan to see whether it fits; the rest of a longer one is read while it runs.
        while asked.waiting <= opened.spec.context and asked.read():
            check_time("before the model was loaded")
        expected = None if limit is None else asked.waiting + limit
        if question.vote or question.outline or (question.beams or 1) > 1:
            from edge.run.branching.several import ROOM, side_by_side

            expected = expected and expected + ROOM * question.outline
            known = replace(options, expected_tokens=expected)
            beams = question.beams is not None
            count = side_by_side(opened, known, question.vote or question.beams, all_or_one=beams)
            options = replace(options, sequences=count)

        def on_load(part: float, doing: str = "") -> None:
            if doing:  # by a first run
                check_time(f"while {doing}: run it once without --time")
            shown.step(doing or f"loading {opened.name}")(part, 1.0)

        request = Request(
            said if question.outline else asked,
            limit,
            stated if question.vote else sampled,
            answer.stop or (),
            ignore_eos=answer.ignore_eos,
            think=think,
            grammar=form,
            beams=question.beams,
            length_penalty=question.length_penalty,
            vote=question.vote,
            skeleton=question.outline,
            system=answer.system if question.outline else None,
            raw=answer.raw,
            keep_text=output.json,
            pruned=pruned,
        )
        words = WordWrap(width)
        with load(
            opened, options, meter=meter, on_load=on_load, grammar=form, expected_tokens=expected,
            expected_prompt=asked.waiting or None,
        ) as session:  # fmt: skip
            seconds, joules = clock.perf_counter() - started, max(0.0, meter.read().joules - made.joules)
            pieces = session.start(
                replace(request, time_spent=seconds, energy_spent=joules),
                Hooks(shown.step(f"prefill, {asked.size} tokens"), thoughts.show),
            )
            try:
                with ended_by_signals(session):
                    for piece in pieces:
                        shown.clear()
                        thoughts.end()
                        if not output.json:
                            words.write(piece)
            finally:
                words.end()
                pieces.close()  # an interrupted run reports, too
                shown.clear()
                thoughts.end()
                if session.report is not None:
                    if output.json:
                        print_json(session.report.to_dict())
                    else:
                        answered = not session.report.unanswered
                        if answered:
                            print(flush=True)
                        if not output.quiet:
                            from edge.lab.report.run import report_line, report_lines

                            told = (report_lines if output.verbose else report_line)(session.report)
                            note("\n".join(["", *told] if answered else told))
            if session.terminated:
                raise Terminated
            if session.report is not None and session.report.stop_reason == "interrupted":
                raise KeyboardInterrupt
            check_complete(session.report)
            check_memory(session.report)


def _check_sees(model: str, options: Options) -> None:
    """Raise InputError for a model without an encoder of pictures: what reads them would not help."""
    from edge.run.starting.opening import open_model
    from edge.run.starting.senses import find_tower

    find_tower(open_model(model), options)
