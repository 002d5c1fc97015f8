"""C files that tests compile are compiled once for the same options, whatever library, kit or program they go into."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"\w+")
OBJECTS = "EDGE_TEST_OBJECTS"  # environment variable: their folder, which children inherit


def share_objects() -> None:
    """Also those of `edge export` and `edge profile --on kit:DIR`, in this process."""
    from edge.apps import library

    plain = library.run_compiler

    def run(toolchain: library.Toolchain, *arguments: str | Path) -> str:
        if OBJECTS not in os.environ or len(arguments) < 4 or arguments[-4] != "-c":
            return plain(toolchain, *arguments)
        source, out = Path(arguments[-3]), Path(arguments[-1])
        made = object_of(
            (*toolchain.compiler, toolchain.version), list(map(str, arguments[:-4])), source,
            lambda flags, made: plain(toolchain, *flags, "-c", source, "-o", made),
        )  # fmt: skip
        shutil.copyfile(made, out)
        return ""

    library.run_compiler = run


def object_of(
    compiler: Sequence[str], flags: Sequence[str], source: Path, make: Callable[[list[str], Path], object]
) -> Path:
    """A file of the cache, which make(flags, path) writes if it is not there. Without definitions (-D) of names that
    neither the file nor a header mentions, so that more share it; those of the system's headers (_GNU_SOURCE) stay."""
    included = [Path(each[2:]) for each in flags if each.startswith("-I")]
    folders = dict.fromkeys([*included, source.parent])
    text = source.read_text(encoding="utf-8")
    for name in re.findall(r'^#include "([\w.]+\.c)"', text, re.MULTILINE):
        text += next(folder / name for folder in included if (folder / name).exists()).read_text(encoding="utf-8")
    names = _NAME.findall(text)
    used = [
        each for each in flags
        if not each.startswith("-D")
        or each.startswith("-D_")
        or (name := each[2:].partition("=")[0]) in names
        or any(name in _headers(folder)[1] for folder in folders)
    ]  # fmt: skip
    headers = "".join(_headers(folder)[0] for folder in folders)
    plain = [each for each in used if not each.startswith("-I")]
    digest = hashlib.sha256(repr((list(compiler), plain, source.name, text, headers)).encode()).hexdigest()[:32]
    kept = Path(os.environ[OBJECTS]) / f"{digest}.o"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_name(f"{digest}-{os.getpid()}.o")
        make(used, made)
        made.rename(kept)
    return kept


def _headers(folder: Path) -> tuple[str, frozenset[str]]:
    """Their text, as its digest, and the names in it."""
    return _read(folder, max((each.stat().st_mtime_ns for each in folder.glob("*.h")), default=0))


@lru_cache
def _read(folder: Path, _changed: int) -> tuple[str, frozenset[str]]:
    text = "".join(f"{each.name}\n{each.read_text(encoding='utf-8')}" for each in sorted(folder.glob("*.h")))
    return hashlib.sha256(text.encode()).hexdigest(), frozenset(_NAME.findall(text))
