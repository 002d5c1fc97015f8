"""Where the time of a pass goes, operator by operator, in an instrumented engine."""

from __future__ import annotations

from edge.backends.base import Backend, EngineConfig, Operator
from edge.backends.operators import by_name
from edge.opened import Model
from edge.profiling.profile import OperatorTime, PhaseOperators
from edge.profiling.speed import OnStep

_LONGEST = 128  # tokens of a prompt's pass: longer ones are made of the same work


def measure_operators(
    model: Model, backend: Backend, config: EngineConfig, context: int, passes: int, on_step: OnStep
) -> list[PhaseOperators]:
    """Of a prompt's first pass, and of an answer's token with `context` rows in the cache. Raises UnsupportedError."""
    found = []
    tokens = min(config.chunk, _LONGEST, config.capacity)
    for part, (name, count, rows) in enumerate([("prefill", tokens, 0), ("decode", 1, context)]):
        on_step(f"operators of {name}", part / 2)
        operators = backend.operators(
            model.file, model.spec, config, tokens=count, context=rows, passes=passes if count == 1 else passes // 3 + 1
        )
        found.append(PhaseOperators("prefill" if part == 0 else "decode", count, rows, _times(operators)))
    return found


def _times(operators: list[Operator]) -> list[OperatorTime]:
    total = sum(each.seconds for each in operators) or 1.0
    return [
        OperatorTime(
            each.name, each.phase, each.calls, each.seconds, each.seconds / total, each.bytes, each.flops, each.waited
        )
        for each in by_name(operators)
    ]
