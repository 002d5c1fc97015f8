"""Several generations at once over one loaded model: continuous batching, one pass at a time.

Each generation has one of the engine's sequences. Decoding generations run their next tokens in one pass; prompts run
in chunks of about 50 ms between such passes. All run the loop of `decoding/loop.py`, so answers are those of a session.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from edge.backends.base import BatchedEngine
from edge.backends.checks import check_lora
from edge.devices.power import memory_root
from edge.devices.thermal import Zone
from edge.errors import BudgetError, EngineError, InputError
from edge.model.adapters.lora import Lora
from edge.model.adapters.lora_file import Loras, parse_lora
from edge.model.chat.thinking import Think
from edge.options import Options
from edge.run.batching.order import Order
from edge.run.batching.scheduler import Scheduler
from edge.run.batching.slots import Prepare, Slot, Slots, Ticket, Work, key_of
from edge.run.batching.stream import Driver, Stream
from edge.run.budgets.governor import RunLimits
from edge.run.budgets.meters import EnergyMeter, Watch
from edge.run.budgets.shares import EnergyLedger, whole_of
from edge.run.decoding.generation import Generation
from edge.run.decoding.loop import Pause, read_ahead
from edge.run.hooks import Hooks, OnCall, OnLogprob, OnThought
from edge.run.loaded import Loaded
from edge.run.report import RunReport, StopReason
from edge.run.reporting import check_complete, report_of, why_unanswered
from edge.run.request import DEFAULT_MAX_TOKENS, Chat, Request, Text

Observe = Callable[[Generation, RunReport], None]

_CHUNK_S = 0.05  # of a prompt: the time for which others wait for their next token
_FIRST_CHUNK, _LEAST_CHUNK = 64, 16  # tokens: while no pace is known, and at least


class Batch:
    """Runs generations in passes. One driver calls `step` until it returns False; `stream` and `generate` drive from
    any number of threads. `Session.batch` makes a batch; use it as a context manager.

    The driving thread calls callbacks between two passes; they must return quickly.
    """

    def __init__(
        self, loaded: Loaded, options: Options, meter: EnergyMeter, zone: Zone | None, steps: Scheduler,
        ended_by: Callable[[], StopReason | None], observe: Observe, restore: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """ended_by: returns a stop reason to end all generations, or None. observe: told of each generation that had
        the engine to itself. restore: keep the session's conversation in the first sequence, and call this at the end,
        while the sequences have their rows. Raises BusyError during a generation."""
        self._loaded, self._options, self._zone, self._steps, self._ended_by = loaded, options, zone, steps, ended_by
        self._observe, self._restore = observe, restore
        self._ledger, self._order = EnergyLedger(meter), Order()
        self._opened = dict[Loras, Lora | None]()
        steps.begin(self)
        self._slots = Slots(loaded, options, self._ledger, restore is not None)
        self._queue: deque[Ticket] = deque()
        limits = RunLimits(memory=options.memory, power=options.power, max_temp=options.max_temp)
        self._watch = Watch(  # over all; each generation's own watch limits its time and energy
            limits, self._ledger, zone.path if zone else None, whole=whole_of(meter), spender=loaded.reclaimer,
            root=memory_root(), ended=self._ended, obey=steps.obey,
        )  # fmt: skip
        self._pace = 0.0  # seconds per prompt token
        self._ran = 0  # tokens of the last pass
        self._decoded = False  # whether the last pass decoded, so that a prompt is next
        self._admitted = self._prompts = 0
        self._left = time.perf_counter()  # when the last step ended
        self.closed = False
        self.driver = Driver(self.step)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.closed:
            self._steps.end()

    def close(self) -> None:
        """End all generations, and release the session. If other threads may drive, leave the context instead."""
        if self.closed:
            return
        self.closed = True
        try:
            for ticket in [*self._slots.running, *self._queue]:
                self._end(ticket)
            if self._restore:
                self._restore()
        finally:
            self._slots.leave()
            self._steps.leave()

    @property
    def slots(self) -> Sequence[Slot]:
        return self._slots.all

    @property
    def free(self) -> int:
        """The number of generations that could start now without waiting."""
        return max(0, len(self._slots.free) - len(self._queue))

    @property
    def waiting(self) -> int:
        """The number of generations in the queue."""
        return sum(not ticket.cancelled for ticket in list(self._queue))

    @property
    def running(self) -> int:
        return len(self._slots.running)

    def start(self, request: Request, hooks: Hooks, *, lora: str | Path | Loras | None = None) -> Ticket:
        """Queue a generation, from any thread. lora: the adapters to run with, as for `--lora`; (): none; None: those
        of the session.

        Raises InputError and UnsupportedError for requests that cannot run, and ModelFormatError for adapters.
        """
        ticket = Ticket(request, hooks, self._order.now())
        self._check(request)
        self._open(ticket, request, lora)
        self._queue.append(ticket)
        return ticket

    def queue(
        self, request: Request, hooks: Hooks, *, lora: Loras, prepare: Prepare | None = None, work: Work | None = None
    ) -> Ticket:  # fmt: skip
        """As `start`, but the request becomes a generation only when its turn comes, in the driving thread, as
        `prepare` returns it; its errors go to `hooks.end`. work: runs in place of a generation, while no other does,
        and may use the session; as long as it returns True, it is queued again."""
        ticket = Ticket(request, hooks, self._order.now(), work)
        self._check(request)
        ticket.open = lambda: self._open(ticket, prepare(request) if prepare else request, lora)
        self._queue.append(ticket)
        return ticket

    def _check(self, request: Request) -> None:
        if self.closed:
            raise InputError("this batch is closed")
        if request.follow_up:
            raise InputError("a batch has no conversation to follow up: give the whole of it as the prompt")

    def _open(self, ticket: Ticket, request: Request, lora: str | Path | Loras | None) -> None:
        """Make the generation. Raises InputError and the like."""
        started, first, request = time.perf_counter(), self._slots.all[0].tokens, request.within(self._options)
        ticket.share = self._ledger.share(anew=request.energy is not None)
        ticket.lora = self._slots.lora if lora is None else self._open_lora(parse_lora(lora))

        def ended() -> StopReason | None:
            return "interrupted" if ticket.cancelled else self._ended_by()

        limits = replace(request.limits(self._options, started), memory=None, power=None, max_temp=None)
        watch = Watch(limits, ticket.share, ended=ended)
        run = ticket.run = Generation.of(request, self._loaded.model, watch, started, ticket.hooks)
        run.at_once = self._at_once if len(self._slots.all) > 1 else None
        if not read_ahead(first, run.prompt, watch):
            first.check_fits(run.prompt, alone=True)
        ticket.open, ticket.opened = None, True

    def cancel(self, ticket: Ticket) -> None:
        """End a generation, from any thread: at once, or after the current pass. Does nothing if it has ended."""
        ticket.cancelled = True
        with self._steps.step_now() as free:
            if free:
                self._end(ticket)

    def step(self) -> bool:
        """Run one pass: the next tokens of all decoding generations, a chunk of a prompt, or a turn of other work.
        False: none is left."""
        with self._steps:
            for ticket in self._slots.running:
                ticket.run.held += time.perf_counter() - self._left
            self._drop()
            worked = bool(self._queue) and self._admit()
            running = self._slots.running
            if worked or not running:
                return worked
            self._loaded.reclaimer.run = running[0].run if len(self._slots.all) == 1 else None
            if reason := self._watch.before_pass(self._ran):
                for ticket in running:
                    ticket.run.stop_reason = reason
                    self._end(ticket)
                return True
            decoding = [each for each in running if each.pause is Pause.PENDING and not each.again]
            prompts = [each for each in running if each not in decoding]
            self._decoded = bool(decoding) and not (prompts and self._decoded)
            if self._decoded:
                self._decode(decoding)
            else:
                ticket = self._order.next(prompts, self._prompts)
                self._prompts, ticket.since = self._prompts + 1, self._order.now()
                self._run_prompt(self._slots.ahead_of(ticket))
            self._ledger.run(())
            self._drop()
            self._left = time.perf_counter()
            return True

    def stream(
        self, prompt: Text | Chat, *, lora: str | Path | Loras | None = None,
        max_tokens: int | None = DEFAULT_MAX_TOKENS, think: Think | str | bool | int | None = None,
        time_limit: float | None = None, energy_limit: float | None = None, on_thought: OnThought | None = None,
        on_logprob: OnLogprob | None = None, on_call: OnCall | None = None, **options: Any,
    ) -> Stream:  # fmt: skip
        """The pieces of an answer, concurrent with other threads: a thread that waits for a piece runs the next pass
        for all. `report` is set after the last piece. Arguments are those of `Session.stream`, `start` and
        `Request`."""
        request = Request(
            prompt, max_tokens, think=Think.parse(think), time=time_limit, energy=energy_limit, **options
        )  # fmt: skip
        return Stream(self, request, Hooks(thought=on_thought, logprob=on_logprob, call=on_call), lora)

    def generate(self, prompt: Text, **options: Any) -> str:
        """The whole answer to a prompt, concurrent with other threads. Options are those of `stream`.

        Raises IncompleteError if an answer with a grammar was cut before the grammar allowed its end.
        """
        stream = self.stream(prompt, **options)
        answer = "".join(stream)
        check_complete(stream.report, answer)
        return answer

    def _at_once(self) -> int:
        """The number of prompt tokens that run in about `_CHUNK_S`."""
        return max(_LEAST_CHUNK, int(_CHUNK_S / self._pace)) if self._pace else _FIRST_CHUNK

    def _open_lora(self, files: Loras) -> Lora | None:
        """Open adapters, or return those opened before."""
        if files not in self._opened:
            found = self._loaded.open_lora(files)
            check_lora(found, self._loaded.plan.config)
            self._opened[files] = found
        return self._opened[files]

    # Assignment of sequences

    def _drop(self) -> None:
        """End cancelled generations, and those whose budget ended before they began, or after they were preempted."""
        queue = [*self._queue]
        for ticket in [*self._slots.running, *queue]:
            waits = ticket.opened and (ticket.loop is None or ticket in queue)
            reason = ticket.run.watch.ends_now() if waits else None
            if reason and ticket.loop is not None:
                ticket.run.stop_reason = reason
            if ticket.cancelled or reason:
                self._end(ticket)

    def _ended(self) -> StopReason | None:
        """Why all generations must end; also if each of them is cancelled, which ends a pause."""
        running = self._slots.running
        gone = bool(running) and all(ticket.cancelled for ticket in running)
        return "interrupted" if gone else self._ended_by()

    def _admit(self) -> bool:
        """Assign sequences to waiting generations; if none is free, preempt a lower class. Work waits until none runs,
        and what comes later waits for it. Returns whether work was done."""
        while self._queue:
            free = len(self._slots.free)
            ticket = self._order.next(list(self._queue), self._admitted if free else 0)
            if ticket.work is not None:
                if not self._slots.running:
                    self._work(ticket, ticket.work)
                return not self._slots.running
            if not free:
                if (preempted := self._slots.preempt(ticket.priority)) is None:
                    return False
                self._queue.append(preempted)
            self._admitted += 1
            self._queue.remove(ticket)
            ticket.began = True
            try:
                if ticket.open is not None:
                    ticket.open()
                self._slots.assign(ticket, self._order.now())
            except Exception as error:  # also an adapter whose values are damaged
                self._queue.append(ticket)
                self._end(ticket, error)
        return False

    def _work(self, ticket: Ticket, work: Work) -> None:
        """Run one turn of a ticket's work."""
        self._queue.remove(ticket)
        ticket.began = True
        self._slots.leave()
        self._steps.leave()
        try:
            more = work()
        finally:
            self._steps.begin(self)
            self._slots.enter()
        if more:  # a cancelled one is told in the next step
            ticket.arrived = ticket.since = self._order.now()
            self._queue.append(ticket)
        else:
            ticket.pause = None

    # Passes

    def _run_prompt(self, ticket: Ticket) -> None:
        """Run a chunk of a prompt, or of the tokens that a preempted generation reruns."""
        slot = self._slots.of(ticket)
        assert slot is not None
        self._ledger.run([ticket.share])
        run, tokens = ticket.run, slot.tokens
        try:
            if ticket.loop is None:
                self._slots.begin(slot, ticket)
                run.experts, run.team = self._loaded.expert_counts(), self._loaded.team()
            started, before = time.perf_counter(), len(tokens.rows.fed) if ticket.again else run.ran
            if ticket.again:
                ticket.again = tokens.run_again(self._at_once())
                self._ran = len(tokens.rows.fed) - before
            else:
                self._advance(ticket)
                self._ran = run.ran - before
        except Exception as error:
            self._end(ticket, error)
            return
        if self._ran >= _LEAST_CHUNK:
            pace = (time.perf_counter() - started) / self._ran
            self._pace = (self._pace + pace) / 2 if self._pace else pace

    def _decode(self, tickets: Sequence[Ticket]) -> None:
        """Run the next tokens of all, in one pass for each set of adapters. A generation with several pending tokens
        runs them in a separate pass."""
        self._ran = 0
        alone, groups = list[Ticket](), dict[str, list[Ticket]]()
        for ticket in tickets:
            if len(tickets) > 1 and ticket.begun.next_pass == 1:
                groups.setdefault(key_of(ticket.lora), []).append(ticket)
            else:
                alone.append(ticket)
        for group in groups.values():
            if len(group) > 1:
                self._run_together(group)
            else:
                alone += group
        for ticket in alone:
            self._ledger.run([ticket.share])
            try:
                sequence = ticket.begun
                sequence.run_pending(ticket.run.sample, ticket.run.most_ahead)
                self._ran += sequence.ran
                self._advance(ticket)
            except Exception as error:
                self._end(ticket, error)

    def _run_together(self, tickets: Sequence[Ticket]) -> None:
        self._ledger.run([each.share for each in tickets])
        numbers = {slot.ticket: slot.number for slot in self._slots.all}
        tokens = np.array([each.begun.observe_next() for each in tickets], np.int32)
        engine = cast(BatchedEngine, self._loaded.engine)
        try:
            logits = engine.forward_batch(tokens, [numbers[each] for each in tickets])
        except EngineError as error:
            for ticket in tickets:
                self._end(ticket, error)
            return
        self._ran += len(tickets)
        for ticket, row in zip(tickets, logits, strict=True):
            ticket.begun.take(row, sharing=len(tickets))
        for ticket in tickets:  # none runs a pass before its next turn, so that all logits stay
            try:
                self._advance(ticket)
            except Exception as error:
                self._end(ticket, error)

    def _advance(self, ticket: Ticket) -> None:
        """Continue the generation until its next turn, or its end."""
        assert ticket.loop is not None
        for piece in ticket.loop:
            if isinstance(piece, Pause):
                ticket.pause = piece
                return
            if ticket.hooks.piece:
                ticket.hooks.piece(piece)
        self._end(ticket)

    def _end(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a generation, report it, and free its sequence."""
        if ticket.pause is None:
            return
        ticket.pause = None
        slot = self._slots.of(ticket)
        if slot is not None:
            self._slots.put(slot, None)
        else:
            self._queue.remove(ticket)
        if not ticket.opened:
            ticket.tell(error or InterruptedError("the generation was ended before it began"))
            return
        run = ticket.run
        if ticket.loop is None:
            run.free()
            ticket.tell(error or _never_began(ticket, run))
            return
        ticket.loop.close()
        if error is not None:
            run.stop_reason = "failed"
        if slot is not None:
            with suppress(EngineError):
                ticket.begun.end()
            if self._restore:
                ticket.tokens = ticket.begun.tokens
        self._ledger.read(anew=True)
        ticket.report = report_of(run, self._loaded, ticket.begun, self._options, self._zone, self._watch)
        if error is None and ticket.report.unanswered:
            why = why_unanswered(ticket.report, self._options, self._loaded)
            error = BudgetError(why, param=ticket.request.stated(ticket.report.stop_reason))
        if len(self._slots.all) == 1:
            self._loaded.reclaimer.run = None
            self._observe(run, ticket.report)
        run.free()
        ticket.tell(error or ticket.report)


def _never_began(ticket: Ticket, run: Generation) -> Exception:
    if run.watch.spent() == "time":
        why = f"--time {run.request.time:g}s was over before its turn came"
        return BudgetError(why, param=ticket.request.stated("time"))
    return InterruptedError("the generation was ended before it began")
