"""What conversions share: some options, and the table at the end, of losses of quality and savings."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import note, table
from edge.devices.profiles import HOST, find_profile
from edge.errors import EdgeError, InputError

if TYPE_CHECKING:
    from edge.converters.evaluate import Evaluated
    from edge.converters.quantizers.mixed import Mixture
    from edge.lab.prediction.predict import Guess

DEVICE = "Also predict the speed on this device (edge devices list)."
NO_EVAL = "Skip the table of what was lost, by 256 tokens that both models run (seconds to minutes)."
CalibrationTokens = Annotated[
    int, o.flag("--calibration-tokens", min=128, max=1 << 30, help="Tokens to use, in equal shares from all texts.")
]


def check_device(device: str | None, *, evaluates: bool) -> None:
    """Raise InputError for an unknown device, or one that no table will show, before minutes of work."""
    if device is not None:
        find_profile(device)
        if not evaluates:
            raise InputError(
                "--device is for the table of what was lost and gained: quantize, without --no-eval and --quiet"
            )


def predicted_speed(target: Path, device: str = HOST) -> Guess | None:
    """Tokens per second in decode, as `edge plan` predicts them; None where it cannot."""
    from edge.lab.prediction.forecast import forecast

    try:
        decode = forecast(target, device=device).prediction.decode
    except EdgeError:  # it may fit another device
        return None
    return decode[0].tok_s if decode else None


def cost_json(found: Evaluated | None, target: Path, device: str | None) -> dict[str, Any]:
    """For --json; empty where nothing was evaluated. device: where speed is predicted, too."""
    if found is None:
        return {"evaluated": None}
    speeds = {name: predicted_speed(target, name) for name in (HOST, *([device] if device else []))}
    predicted = {name: speed and speed.value for name, speed in speeds.items()}
    return {"evaluated": asdict(found) | {"predicted_tok_s": predicted}}


def show_cost(found: Evaluated, target: Path, bits: float, nbytes: int, device: str | None) -> None:
    lost, places = found.divergence, {"here": HOST} | ({f"on {device}": device} if device else {})
    speeds = {place: predicted_speed(target, name) for place, name in places.items()}
    rows = [
        ["KL divergence", f"{lost.kl_mean:.4f} ± {lost.kl_stderr:.4f}"],
        ["99 % of predictions below", f"{lost.kl_p99:.3f}"],
        ["99.9 % of predictions below", f"{lost.kl_p999:.3f}"],
        ["perplexity", f"× {lost.ratio:.3f} ± {lost.ratio_stderr:.3f}"],
        ["same likeliest token", f"{lost.top1:.1%} ± {lost.top1_stderr:.1%}"],
        ["bits per weight", f"{bits:.2f}"],
        ["bytes", format_bytes(nbytes)],
        *([f"predicted {place}", _speed(speed)] for place, speed in speeds.items() if speed or place != "here"),
    ]
    print("\n" + table(["against its source", ""], rows))
    note(
        f"{lost.tokens} predictions in {found.seconds:.1f} s: a first impression (--no-eval goes without; measure with "
        f"edge eval kl on your own texts)"
    )


def _speed(speed: Guess | None) -> str:
    return f"{speed.value:,.3g} tok/s{speed.known and f', {speed.known}'}" if speed else "unknown"


def show_mixture(mixture: Mixture) -> None:
    """How many tensors of each kind got which type."""
    from edge.formats.blocks import bits_per_weight

    counts = Counter((name.removesuffix(".weight").rpartition(".")[2], kind) for name, kind in mixture.types.items())
    kinds = sorted({kind for _, kind in counts}, key=bits_per_weight)
    roles = dict.fromkeys(role for role, _ in counts)
    rows = [[role, *(str(counts[role, kind] or "") for kind in kinds)] for role in roles]
    print("\n" + table(["types by measured loss", *kinds], rows))
    note(f"{mixture.kl:.3f} nats are lost by rounding with scales alone, before what else the method does (estimated)")
