"""`edge run`: one prompt, one answer, inside the budget."""

from __future__ import annotations

import sys
import time as clock
from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.show import note, print_json, progress


def run(
    model: o.ModelArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt (default: stdin); - is stdin.")
    ] = None,
    prompt: Annotated[
        str | None, o.flag("-p", "--prompt", group=o.PROMPT, help="The same; what is piped in goes before it.")
    ] = None,
    file: Annotated[Path | None, o.flag("-f", "--file", group=o.PROMPT, help="Read the prompt from a file.")] = None,
    max_tokens: o.MaxTokens = 512,
    system: o.System = None,
    raw: Annotated[
        bool, o.flag("--raw", group=o.PROMPT, help="Continue the prompt as it is, without a chat template.")
    ] = False,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
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
    verbose: o.Verbose = False,
) -> None:
    """Answer one prompt. Text goes to stdout as it is generated; progress and the report go to stderr.

    \b
      edge run smollm2-135m "Why is the sky blue?" --memory 256MiB
      git diff | edge run smollm2-135m -p "Describe this change." -n 100
      edge run model.gguf -f letter.txt --energy 30J --time 1m --json

    Options can be set in the environment, too: edge help environment.
    """
    from edge.cli.prompts import answer_limit, read_prompt

    said = read_prompt([each for each in (text, prompt) if each is not None], file)
    started = clock.perf_counter()
    from edge.budget import parse_joules, parse_seconds
    from edge.cli.hint import suggest_tuning
    from edge.cli.signals import Terminated, ended_by_signals
    from edge.devices.power import find_meter
    from edge.errors import BudgetError
    from edge.model.model import open_model
    from edge.plan import PlanRequest
    from edge.prediction.history import remember_run
    from edge.run.session import load

    limit = answer_limit(max_tokens)
    time_limit = None if time is None else parse_seconds(time)
    energy_limit = None if energy is None else parse_joules(energy)
    meter = find_meter()
    with progress(enabled=not quiet) as shown:
        opened = open_model(model)
        sampling = opened.sampling(
            temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
        )
        asked = opened.prompt(said, system=system, raw=raw)
        shown.message("reading the prompt")
        # The plan wants to know whether prompt and answer fit; a longer prompt is read while it is run.
        while asked.waiting <= opened.spec.context and asked.read():
            spent = clock.perf_counter() - started
            if time_limit is not None and spent > time_limit:
                raise BudgetError(
                    f"no answer: --time {time_limit:g}s was over after {spent:.2g} s, before the model was loaded"
                )
        request = PlanRequest(
            kv_policy=kv_policy,
            sinks=sinks,
            max_kv_size=max_kv_size,
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            prefill_step_size=prefill_step_size,
            provider=provider,
            threads=threads,
            expected_tokens=None if limit is None else asked.waiting + limit,
        )

        def on_load(part: float, doing: str = "") -> None:
            shown.step(doing or f"loading {opened.path.name}")(part, 1.0)

        with load(
            opened,
            backend=backend,
            memory=memory,
            power=power,
            max_temp=max_temp,
            meter=meter,
            request=request,
            on_load=on_load,
            prompt_cache=prompt_cache,
            prompt_cache_size=prompt_cache_size,
        ) as session:
            try:
                pieces = session.stream(
                    asked,
                    max_tokens=limit,
                    sampling=sampling,
                    stop=stop or (),
                    ignore_eos=ignore_eos,
                    time_limit=time_limit,
                    time_spent=clock.perf_counter() - started,
                    energy_limit=energy_limit,
                    energy_spent=meter.read().joules,
                    keep_text=json,
                    on_prefill=shown.step(f"prefill, {asked.size} tokens"),
                )
                with ended_by_signals(session):
                    for piece in pieces:
                        shown.clear()
                        if not json:
                            sys.stdout.write(piece)
                            sys.stdout.flush()
            finally:
                pieces.close()  # an interrupted run reports, too
                shown.clear()
                if session.report is not None:
                    remember_run(session.spec, session.plan, session.report)
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
