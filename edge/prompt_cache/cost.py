"""The cost of recomputing evicted rows, which makes blocks of several models comparable."""

from __future__ import annotations

from edge.model.structure.spec import ModelSpec
from edge.records import dataclass


@dataclass(frozen=True)
class Cost:
    """Operations per token, and per earlier row that its attention reads."""

    token: float = 1.0
    row: float = 0.0

    @classmethod
    def of_model(cls, spec: ModelSpec) -> Cost:
        """The cost for a model. Ignores sliding windows, which make late tokens cheaper."""
        idle = spec.expert_parameters * (1 - spec.experts_used / spec.experts) if spec.experts else 0.0
        network = spec.network
        widths = [core.width for core in network.attention if core] if network else [spec.heads * spec.head_dim]
        count = 1 if network else spec.layers
        return cls(2.0 * max(1.0, spec.parameters - spec.table_parameters - idle), 4.0 * sum(widths) * count)

    def between(self, first: int, end: int) -> float:
        """Operations for tokens `first` to `end`, exclusive."""
        count = end - first
        return count * (self.token + self.row * (first + end - 1) / 2)
