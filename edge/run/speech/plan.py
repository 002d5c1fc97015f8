"""Whether a model that hears fits, before it is loaded: its weights, its rows, and what a window takes."""

from __future__ import annotations

from dataclasses import fields

from edge.backends import find_backend
from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.budget import format_bytes
from edge.devices.host import usable_cores
from edge.devices.memory import MemoryLimit, memory_limit, memory_use, release_free_memory
from edge.devices.power import memory_root
from edge.errors import BudgetError, InputError
from edge.flags import flags_of
from edge.formats.gguf import GGUFFile
from edge.media.mel import FRAMES, HOP, WINDOW
from edge.model.whisper import Whisper, read_whisper, words_file
from edge.options import Options
from edge.plan.plan import Plan, PlanBytes
from edge.run.hearing import Listener

TAKEN = ("memory", "time", "energy", "power", "max_temp", "backend", "threads", "kv_dtype")
"""Fields of `Options` that a transcript goes by."""


def check_options(options: Options) -> None:
    """Raise InputError for an option that a model that hears does not go by."""
    usual, flags = Options(), flags_of(options)
    for each in fields(options):
        if each.name not in TAKEN and getattr(options, each.name) != getattr(usual, each.name):
            flag = (*flags[each.name].names, each.name)[0]
            raise InputError(f"a model that hears goes by {', '.join(TAKEN)}: leave {flag} out")


def own_options(options: Options) -> Options:
    """Those of these options that a transcript goes by, of a server that has other models, too."""
    return Options(**{name: getattr(options, name) for name in TAKEN})


def plan_hearing(file: GGUFFile, options: Options, more: int = 0) -> tuple[Backend, Plan]:
    """The engine and the plan. more: bytes that the process will hold besides.

    Raises BudgetError, which names the smallest budget that fits, InputError, UnsupportedError.
    """
    check_options(options)
    whisper = read_whisper(file)
    backend = find_backend(options.backend, words_file(file), whisper.spec, options.kv_dtype)
    threads = options.threads or usable_cores()
    need = Listener.need(file, backend, threads=threads, kv_dtype=options.kv_dtype or "")
    release_free_memory()
    use = memory_use()
    counted = _bytes(need, whisper, use.rss + more)
    limit = MemoryLimit(options.memory, "budget") if options.memory else memory_limit(memory_root())
    needed = max(counted.total + counted.reserve, use.peak)
    if needed > limit.bytes:
        what = "the memory budget is" if limit.source == "budget" else f"the limit ({limit.source}) is"
        raise BudgetError(
            f"needs {format_bytes(needed)}, {what} {format_bytes(limit.bytes)}: state --memory {-(-needed >> 20)}MiB, "
            "or take a smaller model",
            needed,
        )
    dtype = options.kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
    config = EngineConfig(whisper.context, whisper.context, dtype, threads)
    return backend, Plan(
        backend.NAME, "full", 0, config, 1, counted, max(counted.total, use.peak), limit.bytes, limit.source
    )


def _bytes(need: Footprint, whisper: Whisper, resident: int) -> PlanBytes:
    """Beside the listener: samples of two windows, and the spectra of one, in parts."""
    sound = 4 * 2 * (FRAMES * HOP + WINDOW) + 3 * 4 * whisper.mels * FRAMES + (8 << 20)
    return PlanBytes(
        resident + need.runtime, need.weights, need.kv, need.scratch + sound, streamed=need.streamed,
        fixed_kv=need.fixed_kv,
    )  # fmt: skip
