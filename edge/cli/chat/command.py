"""`edge chat`: a conversation whose memory is the KV cache and nothing else, so that it can go on forever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from edge.cli import options as o
from edge.cli.terminal.show import ProgressLine, ThoughtView, note, print_json, progress, width
from edge.options import Options

if TYPE_CHECKING:
    from edge.model.model import Model
    from edge.run.batching.scheduler import Pieces
    from edge.run.conversation import Conversation

# Reasons for an answer's end that need no explanation.
_SEEN = ("eos", "stop", "tool_calls", "interrupted", "terminated")


@o.command
def chat(
    model: o.ModelArgument,
    *,
    answer: Annotated[o.AnswerOptions, o.without("raw", "ignore_eos")],
    options: Annotated[Options, o.without("sequences")],
    sampling: o.Sampling,
    tools: Annotated[
        Optional[Path],  # noqa: UP045
        o.flag(
            "--tools", metavar="FILE", help="Functions that the model may call: a JSON list. You type their results."
        ),
    ] = None,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        o.flag("--file", "-f", metavar="FILE", help="Text that goes before the first question."),
    ] = None,
    saved: Annotated[
        Optional[Path],  # noqa: UP045
        o.flag("--load", metavar="FILE", help="Go on with a conversation that /save wrote."),
    ] = None,
    documents: Annotated[
        Optional[list[str]],  # noqa: UP045
        o.flag("--documents", metavar="NAME", help="Put passages of this index before each question (edge index)."),
    ] = None,
    summarize: Annotated[
        bool,
        o.flag(
            "--summarize",
            help="While you type, summarize old turns once half of the KV rows are used; "
            "the next turn has the summary in their place.",
        ),
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Talk with a model. Only each new turn is run; what no longer fits is evicted by the KV policy, but for the system
    prompt. /help lists the commands.

    --time and --energy limit each answer. With --json, every answer is one RunReport on a line of its own.
    """
    from edge.cli.chat.idle import Idle
    from edge.cli.chat.lines import is_terminal, turns
    from edge.cli.chat.slash import Chat, Settings, is_command, obey, read_file, read_tools, warn_unpinned
    from edge.cli.terminal.fetching import fetch_missing
    from edge.cli.terminal.signals import Terminated, get_over_it
    from edge.devices.child import room_for_children
    from edge.errors import EdgeError, InputError, UnsupportedError
    from edge.model.chat.thinking import Think
    from edge.model.structure.spec import check_generates
    from edge.run.arguments import check_limit
    from edge.run.conversation import Conversation, saved_turns
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    if documents and len(documents) > 1:
        raise InputError("--documents takes one index: edge index puts several files and folders into one")
    known = [] if tools is None else read_tools(tools)
    files = [] if file is None else [read_file(file)]
    limit, system, think = check_limit(answer.max_tokens), answer.system, Think.parse(answer.think)
    if saved is not None and system is None:
        system, _ = saved_turns(saved.expanduser())
    with progress(enabled=not quiet) as shown:
        fetch_missing(model, options, shown, quiet=quiet)

    def open_for_chat(name: str) -> Model:
        with room_for_children(options.memory):
            opened = open_model(name).with_template(options.chat_template)
        check_generates(opened.spec)
        if opened.template is None:
            raise UnsupportedError(f"{opened.name} has no chat template: use edge run --raw")
        return opened

    def options_for(opened: Model, system: str | None, think: Think) -> Options:
        if options.keep is not None and not think.chosen:
            return options
        rows = opened.system_rows(system, think)  # refuses a choice that the model does not have
        return options if options.keep is not None else replace(options, keep=_pinned(rows, system, options))

    opened = open_for_chat(model)
    settings = Settings(limit, opened.sampling(**sampling), tuple(answer.stop or ()), think)
    fitting = options_for(opened, system, think)
    typed = is_terminal() and not json
    with (
        progress(enabled=not quiet) as shown,
        ExitStack() as held,
        ExitStack() as sessions,
        turns(typed) as lines,
    ):
        own = None
        needed: AbstractContextManager[None] = nullcontext()
        if documents:
            from edge.documents.documents import Documents
            from edge.documents.encoder import needed_by

            own = held.enter_context(Documents(documents[0], options=options))
            own.load()  # first: the model plans with what is left of the memory
            needed = needed_by(f"with the embedding model, the language model {opened.name}")
        with needed:
            session = sessions.enter_context(load(opened, fitting))
        thoughts = ThoughtView(not quiet and not json, shown)

        chat: Chat

        def switch(name: str) -> None:
            """Go on with another model, or with the one before if the other cannot be loaded."""
            fetch_missing(name, options, shown, quiet=quiet)
            other, before = open_for_chat(name), chat.talk
            fitting = options_for(other, before.system, settings.think)
            sessions.close()  # there is memory for one of them
            try:
                session = sessions.enter_context(load(other, fitting))
            except EdgeError:
                back = options_for(before.session.model, before.system, settings.think)
                chat.talk = before.moved(sessions.enter_context(load(before.session.model, back)))
                raise
            chat.talk, settings.sampling = before.moved(session), other.sampling(**sampling)

        talk = Conversation(session, tools=known)
        if saved is not None:
            talk.load(saved)
        talk.system = system
        chat = Chat(talk, settings, shown.step("prefill"), thoughts.show, switch, files=files, documents=own)
        if typed and not quiet:
            note(f"{opened.spec.label}, {session.plan.config.capacity:,} KV rows. /help lists commands, Ctrl-D leaves")
            warn_unpinned(chat.talk)
        idle = Idle(lambda: chat.talk, quiet=quiet or json) if summarize else None
        for line in lines if idle is None else idle.between(lines, typed=typed):
            text = line.text
            try:
                if not line.verbatim and is_command(text):
                    pieces = obey(chat, text)
                else:
                    slashes = text.startswith("//") and not line.verbatim
                    pieces = chat.say(text[slashes:])
                if pieces is not None:
                    _answer(chat.talk, pieces, shown, thoughts, json=json, quiet=quiet)
                    if own is not None and not quiet and not json and _lacks_passages(chat.talk):
                        note("(no passage stands before this question: none was found, or none fits: --max-kv-size)")
                    if not json:
                        chat.show_call()
            except EdgeError as error:
                if not typed and not is_command(text):
                    raise
                note(f"edge: {error}")
            except KeyboardInterrupt as error:
                if isinstance(error, Terminated) or not typed or is_command(text):
                    raise
                get_over_it()  # meant for the answer, which has ended just before
            if chat.talk.session.terminated:
                raise Terminated
            if chat.left:
                return


