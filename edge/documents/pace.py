"""The tokens that budgets of seconds and joules leave to a prompt, by the plan's estimates."""

from __future__ import annotations

from edge.lab.prediction.forecast import forecast
from edge.model.model import Model
from edge.options import Options

_SHARE = 2  # a half for the prompt, a half for the answer


def affordable(model: Model, options: Options, spent_s: float = 0.0, spent_j: float = 0.0) -> int | None:
    """The most tokens of a prompt, so that half of --time and --energy is left to the answer; None where these limit
    nothing, or nothing is known of this device. spent: before the prompt."""
    if options.time is None and options.energy is None:
        return None
    found = forecast(model, options).prediction
    if found.prefill_tok_s is None:
        return None
    seconds = [] if options.time is None else [(options.time - spent_s) / _SHARE]
    if options.energy is not None and found.watts is not None and found.watts.value > 0:
        seconds.append((options.energy - spent_j) / found.watts.value / _SHARE)
    return max(0, int(min(seconds) * found.prefill_tok_s.value)) if seconds else None
