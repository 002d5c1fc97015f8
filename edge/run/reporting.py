"""The report of a generation, and the explanation of a missing or incomplete answer."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from edge.backends.counts import ExpertCounts
from edge.budget import format_bytes, format_joules
from edge.devices.memory import memory_use
from edge.devices.thermal import Zone
from edge.errors import MEMORY_SHORT, IncompleteError, ShortMemoryError, several
from edge.options import Options
from edge.run.budgets.governor import FIRST_TIMED
from edge.run.budgets.meters import Watch
from edge.run.decoding.generation import Generation
from edge.run.loaded import Loaded
from edge.run.report import AdapterUse, ExpertUse, Heat, KVUse, Memory, PrefixUse, RunReport, team_since
from edge.run.sequences.sequence import TokenSequence
from edge.storage.versions import own_versions

if TYPE_CHECKING:
    from edge.run.history import Phase

_AMPLE = 1.5  # × the expected cost suffices


def report_of(
    run: Generation, loaded: Loaded, sequence: TokenSequence, options: Options, zone: Zone | None, watch: Watch
) -> RunReport:
    """Make the report at the end of a generation. zone: the thermometer that `watch` read."""
    plan, lora, prefix, kv = loaded.plan, sequence.lora, sequence.prefix, sequence.engine.kv
    versions = {**own_versions(), **loaded.backend.versions()}  # first: it takes a MiB, which the report must include
    adapters = zip(lora.adapters, lora.scales, strict=True) if lora else ()
    return RunReport(
        text=None if run.text is None else run.text.getvalue(),
        tokens=run.tokens,
        timings=run.timings(loaded.seconds),
        stop_reason=run.stop_reason,
        stop_text=run.stops.found,
        memory=_memory(run, loaded, options),
        kv=KVUse(sequence.policy.name, kv.capacity, kv.length, plan.config.kv_dtype, sequence.rows.evicted),
        plan=plan.to_dict(),
        versions=versions,
        energy=run.energy(),
        heat=None if zone is None else Heat(zone.name, watch.hottest, options.max_temp),
        actions=loaded.reclaimer.take_actions(),
        thoughts=run.thinking.report(),
        media=run.looked,
        seed=run.seed,
        lora=tuple(AdapterUse(each.name, each.rank, scale, each.sha256) for each, scale in adapters),
        prefix=PrefixUse(prefix.file.name, prefix.ids.size, prefix.file.sha256) if prefix else None,
        team=team_since(run.team, loaded.team()),
        drafted=sequence.ahead.report(),
        tool_calls=run.calls.found if run.calls else (),
        incomplete=run.incomplete,
        beams=run.beams,
        sources=run.request.sources,
        pruned=run.request.pruned,
        logprobs=tuple(run.logprobs.kept) if run.logprobs is not None and run.logprobs.kept is not None else None,
    )


def _memory(run: Generation, loaded: Loaded, options: Options) -> Memory:
    """The measured memory of this process beside the plan's figures."""
    experts = loaded.expert_counts()
    plan, use, counted = loaded.plan, memory_use(), loaded.plan.bytes
    return Memory(
        peak_rss=max(use.peak, loaded.with_children),
        budget=options.memory,
        weights=counted.weights,
        kv=sum(each.engine.kv.nbytes + each.rows.snapshots.nbytes for each in loaded.reclaimer.sequences),
        scratch=counted.scratch,
        interpreter=counted.interpreter,
        anonymous=use.anonymous,
        file=use.file,
        streamed=counted.streamed,
        experts=_use_of(experts.since(run.experts)) if experts and run.experts else None,
        lora=counted.lora,
        draft=counted.draft,
        gpu=counted.gpu,
        on_card=counted.on_card,
        gpu_used=loaded.backend.used_memory(plan.config.adapter) if counted.gpu else None,
        gpu_budget=options.gpu_memory if counted.gpu else None,
    )


def _use_of(counts: ExpertCounts) -> ExpertUse:
    read = counts.read + counts.read_in_chunks
    return ExpertUse(counts.slots, counts.experts, counts.hit_rate, counts.read_per_token, read)


def why_unanswered(report: RunReport, options: Options, loaded: Loaded | None = None) -> str:
    """Why a budget left no answer, and an estimate of the budget that would suffice: by earlier runs of what is loaded
    if little of the prompt ran."""
    tokens, timings, energy, reason = report.tokens, report.timings, report.energy, report.stop_reason
    if reason == "time" and timings.budget_s is not None:
        took = timings.before_s + timings.total_s
        why = f"--time {_seconds(timings.budget_s)} was over after {_seconds(took)}"
        known = _known(report, loaded, lambda phase: phase.seconds)
        why += _needed(report, loaded, timings.before_s, timings.prepared_s, timings.total_s, _seconds, known)
    elif reason == "energy" and energy.budget is not None:
        why = f"--energy {format_joules(energy.budget)} is spent ({energy.certainty})"
        known = _known(report, loaded, lambda phase: phase.joules, energy.kind)
        why += _needed(report, loaded, energy.before, 0.0, energy.joules, format_joules, known)
    elif reason == "power":
        why = f"--power {options.power:g}W cannot be held: the device draws {energy.watts:.2g} W ({energy.certainty})"
    elif reason == "thermal" and report.heat and report.heat.highest is not None:
        why = f"--max-temp {options.max_temp:g}C cannot be held: {report.heat.highest:.0f} °C (measured)"
    else:
        why = why_short(report)
    if tokens.cut:
        return f"stopped in the prompt ({tokens.ran + tokens.reused} of {tokens.prompt_words} tokens): no answer; {why}"
    if report.thoughts is not None:
        thoughts = several(report.thoughts.tokens, "token")
        return f"stopped after {thoughts} of thoughts: no answer (--think N limits them); {why}"
    return f"stopped before the first token of the answer; {why}"


