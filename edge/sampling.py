"""Sampling parameters: the user's choice, and the recommendations of a model's file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from edge.errors import InputError, ModelFormatError
from edge.flags import SAMPLING, flags_of, named_in_errors, option
from edge.records import dataclass
from edge.values import brief

_STATE_IT = "state it, as in --temp 0.7"
MOST_BIASES, LARGEST_BIAS = 1024, 1e9
WHOLE = ("top_k", "seed", "dry_allowed_length", "dry_last_n", "min_tokens")
"""Fields that are whole numbers."""

Biases = tuple[tuple[int, float], ...]


def parse_bias(value: Mapping[int, float] | str | Iterable[tuple[int, float]] | None) -> Biases:
    """Biases of logits by token ids: a dict, or text such as `28=-100,31=2.5`. Raises InputError."""
    try:
        if isinstance(value, str):
            pairs: Any = [each.split("=", 1) for each in value.split(",") if each.strip()]
        else:
            pairs = value.items() if isinstance(value, Mapping) else value or ()
        found = {int(token): float(bias) for token, bias in pairs}
    except (TypeError, ValueError):
        example = "28=-100" if isinstance(value, str) else '{"28": -100}'
        raise InputError(f"--logit-bias takes biases by token ids, such as {example}, not {brief(value)}") from None
    if len(found) > MOST_BIASES or any(token < 0 or not abs(bias) <= LARGEST_BIAS for token, bias in found.items()):
        raise InputError(f"--logit-bias takes at most {MOST_BIASES} tokens, and numbers, not {brief(value)}")
    return tuple(sorted(found.items()))


@named_in_errors
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: the options of sampling of `edge run`, as numbers. temperature 0 is greedy; top_k 0,
    top_p 1 and min_p 0 are off; seed None is random. Raises InputError for values out of range."""

    temperature: float = option(
        0.0, "--temp", group=SAMPLING, unset=True, low=0, high=100,
        help="0 is greedy: the same answer every time (default: the model's, or 0).",
    )  # fmt: skip
    top_k: int = option(
        40, "--top-k", group=SAMPLING, unset=True, low=0,
        help="Draw from the k likeliest; 0 is off (default: the model's, or 40).",
    )  # fmt: skip
    top_p: float = option(
        0.95, "--top-p", group=SAMPLING, unset=True, low=0, high=1,
        help="Draw from the likeliest that make up p; 1 is off (default: the model's, or 0.95).",
    )  # fmt: skip
    min_p: float = option(
        0.05, "--min-p", group=SAMPLING, unset=True, low=0, high=1,
        help="Drop tokens below p times the likeliest; 0 is off (default: the model's, or 0.05).",
    )  # fmt: skip
    repeat_penalty: float = option(
        1.0, "--repeat-penalty", group=SAMPLING, unset=True, low=0.01, high=100,
        help="Penalty on the last 64 tokens; 1 is off (default: the model's, or 1).",
    )  # fmt: skip
    seed: int | None = option(
        None, "--seed", group=SAMPLING, low=0, high=2**64 - 1, help="Seed of the draws (default: random)."
    )
    presence_penalty: float = option(
        0.0, "--presence-penalty", group=SAMPLING, low=-2, high=2,
        help="Subtracted from the logits of the last 64 tokens; 0 is off.",
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "--frequency-penalty", group=SAMPLING, low=-2, high=2,
        help="Subtracted from the logits of the last 64 tokens, as often as each was drawn; 0 is off.",
    )  # fmt: skip
    logit_bias: tuple[tuple[int, float], ...] = option(
        "", "--logit-bias", group=SAMPLING, typed=str, parse=parse_bias, metavar="TOKEN=BIAS", apps=False,
        help="Added to the logits of tokens, such as 28=-100 or, with commas between, several.",
    )  # fmt: skip
    dry_multiplier: float = option(
        0.0, "--dry-multiplier", group=SAMPLING, low=0, high=100,
        help="DRY penalty on tokens that would continue a repetition; 0 is off, 0.8 is usual.",
    )  # fmt: skip
    dry_base: float = option(
        1.75, "--dry-base", group=SAMPLING, low=1, high=100,
        help="By which the DRY penalty grows with each repeated token.",
    )  # fmt: skip
    dry_allowed_length: int = option(
        2, "--dry-allowed-length", group=SAMPLING, low=1, high=1024,
        help="Longest repetition without a DRY penalty, in tokens.",
    )  # fmt: skip
    dry_last_n: int = option(
        1024, "--dry-last-n", group=SAMPLING, low=0, high=65536,
        help="Tokens of the answer in which DRY looks for repetitions.",
    )  # fmt: skip
    xtc_probability: float = option(
        0.0, "--xtc-probability", group=SAMPLING, low=0, high=1,
        help="How often XTC excludes the likeliest tokens; 0 is off.",
    )  # fmt: skip
    xtc_threshold: float = option(
        0.1, "--xtc-threshold", group=SAMPLING, low=0, high=1,
        help="XTC excludes all tokens of this probability but the least likely of them; more than 0.5 is off.",
    )  # fmt: skip
    min_tokens: int = option(
        0, "--min-tokens", group=SAMPLING, low=0, high=1 << 31, apps=False,
        help="The answer does not end its turn before as many tokens, those of thoughts included.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", parse_bias(self.logit_bias))
        for name, flag in flags_of(self).items():
            value = getattr(self, name)
            if (name == "seed" and value is None) or name == "logit_bias":
                continue
            is_number, is_whole = isinstance(value, Real), isinstance(value, Integral)
            if not is_number or not flag.low <= value <= flag.high:  # NaN is never within bounds
                raise InputError(f"{flag.name} must be {flag.range}, not {value!r:.40}")
            if name in WHOLE and not is_whole:
                raise InputError(f"{flag.name} must be a whole number, not {value!r:.40}")

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were drawn change the next logits."""
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def with_seed(self) -> SamplingParams:
        """A copy with a random seed, if sampling needs one and has none, so that reports can be reproduced."""
        if self.temperature > 0 and self.seed is None:
            return replace(self, seed=int.from_bytes(os.urandom(4), "little"))
        return self


# Fields that the makers of a model recommend in its GGUF file, and their keys under `general.sampling.` in llama.cpp.
RECOMMENDED = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
}


def choose_sampling(metadata: Mapping[str, Any], **chosen: Any) -> SamplingParams:
    """The chosen fields; those omitted or None as the model's file recommends, else our defaults.

    Raises InputError for choices out of range, ModelFormatError for recommendations out of range.
    """
    chosen = {name: value for name, value in chosen.items() if value is not None}
    recommended: dict[str, Any] = {}
    for name, key in RECOMMENDED.items():
        value = metadata.get(f"general.sampling.{key}")
        if name in chosen or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFormatError(f"general.sampling.{key} is {str(value)!r:.60}, not a number: {_STATE_IT}")
        recommended[name] = max(0, int(value)) if name == "top_k" and math.isfinite(value) else value
    try:
        params = SamplingParams(**recommended)
    except InputError as error:
        raise ModelFormatError(f"the sampling that the model's file recommends: {error}: {_STATE_IT}") from None
    return replace(params, **chosen)
