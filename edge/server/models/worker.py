"""A thread that has one model loaded, and runs the jobs of its requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Any

from edge.errors import EngineError
from edge.model.adapters.lora_file import Loras
from edge.prompt_cache.tree import agreement
from edge.records import dataclass
from edge.run.batching.slots import Ticket
from edge.run.budgets.shares import EnergyLedger, Share
from edge.run.hooks import Hooks
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.session import Session
from edge.server.events import Call, Ended, Flow, Likely, Piece
from edge.server.guard import where
from edge.server.ledger import COMPARED, Claim
from edge.server.refusal import RefusedError
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.run.batching.batch import Batch

_REMEMBERED = 64  # recent prompts, to find where a new one diverges

_log = logging.getLogger("edge")


class Turns:
    """Lets the threads of several models compute in turn, first come, first served: each engine uses all cores, so two
    at once would wait for each other. energy: divides joules by the time of these turns."""

    def __init__(self, energy: EnergyLedger) -> None:
        self._energy, self._changed = energy, threading.Condition()
        self._next = self._serving = 0

    @contextmanager
    def turn(self, share: Share) -> Iterator[None]:
        """Wait for a turn. Its joules count for `share`."""
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._serving == mine)
        self._energy.run([share])
        try:
            yield
        finally:
            self._energy.run(())
            with self._changed:
                self._serving += 1
                self._changed.notify_all()


@dataclass(eq=False)
class Job:
    """One answer, or other work with a session: where its events and its memory belong."""

    flow: Flow
    choice: int
    request: Request
    lora: Loras
    claim: Claim  # of the memory that it takes while it runs
    prepare: Callable[[Request, Job, Session], Request] | None = None  # when its turn comes
    work: Callable[[Session, Job], bool] | None = None  # in place of generating; True: again
    arrived: float = field(default_factory=time.perf_counter)
    prefix: dict[str, Any] | None = None
    tokens: IntArray | None = None  # of the prompt
    ticket: Ticket | None = None  # its place in the queue

    @property
    def cancelled(self) -> bool:
        return self.flow.closed

    @property
    def began(self) -> bool:
        return self.ticket is not None and self.ticket.began


class Worker:
    """A thread for one model. load: loads the session, in the worker's thread. `opened` gets the session, or the load's
    error. share: the model's share of the joules. lora: the adapters that the session is loaded with."""

    def __init__(
        self, name: str, load: Callable[[], Session], turns: Turns, share: Share,
        on_end: Callable[[Job, RunReport | Exception], None] = lambda job, result: None, lora: Loras = (),
    ) -> None:  # fmt: skip
        self.name, self._load, self._turns, self._share, self._told = name, load, turns, share, on_end
        self.opened: Future[Session] = Future()
        self.opened.set_running_or_notify_cancel()  # a server that ends cancels what waits for it, but not the load
        self._lock = threading.Condition()
        self._batch: Batch | None = None
        self._jobs: list[Job] = []  # that have not ended
        self._closing = False
        self._awaited: list[tuple[Flow, Callable[[], None]]] = []  # called when no job of the request runs
        self._recent: deque[tuple[Hashable, IntArray]] = deque()  # tenants and their prompts, the newest last
        self.used = time.monotonic()  # when a request last began or ended
        self.seconds = 1.0  # that a request takes, approximately
        self.leases = 0  # requests that are about to submit jobs, or wait for their events
        self._lora = lora
        self._thread = threading.Thread(target=self._run, name=f"edge serve {name}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether no request needs the model."""
        return not (self.leases or self._jobs)

    @property
    def failed(self) -> bool:
        """Whether its thread has ended by itself."""
        return self.opened.done() and not self._thread.is_alive()

    @property
    def queued(self) -> int:
        return self._batch.waiting if self._batch else 0

    @property
    def running(self) -> int:
        return self._batch.running if self._batch else 0

    def submit(self, job: Job) -> None:
        """Queue a job. Raises RefusedError if the model is being unloaded."""
        hooks = Hooks(
            piece=lambda text: job.flow.put(Piece(job.choice, text)),
            thought=lambda text: job.flow.put(Piece(job.choice, text, thought=True)),
            logprob=lambda token: job.flow.put(Likely(job.choice, token)),
            call=lambda event: job.flow.put(Call(job.choice, event)),
            end=lambda result: self._end(job, result),
        )
        session, prepare = self.opened.result(), job.prepare
        with self._lock:
            if self._closing or self._batch is None:
                raise RefusedError(503, f"the model {self.name} is being unloaded", retry=1)
            job.ticket = self._batch.queue(
                job.request, hooks, lora=job.lora,
                prepare=None if prepare is None else lambda request: prepare(request, job, session),
                work=None if job.work is None else lambda: self._work(session, job),
            )  # fmt: skip
            self._jobs.append(job)
            self.used = time.monotonic()
            self._lock.notify()

    def has_begun(self, flow: Flow) -> bool:
        """Whether a job of the request has begun, or all have ended."""
        with self._lock:
            jobs = [job for job in self._jobs if job.flow is flow]
            return not jobs or any(job.began for job in jobs)

    def when_done(self, flow: Flow, action: Callable[[], None]) -> None:
        """Call `action` once no job of a closed request runs any more."""
        with self._lock:
            if any(job.flow is flow and job.began for job in self._jobs):
                self._awaited.append((flow, action))
                return
        action()

    def wake(self) -> None:
        """Have the thread end the jobs of closed requests, also while a prompt is run."""
        with self._lock:
            for job in self._jobs:
                if job.cancelled and job.ticket is not None:
                    job.ticket.cancelled = True
            self._lock.notify()

    def close(self) -> None:
        """End the thread and free the model. Waiting jobs are refused, running jobs cancelled."""
        with self._lock:
            self._closing = True
            for job in self._jobs:
                if not job.began:
                    job.flow.put(RefusedError(503, "the server is shutting down", retry=5))
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with ExitStack() as opened:
            try:
                session = opened.enter_context(self._load())
                batch = self._batch = session.batch()
            except BaseException as error:
                self.opened.set_exception(error)
                return
            self.opened.set_result(session)
            try:
                while self._wait():
                    with self._turns.turn(self._share):
                        batch.step()
            except Exception as error:
                _log.error("the thread of %s failed: %s", self.name, where(error))
                self._fail(EngineError("the model's thread failed"))
            finally:
                batch.close()

    def _wait(self) -> bool:
        """Wait for a job. False: the model is being unloaded."""
        with self._lock:
            while not (self._jobs or self._closing):
                self._lock.wait()
            return not self._closing

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._closing = True
            left = list(self._jobs)
        for job in left:
            job.flow.put(error)
            self._forget(job)

    def _work(self, session: Session, job: Job) -> bool:
        """Run a turn of a job's work, with its adapter. Returns whether there is more."""
        assert job.work is not None
        held = job.flow.claim.hold()  # what the work claims is given back, also if its client goes away
        try:
            if job.lora != self._lora:
                session.set_lora(job.lora)
                self._lora = job.lora
            if job.work(session, job) and not job.cancelled:
                return True
            self._forget(job)
        except Exception as error:
            self._end(job, error)
        finally:
            held.release()
        return False

    def _end(self, job: Job, result: RunReport | Exception) -> None:
        self.used = time.monotonic()
        took = time.perf_counter() - job.arrived
        self.seconds += 0.2 * (took - self.seconds)
        if isinstance(result, RunReport):
            job.prefix = self._compared(job, result)
        if job.began:
            self._told(job, result)
        self._forget(job)
        # Last: a client that hears of it may ask for the metrics at once, or for another model in place of this one.
        job.flow.put(Ended(job.choice, result, job.prefix) if isinstance(result, RunReport) else result)

    def _forget(self, job: Job) -> None:
        """Release a job's memory, and its request's if it is the last one."""
        job.claim.release()
        with self._lock:  # others read the ticket
            job.ticket = job.prepare = None
            if job in self._jobs:
                self._jobs.remove(job)
            flows = [each.flow for each in self._jobs if each.began]
            done = [each for each in self._awaited if each[0] not in flows]
            self._awaited = [each for each in self._awaited if each not in done]
        for _, action in done:
            action()

    def _compared(self, job: Job, report: RunReport) -> dict[str, Any]:
        """The reused tokens of a prompt, and where it diverged from the most similar earlier prompt."""
        found: dict[str, Any] = {"reused": report.tokens.reused, "diverged_at": None}
        if job.tokens is None:
            return found
        recent = [tokens for tenant, tokens in self._recent if tenant == job.request.tenant]
        common = max((agreement(each, job.tokens) for each in recent), default=0)
        if recent and common < job.tokens.size - 1 and not any(each.size == common for each in recent):
            found["diverged_at"] = common
        others = [  # no turn of this conversation
            (tenant, tokens) for tenant, tokens in self._recent
            if tenant != job.request.tenant or agreement(tokens, job.tokens) < tokens.size
        ]  # fmt: skip
        self._recent = deque([*others, (job.request.tenant, job.tokens)], _REMEMBERED)
        while sum(tokens.nbytes for _, tokens in self._recent) > COMPARED:
            self._recent.popleft()
        return found
