"""Generations of a batch, and the engine's sequences that they occupy while they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import cast

from edge.backends.base import AdaptedEngine, BatchedEngine, Engine
from edge.errors import EngineError
from edge.model.adapters.lora import Lora
from edge.model.parts.prompt import Prompt
from edge.options import Options
from edge.run.budgets.meters import EnergyMeter
from edge.run.budgets.shares import Share
from edge.run.decoding.generation import Generation
from edge.run.decoding.loop import Loop, Pause, begin, loop_of
from edge.run.hooks import Hooks
from edge.run.loaded import Loaded
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.sequences.sequence import TokenSequence
from edge.types import IntArray

_MOST_PREEMPTED = 2  # preemptions, after which a generation keeps its sequence

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
        self.pause: Pause | None = Pause.PROMPT  # where it waits; None: it has ended
        self.loop: Loop | None = None  # its loop; None: it has not begun
        self.sequence: TokenSequence | None = None  # its tokens; None: it has not begun
        self.tokens: IntArray | None = None  # at the end, all that its sequence had, int32 [n]; None after evictions
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


class Slots:
    """The engine's sequences, taken from a session, and their assignment to generations. all: by number. running: the
    generations that have one. lora: the adapters of generations that name no others."""

    def __init__(self, loaded: Loaded, options: Options, meter: EnergyMeter, forked: bool) -> None:
        """forked: keep the session's conversation, in the first sequence."""
        self._loaded, self._options, self._meter, self._forked = loaded, options, meter, forked
        self.enter()

    def enter(self) -> None:
        """Take the session's engine, without its conversation."""
        loaded = self._loaded
        if not self._forked:
            loaded.sequence.reset()
        count = loaded.plan.config.sequences
        engines = [loaded.engine] if count == 1 else map(cast(BatchedEngine, loaded.engine).sequence, range(count))
        self.lora = loaded.sequence.lora
        self.all = [Slot(number, each, self._new_sequence(each, self.lora)) for number, each in enumerate(engines)]
        if self._forked:
            self.all[0].tokens = loaded.sequence
        self.running: list[Ticket] = []
        self._reclaim()

    def leave(self) -> None:
        """Give the session's engine back."""
        for slot in self.all[self._forked :]:
            with suppress(EngineError):
                _adapt(slot, self.lora)
                slot.engine.kv.truncate(0)
        self._loaded.reclaimer.sequences, self._loaded.reclaimer.run = [self._loaded.sequence], None

    def _new_sequence(self, engine: Engine, lora: Lora | None) -> TokenSequence:
        loaded, cache = self._loaded, self._options.prompt_cache
        drafter, learned, prefix = loaded.drafter, loaded.learned, loaded.model.prefix
        return TokenSequence(engine, loaded.plan, lora, cache, self._meter, drafter, learned, prefix)

    def _reclaim(self) -> None:
        self._loaded.reclaimer.sequences = [slot.tokens for slot in self.all]

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.all if slot.ticket is None]

    def put(self, slot: Slot, ticket: Ticket | None) -> None:
        """Give a sequence to a generation, or free it."""
        slot.ticket = ticket
        self.running = [each.ticket for each in self.all if each.ticket is not None]

    def of(self, ticket: Ticket) -> Slot | None:
        return next((slot for slot in self.all if slot.ticket is ticket), None)

    def assign(self, ticket: Ticket, now: int) -> None:
        """Assign the free sequence with the most useful rows, and switch it to the generation's adapters. Raises the
        errors of `AdaptedEngine.set_lora`."""
        shared = self._shared_rows(ticket)
        slot = max(self.free, key=lambda each: (shared[each], each.may_share(ticket), -each.used))
        _adapt(slot, ticket.lora)
        if ticket.sequence is not None:
            slot.tokens.reset()
            slot.tokens = ticket.sequence
            slot.tokens.resume(slot.engine)
            self._reclaim()
        elif slot.tenant != ticket.tenant:
            slot.tokens.forget()
        slot.tenant, slot.used = ticket.tenant, now
        self.put(slot, ticket)

    def preempt(self, priority: int) -> Ticket | None:
        """Free the sequence of a generation of the lowest class below `priority`, the cheapest to rerun, and return
        that; None if there is none. Generations with evicted rows are not preempted: a rerun would make other rows."""
        found = [
            (ticket.priority, -slot.engine.kv.length, slot.number)
            for slot in self.all
            if (ticket := slot.ticket) and ticket.priority > priority and ticket.preempted < _MOST_PREEMPTED
            and not slot.tokens.rows.evicted
        ]  # fmt: skip
        if not found:
            return None
        slot = self.all[max(found)[-1]]
        ticket = cast(Ticket, slot.ticket)
        self.put(slot, None)
        if ticket.loop is not None:
            slot.tokens.give_up()
            slot.tokens, ticket.again = self._new_sequence(slot.engine, ticket.lora), True
            self._reclaim()
        ticket.preempted += 1
        return ticket

    def ahead_of(self, ticket: Ticket) -> Ticket:
        """The generation whose prompt is about to make rows that this ticket's prompt shares; else the ticket itself.
        Shared rows thus run once."""
        tokens = _whole(ticket.run.prompt) if ticket.loop is None else None
        if tokens is None:
            return self._waiting_for(ticket) or ticket
        for slot in self.all:
            other = slot.ticket
            if other is None or other.loop is None or other.pause is not Pause.PROMPT or other.again:
                continue
            if slot.may_share(ticket) and slot.tokens.rows.is_ahead_of(tokens, slot.tokens.prompt):
                return other
        return ticket

    def _waiting_for(self, ticket: Ticket) -> Ticket | None:
        """A generation that has not begun, and can take the rows and the tail that a running prompt has just now."""
        slot = self.of(ticket)
        if slot is None or ticket.loop is None or not slot.tokens.rows.waits:
            return None
        length = slot.engine.kv.length
        return next((each for each, tokens in self._like(slot) if slot.tokens.rows.shared(tokens) == length), None)

    def _like(self, slot: Slot) -> list[tuple[Ticket, IntArray]]:
        """The generations with sequences that have not begun and may share a slot's rows, and their tokens."""
        new = [each for each in self.running if each.loop is None and each is not slot.ticket and slot.may_share(each)]
        return [(each, tokens) for each in new if (tokens := _whole(each.run.prompt)) is not None]

    def begin(self, slot: Slot, ticket: Ticket) -> None:
        """Begin with the rows that the prompt shares with this sequence, another sequence, or the prompt cache."""
        run, sequence, shared = ticket.run, slot.tokens, self._shared_rows(ticket)
        tail = slot.engine.kv.has_tail
        donors = [each for each in self.all if each is slot or not tail or shared[each] == each.engine.kv.length]
        donor = max(donors, key=lambda each: (shared[each], each is slot))
        most = shared[donor]
        cache, tokens = sequence.rows.prompt_cache, _whole(run.prompt)
        if cache is not None and tokens is not None and cache.known(slot.engine.kv, tokens[:-1]) > most:
            most = 0
        elif donor is not slot:
            sequence.reset(shared[slot])
            sequence.rows.take(donor.tokens.rows, most)
        ticket.sequence = sequence
        begin(sequence, run, most)
        ticket.loop = loop_of(sequence, run)
        for _, other in self._like(slot) if tail and tokens is not None else ():
            sequence.rows.wait_for(other, sequence.prompt)

    def _shared_rows(self, ticket: Ticket) -> dict[Slot, int]:
        """The number of first rows that each sequence shares with the ticket's prompt; 0 once it has begun."""
        tokens = _whole(ticket.run.prompt) if ticket.sequence is None else None
        return {
            slot: slot.tokens.rows.shared(tokens) if tokens is not None and slot.may_share(ticket) else 0
            for slot in self.all
        }  # fmt: skip


def _adapt(slot: Slot, lora: Lora | None) -> None:
    """Switch a sequence to these adapters. Rows that other adapters computed are dropped."""
    if key_of(slot.tokens.lora) == key_of(lora):
        return
    slot.tokens.adopt(None, lost=False)
    cast(AdaptedEngine, slot.engine).set_lora(lora)
    slot.tokens.adopt(lora, lost=False)


def _whole(prompt: Prompt) -> IntArray | None:
    """All tokens of a prompt, int32 [n]; None if some have run or are not known."""
    return prompt.peek(prompt.waiting) if prompt.ended and not prompt.taken else None


def key_of(lora: Lora | None) -> str:
    """The key that identifies adapters; empty for none."""
    return lora.key if lora else ""
