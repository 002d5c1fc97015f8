"""A plan for this device, or for another one that a profile describes."""

from __future__ import annotations

from dataclasses import replace

from edge.backends import backend_elsewhere
from edge.budget import format_bytes
from edge.devices.memory import MemoryLimit
from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan.engines import engine_of, plan_here
from edge.plan.kv_losses import find_losses
from edge.plan.npu import check_npu
from edge.plan.plan import Plan, make_plan

MODULE_MOST = 65535 << 16  # bytes of a WebAssembly module's memory: whole pages and 32-bit addresses
# The tokenizer's buffer for the longest word (MOST_SYMBOLS in tokenizer.c), which any text may contain: for each of its
# 4 × 64 Ki bytes, a byte and six numbers while symbols are merged.
_WORD_BYTES = (4 * 64 << 10) * (1 + 6 * 4)
RUNTIME_BYTES = (3 << 20) + _WORD_BYTES  # of an app without Python: the C runtime, its code and stacks; measured
TOKENIZER_BYTES = 82  # per token of the vocabulary; measured: 68 for SmolLM2, 82 for Gemma 3
_PHONES = ("android", "ios")  # systems without Python: models run in apps
_CORES = 4  # of a device whose profile does not state them


def plan_for(profile: DeviceProfile, file: GGUFFile, spec: ModelSpec, options: Options, more: int = 0) -> Plan:
    """As `make_plan`, with the engine that the device would have. more: bytes of a tokenizer that is not made yet.
    `Plan.chosen` says why the engine is not the one that `auto` prefers. Plans for phones count no interpreter.

    An execution provider other than `cpu` stands for the device's NPU, whose graphs have fixed sizes.

    Raises the errors of `make_plan`, and InputError.
    """
    if profile.name == HOST:
        return plan_here(file, spec, options, more)[1]
    engine, why = backend_elsewhere(engine_of(options), file, spec, profile.system)
    if options.provider is not None and options.provider.lower() != "cpu" and engine.CAPABILITIES.providers:
        check_npu(file, spec, profile, options.provider)
    limit, threads = limits_of(profile, options)
    process = RUNTIME_BYTES + more if profile.system in _PHONES else None
    plan = make_plan(
        spec, engine, options, elsewhere=limit, more=more, process=process, threads=threads,
        losses=find_losses(file, engine, options),
    )  # fmt: skip
    return replace(plan, chosen=f"{engine.NAME} is assumed: {why}") if why else plan


def limits_of(profile: DeviceProfile, options: Options) -> tuple[MemoryLimit, int]:
    """The memory for a run on another device, and its default threads. Raises InputError.

    A profile's memory is that of the smallest version of the device, so that --memory may state more.
    """
    if profile.system == "web" and options.memory is not None and options.memory > MODULE_MOST:
        raise InputError(f"--memory {format_bytes(options.memory)}: a WebAssembly module has less than 4 GiB")
    if profile.memory is None and options.memory is None:
        raise InputError(
            f"the profile of {profile.name} does not say how much memory it has: say --memory, such as --memory=4GiB"
        )
    if options.threads and profile.cores and options.threads > profile.cores:
        raise InputError(f"--threads {options.threads} is more than the {profile.cores} cores of {profile.name}")
    stated = options.memory is not None
    limit = MemoryLimit(options.memory or profile.memory or 0, "budget" if stated else profile.name)
    return limit, profile.threads or _CORES


def assumed_memory(profile: DeviceProfile, options: Options) -> str:
    """A device, and the memory that plans assume it has, in words."""
    if profile.name == HOST:
        return "this device"
    if profile.memory is None:
        return profile.name
    known = format_bytes(profile.memory)
    if options.memory is None or options.memory <= profile.memory:
        return f"{profile.name} with {known}, by its profile"
    return f"{profile.name} with at least {format_bytes(options.memory)}, as stated (its profile: {known})"
