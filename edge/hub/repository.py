"""A repository on the Hub: its commit, licence and files, with sizes and hashes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from edge.errors import DownloadError, InputError
from edge.hub.address import parse_address
from edge.hub.http import RefusedError, get_json
from edge.hub.names import Reference, check_path, is_commit
from edge.hub.settings import endpoint, token_for

_MOST_PAGES, _MOST_FILES = 50, 20_000
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    path: str
    size: int  # bytes
    hash: str  # SHA-256 of its content; for small files git's SHA-1 of a blob; for a joined file a key of its parts
    parts: tuple[RemoteFile, ...] = ()  # of a model that is split into several files


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    revision: str  # the branch or tag that the commit was found by
    commit: str
    licence: str | None  # None if it states none
    files: tuple[RemoteFile, ...]

    def url_of(self, file: RemoteFile) -> str:
        return f"{endpoint()}/{self.name}/resolve/{self.commit}/{quote(file.path)}"


def look_up(reference: Reference, near: str = "") -> Repository:
    """Look up a repository on the Hub. near: a hint of similar names, for an error if there is no such repository.

    Raises DownloadError, InputError.
    """
    api = f"{endpoint()}/api/models/{reference.repository}"
    with explained(reference.repository, reference.revision, near):
        about, _ = get_json(f"{api}/revision/{quote(reference.revision, safe='')}")
        commit = about.get("sha") if isinstance(about, dict) else None
        if not is_commit(commit):
            raise DownloadError(f"{api} is no Hub: its answer names no commit")
        files = tuple(_files(f"{api}/tree/{commit}?recursive=true"))
    return Repository(reference.repository, reference.revision, str(commit), _licence(about), files)


@contextmanager
def explained(repository: str, revision: str = "main", near: str = "") -> Iterator[None]:
    """Convert refusals into readable errors. Raises DownloadError, InputError."""
    try:
        yield
    except RefusedError as error:
        page = f"{endpoint()}/{repository}"
        if error.code == "GatedRepo" or (error.status == 403 and error.code != "RepoNotFound"):
            todo = "set HF_TOKEN to a token that may read it" if token_for(page) is None else "ask for access there"
            raise DownloadError(f"{repository} is gated: accept its terms at {page}, and {todo}") from None
        if error.code == "RevisionNotFound":
            raise InputError(f"{repository} has no revision {revision!r}: see {page}") from None
        if error.status in (401, 404):  # the Hub answers 401 for repositories that may be private
            known = f" ({near})" if near else ""
            rejected = "or HF_TOKEN is not valid" if token_for(page) else "or it is private and needs HF_TOKEN"
            raise InputError(
                f"{parse_address(page).netloc} has no repository {repository}{known}, {rejected}"
            ) from None
        raise DownloadError(str(error)) from None


def _files(url: str) -> Iterator[RemoteFile]:
    """All files of a paginated listing. Raises DownloadError if it is malformed."""
    count, following = 0, url
    for _ in range(_MOST_PAGES):
        entries, after = get_json(following)
        if not isinstance(entries, list):
            raise DownloadError(f"{url} is no listing of files")
        for entry in entries:
            count += 1
            if isinstance(entry, dict) and entry.get("type") == "file":
                yield _file(entry, url)
        if after is None or parse_address(after)[:2] != parse_address(url)[:2]:
            return
        following = after
        if count > _MOST_FILES:
            break
    raise DownloadError(f"{url} lists more than {_MOST_FILES} files: not a model's repository")


def _file(entry: dict[str, Any], url: str) -> RemoteFile:
    large = entry.get("lfs") if isinstance(entry.get("lfs"), dict) else None
    path, size = entry.get("path"), (large or entry).get("size")
    found, form = (large["oid"], _SHA256) if large and "oid" in large else (entry.get("oid"), _SHA1)
    sound = isinstance(path, str) and type(size) is int and 0 <= size < 1 << 44
    if not sound or not isinstance(found, str) or not form.fullmatch(found):
        raise DownloadError(f"{url} lists a file without size or hash: {str(path)[:100]!r}")
    try:
        check_path(str(path))
    except InputError as error:
        raise DownloadError(f"{url} lists a file that may not be written: {error}") from None
    return RemoteFile(str(path), int(size), found)  # type: ignore[arg-type]


def _licence(about: dict[str, Any]) -> str | None:
    """The licence in the repository's card, or its tag."""
    card = about.get("cardData")
    stated = [card.get("license_name"), card.get("license")] if isinstance(card, dict) else []
    tags = about.get("tags") if isinstance(about.get("tags"), list) else []
    stated += [tag[8:] for tag in tags or [] if isinstance(tag, str) and tag.startswith("license:")]
    found = next((each for each in stated if isinstance(each, str) and each), None)
    return found[:80] if found and found.isprintable() else None
