"""What commands share that read a text in windows: options, files, settings, words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edge.cli import options as o
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.model.model import Model
    from edge.quality.windows import Windows
    from edge.run.session import Session
    from edge.types import IntArray

Context = Annotated[
    int | None, o.flag("--context", min=2, help="Read windows of so many tokens, each from an empty cache.")
]
SecondHalf = Annotated[
    bool, o.flag("--second-half", help="Score the second half of every window only, as llama.cpp does.")
]
Output = Annotated[Path | None, o.flag("-o", "--output", help="Write the figures there: .json.")]
Resume = Annotated[bool, o.flag("--resume", help="Go on with OUTPUT.jsonl, where an interrupted run left its figures.")]


def check_output(output: Path | None, *, resume: bool) -> None:
    """Raises InputError."""
    if output is not None and output.suffix != ".json":
        raise InputError(f"{output}: figures are written as .json")
    if resume and output is None:
        raise InputError("--resume goes with -o FILE: figures are kept beside it")
    if output is not None:
        from edge.devices.output import check_writable

        check_writable(output)


def journal_of(output: Path | None) -> Path | None:
    return None if output is None else Path(f"{output}.jsonl")


def write_output(output: Path | None, said: dict[str, Any]) -> None:
    import json

    from edge.devices.output import write_whole

    if output is not None:
        write_whole(output, json.dumps(said, ensure_ascii=False, allow_nan=False) + "\n")


def windows_of(model: Model, ids: IntArray, context: int, *, second_half: bool) -> Windows:
    from edge.quality.windows import Windows

    if context > model.spec.context:
        raise InputError(f"--context must be at most {model.spec.context}, which is what the model knows positions for")
    tokenizer = model.tokenizer
    return Windows(ids, context, second_half, tokenizer.bos_id if tokenizer.add_bos else None)


def window_words(windows: Windows) -> str:
    half = "the second half of " if windows.second_half else ""
    return f"in {half}{len(windows)} windows of {windows.context} tokens"


def text_settings(windows: Windows) -> dict[str, Any]:
    """What is read."""
    from edge.quality.material import checksum_of

    return {
        "tokens_crc32": checksum_of(windows.tokens),
        "tokens_read": windows.tokens.size,
        "context": windows.context,
        "scored": "second half" if windows.second_half else "all but the first",
    }


def reader_settings(session: Session) -> dict[str, Any]:
    """What reads it."""
    from edge.quality.material import identity_of

    plan = session.plan
    return {
        **identity_of(session.model, plan.backend),
        "kv_policy": plan.kv_policy,
        "sinks": plan.sinks,
        "kv_dtype": plan.config.kv_dtype,
        "kv_capacity": plan.config.capacity,
    }
