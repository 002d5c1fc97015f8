"""Checks of the Python API's arguments: a wrong type raises a one-line error before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from reprlib import repr as brief
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import InputError
from edge.grammar.grammar import Grammar
from edge.run.budgets.meters import EnergyMeter
from edge.sampling import SamplingParams
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.model.chat.media_parts import Medium

MOST_TOKENS = 1 << 31  # of an answer
MOST_TOP = 100  # alternatives per token whose probabilities are reported
_PROMPT = "the prompt must be text, pieces of text or an array of token ids"


def check_sampling(sampling: object) -> None:
    """None, SamplingParams, or fields of it. Raises InputError."""
    if not isinstance(sampling, SamplingParams | Mapping | None):
        raise InputError(f"sampling must be SamplingParams, not {sampling!r:.60}")


def check_grammar(grammar: object) -> None:
    """None, or a Grammar. Raises InputError."""
    if not isinstance(grammar, Grammar | None):
        raise InputError(f"grammar must be edge.Grammar, not {grammar!r:.60}")


def check_prompt(prompt: object) -> str | Iterable[str] | IntArray:
    """Return the prompt. Of pieces of text, those up to the first non-empty one are checked now, the rest when read.

    Raises InputError for other types, and if all pieces are empty.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InputError(f"{_PROMPT}, int [n], not {prompt.dtype} of shape {prompt.shape}")
        return prompt
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
        raise InputError(f"{_PROMPT}, not {brief(prompt)}{_as_messages(prompt)}")
    pieces = _pieces(prompt)
    first = next((piece for piece in pieces if piece), None)
    if first is None:
        raise InputError("the prompt is empty")
    return chain([first], pieces)


def check_number(name: str, value: object) -> None:
    """None, or a number of at least 0; NaN is refused. Raises InputError."""
    if value is None:
        return
    if not isinstance(value, int | float | np.number) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise InputError(f"{name} must be a number, at least 0, not {brief(value)}")


def check_text(name: str, value: object) -> None:
    """None, or a text. Raises InputError."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} must be text, not {brief(value)}")


def check_list(name: str, value: object) -> None:
    """A list of texts. Raises InputError."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise InputError(f"{name} must be a list of text, not {brief(value)}")


def check_media(images: object, sounds: object) -> list[Medium]:
    """Pictures, then sounds; None: none of them. Raises InputError."""
    found: list[Medium] = []
    for name, given, what in ("images", images, "pictures"), ("sounds", sounds, "sounds"):
        if given is None:
            continue
        from edge.media.picture import Image
        from edge.media.recording import Sound

        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise InputError(f"{name} must be a list of {what}, not {brief(given)}")
        found += [Image.of(each) if name == "images" else Sound.of(each) for each in given]
    return found


def check_limit(max_tokens: object) -> int | None:
    """The maximum number of answer tokens; None for -1 and None, which set no limit. Raises InputError."""
    if max_tokens is None or (max_tokens == -1 and not isinstance(max_tokens, float)):
        return None
    if not isinstance(max_tokens, int | np.integer) or isinstance(max_tokens, bool) or max_tokens < 1:
        wanted = "a whole number, at least 1, or -1 for no limit"
        raise InputError(f"--max-tokens must be {wanted}, not {brief(max_tokens)}")
    if max_tokens > MOST_TOKENS:
        wanted = f"at most {MOST_TOKENS}, or -1 for no limit"
        raise InputError(f"--max-tokens must be {wanted}, not {brief(max_tokens)}")
    return int(max_tokens)


def check_meter(meter: EnergyMeter) -> EnergyMeter:
    """The meter. Raises InputError for other objects."""
    if not all(hasattr(meter, name) for name in ("read", "add_bytes")):
        raise InputError(f"meter must count joules, as edge.devices.power.app_meter's does, not be {meter!r:.60}")
    return meter


def check_function(name: str, value: object) -> None:
    """None, or a callable. Raises InputError."""
    if value is not None and not callable(value):
        raise InputError(f"{name} must be a function, not {brief(value)}")


def check_stop(stop: object) -> None:
    """None, a text, or a list of texts, none of them empty. Raises InputError."""
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list | tuple | set | frozenset) or not all(isinstance(one, str) and one for one in texts):
        raise InputError(f"--stop must be text that is not empty, not {brief(stop)}")


def check_top(name: str, top: object) -> None:
    """None, or a number of alternatives. Raises InputError."""
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MOST_TOP):
        raise InputError(f"{name} must be a whole number from 0 to {MOST_TOP}, not {brief(top)}")


def _pieces(prompt: Iterable[object]) -> Iterator[str]:
    for piece in prompt:
        if not isinstance(piece, str):
            raise InputError(f"{_PROMPT}: a piece of it is {brief(piece)}{_as_messages(piece)}")
        yield piece


def _as_messages(value: object) -> str:
    """Advice for a caller who passes a conversation, or one of its turns, as the prompt."""
    return ": pass a conversation as messages=[…]" if isinstance(value, Mapping) and "role" in value else ""
