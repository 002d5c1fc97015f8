"""An index: one SQLite file with passages, their words (FTS5) and their vectors.

    files     the files that were read, with their hashes
    passages  their passages, with a place; vector is NULL until the encoder has seen the text
    words     FTS5's index of the passages' words, kept by triggers
    facts     the sources, and the encoder of the vectors

A vector is int8 [size], its values divided by `scale`; all vectors have length 1. A file's passages are replaced, and
vectors added, in transactions: an interrupted run leaves a whole index, and the next one goes on. While sources are
read, two temporary tables hold the paths that were there before and those that were found, which may be millions.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from edge.devices.platform import system_folder
from edge.devices.private import is_private_file, make_private_folder
from edge.documents.reading import Document
from edge.documents.splitting import Passage
from edge.errors import InputError, UnsupportedError
from edge.records import dataclass
from edge.run.report import label_of, place_of
from edge.storage.lock import file_lock
from edge.types import AnyArray, FloatArray

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".sqlite"
_VERSION = 1
_PATIENCE_S = 10.0  # for another process's transaction
_TOGETHER_S = 0.5  # of changes in one transaction
_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, sha256 TEXT NOT NULL, size INTEGER NOT NULL,
    changed INTEGER NOT NULL, title TEXT NOT NULL, unit TEXT NOT NULL
);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES files ON DELETE CASCADE, heading TEXT NOT NULL,
    text TEXT NOT NULL, place INTEGER NOT NULL, tokens INTEGER NOT NULL, scale REAL, vector BLOB
);
CREATE INDEX passages_of_files ON passages (file);
CREATE INDEX waiting ON passages (id) WHERE vector IS NULL;
CREATE VIRTUAL TABLE words USING fts5 (
    heading, text, content='passages', content_rowid='id', tokenize='porter unicode61 remove_diacritics 2'
);
CREATE TRIGGER words_added AFTER INSERT ON passages BEGIN
    INSERT INTO words (rowid, heading, text) VALUES (new.id, new.heading, new.text);
END;
CREATE TRIGGER words_removed AFTER DELETE ON passages BEGIN
    INSERT INTO words (words, rowid, heading, text) VALUES ('delete', old.id, old.heading, old.text);
END;
PRAGMA user_version = {_VERSION};
"""
_BEFORE = "CREATE TEMP TABLE IF NOT EXISTS before AS SELECT path FROM files"


@dataclass(frozen=True)
class Stored:
    """A passage of the index. file: its path. place: a line or a page (`unit`), from 1. tokens: by the encoder."""

    id: int
    text: str
    title: str
    heading: str
    file: str
    place: int
    unit: str
    tokens: int

    @property
    def label(self) -> str:
        return label_of(self.title, self.heading)

    @property
    def where(self) -> str:
        return place_of(self.file, self.place, self.unit)

    @property
    def titled(self) -> str:
        """The text behind its title and headings, as encoders and rerankers read it."""
        return f"{self.label}\n{self.text}"


def indexes_folder() -> Path:
    """The folder of indexes: EDGE_INDEXES, or one in the system's folder for data. It need not exist."""
    chosen = os.environ.get("EDGE_INDEXES") or Path(system_folder("data")) / "indexes"
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def index_path(name: str) -> Path:
    """The file of an index. Raises InputError for a name that none can have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "letters, digits, dots, underscores and hyphens, 64 at most, with a letter or digit first"
        raise InputError(f"an index is named by {wanted}, not {name!r:.80}")
    return indexes_folder() / f"{name}{_SUFFIX}"


def index_names() -> list[str]:
    """The names of all indexes, sorted."""
    folder = indexes_folder()
    return sorted(path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []


@contextmanager
def writing(name: str, waiting: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Let one process at a time change an index; the others wait. waiting: is called once then. Raises InputError,
    CacheError."""
    path = index_path(name)
    with ExitStack() as held:
        with _explained(path):
            make_private_folder(path.parent)
            held.enter_context(file_lock(path.with_suffix(".lock"), waiting=waiting))
        yield


def remove_index(name: str) -> None:
    """Delete an index. Raises InputError if there is none."""
    _check_there(name)
    with writing(name), _explained(index_path(name)):
        index_path(name).unlink()
        for suffix in (".usearch", ".partial"):
            index_path(name).with_suffix(suffix).unlink(missing_ok=True)


def _check_there(name: str) -> None:
    if not index_path(name).is_file():
        known = ", ".join(index_names()) or "none"
        raise InputError(f"there is no index {name!r}: edge index {name} DIR makes it (there: {known})")


