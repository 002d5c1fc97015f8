"""Making and updating an index: files that are new or have changed are read and split, then passages embedded.

The second step takes nearly all of the time. It embeds whatever has no vector yet, a batch a transaction, so that an
interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge.budget import format_bytes
from edge.devices.memory import memory_limit, memory_use
from edge.documents.encoder import MINILM, check_options, embed_passages, full_name, hash_of, load_encoder, open_encoder
from edge.documents.nearest import build
from edge.documents.reading import READERS, read_document
from edge.documents.splitting import MOST, split
from edge.documents.store import Store, remove_index, writing
from edge.errors import EdgeError, InputError, MissingExtraError
from edge.model.model import Model
from edge.options import Options, takes_options
from edge.records import dataclass

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

OnProgress = Callable[[str, float, float], None]
"""Is called with a step's name, the part that is done, and the whole."""

_AT_ONCE = 32  # passages of a transaction
_MOST_FILE = 64 << 20  # bytes
_NAMED = 3  # sources that an error names
_HELD = 12  # bytes of memory that a byte of a file may take while it is read
_WORD = 12  # characters of a token, at most: a long word that the encoder does not know is one token


@dataclass(frozen=True)
class Indexed:
    """The result of an update. Counts are of files, but for `passages`, all of the index, and `embedded`, those that
    got a vector. unread: files that could not be read, with the reasons. bytes: of the index. peak: of the process, in
    bytes, and `planned` what the encoder's plan predicted (None: nothing was to embed)."""

    name: str
    path: str
    encoder: str
    files: int
    added: int
    changed: int
    removed: int
    unread: tuple[tuple[str, str], ...]
    passages: int
    embedded: int
    bytes: int
    seconds: float
    peak: int
    planned: int | None


@takes_options
def index(
    name: str,
    *sources: str | Path,
    encoder: str | None = None,
    options: Options | None = None,
    on_progress: OnProgress | None = None,
    **keywords: Unpack[Keywords],
) -> Indexed:
    """Make an index of files and folders, or update one.

    sources: are added to those of the index; without any, these are read again. Of folders, files that are text,
    Markdown, HTML or PDF by their endings are read, and hidden ones passed over. Unchanged files, by their hashes, cost
    nothing; those that are gone leave. encoder: all-minilm (default), or a model that embeds; another than before
    embeds everything anew. The keywords are options, of which memory, threads and backend hold for the encoder:

    OPTIONS

    An interrupted call leaves a whole index, and the next one goes on. Raises InputError for sources that are missing
    or cannot be read, BudgetError, MissingExtraError.
    """
    began, options = time.perf_counter(), Options.of(options, **keywords)
    check_options(options)
    paths = _absolute(sources)
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"there is no file or folder {path}")
        if not _is_readable(path):
            raise InputError(f"{path} is neither a file nor a folder")

    def wait(holder: str) -> None:
        if on_progress is not None:
            on_progress(f"waiting for another edge index {name}", 0, 1)

    with writing(name, wait), ExitStack() as failed, Store(name, create=bool(paths)) as store:
        known = store.sources
        try:
            chosen = full_name(encoder or store.encoder or MINILM)
            model = open_encoder(chosen, options)
            sources_now = list(dict.fromkeys([*known, *paths]))
            unread = list[tuple[str, str]]()
            count = store.find(_named(_files(name, sources_now), unread))
            store.set_encoder(chosen, hash_of(model))
            store.sources = sources_now
            added, changed = _read_all(store, count, unread, paths, model, options, on_progress)
        except EdgeError:  # a source that fails is none of the index
            if store.new:
                failed.callback(store.path.unlink)  # when it is closed
            else:
                store.sources = known
                store.drop_new()
            raise
        gone = store.drop_gone()
        embedded, planned = _embed_all(store, model, options, on_progress)
        room = (memory_limit().bytes if options.memory is None else options.memory) - memory_use().rss
        build(store, room, lambda done, whole: on_progress and on_progress("linking vectors", done, whole))
        files, passages, _ = store.counts()
        return Indexed(
            name, str(store.path), chosen, files, added, changed, gone, tuple(unread), passages, embedded,
            store.path.stat().st_size, time.perf_counter() - began, memory_use().peak, planned,
        )  # fmt: skip


