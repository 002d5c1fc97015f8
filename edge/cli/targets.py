"""Whether the native engine can generate code for the processor that a profile names."""

from __future__ import annotations

from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError, UnsupportedError

_MACHINES = ("x86_64", "AMD64", "aarch64", "arm64", "wasm32", "armv7l", "riscv64")  # as systems name them


def isa_names(profile: DeviceProfile) -> list[str]:
    """Instruction sets of such a machine for which code can be generated."""
    from edge.backends.tvm.targets import TARGETS

    return [target.name for target in TARGETS if target.machine == profile.arch]


def own_isa() -> str | None:
    """The best of this processor; None where no code is generated for it."""
    from edge.backends.tvm.targets import choose_target

    try:
        return choose_target().name
    except UnsupportedError:
        return None


def check_processor(profile: DeviceProfile) -> None:
    """Raises InputError for a machine, an isa or (where TVM is installed) a cpu that is unknown, or not that
    machine's."""
    from edge.backends.tvm.compiler.compiled import is_installed

    said = f"the profile of {profile.name} has the"
    if profile.machine not in _MACHINES:
        raise InputError(f"{said} unknown machine {profile.machine!r}: choose {', '.join(_MACHINES)}")
    names = isa_names(profile)
    if profile.isa is not None and profile.isa not in names:
        choice = f"choose {', '.join(names)}" if names else "leave isa out"
        raise InputError(f"{said} isa {profile.isa!r}, which {profile.machine} has not: {choice}")
    if profile.isa is not None and profile.cpu is not None and is_installed():
        cpus = _cpu_names(profile.isa)
        if profile.cpu not in cpus:
            raise InputError(f"{said} cpu {profile.cpu!r}, which LLVM does not know: choose {', '.join(cpus)}")


def _cpu_names(isa: str) -> list[str]:
    from tvm.target import Target
    from tvm.target.codegen import llvm_get_cpu_archlist

    from edge.backends.tvm.targets import target_named

    triple = target_named(isa, f"isa {isa!r} is unknown").llvm["mtriple"]
    return [str(name) for name in llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple}))]
