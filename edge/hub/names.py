"""Parser of model names on the Hub: hf.co/USER/REPO:QUANT, hf:USER/REPO@REVISION, USER/REPO, and addresses of pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from edge.errors import InputError

_SITE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:(?://)?", re.IGNORECASE)
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_WORD = r"[\w.-]{1,100}"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})"
    rf"(?:@(?P<revision>{_WORD})|/(?:blob|resolve|tree)/(?P<branch>{_WORD}))?"
    rf"(?:/(?P<file>[^:?#]+))?(?::(?P<quant>{_WORD}))?/?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Reference:
    """A model on the Hub."""

    repository: str  # USER/REPO
    revision: str = "main"  # a branch, tag or commit
    quant: str | None = None  # in capitals, as Q4_K_M
    file: str | None = None  # path in the repository, if given

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        file = "" if self.file is None else f"/{self.file}"
        return f"hf.co/{self.repository}{at}{file}{'' if self.quant is None else f':{self.quant}'}"


def names_a_site(name: str) -> bool:
    """Whether a name explicitly refers to the Hub; others can be paths."""
    return _SITE.match(name) is not None


def parse_reference(name: str) -> Reference:
    """Parse a name. Raises InputError for one that no repository can have."""
    bare = unquote(_SITE.sub("", name, count=1).partition("?")[0].partition("#")[0])
    match = _NAME.fullmatch(bare)
    revision = match and (match["revision"] or match["branch"])
    if match is None or not is_repository(match["repository"]) or ".." in (revision or ""):
        raise InputError(f"{name[:200]!r} names no model: write hf.co/USER/REPO or hf.co/USER/REPO:Q4_K_M")
    if match["file"] is not None:
        check_path(match["file"])
    quant = match["quant"].upper() if match["quant"] else None
    return Reference(match["repository"], revision or "main", quant, match["file"])


def is_repository(name: object) -> bool:
    """Whether a name has the form USER/REPO, which gives it an unambiguous folder in the cache."""
    plain = isinstance(name, str) and re.fullmatch(rf"{_PART}/{_PART}", name, re.ASCII) is not None
    return plain and "--" not in str(name) and ".." not in str(name)


def is_commit(name: object) -> bool:
    return isinstance(name, str) and _COMMIT.fullmatch(name) is not None


def check_path(path: str) -> None:
    """Raise InputError unless a file of that path stays within its folder, on every system."""
    parts = path.split("/")
    if not path.isprintable() or len(path) > 500 or any(each in ("", ".", "..") or "\\" in each for each in parts):
        raise InputError(f"{path[:200]!r} is no path of a file in a repository")
    if ":" in path or any(each.endswith((" ", ".")) for each in parts):
        raise InputError(f"{path[:200]!r} is a path that not every system can hold")
