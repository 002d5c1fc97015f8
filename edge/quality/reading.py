"""What the cells read, made of a person's texts; and the settings by which figures can be compared."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.backends import find_backend
from edge.errors import InputError
from edge.formats.onnx_folder import read_manifest
from edge.model.model import Model
from edge.quality.cells import Setup
from edge.quality.repeat import REPEAT_TOKENS, make_repeats
from edge.quality.retrieval import make_trials
from edge.quality.tasks import TASKS, Material
from edge.storage.fingerprint import fingerprint
from edge.storage.versions import own_versions
from edge.types import IntArray

REPEATS = 4


@dataclass(frozen=True)
class Document:
    """A text in tokens, int32 [n], all of it."""

    name: str
    tokens: IntArray


@dataclass(frozen=True)
class Amounts:
    """How much is read. tokens: scored per document; trials: keys to be found; length: tokens around each."""

    tokens: int = 4000
    trials: int = 20
    length: int = 2048
    seed: int = 0


def possible_tasks(context: int) -> list[str]:
    """Those that a model with so many positions can do with a full cache."""
    return [task for task in TASKS if task != "repeat" or context >= REPEAT_TOKENS]


def make_material(setup: Setup, documents: Sequence[Document], amounts: Amounts, tasks: Sequence[str]) -> Material:
    """Documents are cut to `amounts.tokens` predictions; keys and segments lie in all of them, joined.

    Raises InputError for unknown tasks, and for texts that are too short or longer than the model's context: the full
    cache, which all are compared with, could not hold them.
    """
    for task in tasks:
        if task not in TASKS:
            raise InputError(f"unknown task {task!r}: choose {', '.join(TASKS)}")
    context = setup.model.spec.context
    if "repeat" in tasks and "repeat" not in possible_tasks(context):
        raise InputError(
            f"repeated segments take {REPEAT_TOKENS} positions, and the model knows {context}: see --tasks"
        )
    for name, value, used in (("tokens", amounts.tokens, "perplexity"), ("length", amounts.length, "retrieval")):
        if used in tasks and value > context:
            raise InputError(f"--{name} must be at most {context}, which is what the model knows positions for")
    for document in documents:
        if document.tokens.size < 2:
            raise InputError(f"{document.name} has fewer than two tokens")
    model, text = setup.model, joined(setup, documents)
    bos = [model.tokenizer.bos_id] if model.tokenizer.add_bos and model.tokenizer.bos_id is not None else []
    return Material(
        documents=[each.tokens[: amounts.tokens + 1] for each in documents] if "perplexity" in tasks else (),
        trials=make_trials(model, text, amounts.trials, amounts.length, amounts.seed) if "retrieval" in tasks else (),
        repeats=make_repeats(text, REPEATS, amounts.seed, bos) if "repeat" in tasks else (),
    )


def joined(setup: Setup, documents: Sequence[Document]) -> IntArray:
    """All tokens, without those that begin a text."""
    tokenizer = setup.model.tokenizer
    skipped = int(tokenizer.add_bos and tokenizer.bos_id is not None)
    return np.concatenate([each.tokens[skipped:] for each in documents])


def settings_of(setup: Setup, documents: Sequence[Document], amounts: Amounts) -> dict[str, Any]:
    """What figures depend on beside their cell, for JSON. Two runs with the same settings measure the same."""
    return {
        **identity_of(setup.model, setup.backend),
        "documents": [
            {
                "name": each.name,
                "tokens": min(amounts.tokens, each.tokens.size - 1),
                "crc32": checksum_of(each.tokens),
            }
            for each in documents
        ],
        "trials": amounts.trials,
        "length": amounts.length,
        "repeats": REPEATS,
        "chunk": setup.chunk,
        "sinks": setup.sinks,
        "seed": amounts.seed,
    }


def identity_of(model: Model, backend: str) -> dict[str, Any]:
    """A model, by all of its files, and the engine that runs it."""
    folder = model.file.folder
    files = [model.file.path] if folder is None else [folder / name for name in sorted(read_manifest(folder).files)]
    hashes = "".join(fingerprint(path).sha256 for path in files)
    return {
        "model": model.spec.label,
        "model_sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        "backend": backend,
        "versions": {**own_versions(), **find_backend(backend, model.file, model.spec).versions()},
    }


def checksum_of(tokens: IntArray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes())
