"""The models on this device, in installed packages, the Hub's cache folder, and edge's own; and their removal.

Only headers are read. Their summaries stay in the cache folder, keyed by the state of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Literal

from edge.backends import backend_names, engine_named
from edge.errors import CacheError, EdgeError, InputError, MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.hub.cache import CachedFile, cached_files, find_cached
from edge.hub.names import Reference
from edge.hub.quants import label_of
from edge.hub.removal import remove_cached
from edge.lab.inspection import engine_use
from edge.model.chat.thinking import find_family
from edge.model.names.catalog import PACKAGED, hub_reference, installed_parts
from edge.model.reader import read_spec
from edge.model.structure.spec import model_key
from edge.run.history import last_run
from edge.storage import cache
from edge.storage.fingerprint import FileState
from edge.storage.versions import edge_version
from edge.values import parse

Place = Literal["package", "hub", "cache"]

_EDITION = 2  # of summaries; another one once they say something else of the same file


@dataclass(frozen=True)
class Summary:
    """A summary of a header."""

    architecture: str = "unknown"
    parameters: int = 0
    type: str = ""
    context: int = 0
    chat: bool = False
    thinks: bool = False
    key: str = ""  # `edge.model.structure.spec.model_key`
    engines: tuple[str, ...] = ()  # that run the model
    refused: dict[str, str] = field(default_factory=dict)  # why other engines do not
    reason: str | None = None  # why edge cannot run the file


@dataclass(frozen=True)
class LocalModel:
    """A model on this device."""

    name: str  # as commands take it
    place: Place
    path: Path | None  # None: parts that were not joined yet
    bytes: int  # on disk
    last_used: float  # seconds since 1970
    by: Literal["run", "read", "written"]  # the event that `last_used` dates
    summary: Summary
    packed: int = 0  # bytes on disk of weights that the native engine has packed of it


def models() -> list[LocalModel]:
    """Models in installed packages, the Hub's cache folder and edge's own, last used first. Damaged and foreign files
    are included, with the reason."""
    packed = Counter[str | None]()
    with suppress(CacheError):
        for each in cache.entries("weights"):
            packed[each.about] += each.bytes
    found = [*_packaged(), *_downloaded(), *_joined()]
    found = [replace(each, packed=packed[each.path.name]) if each.path else each for each in found]
    return sorted(found, key=lambda each: -each.last_used)


@dataclass(frozen=True)
class Removed:
    """A removed model."""

    name: str
    files: tuple[Path, ...]
    bytes: int  # freed on the disk, including derived files


def find(name: str) -> LocalModel:
    """The model that `models` lists under a name or a path, or the only local model of a repository named as for `edge
    run`: `qwen3:0.6b`, USER/REPO. Raises InputError if there is none, or several."""
    found = models()
    for each in found:
        if each.name.lower() == name.lower() or (each.path is not None and str(each.path) == name):
            return each
    if reference := hub_reference(name):
        named = [each for each in found if _is_of(each, reference)]
        if len(named) == 1:
            return named[0]
        if named:
            raise InputError(f"{name[:200]!r} names several models: {', '.join(each.name for each in named)}")
    listed = ", ".join(each.name for each in found) or "none"
    raise InputError(f"{name[:200]!r} is not among the models here: {listed}")


def _is_of(model: LocalModel, wanted: Reference) -> bool:
    if model.place != "hub":
        return False
    found = hub_reference(model.name)
    if found is None or found.repository.lower() != wanted.repository.lower() or wanted.file not in (None, found.file):
        return False
    return found.revision == wanted.revision and wanted.quant in (None, found.quant)


def remove(model: LocalModel) -> Removed:
    """Remove a model and its derived files: packed weights, its tokenizer's tables, its hash. Compiled kernels stay,
    because models of one shape share them.

    Raises InputError for a model of an installed package, and for one that is being downloaded; CacheError.
    """
    if model.place == "package":
        raise InputError(f"{model.name} belongs to installed packages: {_uninstall(model.name)} removes it")
    assert model.path is not None
    derived = [entry for entry in cache.entries() if entry.about in (model.path.name, f"tokens of {model.path.name}")]
    if model.place == "hub":
        files, freed = remove_cached(model.path)
    else:
        files, freed = (model.path,), 0
        derived += [entry for entry in cache.entries("models") if entry.path == model.path]
    for entry in derived:
        cache.discard(entry)
        freed += entry.bytes
    return Removed(model.name, (*files, *(entry.path for entry in derived)), freed)


def _packaged() -> Iterator[LocalModel]:
    for name, packaged in PACKAGED.items():
        parts = installed_parts(name)
        if len(parts) < len(packaged.files):
            continue
        size = sum(part.stat().st_size for part in parts)
        path = cache.find("models", packaged.sha256, ".gguf") if packaged.made else parts[0]
        if path is None and packaged.hears:
            summary = Summary("whisper", reason="edge transcribe makes its GGUF file when it is first used")
            yield LocalModel(name, "package", None, size, parts[0].stat().st_mtime, "written", summary)
        elif path is None:  # the first part has the header
            yield LocalModel(name, "package", None, size, parts[0].stat().st_mtime, "written", _summary(parts[0], size))
        else:
            yield _local(name, "package", path, size + path.stat().st_size * packaged.made)


def _downloaded() -> Iterator[LocalModel]:
    for each in cached_files():
        yield _local(_name(each), "hub", each.path, each.bytes)


def _joined() -> Iterator[LocalModel]:
    """Models in edge's own cache whose packages are gone."""
    present = {packaged.sha256 for name, packaged in PACKAGED.items() if installed_parts(name)}
    for entry in cache.entries("models"):
        if entry.key not in present:
            yield _local(str(entry.path), "cache", entry.path, entry.bytes)


