"""Seeds faults in sources, one at a time, and says which of them the given tests find.

    python tests/faults.py backends/tvm edge/apps --count 20 --seed 48 -- tests/native tests/apps -n 2

A fault is a wrong constant, a swapped operator or a skipped line, in a place that the seed alone chooses. Each is
undone after its run. Without tests: lists them.

A fault may disable the check that keeps a test from replacing a system's file, and in a container tests run as root. So
they run where only this tree, the folder of temporary files and build/ can be written; without such a namespace, only
for users other than root.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In a mount namespace: "$@" with all else read-only. Compilers and drivers keep caches in HOME.
_CONFINED = """
for each in "$1" "$2" $(readlink -f "$1"/build/*) /dev; do mount --rbind "$each" "$each" || exit 125; done
mount -o remount,ro,bind / && mount -o remount,ro,bind /dev || exit 125
export HOME="$2/edge-faults-home" && mkdir -p "$HOME" && cd "$1" && shift 2
exec "$@"
"""
SUFFIXES = (".py", ".c", ".h", ".js", ".mjs")
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "===": "!==", "!==": "===",
    " + ": " - ", " - ": " + ", " // ": " * ", " % ": " + ", "+=": "-=", "-=": "+=", "&&": "||", "||": "&&",
    "and": "or", "or": "and", "not ": "", "is not": "is", "True": "False", "False": "True",
    "true": "false", "false": "true", "min": "max", "max": "min", "any": "all", "all": "any",
}  # fmt: skip
_PROSE = r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|`(?:\\.|[^`\\])*`|->|=>'
_COMMENT = {".py": r"#.*|^from .*|^import .*|^@.*"}
_OTHER_COMMENT = r" ?//.*|/\*[\s\S]*?\*/|^[ \t]*#.*"
_PLACES = (
    r"(?P<line>^[ \t]+[\w.>\[\]-]+ [-+*|&]?= [^\n(\[{]*$|^[ \t]+[\w.]+\([^\n()]*\);?$"
    r"|^[ \t]+[\w.>\[\]-]+ [-+*|&]?= [^\n]*;$)"
    r"|(?P<number>\b\d+\b(?![.\w\"]))"
    r"|(?P<swap>is not|not | (?:\+|-|//|%) |[-+]=|[<>=!]==?=?|&&|\|\|"
    r"|\b(?:and|or|True|False|true|false|min|max|any|all)\b)"
)


@dataclass(frozen=True)
class Fault:
    path: Path
    start: int  # of the changed text
    old: str
    new: str

    def __str__(self) -> str:
        text = self.path.read_text()
        line = text.count("\n", 0, self.start) + 1
        return f"{self.path.relative_to(ROOT)}:{line}: {self.old.strip()!r} becomes {self.new.strip()!r}"

    def is_found(self, tests: list[str]) -> str | None:
        """The first test that fails with this fault."""
        before = self.path.read_text()
        self.path.write_text(before[: self.start] + self.new + before[self.start + len(self.old) :])
        try:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
            done = subprocess.run([*_confinement(), *command], cwd=ROOT, capture_output=True, text=True)
        finally:
            self.path.write_text(before)
        if done.returncode == 0:
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[1] if failed else (done.stdout + done.stderr).strip().splitlines()[-1]


@cache
def _confinement() -> list[str]:
    """The words before a command that keep it from damaging anything else."""
    prefix = ["unshare", "--mount", "sh", "-c", _CONFINED, "sh", str(ROOT), tempfile.gettempdir()]
    if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
        return prefix
    if os.geteuid() == 0:
        sys.exit("no mount namespace for the tests, and as root they could damage this system: run as another user")
    return []


def faults(path: Path) -> Iterator[Fault]:
    """All that can be seeded in a file."""
    text, suffix = path.read_text(), path.suffix
    pattern = "|".join((_PROSE, _COMMENT.get(suffix, _OTHER_COMMENT), _PLACES))
    for match in re.finditer(pattern, text, re.MULTILINE):
        old = match[0]
        if match["line"]:
            indent = old[: len(old) - len(old.lstrip())]
            yield Fault(path, match.start(), old, indent + ("pass" if suffix == ".py" else ";"))
        elif match["number"]:
            yield Fault(path, match.start(), old, str(int(old) + 1))
        elif match["swap"] and old in SWAPS:
            yield Fault(path, match.start(), old, SWAPS[old])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path, help="folders or files to choose places in")
    parser.add_argument("--count", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=48)
    parser.add_argument("--only", help="numbers of faults to run, such as 3,7: others are listed alone")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen, tests = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    named = [ROOT / each for each in chosen.sources]
    paths = [path for each in named for path in (sorted(each.rglob("*")) if each.is_dir() else [each])]
    lines = {  # one fault a line, so that long lines count once
        (fault.path, fault.path.read_text().count("\n", 0, fault.start)): fault
        for path in paths
        if path.suffix in SUFFIXES
        for fault in faults(path)
    }
    only = set(map(int, chosen.only.split(","))) if chosen.only else set(range(1, chosen.count + 1))
    found = 0
    for number, fault in enumerate(random.Random(chosen.seed).sample(list(lines.values()), chosen.count), 1):
        by = fault.is_found(tests) if tests and number in only else None
        found += by is not None
        outcome = "" if not tests or number not in only else f": found by {by}" if by else ": not found"
        print(f"{number:3} {fault}{outcome}", flush=True)
    if tests:
        print(f"{found} of {len(only)} found")


if __name__ == "__main__":
    main()
