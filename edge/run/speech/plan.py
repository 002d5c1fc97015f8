"""Whether a model that hears fits, before it is loaded: its weights, its rows, and what a window takes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace

from edge.backends import find_backend
from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.budget import format_bytes
from edge.devices.host import usable_cores
from edge.devices.memory import MemoryLimit, memory_limit, memory_use, release_free_memory
from edge.devices.power import memory_root
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.flags import flags_of
from edge.formats.gguf import GGUFFile
from edge.media.mel import FRAMES, HOP, WINDOW
from edge.model.whisper import MISHEARD, Whisper, read_whisper, words_file
from edge.options import Options
from edge.plan.checks import check_count, check_engine, check_gpu_memory
from edge.plan.plan import Plan, PlanBytes, card_limit, gpu_limit
from edge.run.request import MOST_BEAMS
from edge.run.senses.hearing import Listener

TAKEN = ("memory", "gpu_memory", "time", "energy", "power", "max_temp", "backend", "threads", "kv_dtype", "sequences")
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
    return Options(**{name: getattr(options, name) for name in TAKEN if name != "sequences"})


def beside(file: GGUFFile, options: Options, beams: int) -> Options:
    """The options with a sequence for each beam, if the engine runs several and they fit."""
    found = replace(options, sequences=beams)
    with suppress(BudgetError, UnsupportedError):
        plan_hearing(file, found)
        return found
    return options


def check_rows(kv_dtype: str | None) -> None:
    """Raise UnsupportedError for rows in which a transcript has other words."""
    if kv_dtype in MISHEARD:
        raise UnsupportedError(f"with rows in {kv_dtype}, models that hear write other words: choose --kv-dtype=int8")


def plan_hearing(file: GGUFFile, options: Options, more: int = 0) -> tuple[Backend, Plan]:
    """The engine and the plan. more: bytes that the process will hold besides.

    Raises BudgetError, which names the smallest budget that fits, InputError, UnsupportedError.
    """
    check_options(options)
    whisper = read_whisper(file)
    if options.backend == "llamacpp":
        raise UnsupportedError("llama.cpp runs no models that hear: leave --backend=llamacpp out")
    backend = find_backend(options.backend, words_file(file), whisper.spec)
    dtype = options.kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
    check_engine(backend, dtype, options.threads)
    check_gpu_memory(backend, options)
    check_rows(dtype)
    threads = options.threads or usable_cores()
    sequences = options.sequences  # beams that run side by side
    check_count("--sequences", sequences, 1, MOST_BEAMS)
    if sequences > 1 and backend.one_sequence(whisper.spec) is not None:
        raise UnsupportedError(f"the {backend.NAME} engine runs one beam of speech at a time: leave --sequences out")
    need = Listener.need(file, backend, threads=threads, sequences=sequences, kv_dtype=dtype)
    release_free_memory()
    use = memory_use()
    gpu = backend.gpu_memory()
    counted = _bytes(need, whisper, use.rss + more, on_card=gpu is not None and not gpu.unified)
    limit = MemoryLimit(options.memory, "budget") if options.memory else memory_limit(memory_root())
    needed = max(counted.total + counted.reserve, use.peak)
    if needed > limit.bytes:
        what = "the memory budget is" if limit.source == "budget" else f"the limit ({limit.source}) is"
        raise BudgetError(
            f"needs {format_bytes(needed)}, {what} {format_bytes(limit.bytes)}: state --memory {-(-needed >> 20)}MiB, "
            "or take a smaller model",
            needed,
        )
    card = gpu_limit(options, gpu)
    if card and counted.gpu > card.bytes:
        raise BudgetError(
            f"needs {format_bytes(counted.gpu)} on the GPU, {card_limit(card)}: "
            f"state --gpu-memory {-(-counted.gpu >> 20)}MiB, or take a smaller model",
            counted.gpu,
        )
    config = EngineConfig(whisper.context, whisper.context, dtype, threads, sequences=sequences)
    return backend, Plan(
        backend.NAME, "full", 0, config, 1, counted, max(counted.total, use.peak), limit.bytes, limit.source,
        gpu_limit=card.bytes if card and need.gpu else None, gpu_limit_source=card.source if card and need.gpu else "",
    )  # fmt: skip


def _bytes(need: Footprint, whisper: Whisper, resident: int, *, on_card: bool) -> PlanBytes:
    """Beside the listener: samples of two windows, and the spectra of one, in parts."""
    sound = 4 * 2 * (FRAMES * HOP + WINDOW) + 3 * 4 * whisper.mels * FRAMES + (8 << 20)
    return PlanBytes(
        resident + need.runtime, need.weights, need.kv, need.scratch + sound, streamed=need.streamed,
        fixed_kv=need.fixed_kv, gpu=need.gpu, on_card=on_card,
    )  # fmt: skip
