"""Trials on a Dask cluster, whose workers have the models in the same places.

The trials of a worker that dies go to the other workers. Workers run trials in child processes, within a thread's share
of the worker's memory limit, and keep converted models in their own cache folders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from edge.devices.logs import only_from
from edge.errors import InputError, MissingExtraError
from edge.lab.searching.trials import Outcome, Runner, Trial, run_trial
from edge.storage.versions import edge_version
from edge.values import parse

_PATIENCE = 10.0  # seconds to wait for the scheduler's answer, and for a first worker


@contextmanager
def cluster(address: str) -> Iterator[Runner]:
    """Yield a Runner of trials on the cluster of a scheduler, such as tcp://10.0.0.1:8786.

    Raises MissingExtraError without `distributed`, InputError for a scheduler that cannot be reached or has no workers.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise MissingExtraError("distributed", "search") from None
    with only_from(logging.CRITICAL, "distributed"):  # failures are reported here, in one line
        try:
            client = Client(address, timeout=_PATIENCE, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"--scheduler {address}: no Dask scheduler answers there ({_line(error)})") from None
        with client:
            try:
                client.wait_for_workers(1, timeout=_PATIENCE)
            except (TimeoutError, asyncio.TimeoutError):  # the same class from Python 3.11 on
                raise InputError(f"--scheduler {address} has no workers: start some: dask worker {address}") from None

            def run(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
                version = edge_version()
                jobs = {client.submit(run_on_worker, asdict(each), version, pure=False): each for each in trials}
                for future in as_completed(jobs, loop=client.loop):
                    yield jobs[future], _outcome(future)

            yield run


def _outcome(future: Any) -> Outcome:
    try:
        return parse(Outcome, future.result())
    except (Exception, CancelledError) as error:  # cancelled: the scheduler is gone
        return Outcome(reason=f"the cluster could not run it: {_line(error)}")


def run_on_worker(trial: dict[str, Any], version: str) -> dict[str, Any]:
    """Run a trial on a worker. Returns an Outcome as a dictionary, since a client may have other classes. version:
    edge's in the process of the search."""
    from distributed import get_worker

    if version != edge_version():
        return asdict(Outcome(reason=f"a worker has edge {edge_version()}, and the search is of edge {version}"))
    worker: Any = get_worker()
    limit = worker.memory_manager.memory_limit
    return asdict(run_trial(parse(Trial, trial), limit // worker.state.nthreads if limit else None))


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
