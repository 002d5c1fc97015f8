"""A run's report as text for a terminal."""

from __future__ import annotations

from math import inf

from edge.budget import format_bytes, format_joules
from edge.errors import several
from edge.run.report import Action, AdapterUse, Branched, Drafted, Energy, Heat, Memory, RunReport, Thoughts, Timings

_TOLD_S = 0.1  # of preparing a model, to be reported: shorter times are no first run, but a list of its tokens


def report_line(report: RunReport) -> list[str]:
    """The report on one line; `--verbose` prints the rest."""
    tokens, timings, memory, energy = report.tokens, report.timings, report.memory, report.energy
    thoughts = report.thoughts
    said = [
        several(tokens.generated, "token") + _at(timings.decode_tok_s),
        "" if thoughts is None else f"{thoughts.tokens} of them thoughts" + (", then cut" if thoughts.cut else ""),
        f"first after {_seconds(timings.ttft_s)}" if timings.ttft_s is not None else "",
        _media(report),
        _branched(report.branched),
        f"peak {format_bytes(memory.peak_rss)}" + (f" of {format_bytes(memory.budget)}" if memory.budget else ""),
        format_joules(energy.joules) + _of_budget(energy) + f" ({energy.certainty})",
        _prepared(report),
        f"{tokens.reused + tokens.ran} of {tokens.prompt_words} prompt tokens run" if tokens.cut else "",
        "memory was given back" if report.actions else "",
        f"stopped: {report.stop_reason}",
        "no answer: -n allows more tokens, --think fewer of thoughts" if _only_thoughts(report) else "",
        "-v: more",
    ]
    return [" · ".join(filter(None, said))]


def _branched(branched: Branched | None) -> str:
    """The branches of a vote or an outline, in a few words."""
    if branched is None:
        return ""
    parts = [each.part for each in branched.branches]
    if branched.by == "vote":
        most = max(each.votes for each in branched.branches)
        return f"{most} of {len(parts)} answers agree" if most > 1 else f"no two of {len(parts)} answers agree"
    if "point" in parts:
        return f"{parts.count('point')} points, {branched.side_by_side} side by side"
    return f"in one piece: {branched.one_piece}" if branched.one_piece else ""


def _media(report: RunReport) -> str:
    """The media that were encoded, and the seconds that took."""
    looks = report.media
    if looks is None:
        return ""
    counts = {"picture": looks.pictures, "sound": looks.sounds}
    what = " and ".join(several(count, kind) for kind, count in counts.items() if count)
    verb = "seen and heard" if all(counts.values()) else "seen" if looks.pictures else "heard"
    return f"{what} of {several(looks.tokens, 'token')} {verb} in {_seconds(looks.seconds)}"


def report_lines(report: RunReport) -> list[str]:
    """The full report: four lines, plus one for thoughts, and one for released memory."""
    tokens, timings, memory, kv, energy = report.tokens, report.timings, report.memory, report.kv, report.energy
    budget = f" of {format_bytes(memory.budget)}" if memory.budget else ""
    said = [f"{tokens.reused} of them reused"] if tokens.reused else []
    said += [f"only {tokens.ran} run"] if tokens.cut else []
    speed = _at(timings.prefill_tok_s)
    prompt = f"prompt {', '.join([f'{tokens.prompt_words} tokens', *said])}{',' if said and speed else ''}{speed}"
    return [
        f"{prompt} · generated {tokens.generated:,}"
        f"{_at(timings.decode_tok_s)} · first token {_seconds(timings.ttft_s)} · load {_seconds(timings.load_s)}"
        f"{_time(timings)} · stopped: {report.stop_reason}",
        f"memory peak {format_bytes(memory.peak_rss)}{budget} (measured)"
        f" · interpreter {format_bytes(memory.interpreter)} + weights {format_bytes(memory.weights)}"
        f" + KV {format_bytes(memory.kv)} + scratch {format_bytes(memory.scratch)}"
        + (f" + adapters {format_bytes(memory.lora)}" if memory.lora else "")
        + (f" + drafts {format_bytes(memory.draft)}" if memory.draft else "")
        + " (counted)"
        + _gpu_part(memory)
        + _streamed(memory),
        f"KV {kv.policy} {kv.dtype}: {kv.rows:,} of {kv.capacity:,} rows, {kv.evicted:,} evicted",
        *([_media(report)] if report.media else []),
        *([f"planned: {report.plan['rows_by']}"] if report.plan.get("rows_by") else []),
        *([str(report.team)] if report.team and not report.team.whole else []),
        *([_drafted(report.drafted)] if report.drafted and report.drafted.tokens else []),
        *([f"LoRA {', '.join(map(_adapter, report.lora))}"] if report.lora else []),
        *([f"prefix {report.prefix.name}: {report.prefix.rows} rows"] if report.prefix else []),
        _energy_line(report),
        *([_prepared(report)] if _prepared(report) else []),
        *([_thoughts_line(report.thoughts, energy.certainty)] if report.thoughts else []),
        *([f"for want of memory: {', '.join(map(_action, report.actions))}"] if report.actions else []),
    ]


