"""The table with which conversions end: what they lost, and what was gained."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.budget import format_bytes
from edge.cli.terminal.show import note, table
from edge.errors import EdgeError

if TYPE_CHECKING:
    from edge.converters.evaluate import Evaluated
    from edge.converters.quantizers.mixed import Mixture
    from edge.prediction.predict import Guess

NO_EVAL = "Skip the table of what was lost, by 256 tokens that both models run (seconds to minutes)."


def predicted_speed(target: Path) -> Guess | None:
    """Tokens per second in decode, as `edge plan` predicts them here; None where it cannot."""
    from edge.prediction.forecast import forecast

    try:
        decode = forecast(target).prediction.decode
    except EdgeError:  # it may fit another device
        return None
    return decode[0].tok_s if decode else None


def cost_json(found: Evaluated | None, target: Path) -> dict[str, Any]:
    """For --json; empty where nothing was evaluated."""
    if found is None:
        return {"evaluated": None}
    speed = predicted_speed(target)
    return {"evaluated": asdict(found) | {"predicted_tok_s": speed and speed.value}}


def show_cost(found: Evaluated, target: Path, bits: float, nbytes: int) -> None:
    lost, speed = found.divergence, predicted_speed(target)
    rows = [
        ["KL divergence", f"{lost.kl_mean:.4f} ± {lost.kl_stderr:.4f}"],
        ["99 % of predictions below", f"{lost.kl_p99:.3f}"],
        ["99.9 % of predictions below", f"{lost.kl_p999:.3f}"],
        ["perplexity", f"× {lost.ratio:.3f} ± {lost.ratio_stderr:.3f}"],
        ["same likeliest token", f"{lost.top1:.1%} ± {lost.top1_stderr:.1%}"],
        ["bits per weight", f"{bits:.2f}"],
        ["bytes", format_bytes(nbytes)],
        *([["predicted here", f"{speed.value:,.3g} tok/s"]] if speed else []),
    ]
    print("\n" + table(["against its source", ""], rows))
    note(
        f"{lost.tokens} predictions in {found.seconds:.1f} s: a first impression (--no-eval goes without; measure with "
        f"edge eval kl on your own texts)"
    )


def show_mixture(mixture: Mixture) -> None:
    """How many tensors of each kind got which type."""
    from edge.formats.blocks import bits_per_weight

    counts = Counter((name.removesuffix(".weight").rpartition(".")[2], kind) for name, kind in mixture.types.items())
    kinds = sorted({kind for _, kind in counts}, key=bits_per_weight)
    roles = dict.fromkeys(role for role, _ in counts)
    rows = [[role, *(str(counts[role, kind] or "") for kind in kinds)] for role in roles]
    print("\n" + table(["types by measured loss", *kinds], rows))
    note(f"{mixture.kl:.3f} nats are lost by rounding with scales alone, before what else the method does (estimated)")
