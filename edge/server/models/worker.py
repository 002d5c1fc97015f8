"""A thread that has one model loaded, and runs the jobs of its requests."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import field
from itertools import count
from typing import Any

from edge.errors import EngineError
from edge.model.lora_file import Loras
from edge.prompt_cache.tree import agreement
from edge.records import dataclass
from edge.run.budgets.shares import Ledger, Share
from edge.run.hooks import Hooks
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.session import Session
from edge.server.events import Call, Ended, Flow, Likely, Piece
from edge.server.guard import where
from edge.server.ledger import COMPARED, Claim
from edge.server.models.driver import Driver, make_driver
from edge.server.refusal import RefusedError
from edge.types import IntArray

_REMEMBERED = 64  # recent prompts, to find where a new one diverges

_log = logging.getLogger("edge")


class Turns:
    """Lets the threads of several models compute in turn, first come, first served: each engine uses all cores, so two
    at once would wait for each other. energy: divides joules by the time of these turns."""

    def __init__(self, energy: Ledger) -> None:
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
    """One answer, or other work with a session."""

    flow: Flow
    choice: int
    priority: int
    lora: Loras
    claim: Claim  # of the memory that it takes while it runs
    make: Callable[[Job, Session], Request] | None = None  # makes the request, when the model is loaded
    work: Callable[[Session, Job], bool] | None = None  # instead of a request: needs the session to itself; True: again
    tenant: Hashable = ""
    arrived: float = field(default_factory=time.perf_counter)
    prefix: dict[str, Any] | None = None
    tokens: IntArray | None = None  # of the prompt
    ticket: Any = None
    began: bool = False
    began_badly: bool = False  # its adapter could not be set, or its work failed

    @property
    def cancelled(self) -> bool:
        return self.flow.closed


class Worker:
    """A thread for one model. load: loads the session, in the worker's thread. `opened` gets the session, or the load's
    error. share: the model's share of the joules. lora: the adapters that the session is loaded with."""

    def __init__(
        self, name: str, load: Callable[[], Session], turns: Turns, share: Share,
        on_end: Callable[[Job, RunReport | Exception], None] = lambda job, result: None, lora: Loras = (),
    ) -> None:  # fmt: skip
        self.name, self._load, self._turns, self._share, self._told = name, load, turns, share, on_end
        self.opened: Future[Session] = Future()
        self._lock = threading.Condition()
        self._waiting: list[tuple[int, int, Job]] = []
        self._order = count()
        self._running: list[Job] = []
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
        return not (self.leases or self._waiting or self._running)

    @property
    def failed(self) -> bool:
        """Whether its thread has ended by itself."""
        return self.opened.done() and not self._thread.is_alive()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, job: Job) -> None:
        """Queue a job, by priority, then by arrival. Raises RefusedError if the model is being unloaded."""
        with self._lock:
            if self._closing:
                raise RefusedError(503, f"the model {self.name} is being unloaded", retry=1)
            heapq.heappush(self._waiting, (job.priority, next(self._order), job))
            self.used = time.monotonic()
            self._lock.notify()

    def has_begun(self, flow: Flow) -> bool:
        """Whether a job of the request has begun, or none of its jobs waits any more."""
        with self._lock:
            waiting = [job for _, _, job in self._waiting if job.flow is flow]
            return any(job.flow is flow for job in self._running) or not waiting or any(job.began for job in waiting)

    def when_done(self, flow: Flow, action: Callable[[], None]) -> None:
        """Call `action` once no job of a closed request runs any more."""
        with self._lock:
            if any(job.flow is flow for job in self._running):
                self._awaited.append((flow, action))
                return
        action()

    def wake(self) -> None:
        """Drop cancelled jobs from the queue, and interrupt the session if all running jobs are cancelled."""
        session = self.opened.result() if self.opened.done() and not self.opened.exception() else None
        with self._lock:
            self._waiting = [each for each in self._waiting if not each[2].cancelled]
            heapq.heapify(self._waiting)
            if session is not None and self._running and all(job.cancelled for job in self._running):
                session.interrupt()  # also while a prompt is run
            self._lock.notify()

    def close(self) -> None:
        """End the thread and free the model. Waiting jobs are refused, running jobs cancelled."""
        with self._lock:
            self._closing = True
            for _, _, job in self._waiting:
                job.flow.put(RefusedError(503, "the server is shutting down", retry=5))
            self._waiting = []
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            session = self._load()
        except BaseException as error:
            self.opened.set_exception(error)
            return
        driver = make_driver(session)
        self.opened.set_result(session)
        try:
            while True:
                jobs = self._take(driver)
                if self._closing:
                    break
                for job in jobs:
                    if self._is_alone(job, driver):
                        driver.close()
                        self._work(session, job)
                        driver = make_driver(session)
                    if job.work is None and not job.began_badly:
                        self._start(session, driver, job)
                for job in [each for each in self._running if each.cancelled]:
                    driver.cancel(job.ticket)
                if self._running:
                    with self._turns.turn(self._share):
                        driver.step()
        except Exception as error:
            _log.error("the thread of %s failed: %s", self.name, where(error))
            self._fail(EngineError("the model's thread failed"))
        finally:
            for job in list(self._running):
                driver.cancel(job.ticket)
            session.close()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._closing = True
            left = [*self._running, *(job for _, _, job in self._waiting)]
            self._waiting, self._running = [], []
        for job in left:
            job.flow.put(error)
            self._forget(job)

    def _take(self, driver: Driver) -> list[Job]:
        """Jobs to start now; waits for one while nothing runs."""
        with self._lock:
            while not (self._waiting or self._running or self._closing):
                self._lock.wait()
            taken: list[Job] = []
            while self._waiting and not self._closing:
                job = self._waiting[0][2]
                alone = self._is_alone(job, driver)
                before = [*self._running, *taken]
                gives_way = driver.preempts and any(each.priority > job.priority for each in before)
                if before if alone else driver.free <= len(taken) and not gives_way:
                    break
                heapq.heappop(self._waiting)
                if not job.cancelled:
                    taken.append(job)
                    if alone:
                        break
            self._running += [job for job in taken if job.work is None]
            return taken

    def _is_alone(self, job: Job, driver: Driver) -> bool:
        """Whether a job may begin only while no other runs."""
        return job.work is not None or (job.lora != self._lora and not driver.adapts)

    def _work(self, session: Session, job: Job) -> None:
        """Do the part of a job that needs the session to itself: change the adapter, and run the job's `work`. What is
        left of it waits for another turn, behind other jobs."""
        job.began = True
        try:
            if job.lora != self._lora:
                session.set_lora(job.lora)
                self._lora = job.lora
            if job.work is not None:
                held = job.flow.claim.hold()  # what the work claims is given back, also if its client goes away
                try:
                    with self._turns.turn(self._share):
                        more = job.work(session, job)
                finally:
                    held.release()
                if more and not job.cancelled:
                    self.submit(job)
                else:
                    job.claim.release()
        except Exception as error:
            job.began_badly = True
            self._end(job, error)

    def _start(self, session: Session, driver: Driver, job: Job) -> None:
        try:
            assert job.make is not None
            hooks = Hooks(
                prefill=lambda *_: session.interrupt() if job.cancelled else None,
                piece=lambda text: job.flow.put(Piece(job.choice, text)),
                thought=lambda text: job.flow.put(Piece(job.choice, text, thought=True)),
                logprob=lambda token: job.flow.put(Likely(job.choice, token)),
                call=lambda event: job.flow.put(Call(job.choice, event)),
                end=lambda result: self._end(job, result),
            )
            job.ticket = driver.start(job.make(job, session), hooks, job.lora)
        except Exception as error:
            self._end(job, error)

    def _end(self, job: Job, result: RunReport | Exception) -> None:
        self.used = time.monotonic()
        took = time.perf_counter() - job.arrived
        self.seconds += 0.2 * (took - self.seconds)
        if isinstance(result, RunReport):
            job.prefix = self._compared(job, result)
        self._told(job, result)
        self._forget(job)
        # Last: a client that hears of it may ask for the metrics at once, or for another model in place of this one.
        job.flow.put(Ended(job.choice, result, job.prefix) if isinstance(result, RunReport) else result)

    def _forget(self, job: Job) -> None:
        """Let go of what a job has made, and of what its request holds if it is the last one."""
        job.ticket = job.make = None
        job.claim.release()
        with self._lock:
            if job in self._running:
                self._running.remove(job)
            flows = [each.flow for each in self._running]
            done = [each for each in self._awaited if each[0] not in flows]
            self._awaited = [each for each in self._awaited if each not in done]
        for _, action in done:
            action()

    def _compared(self, job: Job, report: RunReport) -> dict[str, Any]:
        """The reused tokens of a prompt, and where it diverged from the most similar earlier prompt."""
        found: dict[str, Any] = {"reused": report.tokens.reused, "diverged_at": None}
        if job.tokens is None:
            return found
        recent = [tokens for tenant, tokens in self._recent if tenant == job.tenant]
        common = max((agreement(each, job.tokens) for each in recent), default=0)
        if recent and common < job.tokens.size - 1 and not any(each.size == common for each in recent):
            found["diverged_at"] = common
        others = [  # no turn of this conversation
            (tenant, tokens) for tenant, tokens in self._recent
            if tenant != job.tenant or agreement(tokens, job.tokens) < tokens.size
        ]  # fmt: skip
        self._recent = deque([*others, (job.tenant, job.tokens)], _REMEMBERED)
        while sum(tokens.nbytes for _, tokens in self._recent) > COMPARED:
            self._recent.popleft()
        return found
