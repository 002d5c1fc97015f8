"""The options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PROMPT, BUDGETS, CACHE, SAMPLING, ENGINE, OUTPUT = "Prompt", "Budgets", "KV cache", "Sampling", "Engine", "Output"
"""Groups of options in a command's help; those without one are its own."""


def flag(*names: str, help: str, group: str | None = None, **more: Any) -> Any:
    """A typer option."""
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def shared(*names: str, help: str, group: str, **more: Any) -> Any:
    """An option that means the same in every command, and so may have a twin in the environment: EDGE_ and its long
    name, as EDGE_KV_POLICY for `--kv-policy`."""
    long_name = next(name for name in names if name.startswith("--"))
    twin = "EDGE_" + long_name[2:].replace("-", "_").upper()
    return flag(*names, help=help, group=group, envvar=twin, show_envvar=False, **more)


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A GGUF file, a folder of edge convert, or an installed model: smollm2-135m."),
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A GGUF file, a folder of edge convert, or an installed model: smollm2-135m."),
]
Backend = Annotated[str, shared("--backend", group=ENGINE, help="Engine: auto, tvm, llamacpp, onnx or reference.")]
Provider = Annotated[
    str | None,
    shared("--provider", group=ENGINE, help="What the onnx engine runs on: an execution provider (default: cpu)."),
]
Threads = Annotated[int | None, shared("--threads", group=ENGINE, help="CPU threads (default: physical cores).")]

Memory = Annotated[
    str | None,
    shared(
        "--memory",
        group=BUDGETS,
        help="Most memory the whole process may hold, such as 256MiB (default: what the system grants).",
    ),
]
Time = Annotated[str | None, shared("--time", group=BUDGETS, help="Stop after this long, such as 20s.")]
Energy = Annotated[
    str | None,
    shared(
        "--energy",
        group=BUDGETS,
        help="Stop before more is spent, such as 30J (edge devices sensors: how it is known).",
    ),
]
Power = Annotated[
    str | None, shared("--power", group=BUDGETS, help="Most watts on average, such as 3W; held by pauses.")
]
MaxTemp = Annotated[
    str | None, shared("--max-temp", group=BUDGETS, help="Hottest the processor may be, such as 70C; held by pauses.")
]

KVPolicy = Annotated[
    str,
    shared(
        "--kv-policy",
        group=CACHE,
        help="What stays when the KV cache is full: streaming (sinks + window), window, full (stop), auto, or by "
        "attention h2o, tova, scissorhands, snapkv, pyramidkv, adakv, fastgen, by keys keydiff, knorm; options as in "
        "snapkv:window=16,kernel=5.",
    ),
]
KVMemory = Annotated[
    str | None, shared("--kv-memory", group=CACHE, help="Size of the KV cache instead of its rows, such as 12MiB.")
]
MaxKVSize = Annotated[int | None, shared("--max-kv-size", group=CACHE, help="KV rows (default: planned).")]
Sinks = Annotated[int, shared("--sinks", group=CACHE, help="First rows that streaming never evicts.")]
Keep = Annotated[
    int | None,
    shared("--keep", group=CACHE, help="First rows that no policy ever evicts (default: those of the system prompt)."),
]
KVDtype = Annotated[
    str | None,
    shared(
        "--kv-dtype",
        group=CACHE,
        help="f16 or below, as the engine has them: int8, int4, q8_0 … (default: f16; of onnx, f32).",
    ),
]
NativeKVDtype = Annotated[str, flag("--kv-dtype", help="f16, int8, int4 or f32.")]
PromptCache = Annotated[
    Path | None,
    shared("--prompt-cache", metavar="DIR", group=CACHE, help="Keep prompts' KV rows here, and do not run them again."),
]
PromptCacheSize = Annotated[
    str, shared("--prompt-cache-size", group=CACHE, help="Most bytes there; the least recently used go.")
]
PrefillStepSize = Annotated[
    int | None, shared("--prefill-step-size", group=CACHE, help="Prompt tokens run at once (default: planned).")
]

MaxTokens = Annotated[int, shared("-n", "--max-tokens", group=PROMPT, help="Tokens to generate; -1 has no limit.")]
System = Annotated[str | None, shared("--system", group=PROMPT, help="System prompt.")]
Stop = Annotated[list[str] | None, shared("--stop", group=PROMPT, help="Stop before this text; may be repeated.")]
IgnoreEos = Annotated[bool, shared("--ignore-eos", group=PROMPT, help="Never end the turn; go on.")]

Temperature = Annotated[
    float | None,
    shared("--temp", group=SAMPLING, help="0 is greedy: the same answer every time (default: the model's, or 0)."),
]
TopK = Annotated[
    int | None,
    shared("--top-k", group=SAMPLING, help="Draw from the k likeliest; 0 is off (default: the model's, or 40)."),
]
TopP = Annotated[
    float | None,
    shared(
        "--top-p",
        group=SAMPLING,
        help="Draw from the likeliest that make up p; 1 is off (default: the model's, or 0.95).",
    ),
]
MinP = Annotated[
    float | None,
    shared(
        "--min-p",
        group=SAMPLING,
        help="Drop what is below p times the likeliest; 0 is off (default: the model's, or 0.05).",
    ),
]
RepeatPenalty = Annotated[
    float | None,
    shared(
        "--repeat-penalty",
        group=SAMPLING,
        help="Penalty on the last 64 tokens; 1 is off (default: the model's, or 1).",
    ),
]
Seed = Annotated[int | None, shared("--seed", group=SAMPLING, help="Seed of the draws (default: random).")]

Json = Annotated[bool, shared("--json", group=OUTPUT, help="Print JSON to stdout.")]
Quiet = Annotated[bool, shared("-q", "--quiet", group=OUTPUT, help="No progress and no report on stderr.")]
Verbose = Annotated[bool, shared("-v", "--verbose", group=OUTPUT, help="The whole report on stderr instead of a line.")]