def remove(name: str, *sources: str | Path) -> tuple[int, int]:
    """Remove sources from an index, with the passages of their files; without any, delete the index. Returns the
    numbers of files and of passages that left: none of a damaged index. Raises InputError for sources that it does not
    have."""
    if not sources:
        gone = 0, 0
        with suppress(EdgeError), Store(name) as store:
            gone = store.counts()[:2]
        remove_index(name)
        return gone
    paths = _absolute(sources)
    with Store(name) as store, writing(name):
        if unknown := [path for path in paths if path not in store.sources]:
            some, more = store.sources[:_NAMED], len(store.sources) - _NAMED
            known = ", ".join(some) + (f" and {more:,} more (edge index --json lists them)" if more > 0 else "")
            raise InputError(f"{unknown[0]} is no source of {name}: it has {known or 'none'}")
        before = store.counts()
        store.sources = left = [each for each in store.sources if each not in paths]
        inside = tuple(os.path.join(each, "") for each in left)
        store.drop([path for path in store.files() if path not in left and not path.startswith(inside)])
        after = store.counts()
        return before[0] - after[0], before[1] - after[1]


def _absolute(sources: Sequence[object]) -> list[str]:
    for each in sources:
        if not isinstance(each, str | os.PathLike):
            raise InputError(f"a source must be a path, not {each!r:.60}")
    return [os.path.abspath(os.path.expanduser(each)) for each in sources]  # type: ignore[call-overload]


def _is_readable(path: str) -> bool:
    """Not so a pipe or a device, which may never end."""
    return os.path.isfile(path) or os.path.isdir(path)


def _files(name: str, sources: Sequence[str]) -> Iterator[str]:
    """Yield the files of sources. Raises InputError for a missing source: a disk that is not mounted must not empty an
    index."""
    for source in sources:
        if not _is_readable(source):
            what = "is neither a file nor a folder" if os.path.exists(source) else "is not there"
            raise InputError(f"{source} {what}: edge index {name} {source} --remove takes it out of the index")
        yield from _walk(source) if os.path.isdir(source) else [source]


def _named(paths: Iterable[str], unread: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the paths that are in UTF-8, as SQLite's text is; the others cannot be read."""
    for path in paths:
        try:
            path.encode()
            yield path
        except UnicodeEncodeError:
            unread.append((path.encode(errors="backslashreplace").decode(), "its name is not in UTF-8"))


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        for each in sorted(names):
            path = os.path.join(parent, each)
            if not each.startswith(".") and Path(each).suffix.lower() in READERS and os.path.isfile(path):
                yield path


def _read_all(
    store: Store, found: int, unread: list[tuple[str, str]], named: Sequence[str], model: Model, options: Options,
    on_progress: OnProgress | None,
) -> tuple[int, int]:  # fmt: skip
    """Read and split those of the files found that are new or have changed. Returns the numbers of both. unread: gets
    files that could not be read. named: raise the errors of these files."""
    added = changed = 0
    most = min(MOST, model.spec.context * 25 // 32)  # the rest is for the title

    def count(text: str) -> int:
        return max(model.tokenizer.encode(text).size, len(text) // _WORD)

    with store.together() as step:
        for number, path in enumerate(store.found()):
            step()
            if on_progress is not None:
                on_progress("reading files", number, found)
            before = store.state(path)
            try:
                status = os.stat(path)
                if before is not None and before[1:] == (status.st_size, status.st_mtime_ns):
                    continue
                data = _bytes_of(path, status.st_size, options)
                state = (hashlib.sha256(data).hexdigest(), status.st_size, status.st_mtime_ns)
                if before is not None and before[0] == state[0]:
                    store.put(path, state, None, ())
                    continue
                document = read_document(path, data)
            except (InputError, MissingExtraError, OSError) as error:
                if path in named and not isinstance(error, OSError):
                    raise
                system = error.strerror if isinstance(error, OSError) else None
                unread.append((path, f"cannot be read ({system})" if system else str(error).removeprefix(f"{path} ")))
            else:
                store.put(path, state, document, split(document, count, most))
                added, changed = added + (before is None), changed + (before is not None)
    if on_progress is not None:
        on_progress("reading files", 1, 1)
    return added, changed


def _bytes_of(path: str, size: int, options: Options) -> bytes:
    """A file's content. Raises InputError for one that is larger than the memory allows; OSError."""
    room = memory_limit().bytes if options.memory is None else options.memory
    most = min(_MOST_FILE, max(0, room - memory_use().rss) // _HELD)
    if size > most:
        limit = "files may have" if most == _MOST_FILE else "the memory allows"
        raise InputError(f"{path} has {format_bytes(size)}, but {limit} {format_bytes(most)} at most: split it")
    return Path(path).read_bytes()


def _embed_all(
    store: Store, model: Model, options: Options, on_progress: OnProgress | None
) -> tuple[int, int | None]:  # fmt: skip
    """Embed the passages that have no vector. Returns their number, and the peak that the encoder's plan predicted."""
    _, _, left = store.counts()
    if not left:
        return 0, None
    done = 0
    with load_encoder(model, options) as session:
        while some := store.waiting(_AT_ONCE):
            store.put_vectors([each.id for each in some], embed_passages(session, some))
            done += len(some)
            if on_progress is not None:
                on_progress("embedding passages", done, left)
        return done, session.plan.predicted_peak
