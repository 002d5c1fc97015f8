"""`edge profile --on`: write a kit, or run one on another machine and read its result."""

from __future__ import annotations

from collections.abc import Callable

from edge.devices.output import work_folder
from edge.errors import InputError
from edge.model.model import Model
from edge.profiling.kit.make import make_kit
from edge.profiling.kit.result import Result, parse_result
from edge.profiling.kit.ssh import Address, ask_machine, run_kit
from edge.profiling.profile import Settings

OnStep = Callable[[str, float], None]
"""Called with the current step, and the part of it that is done."""

_PLACES = "write kit:DIR or ssh:user@host"


def check_place(place: str) -> None:
    """Raises InputError for a --on that is neither."""
    kind, _, rest = place.partition(":")
    if kind == "ssh":
        Address.of(rest)
    elif kind != "kit" or not rest:
        raise InputError(f"--on {place} is unknown: {_PLACES}")


def profile_over_ssh(
    model: Model, called: str, address: Address, settings: Settings, *, quick: bool = False, on_step: OnStep
) -> Result:
    """Measure on the machine at an address. Raises EngineError where that fails, and as `make_kit`."""
    on_step(f"asking {address}", 0.0)
    profile = ask_machine(address)
    with work_folder() as work:
        folder = work / "kit"
        make_kit(model, called, folder, profile, settings, quick=quick, progress=on_step)
        return parse_result(run_kit(address, folder, on_step), str(address))
