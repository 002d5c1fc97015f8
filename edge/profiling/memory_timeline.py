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
    plan: Plan, before: MemorySample, warm: MemorySample, files_before: dict[str, Mapped], files: dict[str, Mapped]
) -> MemoryBase | None:
    """before: a sample before loading; warm: after the first passes; files: what is mapped at the end. None where pages
    are not told apart.

    Weights are the files mapped since then that have no code in them. Where less than half of the weights' bytes is
    mapped, they were copied. The cache takes all of its memory at once, or as its rows are used: whichever is nearer to
    the private memory that loading and the first passes took, with half of the planned scratch, as they may not have
    touched all of it. (An engine may clear its whole cache; with huge pages, a few rows touch all of it, too.)
    """
    if before.anonymous is None or warm.anonymous is None or warm.file is None or not files:
        return None
    weights = [
        each for path, each in files.items()
        if path not in files_before and not each.code and each.size >= _WEIGHTS_AT_LEAST
    ]  # fmt: skip
    mapped = 2 * sum(each.size for each in weights) > plan.bytes.weights
    resident = sum(each.resident for each in files.values())
    growth = warm.anonymous - before.anonymous - (0 if mapped else plan.bytes.weights)
    used = plan.bytes.kv * min(1.0, warm.rows / plan.config.capacity)
    return MemoryBase(
        anonymous=before.anonymous,
        libraries=resident - sum(each.resident for each in weights),
        mapped=mapped,
        kv_at_once=growth >= (used + plan.bytes.kv + plan.bytes.scratch) / 2,
        weights=plan.bytes.weights,
        kv=plan.bytes.kv,
        capacity=plan.config.capacity,
    )


def split(sample: MemorySample, base: MemoryBase) -> Split:
    """Parts of `sample.rss`, which is measured, as are mapped weights. The cache is what its used rows take (all of it,
    if it took its memory at once), copied weights are what the plan counted, scratch is the rest."""
    file, anonymous = sample.file or 0, sample.anonymous or 0
    libraries = min(file, base.libraries)
    weights = file - libraries
    interpreter = min(anonymous, base.anonymous)
    left = anonymous - interpreter
    if not base.mapped:
        copied = min(left, base.weights)
        libraries, weights, left = file, copied, left - copied
    rows = base.capacity if base.kv_at_once else min(sample.rows, base.capacity)
    kv = min(left, base.kv * rows // base.capacity)
    shared = max(0, sample.rss - file - anonymous)  # memory that the system calls neither
    return Split(interpreter + libraries, weights, kv, left - kv + shared)
