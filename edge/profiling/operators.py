"""Where the time of a pass goes, operator by operator, in an instrumented engine."""

from __future__ import annotations

from edge.backends.base import Backend, Operator
from edge.backends.operators import by_name
from edge.model.model import Model
from edge.profiling.profile import EngineProfile, OperatorTime, PhaseOperators
from edge.profiling.progress import OnStep

_LONGEST = 128  # tokens of a prompt's pass: longer ones are made of the same work
_CONTEXT = 256  # rows in the cache of an answer: they have to be run first
_PASSES = (2, 16)  # at least, at most
_SLOWER = 2.0  # than without instruments, to be sure


def measure_operators(
    model: Model, backend: Backend, measured: EngineProfile, seconds: float, on_step: OnStep
) -> list[PhaseOperators]:
    """Of a prompt's first pass, and of an answer's token behind a context, in about so many seconds, as far as fewest
    passes allow. measured: tells how long they take. Raises UnsupportedError."""
    config, found = measured.plan.config, []
    longest = min(config.chunk, _LONGEST, config.capacity)
    context = max(0, min(_CONTEXT, measured.prefill.tokens, config.capacity - 1))
    for part, (phase, tokens, rows) in enumerate(((measured.prefill, longest, 0), (measured.decode, 1, context))):
        on_step(f"operators of {phase.name}", part / 2)
        fewest, most = _PASSES
        passes = max(fewest, min(most, int(seconds / 2 / (_SLOWER * tokens * phase.per_token.p50))))
        operators = backend.operators(model.file, model.spec, config, tokens=tokens, context=rows, passes=passes)
        found.append(PhaseOperators(phase.name, tokens, rows, _times(operators)))
    return found


def _times(operators: list[Operator]) -> list[OperatorTime]:
    total = sum(each.seconds for each in operators) or 1.0
    return [
        OperatorTime(
            each.name, each.phase, each.calls, each.seconds, each.seconds / total, each.bytes, each.flops, each.waited
        )
        for each in by_name(operators)
    ]