def _local(name: str, place: Place, path: Path, size: int) -> LocalModel:
    status = path.stat()  # before the header is read
    summary = _summary(path)
    ran = last_run(summary.key) if summary.key else None
    if ran is not None:
        return LocalModel(name, place, path, size, ran, "run", summary)
    by: Literal["read", "written"] = "read" if status.st_atime > status.st_mtime else "written"
    return LocalModel(name, place, path, size, max(status.st_atime, status.st_mtime), by, summary)


def _name(cached: CachedFile) -> str:
    """The shortest unambiguous name of this file: with its quantization, else with the file's path."""
    label = label_of(cached.file)
    candidates = [Reference(cached.repository, quant=label)] if label else []
    candidates += [
        Reference(cached.repository, file=cached.file),
        Reference(cached.repository, cached.commit, file=cached.file),
    ]
    return next((str(each) for each in candidates if find_cached(each) == cached.path), str(cached.path))


def _summary(path: Path, size: int | None = None) -> Summary:
    """The summary, from the cache or the header. size: bytes of the whole model, if `path` is its first part."""
    depends = (_EDITION, FileState.of(path.stat()), edge_version(), _installed_engines())
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:32]
    made: list[Summary] = []

    def write(target: Path) -> None:
        made.append(_read(path, size))
        target.write_text(json.dumps(asdict(made[0])), encoding="utf-8")

    with suppress(CacheError, OSError, ValueError):  # without a cache folder it is read each time
        found = cache.find_or_make("headers", key, ".json", write, about=f"summary of {path.name}")
        return made[0] if made else parse(Summary, json.loads(found.read_text(encoding="utf-8")))
    return made[0] if made else _read(path, size)


def _read(path: Path, size: int | None) -> Summary:
    """Read a summary. Never raises: a fault of the file becomes its reason."""
    try:
        file = read_gguf(path, size)
    except (EdgeError, OSError) as error:
        return Summary(reason=_plain(error, path))
    known = Summary(
        architecture=str(file.metadata.get("general.architecture", "unknown"))[:100],
        parameters=sum(info.elements for info in file.tensors.values()),
    )
    try:
        return _describe(file, known)
    except EdgeError as error:
        return Summary(known.architecture, known.parameters, reason=_plain(error, path))


def _describe(file: GGUFFile, known: Summary) -> Summary:
    spec = read_spec(file)
    template = file.metadata.get("tokenizer.chat_template")
    uses = [engine_use(name, file, spec) for name in backend_names() if name != "reference"]
    engines = tuple(use.engine for use in uses if use.reason is None)
    refused = {use.engine: use.reason for use in uses if use.reason is not None}
    return Summary(
        architecture=known.architecture,
        parameters=known.parameters,
        type=spec.weight_type,
        context=spec.context,
        chat=isinstance(template, str),
        thinks=isinstance(template, str) and find_family(template) is not None,
        key=model_key(spec),
        engines=engines,
        refused=refused,
        reason=None if engines else "; ".join(f"{name}: {why}" for name, why in refused.items()),
    )


def _plain(error: Exception, path: Path) -> str:
    return " ".join(str(error).removeprefix(f"{path}: ").split())


def _installed_engines() -> list[str]:
    found = []
    for name in backend_names():
        with suppress(MissingExtraError, UnsupportedError):
            engine_named(name).check_installed()
            found.append(name)
    return found


def _uninstall(name: str) -> str:
    """The pip command that removes the packages of a model."""
    known = packages_distributions()
    names = dict.fromkeys(known.get(package, [package])[0] for package, _ in PACKAGED[name].files)
    return f"pip uninstall {' '.join(names)}"
