"""The options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def flag(*names: str, help: str, envvar: str | None = None, **more: Any) -> Any:
    """A typer option whose twin in the environment is EDGE_ and its long name: `--kv-policy`, EDGE_KV_POLICY. envvar:
    another twin, for a name that means something else in other commands."""
    long_name = next(name for name in names if name.startswith("--"))
    return typer.Option(*names, help=help, envvar=envvar or "EDGE_" + long_name[2:].replace("-", "_").upper(), **more)


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A GGUF file, a folder of edge convert, or an installed model: smollm2-135m."),
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A GGUF file, a folder of edge convert, or an installed model: smollm2-135m."),
]
Backend = Annotated[str, flag("--backend", help="Engine: auto, tvm, llamacpp, onnx or reference.")]
Provider = Annotated[
    str | None, flag("--provider", help="What the onnx engine runs on: an execution provider (default: cpu).")
]
Threads = Annotated[int | None, flag("--threads", help="CPU threads (default: physical cores).")]

Memory = Annotated[
    str | None,
    flag("--memory", help="Most memory the whole process may hold, such as 256MiB (default: what the system grants)."),
]
Time = Annotated[str | None, flag("--time", help="Stop after this long, such as 20s.")]
Energy = Annotated[
    str | None, flag("--energy", help="Stop before more is spent, such as 30J (edge devices sensors: how it is known).")
]
Power = Annotated[str | None, flag("--power", help="Most watts on average, such as 3W; held by pauses.")]
MaxTemp = Annotated[str | None, flag("--max-temp", help="Hottest the processor may be, such as 70C; held by pauses.")]

KVPolicy = Annotated[
    str,
    flag(
        "--kv-policy",
        help="What stays when the KV cache is full: streaming (sinks + window), window, full (stop), auto, or by "
        "attention h2o, tova, scissorhands, snapkv, pyramidkv, adakv, fastgen, by keys keydiff, knorm; options as in "
        "snapkv:window=16,kernel=5.",
    ),
]
KVMemory = Annotated[str | None, flag("--kv-memory", help="Size of the KV cache instead of its rows, such as 12MiB.")]
MaxKVSize = Annotated[int | None, flag("--max-kv-size", help="KV rows (default: planned).")]
Sinks = Annotated[int, flag("--sinks", help="First rows that streaming never evicts.")]
KVDtype = Annotated[
    str | None,
    flag("--kv-dtype", help="f16 or below, as the engine has them: int8, int4, q8_0 … (default: f16; of onnx, f32)."),
]
NativeKVDtype = Annotated[str, flag("--kv-dtype", help="f16, int8, int4 or f32.")]
PromptCache = Annotated[
    Path | None, flag("--prompt-cache", metavar="DIR", help="Keep prompts' KV rows here, and do not run them again.")
]
PromptCacheSize = Annotated[str, flag("--prompt-cache-size", help="Most bytes there; the least recently used go.")]
PrefillStepSize = Annotated[
    int | None, flag("--prefill-step-size", help="Prompt tokens run at once (default: planned).")
]

MaxTokens = Annotated[int, flag("-n", "--max-tokens", help="Tokens to generate; -1 has no limit.")]
System = Annotated[str | None, flag("--system", help="System prompt.")]
Stop = Annotated[list[str] | None, flag("--stop", help="Stop before this text; may be repeated.")]
IgnoreEos = Annotated[bool, flag("--ignore-eos", help="Never end the turn; go on.")]

Temperature = Annotated[float, flag("--temp", help="0 is greedy: the same answer every time.")]
TopK = Annotated[int, flag("--top-k", help="Draw from the k likeliest; 0 is off.")]
TopP = Annotated[float, flag("--top-p", help="Draw from the likeliest that make up p; 1 is off.")]
MinP = Annotated[float, flag("--min-p", help="Drop what is below p times the likeliest; 0 is off.")]
RepeatPenalty = Annotated[float, flag("--repeat-penalty", help="Penalty on the last 64 tokens; 1 is off.")]
Seed = Annotated[int | None, flag("--seed", help="Seed of the draws (default: random).")]

Json = Annotated[bool, flag("--json", help="Print JSON to stdout.")]
Quiet = Annotated[bool, flag("-q", "--quiet", help="No progress and no report on stderr.")]