def _drafted(drafted: Drafted) -> str:
    gain = "" if drafted.gain is None else f": {drafted.gain:.2f} × the speed of one by one (measured)"
    return f"drafts {drafted.accepted:,} of {drafted.tokens:,} tokens right{gain}; they had to pay by {drafted.by}"


def _streamed(memory: Memory) -> str:
    """The weights or experts that are read again."""
    if (used := memory.experts) is None:
        return f" · {format_bytes(memory.streamed)} of weights streamed per token" if memory.streamed else ""
    said = f" · {used.slots:,} of {used.experts:,} experts in memory"
    if used.hit_rate is None or used.read_per_token is None:
        return f"{said}, {format_bytes(used.read)} read"
    return f"{said}: {used.hit_rate:.0%} hits, {format_bytes(int(used.read_per_token))} read per token (measured)"


def _gpu_part(memory: Memory) -> str:
    """The part of the memory in buffers of a GPU."""
    if not memory.gpu:
        return ""
    where = "in the memory of the GPU" if memory.on_card else "in buffers of the GPU"
    budget = f" of {format_bytes(memory.gpu_budget)}" if memory.gpu_budget else ""
    used = f", {format_bytes(memory.gpu_used)} by its driver's count" if memory.gpu_used else ""
    return f" · {format_bytes(memory.gpu)}{budget} {where} (counted{used})"


def _adapter(adapter: AdapterUse) -> str:
    return f"{adapter.name}: rank {adapter.rank}, scale {adapter.scale:g}, SHA-256 {adapter.sha256[:12]}…"


def _only_thoughts(report: RunReport) -> bool:
    thoughts = report.thoughts
    return thoughts is not None and thoughts.tokens == report.tokens.generated and report.stop_reason == "length"


def _thoughts_line(thoughts: Thoughts, certainty: str) -> str:
    return (
        f"thoughts {thoughts.tokens} of the tokens in {thoughts.seconds:.2f} s,"
        f" {format_joules(thoughts.joules)} ({certainty})"
        + (f" · cut by --think, with {thoughts.added} tokens more" if thoughts.cut else "")
    )


_REASONS = {
    "limit": "the limit of memory fell",
    "free memory": "the system ran short of free memory",
    "pressure": "the system was waiting for memory",
    "trim": "session.trim asked for it",
}


def _action(action: Action) -> str:
    size = format_bytes(action.bytes)
    what = {
        "shrink": f"{size} of KV rows given back ({action.left} rows are left)",
        "chunk": f"the rest of the prompt run {action.left} tokens at a time",
        "prompt cache": f"{size} of prompt cache given back",
        "snapshots": f"{size} of snapshots given back",
    }
    when = f"after {action.token} tokens of the answer" if action.token else "before the answer"
    return f"{what[action.action]} {when}, as {_REASONS.get(action.reason, action.reason)}"


def _energy_line(report: RunReport) -> str:
    energy, heat = report.energy, report.heat
    return (
        f"energy {format_joules(energy.joules)}"
        + _of_budget(energy)
        + (f", {format_joules(energy.per_token)} per token" if energy.per_token is not None else "")
        + f" ({energy.certainty}: {energy.source}, the whole {energy.scope})"
        + (f" · {energy.watts:.2g} W of {energy.watts_limit:g} W" if energy.watts_limit is not None else "")
        + (f" · paused {report.timings.paused_s:.1f} s" if report.timings.paused_s >= 0.05 else "")
        + (f" · {_heat(heat)}" if heat and heat.highest is not None else "")
        + (" · the start alone takes more than the budget" if energy.before > (energy.budget or inf) else "")
    )


def _of_budget(energy: Energy) -> str:
    if energy.budget is None:
        return ""
    start = f" + {format_joules(energy.before)} for the start," if energy.before else ""
    return f"{start} of {format_joules(energy.budget)}"


def _prepared(report: RunReport) -> str:
    """The cost of one-time preparation: outside a budget of joules, but part of a budget of seconds, since the user
    waits."""
    seconds, energy = report.timings.prepared_s, report.energy
    if seconds < _TOLD_S:
        return ""
    besides = f", besides the {format_joules(energy.budget)}" if energy.budget is not None else ""
    return f"first run: {format_joules(energy.prepared)} in {seconds:.1f} s to prepare the model, once{besides}"


def _time(timings: Timings) -> str:
    if timings.budget_s is None:
        return ""
    before = f" + {timings.before_s:.2f} s for the start," if timings.before_s else ""
    return f" · took {timings.total_s:.2f} s{before} of {timings.budget_s:g} s"


def _heat(heat: Heat) -> str:
    limit = "" if heat.limit is None else f" of {heat.limit:g} °C"
    return f"{heat.highest:.0f} °C{limit} at {heat.sensor} (measured)"


def _at(speed: float | None) -> str:
    if speed is None:
        return ""
    return f" at {speed:,.0f} tok/s" if speed >= 1 else f" at {speed:.2g} tok/s"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
