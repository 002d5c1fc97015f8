"""What the memory of a run was for: every sample of the resident set split into parts that add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from edge.devices.mappings import Mapped
from edge.plan import Plan
from edge.profiling.profile import MemoryBase, MemorySample

_WEIGHTS_AT_LEAST = 1 << 16  # bytes: smaller files that are mapped are no weights


@dataclass(frozen=True)
class Split:
    """Bytes. interpreter: with all libraries."""

    interpreter: int
    weights: int
    kv: int
    scratch: int


def memory_base(
    plan: Plan, before: MemorySample, loaded: MemorySample, files_before: dict[str, Mapped], files: dict[str, Mapped]
) -> MemoryBase | None:
    """before, loaded: samples around loading; files: what is mapped at the end. None where pages are not told apart.

    Weights are the files mapped since then that have no code in them. Where less than half of the weights' bytes is
    mapped, they were copied. A cache is written to at load if that took as much private memory as the cache has.
    """
    if before.anonymous is None or loaded.anonymous is None or loaded.file is None or not files:
        return None
    weights = [
        each for path, each in files.items()
        if path not in files_before and not each.code and each.size >= _WEIGHTS_AT_LEAST
    ]  # fmt: skip
    mapped = 2 * sum(each.size for each in weights) > plan.bytes.weights
    resident = sum(each.resident for each in files.values())
    growth = loaded.anonymous - before.anonymous - (0 if mapped else plan.bytes.weights)
    return MemoryBase(
        anonymous=before.anonymous,
        libraries=resident - sum(each.resident for each in weights),
        mapped=mapped,
        kv_at_load=growth >= plan.bytes.kv,
        weights=plan.bytes.weights,
        kv=plan.bytes.kv,
        capacity=plan.config.capacity,
    )


def split(sample: MemorySample, base: MemoryBase) -> Split:
    """Parts of `sample.rss`, which is measured, as are mapped weights. The cache is what its used rows take (all of it,
    if it was written to at load), copied weights are what the plan counted, scratch is the rest."""
    file, anonymous = sample.file or 0, sample.anonymous or 0
    libraries = min(file, base.libraries)
    weights = file - libraries
    interpreter = min(anonymous, base.anonymous)
    left = anonymous - interpreter
    if not base.mapped:
        copied = min(left, base.weights)
        libraries, weights, left = file, copied, left - copied
    rows = base.capacity if base.kv_at_load else min(sample.rows, base.capacity)
    kv = min(left, base.kv * rows // base.capacity)
    shared = max(0, sample.rss - file - anonymous)  # memory that the system calls neither
    return Split(interpreter + libraries, weights, kv, left - kv + shared)
