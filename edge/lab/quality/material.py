"""The texts that every cell of the quality matrix reads, and the settings that make its figures comparable."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.backends import find_backend
from edge.errors import InputError
from edge.formats.onnx_folder import content_hash
from edge.kv import DEFAULT_SINKS
from edge.lab.quality.perplexity import REPEAT_TOKENS, make_repeats
from edge.lab.quality.retrieval import Trial, make_trials
from edge.model.model import Model
from edge.run.session import Session
from edge.storage.versions import own_versions
from edge.types import IntArray

TASK_NAMES = ("perplexity", "retrieval", "repeat", "kl")
REPEATS = 4
LONGEST_CHUNK = 64  # tokens of a pass by default, at most


@dataclass(frozen=True)
class Setup:
    """Settings shared by all cells."""

    model: Model
    backend: str
    chunk: int | None = None  # tokens of a pass; None: by the cell's plan, up to LONGEST_CHUNK
    sinks: int = DEFAULT_SINKS
    threads: int | None = None
    memory: int | None = None  # most bytes of the process


@dataclass(frozen=True)
class Document:
    """A whole text in tokens."""

    name: str
    tokens: IntArray  # int32 [n]


@dataclass(frozen=True)
class Amounts:
    """The amount of text to measure."""

    tokens: int = 4000  # scored per document
    trials: int = 20  # keys to find
    length: int = 2048  # tokens of each trial's context
    seed: int = 0


@dataclass(frozen=True)
class Material:
    """Tokenized texts by task. A task without texts is skipped."""

    documents: Sequence[IntArray] = ()
    compared: Sequence[IntArray] = ()  # documents whose predictions are compared with the full cache's
    repeats: Sequence[IntArray] = ()
    trials: Sequence[Trial] = ()

    def tokens(self, task: str) -> int:
        """The number of tokens that the task runs in a cell."""
        if task == "retrieval":
            return 3 * sum(trial.tokens for trial in self.trials)  # one for each protocol
        texts = {"perplexity": self.documents, "repeat": self.repeats, "kl": self.compared}[task]
        return sum(text.size - 1 for text in texts)

    @property
    def longest(self) -> int:
        """Tokens of the longest text. All tasks plan for this length, so that a cell has the same cache in each."""
        texts = [text.size - 1 for text in (*self.documents, *self.compared, *self.repeats)]
        return max([*texts, *(trial.tokens for trial in self.trials)])


def possible_tasks(context: int) -> list[str]:
    """The default tasks: those that fit a model's context with a full cache, except `kl`, which reads texts twice."""
    return [task for task in TASK_NAMES if task != "kl" and (task != "repeat" or context >= REPEAT_TOKENS)]


def make_material(setup: Setup, documents: Sequence[Document], amounts: Amounts, tasks: Sequence[str]) -> Material:
    """Cut documents to `amounts.tokens` predictions; place keys and segments in the concatenation of all documents.

    Raises InputError for unknown tasks, texts that are too short, and amounts beyond the model's context, which the
    full cache, the reference of all cells, could not hold.
    """
    for task in tasks:
        if task not in TASK_NAMES:
            raise InputError(f"unknown task {task!r}: choose {', '.join(TASK_NAMES)}")
    context, tokenizer = setup.model.spec.context, setup.model.tokenizer
    if "repeat" in tasks and "repeat" not in possible_tasks(context):
        raise InputError(
            f"repeated segments take {REPEAT_TOKENS} positions, and the model knows {context}: see --tasks"
        )
    limits = (("tokens", amounts.tokens, {"perplexity", "kl"}), ("length", amounts.length, {"retrieval"}))
    for name, value, used in limits:
        if used & set(tasks) and value > context:
            raise InputError(f"--{name} must be at most {context}, which is what the model knows positions for")
    for document in documents:
        if document.tokens.size < 2:
            raise InputError(f"{document.name} has fewer than two tokens")
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    text, seed = np.concatenate([each.tokens[len(bos) :] for each in documents]), amounts.seed
    read = [each.tokens[: amounts.tokens + 1] for each in documents]
    return Material(
        documents=read if "perplexity" in tasks else (),
        compared=read if "kl" in tasks else (),
        repeats=make_repeats(text, REPEATS, seed, bos) if "repeat" in tasks else (),
        trials=make_trials(setup.model, text, amounts.trials, amounts.length, seed) if "retrieval" in tasks else (),
    )


def settings_of(setup: Setup, documents: Sequence[Document], amounts: Amounts) -> dict[str, Any]:
    """All settings besides the cell on which figures depend, for JSON. Equal settings give equal figures."""
    texts = [
        {"name": each.name, "tokens": min(amounts.tokens, each.tokens.size - 1), "crc32": checksum_of(each.tokens)}
        for each in documents
    ]
    return {
        **identity_of(setup.model, setup.backend),
        "documents": texts,
        "trials": amounts.trials,
        "length": amounts.length,
        "repeats": REPEATS,
        "chunk": setup.chunk,
        "sinks": setup.sinks,
        "seed": amounts.seed,
    }


def identity_of(model: Model, backend: str) -> dict[str, Any]:
    """The identity of a model, by all of its files, and of the engine that runs it."""
    return {
        "model": model.spec.label,
        "model_sha256": content_hash(model.file),
        "backend": backend,
        "versions": {**own_versions(), **find_backend(backend, model.file, model.spec).versions()},
    }


def reader_settings(session: Session) -> dict[str, Any]:
    """The identity of a session's model, its engine and its KV cache."""
    plan = session.plan
    return {
        **identity_of(session.model, plan.backend),
        "kv_policy": plan.kv_policy,
        "sinks": plan.sinks,
        "kv_dtype": plan.config.kv_dtype,
        "kv_capacity": plan.config.capacity,
        **({"lora": session.lora.key} if session.lora else {}),
    }


def checksum_of(tokens: IntArray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes())