def check_complete(report: RunReport | None, answer: str = "") -> None:
    """Raise IncompleteError for an answer that was cut before its grammar allowed the end."""
    if report is None or report.incomplete is None:
        return
    count, reason = report.tokens.generated, report.incomplete
    why = {
        "length": "--max-tokens ends it: use more",
        "stop": "a --stop text is in it: use none with a grammar",
        "capacity": "the KV cache is full: raise --max-kv-size or use --kv-policy=streaming",
        "memory": why_short(report),
        "time": "--time is over: state more",
        "energy": "--energy is spent: state more",
        "power": "--power cannot be held: state more",
        "thermal": "--max-temp cannot be held: state more",
    }.get(reason, f"it was {reason}")
    message = f"the answer is incomplete after {several(count, 'token')}, and does not match its grammar; {why}"
    raise IncompleteError(message, reason, answer)


def check_memory(report: RunReport | None) -> None:
    """Raise ShortMemoryError for an answer that was cut since memory is short."""
    if report is not None and report.stop_reason == "memory":
        count = report.tokens.generated
        raise ShortMemoryError(f"the answer is cut after {several(count, 'token')}: {why_short(report)}")


def why_short(report: RunReport) -> str:
    """Why memory ended an answer, and what to do."""
    peak, budget = report.memory.peak_rss, report.memory.budget
    if budget is not None and peak > budget:
        return (
            f"the peak of {format_bytes(peak)} (measured) is above the memory budget of {format_bytes(budget)}: "
            "state a smaller --max-kv-size, or more memory"
        )
    return MEMORY_SHORT


def _known(
    report: RunReport, loaded: Loaded | None, cost: Callable[[Phase], float | None], kind: str | None = None
) -> float | None:
    """What the prompt cost at most by the earlier runs of this setting; None if they do not tell. kind: of joules."""
    if loaded is None or (report.tokens.ran and not _ran_alone(report, loaded)):
        return None
    from edge.run.history import Setting, earlier_runs  # here: few runs fail

    runs = earlier_runs(Setting.of(loaded.model.spec, loaded.plan.backend, loaded.plan.config))
    phases = [run.prefill for run in runs if run.prefill and kind in (None, run.energy_kind)]
    costs = [(cost(each), max(1.0, (report.tokens.prompt + 1) / each.tokens)) for each in phases]
    return min((each * times for each, times in costs if each), default=None)


def _ran_alone(report: RunReport, loaded: Loaded | None) -> bool:
    """Whether the prompt's tokens that ran say little of the others: one alone costs several times one of a chunk."""
    chunks = loaded is None or loaded.plan.config.chunk > 1
    return report.tokens.cut and report.tokens.ran < FIRST_TIMED and chunks


def _needed(
    report: RunReport, loaded: Loaded | None, before: float, once: float, spent: float, words: Callable[[float], str],
    known: float | None,
) -> str:  # fmt: skip
    """State the cost of the start, and a budget that suffices for prompt and answer in the next run, extrapolated from
    the prompt tokens that ran, the first of which cost most. once: the part of `before` that no later run takes. known:
    the cost of the prompt by earlier runs.

    Adds half: the last tokens of a budget run one at a time, and no two runs cost the same.
    """
    tokens, start = report.tokens, f", {words(before)} of it by the start" if before else ""
    if report.thoughts:
        return start  # the length of the remaining thoughts is unknown
    if known is not None:
        return f"{start}: state {words(_rounded_up(_AMPLE * (before - once + spent + known)))} or more (estimated)"
    if not tokens.ran:
        least = words(_rounded_up(_AMPLE * (before - once + spent)))
        return f"{start}: state about {least} and what the prompt's {tokens.prompt_words} tokens take"
    needed = words(_rounded_up(_AMPLE * (before - once + spent * (tokens.prompt + 1) / tokens.ran)))
    beginning = f"for the first {tokens.prompt} tokens " if tokens.unread else ""
    if _ran_alone(report, loaded):
        by = "the first token, which costs" if tokens.ran == 1 else f"the first {tokens.ran} tokens, which cost"
        return f"{start}: {beginning}{needed} suffice, and less may (estimated by {by} most)"
    return f"{start}: {beginning}state {needed} or more (estimated)"


def _rounded_up(value: float) -> float:
    """Round up to two significant digits, so that formatting never states less."""
    step = 10.0 ** (floor(log10(max(value, 1e-9))) - 1)
    return ceil(value / step) * step


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.2g}s" if seconds >= 0.1 else f"{seconds * 1e3:.2g}ms"
