"""`edge profile --on`: write a kit, or run one on another machine and read its result."""

from __future__ import annotations

from edge.devices.output import work_folder
from edge.errors import InputError
from edge.lab.profiling.kit.adb import check_serial, find_device
from edge.lab.profiling.kit.make import make_kit
from edge.lab.profiling.kit.remote import OnStep, Remote, ask_machine, run_kit
from edge.lab.profiling.kit.result import Result, parse_result
from edge.lab.profiling.kit.ssh import Address
from edge.lab.profiling.profile import Settings
from edge.model.model import Model

_PLACES = "write kit:DIR, web:DIR, ssh:user@host or adb"


def check_place(place: str) -> None:
    """Raise InputError for an invalid value of --on."""
    kind, _, rest = place.partition(":")
    if kind == "ssh":
        Address.of(rest)
    elif kind == "adb" and place != "adb":
        check_serial(rest)
    elif place != "adb" and (kind not in ("kit", "web") or not rest):
        raise InputError(f"--on {place} is unknown: {_PLACES}")


def find_remote(place: str) -> Remote:
    """The machine that ssh:… or adb[:…] names. Raises InputError, and the errors of `adb.find_device`."""
    check_place(place)
    kind, _, rest = place.partition(":")
    return Address.of(rest) if kind == "ssh" else find_device(rest or None)


def profile_remotely(
    model: Model, called: str, place: str, settings: Settings, *, quick: bool = False, on_step: OnStep
) -> Result:
    """Measure on the machine at ssh:… or adb[:…]. Raises EngineError if that fails, and the errors of `find_remote` and
    `make_kit`."""
    on_step(f"asking {place}", 0.0)
    remote = find_remote(place)
    profile = ask_machine(remote)
    with work_folder() as work:
        folder = work / "kit"
        make_kit(model, called, folder, profile, settings, quick=quick, progress=on_step)
        return parse_result(run_kit(remote, folder, on_step), str(remote))
