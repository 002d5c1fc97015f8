"""Tasks of EleutherAI's lm-eval on edge's engines: accuracy of multiple choice, of greedy answers, perplexity.

lm-eval (extra `eval`) reads tasks, makes requests from their documents and scores the model's answers (`harness.py`).
Three small tasks come with edge, in `shipped/`, and need no network.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partialmethod
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.devices.logs import only_from
from edge.errors import EdgeError, InputError, MissingExtraError, UnsupportedError, did_you_mean
from edge.run.session import Session

if TYPE_CHECKING:
    from edge.lab.quality.harness import OnProgress

OWN = "edge"  # the tag of all shipped tasks
LONGEST = 2048  # tokens of a request for which plans allow, as in lm-eval
SHIPPED = Path(__file__).with_name("shipped")
_BOOTSTRAPS = 1000  # resamplings for standard errors of perplexities and the like
_SEED = 1234  # for the choice of solved examples: lm-eval's own
_NAMED = 5  # similar names in an error


@dataclass(frozen=True)
class TaskScore:
    """A figure of a task, or of a group of tasks, as lm-eval computes it."""

    task: str
    metric: str  # such as `acc`; after a comma, the filter of answers, if it has a name
    value: float | None  # None if it is not finite
    stderr: float | None  # None if lm-eval has none for the metric, or there is one question only
    questions: int  # documents of the task that were scored; of a group, of all of its tasks
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskScores:
    """The result of `eval_tasks`."""

    scores: tuple[TaskScore, ...]
    shots: dict[str, int]  # solved examples before each question, by task
    versions: dict[str, str]  # of tasks and of lm-eval
    shortened: int  # requests that lost their beginning, since they have more tokens than the model can read
    seconds: float


@dataclass(frozen=True)
class Tasks:
    """Tasks that have been found and read, including their documents."""

    loaded: Any  # lm-eval's TaskDict
    num_fewshot: int | None  # replaces the tasks' own; None: keep those


def open_tasks(
    names: Sequence[str] = (OWN,), include: str | Path | None = None, num_fewshot: int | None = None
) -> Tasks:
    """Find tasks by name and read their documents.

    names: of tasks, groups and tags: those in `shipped`, in `include`, and lm-eval's own, whose documents come from the
    Hub. include: a folder of task files (.yaml), whose Python functions will be run. num_fewshot: solved examples
    before each question, where a task allows it. Raises MissingExtraError without lm-eval, InputError for unknown names
    and tasks that cannot be read, UnsupportedError for tasks that need images or run code that the model writes.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingExtraError("lm-eval", "eval") from None
    folders = [SHIPPED]
    if include is not None:
        folders.append(Path(include))
        if not Path(include).is_dir():
            raise InputError(f"--include {include}: there is no such folder")
    if num_fewshot is not None and not num_fewshot >= 0:
        raise InputError(f"--num-fewshot must be 0 or more, not {num_fewshot}")
    names = [names] if isinstance(names, str) else names
    with _quiet():
        manager = TaskManager(include_path=folders, include_defaults=False)
        if include is not None and not set(manager.all_tasks) - set(TaskManager(None, SHIPPED, False).all_tasks):
            raise InputError(f"--include {include}: no .yaml file in it describes a task")
        if not set(names) <= set(manager.all_tasks):  # indexing lm-eval's own tasks takes seconds
            manager = TaskManager(include_path=folders)
        for name in names:
            if name not in manager.all_tasks:
                near = did_you_mean(name, manager.all_tasks, _NAMED)
                hint = near or f"those that come with edge are {OWN}"
                raise InputError(f"there is no task {name!r}: {hint}")
        try:
            loaded = manager.load([*dict.fromkeys(names)])
        except Exception as error:  # a task's file, its code, its dependencies and the Hub may raise anything
            raise InputError(f"{', '.join(names)} cannot be read: {_line(error)}") from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UnsupportedError(f"{name} runs code that the model writes, which edge does not")
        if getattr(task, "MULTIMODAL", False):
            raise UnsupportedError(f"{name} shows images, and edge runs models of text")
    return Tasks(loaded, num_fewshot)


def eval_tasks(
    session: Session,
    tasks: Tasks | Sequence[str] = (OWN,),
    *,
    limit: int | None = None,
    on_progress: OnProgress | None = None,
) -> TaskScores:
    """Score a session's answers to tasks of lm-eval.

    tasks: names, or the result of `open_tasks`. limit: score only the first questions of each task. Load the session
    with `logits_rows=LOGITS_ROWS` of edge.lab.quality.perplexity, and for the model's own quality with
    `kv_policy="full"`; requests longer than such a cache lose their beginning, as in lm-eval. Raises the errors of
    `open_tasks` and of `Session.score`.
    """
    if limit is not None and not limit >= 1:
        raise InputError(f"--limit must be 1 or more, not {limit}")
    opened = tasks if isinstance(tasks, Tasks) else open_tasks(tasks)
    from lm_eval.evaluator import evaluate

    from edge.lab.quality.harness import SessionLM

    started, model = time.perf_counter(), SessionLM(session, on_progress)
    for task in opened.loaded["tasks"].values():
        usual = task.get_config("num_fewshot")
        task.set_config("num_fewshot", usual or 0 if opened.num_fewshot is None or usual == 0 else opened.num_fewshot)
        task.set_fewshot_seed(_SEED)
    try:
        with _quiet():
            found = evaluate(model, opened.loaded, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False)
    except (EdgeError, MemoryError):
        raise
    except Exception as error:  # a task's own code may raise anything
        raise InputError(f"lm-eval cannot score {', '.join(opened.loaded['tasks'])}: {_line(error)}") from error
    return TaskScores(
        scores=tuple(_scores(found)),
        shots=dict(found["n-shot"]),
        versions={**{name: str(version) for name, version in found["versions"].items()}, **_own_version()},
        shortened=model.shortened,
        seconds=time.perf_counter() - started,
    )


def read_shipped(name: str, **_: Any) -> dict[str, Any]:
    """The documents of a task in `shipped`. lm-eval calls this function, which the task's file names."""
    from datasets import Dataset

    lines = (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def _scores(found: dict[str, Any]) -> Iterator[TaskScore]:
    samples, members = found["n-samples"], found["group_subtasks"]
    better = found["higher_is_better"]

    def questions(task: str) -> int:
        return int(samples[task]["effective"]) if task in samples else sum(map(questions, members.get(task, ())))

    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            stderr, name = figures.get(f"{metric}_stderr,{kind}"), metric if kind == "none" else f"{metric},{kind}"
            higher = better.get(task, {}).get(metric)
            yield TaskScore(task, name, _finite(value), _finite(stderr), questions(task), higher)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _own_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm_eval": version("lm_eval")}


def _line(error: Exception) -> str:
    """The type and first line of a foreign error."""
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lm-eval's logs, prints and progress bars, and the processes in which it would resample: they would be
    forks of a process with an engine's threads."""
    from tqdm import tqdm

    whole, before = tqdm.__init__, os.environ.get("DISABLE_MULTIPROC")
    tqdm.__init__ = partialmethod(whole, disable=True)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with only_from(logging.CRITICAL, "lm_eval"), redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = whole
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
