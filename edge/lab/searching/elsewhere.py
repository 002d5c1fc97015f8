"""Speeds on another machine, measured there by a kit of `edge profile --on` for each setting."""

from __future__ import annotations

from dataclasses import dataclass

from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError
from edge.lab.profiling.kit.remote import ask_machine
from edge.lab.profiling.kit.result import profile_of
from edge.lab.profiling.kit.run import find_remote, profile_remotely
from edge.lab.profiling.profile import EngineProfile, Settings
from edge.lab.quality.matrix import Cell
from edge.model.model import Model

_KINDS = ("ssh:", "adb")
_SPEED_S = 10.0  # for prompts and answers
_REPETITIONS = 3


@dataclass(frozen=True)
class Machine:
    """Another machine, on which trials run."""

    on: str  # ssh:user@host[:port] or adb[:serial]
    description: str  # by the machine itself
    memory: int | None  # most bytes of a run there; None: the machine's limit


def find_machine(on: str, device: DeviceProfile, memory: int | None) -> Machine:
    """The machine at `on`, which must match `device`. Raises InputError, UnsupportedError, and EngineError if it cannot
    be reached."""
    if not on.startswith(_KINDS):
        raise InputError(f"--on {on}: a search measures at ssh:user@host[:port] or adb[:serial]")
    found = ask_machine(find_remote(on))
    if (found.arch, found.system) != (device.arch, device.system):
        raise InputError(
            f"{on} is no {device.name}: it runs {found.system} on {found.arch}, and --device {device.name} is "
            f"{device.system} on {device.arch}"
        )
    return Machine(on, found.description, memory)


def measure_there(model: Model, called: str, machine: Machine, cell: Cell, tokens: int, steps: int,
                  threads: int | None) -> EngineProfile:  # fmt: skip
    """Measure the speed of `steps` tokens in the middle of an answer to a prompt of half of `tokens`, or just before
    the cell's cache is full: the time of evictions is not measured. Raises the errors of `profile_remotely`."""
    rows = cell.max_kv_size or tokens
    answer = max(2, min(steps, rows // 2))
    settings = Settings(
        prompt=max(1, min(tokens * 3 // 4, rows) - answer // 2), answer=answer, contexts=[], repetitions=_REPETITIONS,
        speed_s=_SPEED_S, curve_s=0.0, sustained_s=0.0, operators_s=0.0, memory=machine.memory, kv_policy=cell.policy,
        max_kv_size=rows, kv_dtype=cell.kv_dtype, threads=threads,
    )  # fmt: skip
    result = profile_remotely(model, called, machine.on, settings, quick=True, on_step=lambda what, share: None)
    return profile_of(result).engines[0]
