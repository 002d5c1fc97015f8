"""The options that several commands share, each declared once. Every flag has an EDGE_… twin in the environment."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

_MODEL, _SAMPLING, _BUDGET, _CACHE, _OUTPUT = "Model", "Sampling", "Budgets", "KV cache", "Output"

ModelArgument = Annotated[str, typer.Argument(help="A GGUF file, or an installed model such as smollm2-135m.", metavar="MODEL")]

Backend = Annotated[
    str, typer.Option("--backend", envvar="EDGE_BACKEND", help="Engine: auto, llamacpp or reference.", rich_help_panel=_MODEL)
]
Threads = Annotated[
    Optional[int],
    typer.Option("--threads", envvar="EDGE_THREADS", help="CPU threads (default: physical cores).", rich_help_panel=_MODEL),
]

Memory = Annotated[
    Optional[str],
    typer.Option(
        "--memory",
        envvar="EDGE_MEMORY",
        help="Most memory the whole process may have resident, such as 256MiB (default: what the system grants).",
        rich_help_panel=_BUDGET,
    ),
]
Time = Annotated[
    Optional[str],
    typer.Option("--time", envvar="EDGE_TIME", help="Stop after this long, such as 20s.", rich_help_panel=_BUDGET),
]

KVPolicy = Annotated[
    str,
    typer.Option(
        "--kv-policy",
        envvar="EDGE_KV_POLICY",
        help="Which rows stay when the cache is full: streaming (sinks + window), window, or full (stop).",
        rich_help_panel=_CACHE,
    ),
]
MaxKVSize = Annotated[
    Optional[int],
    typer.Option("--max-kv-size", envvar="EDGE_MAX_KV_SIZE", help="KV rows (default: planned).", rich_help_panel=_CACHE),
]
Sinks = Annotated[
    int,
    typer.Option("--sinks", envvar="EDGE_SINKS", help="First rows that streaming never evicts.", rich_help_panel=_CACHE),
]
KVDtype = Annotated[
    Optional[str],
    typer.Option("--kv-dtype", envvar="EDGE_KV_DTYPE", help="f16, q8_0 or q4_0 (default: f16).", rich_help_panel=_CACHE),
]
PrefillStepSize = Annotated[
    Optional[int],
    typer.Option(
        "--prefill-step-size",
        envvar="EDGE_PREFILL_STEP_SIZE",
        help="Prompt tokens run at once (default: planned).",
        rich_help_panel=_CACHE,
    ),
]

MaxTokens = Annotated[
    int,
    typer.Option("-n", "--max-tokens", envvar="EDGE_MAX_TOKENS", help="Tokens to generate; -1 has no limit."),
]
System = Annotated[Optional[str], typer.Option("--system", envvar="EDGE_SYSTEM", help="System prompt.")]
Stop = Annotated[
    Optional[list[str]], typer.Option("--stop", envvar="EDGE_STOP", help="Stop before this text; may be repeated.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", envvar="EDGE_IGNORE_EOS", help="Never end the turn; go on.")
]

Temperature = Annotated[
    float,
    typer.Option("--temp", envvar="EDGE_TEMP", help="0 is greedy: the same answer every time.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int, typer.Option("--top-k", envvar="EDGE_TOP_K", help="Draw from the k likeliest; 0 is off.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option("--top-p", envvar="EDGE_TOP_P", help="Draw from the likeliest that make up p.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option("--min-p", envvar="EDGE_MIN_P", help="Drop what is below p × the likeliest.", rich_help_panel=_SAMPLING),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        envvar="EDGE_REPEAT_PENALTY",
        help="Penalty on the last 64 tokens; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    Optional[int],
    typer.Option("--seed", envvar="EDGE_SEED", help="Seed of the draws (default: random).", rich_help_panel=_SAMPLING),
]

Json = Annotated[
    bool, typer.Option("--json", envvar="EDGE_JSON", help="Print one JSON object to stdout.", rich_help_panel=_OUTPUT)
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="EDGE_QUIET", help="No progress and no report on stderr.", rich_help_panel=_OUTPUT),
]
