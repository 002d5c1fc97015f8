"""`edge chat`: a conversation whose memory is the KV cache and nothing else, so that it can go on forever."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from edge.cli import options as o
from edge.cli.show import note, print_json, progress, report_lines

_HELP = "/reset forgets the conversation, /report shows what the last answer cost, /quit (or Ctrl-D) leaves"

_SEEN = ("eos", "length", "stop", "interrupted", "terminated")  # ends of answers that need no word of why


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
    """Talk with a model. Only each new turn is run; what no longer fits is evicted by the KV policy.

    --time and --energy limit each answer. With --json, every answer is one RunReport on a line of its own.
    """
    from edge.cli.prompts import answer_limit
    from edge.cli.signals import Terminated, stopped_by_sigterm
    from edge.errors import UnsupportedError
    from edge.opened import open_model
    from edge.plan import PlanRequest
    from edge.prediction.history import remember_run
    from edge.session import load

    limit = answer_limit(max_tokens)
    opened = open_model(model)
    sampling = opened.sampling(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
    )
    if opened.template is None:
        raise UnsupportedError(f"{opened.path.name} has no chat template: use edge run --raw")
    request = PlanRequest(
        kv_policy=kv_policy,
        sinks=sinks,
        max_kv_size=max_kv_size,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        prefill_step_size=prefill_step_size,
        provider=provider,
        threads=threads,
    )
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
    ):
        if not quiet and not json and sys.stdin and sys.stdin.isatty():
            note(f"{opened.spec.label}, {session.plan.config.capacity} KV rows. {_HELP}")
        for turn in _turns(prompting=not json):
            if turn == "/quit":
                return
            if turn == "/reset":
                session.reset()
            elif turn == "/report":
                note("\n".join(report_lines(session.report)) if session.report else "nothing has been generated yet")
            elif turn.startswith("/"):
                note(_HELP)
            elif turn.strip():
                pieces = session.stream(
                    turn,
                    max_tokens=limit,
                    sampling=sampling,
                    stop=stop or (),
                    system=system,
                    follow_up=session.engine.kv.length > 0,
                    on_prefill=shown.step("prefill"),
                )
                try:
                    with stopped_by_sigterm(session):
                        for piece in pieces:
                            shown.clear()
                            if not json:
                                print(piece, end="", flush=True)
                except Terminated:
                    raise
                except KeyboardInterrupt:
                    note("\n(interrupted)")  # ends the answer, not the conversation
                finally:
                    pieces.close()
                    shown.clear()
                if session.report is not None:
                    remember_run(session.spec, session.plan, session.report)
                if json and session.report is not None:
                    print_json(session.report.to_dict())
                elif not json:
                    print(flush=True)
                    if session.report is not None and not quiet and session.report.stop_reason not in _SEEN:
                        note(f"stopped: {session.report.stop_reason}")
                if session.terminated:
                    raise Terminated


def _turns(prompting: bool) -> Iterator[str]:
    """What the user says, line by line, until the end of input."""
    from edge.cli.prompts import read_lines

    if prompting and sys.stdin and sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() its line editing

        while True:
            try:
                yield input("› ")
            except EOFError:
                return
    yield from read_lines()