def _lacks_passages(talk: Conversation) -> bool:
    """Whether the last answer is one to a question, and by no passage."""
    report, asked = talk.session.report, talk.messages[-2:-1]
    return report is not None and not report.sources and [each["role"] for each in asked] == ["user"]


def _pinned(rows: int, system: str | None, options: Options) -> int:
    """Rows that are pinned unless --keep says otherwise: those before the first turn's text, but none in a plain
    window, and of the template's default system prompt as many as fit into half of the cache."""
    if options.kv_policy == "window":
        return 0
    most = options.max_kv_size
    return rows if system or most is None else min(rows, max(0, most - 8) // 2)


def _answer(
    talk: Conversation, pieces: Pieces, shown: ProgressLine, thoughts: ThoughtView, *, json: bool, quiet: bool
) -> None:
    """Print an answer as it is generated, and notices about it. Ctrl-C ends the answer, not the conversation."""
    from edge.cli.terminal.signals import Terminated, ended_by_signals, get_over_it
    from edge.cli.terminal.wrap import WordWrap
    from edge.errors import BudgetError

    session = talk.session
    before, unanswered, words = session.report, None, WordWrap(width)
    try:
        with ended_by_signals(session):
            for piece in pieces:
                shown.clear()
                thoughts.end()
                if not json:
                    words.write(piece)
    except Terminated:
        raise
    except KeyboardInterrupt:
        get_over_it()  # a second Ctrl-C
    except BudgetError as error:
        unanswered = error
    finally:
        words.end()
        pieces.close()
        shown.clear()
        thoughts.end()
    report = session.report
    if report is None or report is before:
        return
    if json:
        print_json(report.to_dict())
    else:
        if unanswered is None:
            print(flush=True)
        if report.stop_reason == "interrupted":
            note("(interrupted)" if report.tokens.generated else "(interrupted: the question was taken back)")
    if unanswered is not None:
        raise unanswered
    if not quiet and not json:
        if report.sources:
            from edge.cli.documents.ask import lines

            note("\n".join(lines(report.sources)))
        for notice in _notices(talk):
            note(f"({notice})")


def _notices(talk: Conversation) -> Iterator[str]:
    """Events that the answer itself does not show: evictions, its early end."""
    session, report = talk.session, talk.session.report
    assert report is not None
    if talk.evicted:
        rows = f"{talk.evicted} row{'' if talk.evicted == 1 else 's'} of the conversation were evicted"
        policy = session.plan.kv_policy.partition(":")[0]
        yield f"the oldest {rows}" if policy in ("streaming", "window") else f"{rows}, those that {policy} chose"
    if report.stop_reason == "length":
        thoughts = f", {report.thoughts.tokens} of them thoughts" if report.thoughts else ""
        yield f"the answer was cut after {report.tokens.generated} tokens{thoughts} (-n): /set max-tokens N allows more"
    elif report.thoughts is not None and report.thoughts.cut:
        yield f"the thoughts were cut after {report.thoughts.tokens} tokens: /think allows more"
    elif report.stop_reason == "memory":
        from edge.run.reporting import why_short

        yield f"the answer was cut after {report.tokens.generated} tokens: {why_short(report)}"
    elif report.stop_reason not in _SEEN:
        yield f"stopped: {report.stop_reason}"
