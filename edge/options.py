"""Options of a run, each defined once: a field here, and code that goes by it.

The flags of the command line and their help (`edge/cli/options.py`), the variables of the environment and their page,
and the keywords of `edge.load` and their documentation are made from the fields of `Options`. How tokens are drawn is
chosen for each answer: `SamplingParams` in `edge/sampling.py`, defined likewise.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edge.budget import parse_bytes, parse_celsius, parse_joules, parse_seconds, parse_watts
from edge.errors import STATED_ONCE, InputError, did_you_mean
from edge.flags import BUDGETS, CACHE, ENGINE, PROMPT, flags_of, named_in_errors, option
from edge.kv import POLICY_HELP, own_policy
from edge.model.adapters.lora_file import LoraFile, LoraSize, parse_lora
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.model.adapters.prefix import PrefixFile
    from edge.model.drafters.draft import DraftFile

AUTO = "auto"
NO_EYES = Path("off")  # of --mmproj

Function = TypeVar("Function", bound=Callable[..., Any])


def _parse_speculate(text: str) -> str:
    if text not in (AUTO, "on", "off"):
        raise InputError(f"--speculate must be auto, on or off, not {text!r:.40}")
    return text


def _parse_policy(value: Any) -> str:
    return value if isinstance(value, str) else own_policy(value)


def _parse_path(flag: str, value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise InputError(f"{flag} must be a path, not {value!r:.60}")
    return Path(value)


def _parse_image_tokens(value: Any) -> int | None:
    if value == AUTO:
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if not _is_whole(number) or not 0 < number < 1 << 20:
        raise InputError(f"--image-tokens must be auto or a whole number below {1 << 20}, not {value!r:.40}")
    return int(number)


def _parse_prompt_cache(value: Any) -> Any:
    return _parse_path("--prompt-cache", value) if isinstance(value, str) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@named_in_errors
@dataclass(frozen=True)
class Options:
    """The budgets and settings of a run, as the user stated them; None leaves the choice to the plan.

    Values are parsed: bytes, seconds, joules, watts, °C. Text such as "256MiB" is parsed here, and raises InputError.
    """

    memory: int | None = option(
        None, "--memory", group=BUDGETS, typed=str, parse=parse_bytes,
        help="Most memory the whole process may hold, such as 256MiB (default: what the system grants).",
    )  # fmt: skip
    gpu_memory: int | None = option(
        None, "--gpu-memory", group=BUDGETS, typed=str, parse=partial(parse_bytes, what="--gpu-memory"),
        help="Most memory on the GPU, such as 2GiB (default: what a card has free; other GPUs use main memory).",
    )  # fmt: skip
    time: float | None = option(
        None, "--time", group=BUDGETS, typed=str, parse=parse_seconds, help="Stop after this long, such as 20s."
    )
    energy: float | None = option(
        None, "--energy", group=BUDGETS, typed=str, parse=parse_joules,
        help="Stop before more is spent, such as 30J (edge devices sensors: how it is known).",
    )  # fmt: skip
    power: float | None = option(
        None, "--power", group=BUDGETS, typed=str, parse=parse_watts,
        help="Most watts on average, such as 3W; held by pauses.",
    )  # fmt: skip
    max_temp: float | None = option(
        None, "--max-temp", group=BUDGETS, typed=str, parse=partial(parse_celsius, what="max-temp"),
        help="Hottest the processor may be, such as 70C; held by pauses.",
    )  # fmt: skip

    kv_policy: str = option(
        "streaming", "--kv-policy", group=CACHE, typed=str, parse=_parse_policy, written="str | Policy",
        help=f"What stays when the KV cache is full (full: it stops): auto, {POLICY_HELP}. Options as in "
        "snapkv:window=16,kernel=5.",
    )  # fmt: skip
    max_kv_size: int | None = option(None, "--max-kv-size", group=CACHE, help="KV rows (default: planned).")
    kv_memory: int | None = option(
        None, "--kv-memory", group=CACHE, typed=str, parse=partial(parse_bytes, what="--kv-memory"),
        help="Size of the KV cache instead of its rows, such as 12MiB.",
    )  # fmt: skip
    sinks: int = option(4, "--sinks", group=CACHE, help="First rows that streaming never evicts.")
    keep: int | None = option(
        None, "--keep", group=CACHE,
        help="First rows that no policy ever evicts (default: in edge chat, those of the system prompt).",
    )  # fmt: skip
    kv_dtype: str | None = option(
        None, "--kv-dtype", group=CACHE,
        help="f16 or below, as the engine has them: int8, int4, q8_0 … (default: f16; of onnx, f32).",
    )  # fmt: skip
    prefill_step_size: int | None = option(
        None, "--prefill-step-size", group=CACHE, help="Prompt tokens run at once (default: planned)."
    )
    prompt_cache: Any = option(
        None, "--prompt-cache", group=CACHE, typed=str, parse=_parse_prompt_cache, metavar="DIR",
        help="Keep prompts' KV rows here, and do not run them again.",
    )  # fmt: skip
    """A folder, or in Python a PromptCache, which sessions may share."""
    prompt_cache_size: int = option(
        "1GiB", "--prompt-cache-size", group=CACHE, typed=str, parse=partial(parse_bytes, what="--prompt-cache-size"),
        help="Most bytes there; the least recently used go.",
    )  # fmt: skip

    chat_template: Path | None = option(
        None, "--chat-template", group=PROMPT, typed=str, parse=partial(_parse_path, "--chat-template"),
        metavar="FILE",
        help="Write chats by the Jinja template in this file, not by the model's own.",
    )  # fmt: skip

    prefix: Path | None = option(
        None, "--prefix", group=PROMPT, typed=str, parse=partial(_parse_path, "--prefix"),
        metavar="FILE|DIR",
        help="Soft prompt before every prompt: a folder that PEFT saved after prompt, P- or prefix tuning, "
        "or the file that edge convert makes of it.",
    )  # fmt: skip

    mmproj: Path | None = option(
        None, "--mmproj", group=PROMPT, typed=str, parse=partial(_parse_path, "--mmproj"), metavar="FILE",
        help="The model's encoder of pictures or sounds, as llama.cpp writes it (default: an mmproj file beside the "
        "model); off: none.",
    )  # fmt: skip
    image_tokens: int | None = option(
        None, "--image-tokens", group=PROMPT, typed=str, parse=_parse_image_tokens, metavar="N|auto",
        help="Most tokens of a picture (default: auto, the most of the family's own sizes that the budgets allow).",
    )  # fmt: skip

    backend: str = option(AUTO, "--backend", group=ENGINE, help="Engine: auto, cpu, llamacpp, onnx, gpu or reference.")
    provider: str | None = option(
        None, "--provider", group=ENGINE,
        help="What the onnx engine runs on: an execution provider (default: cpu).",
    )  # fmt: skip
    gpu_layers: int | None = option(
        None, "--gpu-layers", group=ENGINE,
        help="Layers that the llamacpp engine runs on a GPU, the last ones first (default: 0).",
    )  # fmt: skip
    lora: tuple[LoraFile, ...] | None = option(
        None, "--lora", group=ENGINE, typed=str, parse=parse_lora, metavar="FILE[:SCALE]",
        written="str | Path | tuple[LoraFile, ...] | None",
        help="LoRA adapter in GGUF, such as style.gguf or style.gguf:0.5; several with commas between.",
    )  # fmt: skip
    threads: int | None = option(None, "--threads", group=ENGINE, help="CPU threads (default: physical cores).")

    speculate: str = option(
        AUTO, "--speculate", group=ENGINE, parse=_parse_speculate,
        help="auto: verify drafts of repeated text, or of the model's MTP layer, with the same answer; on: on GPUs, "
        "too; or off.",
    )  # fmt: skip
    draft: Any = option(
        None, "--draft", group=ENGINE, typed=str, metavar="MODEL",
        help="What drafts where that pays: a small model with the same tokens, an EAGLE-3 head, Gemma 4's assistant.",
    )  # fmt: skip
    """A path or a name."""
    sequences: int = option(
        1, "--sequences", group=ENGINE,
        help="Conversations that run at the same time, each with KV rows of its own; the cpu engine has several.",
    )  # fmt: skip

    expected_tokens: int | None = option(None, help="Tokens of prompt and answer together, if they are known.")
    expected_prompt: int | None = option(None, help="Tokens of the prompt, if they are known.")
    logits_rows: int = option(1, help="Most rows of logits that exist at once, for Session.forward of every token.")
    loras: int | None = option(None, help="Adapters that sequences run with at the same time (default: one for each).")

    def __post_init__(self) -> None:
        flags = flags_of(self)
        for each in fields(self):
            flag, value = flags[each.name], getattr(self, each.name)
            name, kind = (*flag.names, each.name)[0], str(each.type).removesuffix(" | None")
            if value is None:
                if flag.default is not None:
                    raise InputError(f"{name} must not be None: leave it out for {flag.default}")
            elif flag.parse:
                if isinstance(value, str) or kind == "str":
                    object.__setattr__(self, each.name, flag.parse(value))
            elif kind == "str" and not isinstance(value, str):
                raise InputError(f"{name} must be text, not {value!r:.60}")
            elif kind == "int" and not _is_whole(value):
                raise InputError(f"{name} must be a whole number, not {value!r:.60}")

    @classmethod
    def parse(cls, **values: object) -> Options:
        """Options as people write them. Raises InputError for unknown names and impossible values, numbers too."""
        return cls().updated(**values)

    @staticmethod
    def of(options: Options | None, **values: object) -> Options:
        """`options`, or the default ones, with others in place of some. Raises InputError."""
        if options is not None and not isinstance(options, Options):
            raise InputError(f"options must be edge.Options, not {options!r:.60}: give single options by name")
        return (options or Options()).updated(**values)

    def updated(self, **values: object) -> Options:
        """These options with others in place of some, as people write them. Raises InputError."""
        known = flags_of(self)
        for name, value in values.items():
            if name not in known:
                advice = did_you_mean(name, known, 1) or f"choose from {', '.join(known)}"
                raise InputError(f"unknown option {name!r}: {advice}")
            parse = known[name].parse
            values[name] = parse(value) if parse and value is not None else value
        return replace(self, **values)  # type: ignore[arg-type]

    @cached_property
    def draft_file(self) -> DraftFile | None:
        """The header of the model that drafts. Raises InputError, ModelFormatError, UnsupportedError."""
        from edge.devices.output import check_path
        from edge.model.drafters.draft import open_draft

        if self.draft is None:
            return None
        check_path("--draft", self.draft, "a path or a name")
        return open_draft(self.draft)

    @cached_property
    def prefix_file(self) -> PrefixFile | None:
        """The header of the prefix. Raises InputError, ModelFormatError, UnsupportedError."""
        if self.prefix is None:
            return None
        from edge.model.adapters.prefix import read_prefix

        return read_prefix(self.prefix)

    @property
    def prefix_rows(self) -> int:
        """The rows that the prefix takes. Raises what `prefix_file` raises."""
        return self.prefix_file.size if self.prefix_file else 0

    @cached_property
    def lora_size(self) -> LoraSize:
        """The size of the adapters, by their headers. Raises ModelFormatError, UnsupportedError."""
        from edge.model.adapters.lora import size_of

        return size_of(self.lora or ())


STATED_ONCE.update(flag.name for flag in flags_of(Options).values() if flag.names)


def written_types() -> dict[str, str]:
    """Types of the options as people write them, by name: those of bytes, seconds, … may be text, such as "256MiB"."""
    types, flags = {each.name: str(each.type) for each in fields(Options)}, flags_of(Options)
    amounts = {name: f"str | {types[name]}" for name in flags if flags[name].typed is str and types[name] != "Any"}
    return types | amounts | {name: flag.written for name, flag in flags.items() if flag.written}


class _Written(str):
    """An annotation that `help` shows as it is written, without quotes."""

    __repr__ = str.__str__


def takes_options(function: Function) -> Function:
    """A function whose `**keywords` are options: its signature shows them, and its docstring in place of OPTIONS."""
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    flags, types = flags_of(Options), written_types()
    for name, flag in flags.items():
        keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=types[name])
        parameters.append(keyword)
    shown = [each.replace(annotation=_Written(each.annotation)) for each in parameters]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=shown, return_annotation=_Written(signature.return_annotation)
    )
    lines = [
        textwrap.fill(
            f"{name}: {flag.help}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        for name, flag in flags.items()
    ]
    function.__doc__ = (function.__doc__ or "").replace("    OPTIONS", "\n".join(lines))
    return function
