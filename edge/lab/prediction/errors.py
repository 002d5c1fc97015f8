"""Corrections of estimates for devices on which edge was never measured, and the remaining errors: errors.toml.

`benchmarks/published.py --write` makes that file from published.toml. A correction is the geometric mean of published /
predicted speeds, with equal weights of the devices. The error is out of sample: each device's figures are compared with
predictions that only the other devices corrected, and nine in ten have no larger error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import exp, floor, log
from statistics import geometric_mean
from typing import Literal

from edge.records import dataclass
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

What = Literal["decode", "prompt"]
QUANTILE = 0.9  # the quantile of errors that is stated
_PERCENT = 1.5  # the largest factor that is stated in percent


@dataclass(frozen=True)
class Correction:
    """The correction of one engine's estimates, of answers or of prompts."""

    backend: str
    machine: str  # as compilers name it
    npu: bool
    what: What
    factor: float  # published / predicted
    error: float | None  # factor by which nine in ten are off at most, corrected, out of sample; None: unknown
    figures: int
    devices: list[str]
    engines: list[str]  # programs whose figures these are


@dataclass(frozen=True)
class _File:
    corrections: list[Correction]


@cache
def corrections() -> list[Correction]:
    """All corrections."""
    text = files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    return parse(_File, tomllib.loads(text)).corrections


def correction(backend: str, machine: str, what: What, *, npu: bool) -> Correction | None:
    """The correction of an engine's estimates on machines of a kind; None if nothing was published to compare with."""
    same = (backend, machine, what, npu)
    return next((each for each in corrections() if (each.backend, each.machine, each.what, each.npu) == same), None)


def fitted(ratios: Mapping[str, Sequence[float]]) -> float:
    """The factor that fits published / predicted speeds, by device."""
    return geometric_mean([geometric_mean(own) for own in ratios.values()])


def left_out(ratios: Mapping[str, Sequence[float]]) -> list[float]:
    """Published / predicted speeds, with each device's predictions corrected by the other devices alone."""
    found = []
    for device, own in ratios.items():
        factor = fitted({name: each for name, each in ratios.items() if name != device})
        found += [each / factor for each in own]
    return found


def quantile(ratios: Sequence[float], share: float = QUANTILE) -> float:
    """The factor, at least 1, by which that share of predictions is off at most; interpolated between logarithms."""
    errors = sorted(abs(log(each)) for each in ratios)
    at = share * (len(errors) - 1)
    low = floor(at)
    high = min(low + 1, len(errors) - 1)
    return exp(errors[low] + (at - low) * (errors[high] - errors[low]))


def worded(error: float | None) -> str:
    """An error in words: `±11 %`, `within a factor of 2.6`."""
    if error is None:
        return "error not known"
    return f"±{error - 1:.0%}".replace("%", " %") if error <= _PERCENT else f"within a factor of {error:.2g}"


def corrected_by(answers: Correction, prompts: Correction) -> str:
    """The factors of estimates of answers and of prompts, and the meaning of their errors, in words."""
    devices, engines = ({*getattr(answers, name), *getattr(prompts, name)} for name in ("devices", "engines"))
    factors = f"{answers.factor:.2f} (answers) and {prompts.factor:.2f} (prompts)"
    figures = answers.figures + prompts.figures
    return (
        f"edge was not measured on such a device: speeds are multiplied by {factors}, fitted to {figures} published\n"
        f"speeds of {', '.join(sorted(engines))} on {len(devices)} devices; nine in ten of these are within the stated "
        "errors, with their device left out of the fit"
    )


def learned_from(answers: Correction, prompts: Correction) -> str:
    """As `corrected_by`, for corrections by speeds of other models measured on the device."""
    factors = f"{answers.factor:.2f} (answers) and {prompts.factor:.2f} (prompts)"
    return f"speeds are multiplied by {factors}, fitted to speeds measured there of {', '.join(answers.engines)}"
