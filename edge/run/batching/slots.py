"""Generations of a batch, and the engine's sequences that they occupy while they run."""

from __future__ import annotations

from collections.abc import Hashable

from edge.backends.base import Engine
from edge.model.lora import Lora
from edge.run.budgets.shares import Share
from edge.run.generation import Generation
from edge.run.hooks import Hooks
from edge.run.loop import Turn, Turns
from edge.run.report import RunReport
from edge.run.sequences.sequence import TokenSequence


class Ticket:
    """A handle to a started generation, for `Batch.cancel`. report: set at its end, if it began to run."""

    report: RunReport | None = None

    def __init__(self, run: Generation, share: Share, lora: Lora | None, hooks: Hooks, arrived: int) -> None:
        self.run, self.share, self.lora, self.hooks = run, share, lora, hooks
        self.priority, self.tenant = run.request.priority, run.request.tenant
        self.arrived = self.since = arrived
        self.turn: Turn | None = Turn.PROMPT  # the turn that it waits for; None: it has ended
        self.turns: Turns | None = None  # its loop; None: it has not begun
        self.sequence: TokenSequence | None = None  # its tokens; None: it has not begun
        self.again = False  # whether dropped rows have to run again first
        self.preempted = 0  # number of preemptions
        self.cancelled = False

    def tell(self, result: RunReport | Exception) -> None:
        if self.hooks.end:
            self.hooks.end(result)

    @property
    def begun(self) -> TokenSequence:
        assert self.sequence is not None
        return self.sequence


class Slot:
    """A sequence of the engine, and its occupant. Its rows stay when a generation ends, until others need the room."""

    def __init__(self, number: int, engine: Engine, tokens: TokenSequence) -> None:
        self.number, self.engine, self.tokens = number, engine, tokens
        self.ticket: Ticket | None = None
        self.tenant: Hashable = None  # the owner of the rows
        self.used = 0  # time of the last use, of `Order.now`

    def may_share(self, ticket: Ticket) -> bool:
        """Whether a generation may reuse the rows: same tenant and same adapters."""
        return self.tenant == ticket.tenant and key_of(self.tokens.lora) == key_of(ticket.lora)


def key_of(lora: Lora | None) -> str:
    """The key that identifies adapters; empty for none."""
    return lora.key if lora else ""
