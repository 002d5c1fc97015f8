"""`edge chat`: a conversation whose memory is the KV cache and nothing else, so that it can go on forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edge.cli import options as o
from edge.cli.show import Progress, note, print_json, progress

if TYPE_CHECKING:
    from edge.run.conversation import Conversation, Pieces

_SEEN = ("eos", "stop", "interrupted", "terminated")  # ends of answers that need no word of why


def chat(
    model: o.ModelArgument,
    max_tokens: o.MaxTokens = 512,
    system: o.System = None,
    stop: o.Stop = None,
    memory: o.Memory = None,
    time: o.Time = None,
    energy: o.Energy = None,
    power: o.Power = None,
    max_temp: o.MaxTemp = None,
    kv_policy: o.KVPolicy = "streaming",
    max_kv_size: o.MaxKVSize = None,
    kv_memory: o.KVMemory = None,
    sinks: o.Sinks = 4,
    keep: o.Keep = None,
    kv_dtype: o.KVDtype = None,
    prefill_step_size: o.PrefillStepSize = None,
    prompt_cache: o.PromptCache = None,
    prompt_cache_size: o.PromptCacheSize = "1GiB",
    temp: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repeat_penalty: o.RepeatPenalty = None,
    seed: o.Seed = None,
    backend: o.Backend = "auto",
    provider: o.Provider = None,
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Talk with a model. Only each new turn is run; what no longer fits is evicted by the KV policy, but for the system
    prompt. /help lists the commands.

    --time and --energy limit each answer. With --json, every answer is one RunReport on a line of its own.
    """
    from edge.cli.chat_commands import Chat, Settings, is_command, obey, warn_unpinned
    from edge.cli.chat_lines import is_terminal, turns
    from edge.cli.prompts import answer_limit
    from edge.cli.signals import Terminated
    from edge.errors import EdgeError, UnsupportedError
    from edge.model.model import open_model
    from edge.plan import PlanRequest
    from edge.run.conversation import Conversation
    from edge.run.session import load

    limit = answer_limit(max_tokens)
    opened = open_model(model)
    if opened.template is None:
        raise UnsupportedError(f"{opened.path.name} has no chat template: use edge run --raw")
    settings = Settings(
        limit,
        opened.sampling(
            temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
        ),
        tuple(stop or ()),
    )
    request = PlanRequest(
        kv_policy=kv_policy,
        sinks=sinks,
        keep=_pinned(opened.system_rows(system), system, kv_policy, max_kv_size) if keep is None else keep,
        max_kv_size=max_kv_size,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        prefill_step_size=prefill_step_size,
        provider=provider,
        threads=threads,
    )
    typed = is_terminal() and not json
    with (
        progress(enabled=not quiet) as shown,
        load(
            opened,
            backend=backend,
            memory=memory,
            time=time,
            energy=energy,
            power=power,
            max_temp=max_temp,
            request=request,
            prompt_cache=prompt_cache,
            prompt_cache_size=prompt_cache_size,
        ) as session,
        turns(typed) as lines,
    ):
        chat = Chat(Conversation(session, system=system), settings, shown.step("prefill"))
        if typed and not quiet:
            note(f"{opened.spec.label}, {session.plan.config.capacity} KV rows. /help lists commands, Ctrl-D leaves")
            warn_unpinned(chat.talk)
        for line in lines:
            text = line.text
            try:
                if not line.verbatim and is_command(text):
                    pieces = obey(chat, text)
                else:
                    slashes = text.startswith("//") and not line.verbatim
                    pieces = chat.say(text[slashes:]) if text.strip() else None
                if pieces is not None:
                    _answer(chat.talk, pieces, shown, json=json, quiet=quiet)
            except EdgeError as error:
                if not typed and not is_command(text):
                    raise
                note(f"edge: {error}")
            if session.terminated:
                raise Terminated
            if chat.left:
                return


def _pinned(rows: int, system: str | None, kv_policy: str, max_kv_size: int | None) -> int:
    """Rows that are pinned unless --keep says otherwise: those before the first turn's text, but none in a plain
    window. Of the template's own system prompt, which is not asked for, as many as there is room for."""
    if kv_policy == "window":
        return 0
    return rows if system or max_kv_size is None else min(rows, max(0, max_kv_size - 8) // 2)


def _answer(talk: Conversation, pieces: Pieces, shown: Progress, *, json: bool, quiet: bool) -> None:
    """Print an answer as it is made, and what is to be said of it. Ctrl-C ends the answer, not the conversation."""
    from edge.cli.signals import Terminated, ended_by_signals
    from edge.errors import BudgetError
    from edge.prediction.history import remember_run

    session = talk.session
    before, unanswered = session.report, None
    try:
        with ended_by_signals(session):
            for piece in pieces:
                shown.clear()
                if not json:
                    print(piece, end="", flush=True)
    except Terminated:
        raise
    except KeyboardInterrupt:
        pass  # a second one
    except BudgetError as error:
        unanswered = error
    finally:
        pieces.close()
        shown.clear()
    report = session.report
    if report is None or report is before:
        return
    remember_run(session.spec, session.plan, report)
    if json:
        print_json(report.to_dict())
    else:
        print(flush=True)
        if report.stop_reason == "interrupted":
            note("(interrupted)")
    if unanswered is not None:
        raise unanswered
    if not quiet and not json:
        for notice in _notices(talk):
            note(f"({notice})")


def _notices(talk: Conversation) -> Iterator[str]:
    """What happened to an answer or to the conversation that the answer does not show."""
    session, report = talk.session, talk.session.report
    assert report is not None
    if talk.evicted:
        rows = f"{talk.evicted} row{'' if talk.evicted == 1 else 's'} of the conversation were evicted"
        policy = session.plan.kv_policy.partition(":")[0]
        yield f"the oldest {rows}" if policy in ("streaming", "window") else f"{rows}, those that {policy} chose"
    if report.stop_reason == "length":
        yield f"the answer was cut after {report.tokens.generated} tokens (-n): /set max-tokens N allows more"
    elif report.stop_reason not in _SEEN:
        yield f"stopped: {report.stop_reason}"
