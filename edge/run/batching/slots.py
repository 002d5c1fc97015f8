"""Generations of a batch, and the engine's sequences that they occupy while they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from edge.backends.base import Engine
from edge.model.lora import Lora
from edge.run.budgets.shares import Share
from edge.run.generation import Generation
from edge.run.hooks import Hooks
from edge.run.loop import Turn, Turns
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.sequences.sequence import TokenSequence

Prepare = Callable[[Request], Request]
Work = Callable[[], bool]  # whether there is more to do


class Ticket:
    """A place in the queue of a batch, later a running generation; a handle for `Batch.cancel`. report: set at its end,
    if it began to run."""

    report: RunReport | None = None
    run: Generation  # these two are set once it is `opened`
    share: Share
    lora: Lora | None

    def __init__(self, request: Request, hooks: Hooks, arrived: int, work: Work | None = None) -> None:
        """work: runs in place of a generation, while no other does."""
        self.request, self.hooks, self.work = request, hooks, work
        self.priority, self.tenant = request.priority, request.tenant
        self.open: Callable[[], None] | None = None  # sets `run` when its turn comes
        self.opened = False
        self.began = False  # whether it had a turn
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
