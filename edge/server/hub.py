"""Hands requests to a model's worker, and yields their events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from edge.model.tokens.tokenizer import TokenizerLike
from edge.options import AUTO, Options
from edge.run.arguments import check_limit
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.session import Session
from edge.server.deadline import Deadline
from edge.server.events import Embedded, Ended, Event, Flow, Ranked, Scored, Transcribed
from edge.server.ledger import Claim
from edge.server.models.costs import of_answer, of_tokens
from edge.server.models.pool import Lease, Pool
from edge.server.models.worker import Job
from edge.server.prompts import prepare
from edge.server.refusal import RefusedError
from edge.server.settings import Settings

_AT_ONCE = 8  # texts scored, embedded or ranked before other requests have their turn
_SIDE_BY_SIDE = 32  # the same of encoders, which run several in one pass
_MORE = 1024  # tokens of an answer whose memory is claimed at once
_SOON_S = 5.0  # after which a stream begins, even without text

Work = Callable[[Sequence[tuple[int, Request]], Session, Job], None]  # takes some requests with their numbers


class Hub:
    """The server's models, and figures of the requests so far."""

    def __init__(
        self, make_pool: Callable[[Callable[[Job, RunReport | Exception], None]], Pool], settings: Settings
    ) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()  # of /metrics
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and status
        self.started = time.time()
        self.draining = False
        self.pool = make_pool(self._count)

    def _count(self, job: Job, result: RunReport | Exception) -> None:
        """Add the figures of one answer. Runs in a worker's thread."""
        if isinstance(result, RunReport):
            self.counts["prompt_tokens"] += result.tokens.ran
            self.counts["reused_tokens"] += result.tokens.reused
            self.counts["generated_tokens"] += result.tokens.generated
            self.counts["evicted_rows"] += result.kv.evicted
            self.counts["microjoules"] += round(1e6 * result.energy.joules)
            self.counts["milliseconds"] += round(1e3 * result.timings.total_s)
        ended = "answers" if isinstance(result, RunReport) else "failed"
        self.counts["cancelled" if job.cancelled else ended] += 1

    @property
    def queued(self) -> int:
        return sum(worker.queued for worker in self.pool.workers.values())

    @property
    def evicts(self) -> bool:
        """Whether the owner lets rows of long prompts be evicted: by --evict, or by a policy chosen for that."""
        return self.settings.evict or self.pool.options.kv_policy not in (Options.kv_policy, AUTO)

    async def lease(self, model: str | None) -> Lease:
        """Lease a model, loading it if necessary. Raises RefusedError and the errors of `Pool.acquire`."""
        if self.draining:
            raise RefusedError(503, "the server is shutting down", code="draining", retry=5)
        return await self.pool.acquire(model)

    async def ask(
        self, model: str | None, requests: Sequence[Request], claim: Claim, *, work: Work | None = None
    ) -> Answering:  # fmt: skip
        """Begin to answer requests to one model; their numbers are the choices of events. claim: of the request's
        memory, which lasts as long as its answers. work: replaces generating.

        Raises RefusedError if the queue is full, or memory.
        """
        limit = check_limit(self.settings.max_tokens)
        requests = [
            replace(each, max_tokens=each.max_tokens if each.max_tokens or work else limit,
                    evict=each.evict or self.evicts)
            for each in requests
        ]  # fmt: skip
        count = 1 if work else len(requests)
        self._check_queue(model, count)
        lease = await self.lease(model)
        flow = Flow(claim.hold())
        answering = Answering(flow, lease, self, len(requests))
        try:
            self._check_queue(model, count)  # others may have come meanwhile
            if work is None:
                answering.expect(requests)
            for number, request in enumerate(requests if work is None else requests[:1]):
                job = Job(
                    flow, number, request, lease.lora, Claim(self.pool.ledger), prepare,
                    work=None if work is None else _in_turns(work, list(enumerate(requests))),
                )  # fmt: skip
                lease.worker.submit(job)
        except BaseException:
            answering.close()
            raise
        answering.expire_after(self.settings.most_wait)
        return answering

    def _check_queue(self, model: str | None, count: int) -> None:
        """Raise RefusedError if so many jobs have no room in the queue."""
        if self.queued and self.queued + count > self.settings.queue:
            raise self.pool.full(model or "")


def _in_turns(work: Work, numbered: Sequence[tuple[int, Request]]) -> Callable[[Session, Job], bool]:
    """Work through requests, some in each turn of a job."""
    left = deque(numbered)

    def turn(session: Session, job: Job) -> bool:
        some = [left.popleft() for _ in range(min(_SIDE_BY_SIDE if session.spec.encoder else _AT_ONCE, len(left)))]
        if some and not job.cancelled:
            session.reset()
            work(some, session, job)
        return bool(left)

    return turn


class Answering:
    """The events of one request. `close` cancels unfinished jobs and returns the model; it must be called."""

    def __init__(self, flow: Flow, lease: Lease, hub: Hub, expected: int) -> None:
        self.flow, self.lease, self.expected, self._hub = flow, lease, expected, hub
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._claimed = 0  # events of the answers that have memory
        self._alternatives: int | None = None

    @property
    def tokenizer(self) -> TokenizerLike:
        return self.lease.session.model.tokenizer

    def expect(self, requests: Sequence[Request]) -> None:
        """Claim the memory of the answers. Raises RefusedError."""
        capacity = self.lease.session.plan.config.capacity
        self.flow.claim.add("answers", sum(of_answer(each, capacity) for each in requests))
        self._claimed = capacity * len(requests)
        self._alternatives = requests[0].logprobs

    def expire_after(self, seconds: float) -> None:
        """Refuse the request unless it begins to run within `seconds`."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        if not self.lease.worker.has_begun(self.flow):
            self.flow.put(self._hub.pool.full(self.lease.entry.name))

    async def first(self) -> Event | None:
        """The first event, so that a refusal sets the response's status; None if there is none within _SOON_S."""
        try:
            async with Deadline(_SOON_S):
                return await self.flow.get()
        except asyncio.TimeoutError:
            return None

    async def events(self, first: Event | None = None, *, keeps: bool = True) -> AsyncIterator[Event]:
        """Yield events until the last answer has ended. first: the event that `first` took. keeps: whether the caller
        gathers them: memory is claimed where an answer goes on because rows are evicted.

        Raises a job's error, and RefusedError.
        """
        left, count = self.expected, 0
        while left:
            event = first or await self.flow.get()
            first, count = None, count + 1
            if keeps and count > self._claimed:
                self.flow.claim.add("answers", of_tokens(_MORE, self._alternatives))
                self._claimed += _MORE
            left -= isinstance(event, Ended | Scored | Embedded | Ranked | Transcribed)
            yield event

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.flow.close()
        self.lease.worker.wake()
        self.lease.worker.when_done(self.flow, self.flow.claim.release)
        self._hub.pool.release(self.lease)
