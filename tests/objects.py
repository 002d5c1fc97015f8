"""C files that tests compile are compiled once for the same options, whatever library, kit or program they go into."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

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
    headers = "".join(map(_headers, dict.fromkeys([*included, source.parent])))
    text = source.read_text(encoding="utf-8")
    for name in re.findall(r'^#include "([\w.]+\.c)"', text, re.MULTILINE):
        text += next(folder / name for folder in included if (folder / name).exists()).read_text(encoding="utf-8")
    defined = {each: re.escape(each[2:].partition("=")[0]) for each in flags if each.startswith("-D")}
    used = [
        each for each in flags
        if each not in defined
        or each.startswith("-D_")
        or any(re.search(rf"\b{defined[each]}\b", part) for part in (text, headers))
    ]  # fmt: skip
    plain = [each for each in used if not each.startswith("-I")]
    digest = hashlib.sha256(repr((list(compiler), plain, source.name, text, headers)).encode()).hexdigest()[:32]
    kept = Path(os.environ[OBJECTS]) / f"{digest}.o"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_name(f"{digest}-{os.getpid()}.o")
        make(used, made)
        made.rename(kept)
    return kept


def _headers(folder: Path) -> str:
    return _read(folder, max((each.stat().st_mtime_ns for each in folder.glob("*.h")), default=0))


@lru_cache
def _read(folder: Path, _changed: int) -> str:
    return "".join(f"{each.name}\n{each.read_text(encoding='utf-8')}" for each in sorted(folder.glob("*.h")))