class Store:
    """An open index. Use it as a context manager, or call `close`. Any thread may use it, one at a time.

    create: whether a missing index is made, as `new` then says. Raises InputError for an index that is missing or
    damaged, UnsupportedError for one of a later version, or where SQLite has no FTS5.
    """

    def __init__(self, name: str, *, create: bool = False) -> None:
        path = self.path = index_path(name)
        self.name = name
        if not create:
            _check_there(name)
        with _explained(path):
            if path.exists() and not is_private_file(path.stat()):
                raise InputError(f"{path} is not used: other users may have written it")
            new = self.new = not path.exists()
            if new:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._base = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
        try:
            with _explained(path):
                self._base.execute("PRAGMA foreign_keys = ON")
                version = self._base.execute("PRAGMA user_version").fetchone()[0]
                if version > _VERSION:
                    raise UnsupportedError(f"{path} was made by a later edge: use that, or edge index --remove {name}")
                if not version:
                    self._base.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except BaseException:
            self.close()
            if new:
                path.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._base.close()

    @contextmanager
    def together(self) -> Iterator[Callable[[], None]]:
        """Write changes in common transactions: one for each file costs a disk some 40 ms. Yields what is to be called
        between two changes, which ends a transaction after half a second."""
        began = time.monotonic()

        def step() -> None:
            nonlocal began
            if time.monotonic() - began > _TOGETHER_S:
                self._run("COMMIT")
                self._run("BEGIN IMMEDIATE")
                began = time.monotonic()

        self._run("BEGIN IMMEDIATE")
        try:
            yield step
        except BaseException:
            self._base.rollback()  # unless SQLite has done so
            raise
        self._run("COMMIT")

    def _run(self, statement: str) -> None:
        with _explained(self.path):
            self._base.execute(statement)

    @contextmanager
    def _changing(self, *, passages: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction, or a part of one, which counts as a whole or not at all. passages: it may change these."""
        with _explained(self.path), nullcontext() if self._base.in_transaction else self.together():
            before = self._base.total_changes
            yield self._base
            if passages and self._base.total_changes != before:
                self._base.execute("DELETE FROM facts WHERE name = 'near'")

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with _explained(self.path):
            return self._base.execute(query, values).fetchall()

    # Facts

    @property
    def sources(self) -> list[str]:
        """Paths of files and folders, as they were named."""
        return list(json.loads(self._fact("sources") or "[]"))

    @sources.setter
    def sources(self, paths: Iterable[str]) -> None:
        self._set_fact("sources", json.dumps(list(dict.fromkeys(paths))))

    @property
    def encoder(self) -> str | None:
        """The name or path of the encoder of the vectors."""
        return self._fact("encoder")

    @property
    def encoder_hash(self) -> str | None:
        """SHA-256 of its file."""
        return self._fact("encoder_hash")

    def set_encoder(self, name: str, sha256: str) -> None:
        """State the encoder. Vectors of another one leave."""
        changed = self.encoder_hash not in (None, sha256)
        with self._changing(passages=changed) as base:
            if changed:
                base.execute("UPDATE passages SET vector = NULL, scale = NULL")
            for fact, value in (("encoder", name), ("encoder_hash", sha256)):
                base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (fact, value))

    # The graph of its vectors (nearest.py)

    @property
    def near_path(self) -> Path:
        return self.path.with_suffix(".usearch")

    @property
    def near(self) -> str | None:
        """The mark of the file that has the present vectors: a change of these makes it stale."""
        return self._fact("near")

    @near.setter
    def near(self, mark: str) -> None:
        self._set_fact("near", mark)

    def vector_size(self) -> tuple[int, int]:
        """The values of a vector, and the number of vectors."""
        [[size, count]] = self._rows("SELECT max(length(vector)), count(vector) FROM passages")
        return int(size or 0), int(count)

    def _fact(self, name: str) -> str | None:
        found = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return str(found[0][0]) if found else None

    def _set_fact(self, name: str, value: str) -> None:
        with self._changing(passages=False) as base:
            base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    # Files and passages

    def counts(self) -> tuple[int, int, int]:
        """The numbers of files, of passages, and of passages without a vector."""
        [found] = self._rows(
            "SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM passages), "
            "(SELECT count(*) FROM passages WHERE vector IS NULL)"
        )
        return found[0], found[1], found[2]

    def files(self) -> Iterator[str]:
        """The paths of all files."""
        return (row[0] for row in self._rows("SELECT path FROM files"))

    def state(self, path: str) -> tuple[str, int, int] | None:
        """SHA-256, size and time of the last change (nanoseconds) of a file."""
        found = self._rows("SELECT sha256, size, changed FROM files WHERE path = ?", (path,))
        return found[0] if found else None

    def find(self, paths: Iterable[str]) -> int:
        """Note the paths of all files that sources have now, each once. Returns their number."""
        with _explained(self.path):
            self._base.executescript(f"{_BEFORE}; CREATE TEMP TABLE found (id INTEGER PRIMARY KEY, path TEXT UNIQUE);")
            with self.together():
                self._base.executemany("INSERT OR IGNORE INTO found (path) VALUES (?)", ((each,) for each in paths))
            return int(self._rows("SELECT count(*) FROM found")[0][0])

    def found(self) -> Iterator[str]:
        """The paths that were found, in their order."""
        rows = [(0, "")]
        while rows := self._rows("SELECT id, path FROM found WHERE id > ? ORDER BY id LIMIT 1000", (rows[-1][0],)):
            yield from (path for _, path in rows)

    def drop_gone(self) -> int:
        """Remove the files that were not found. Returns their number."""
        return self._drop_but("found")

    def drop_new(self) -> None:
        """Remove the files that were not there before any were found."""
        with self._changing() as base:
            base.execute(_BEFORE)
        self._drop_but("before")

    def _drop_but(self, kept: str) -> int:
        with self._changing() as base:
            return base.execute(f"DELETE FROM files WHERE path NOT IN (SELECT path FROM temp.{kept})").rowcount

    def put(
        self, path: str, state: tuple[str, int, int], document: Document | None, passages: Iterable[Passage]
    ) -> None:
        """Replace a file's passages; without a document only its state."""
        with self._changing(passages=document is not None) as base:
            if document is None:
                base.execute("UPDATE files SET sha256 = ?, size = ?, changed = ? WHERE path = ?", (*state, path))
                return
            base.execute("DELETE FROM files WHERE path = ?", (path,))
            title, insert = document.title, "INSERT INTO files (path, sha256, size, changed, title, unit) VALUES "
            file = base.execute(f"{insert} (?, ?, ?, ?, ?, ?)", (path, *state, title, document.unit)).lastrowid
            for each in passages:
                base.execute(
                    "INSERT INTO passages (file, heading, text, place, tokens) VALUES (?, ?, ?, ?, ?)",
                    (file, each.heading, each.text, each.place, each.tokens),
                )

    def drop(self, paths: Iterable[str]) -> None:
        """Remove files and their passages."""
        with self._changing() as base:
            base.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def passages(self, ids: Sequence[int]) -> list[Stored]:
        """Passages by their ids, in this order; those that have left meanwhile are missing."""
        found = {}
        for start in range(0, len(ids), 500):  # SQLite limits the variables of a query
            some = ids[start : start + 500]
            for row in self._rows(f"{_PASSAGES} WHERE passages.id IN ({','.join('?' * len(some))})", some):
                found[row[0]] = Stored(*row)
        return [found[each] for each in ids if each in found]

    def waiting(self, most: int) -> list[Stored]:
        """The first passages without a vector, at most this many."""
        return [Stored(*row) for row in self._rows(f"{_PASSAGES} WHERE vector IS NULL ORDER BY passages.id LIMIT ?",
                                                   (most,))]  # fmt: skip

    # Vectors and words

    def put_vectors(self, ids: Sequence[int], vectors: FloatArray) -> None:
        """Store vectors of length 1, float32 [ids, size], as int8."""
        scales = np.abs(vectors).max(axis=1) / 127
        codes = np.rint(vectors / np.maximum(scales, 1e-12)[:, None]).astype(np.int8)
        rows = [(float(scale), code.tobytes(), each) for each, scale, code in zip(ids, scales, codes, strict=True)]
        with self._changing() as base:
            base.executemany("UPDATE passages SET scale = ?, vector = ? WHERE id = ?", rows)

    def vectors(
        self, size: int, at_once: int, only: Sequence[int] | None = None
    ) -> Iterator[tuple[AnyArray, FloatArray, AnyArray]]:
        """Yield ids, int64 [n], scales, float32 [n], and codes, int8 [n, size], n at most `at_once`. only: of these
        passages, some hundreds."""
        some = "" if only is None else f" AND id IN ({','.join(map(str, only))})"
        with _explained(self.path), closing(self._base.cursor()) as cursor:
            cursor.execute("SELECT id, scale, vector FROM passages WHERE length(vector) = ?" + some, (size,))
            while rows := cursor.fetchmany(at_once):
                ids, scales, codes = zip(*rows, strict=True)
                yield (
                    np.array(ids, np.int64), np.array(scales, np.float32),
                    np.frombuffer(b"".join(codes), np.int8).reshape(len(rows), size),
                )  # fmt: skip

    def find_words(self, query: str, most: int) -> list[int]:
        """The ids of the passages that FTS5 ranks best by BM25 for a query in its language, the best first."""
        return [row[0] for row in self._rows(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words, 2.0, 1.0), rowid LIMIT ?", (query, most)
        )]  # fmt: skip


_PASSAGES = (
    "SELECT passages.id, text, title, heading, path, place, unit, tokens FROM passages JOIN files ON files.id = file"
)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if "fts5" in str(error):
            raise UnsupportedError("this Python's SQLite has no FTS5, which indexes need") from None
        if isinstance(error, sqlite3.ProgrammingError):
            raise InputError(f"the index {path.stem} is closed") from None
        damaged = "not a database" in str(error) or "malformed" in str(error)
        advice = f": edge index {path.stem} --remove deletes it, to be made anew" if damaged else ""
        raise InputError(f"{path}: {error}{advice}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None
