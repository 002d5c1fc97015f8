"""The table of trials beside a record, a line of JSON each: what `--show` explains and a second tuning starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edge.devices.private import make_private_folder
from edge.devices.regular import read_regular
from edge.tuning.search import Trial


@dataclass(frozen=True)
class Table:
    """key: what the trials depend on; those of another key are of no use."""

    path: Path
    key: str

    def start(self, trials: Sequence[Trial]) -> None:
        """Write the table anew, with these trials. Raises OSError."""
        make_private_folder(self.path.parent)
        lines = [json.dumps({"key": self.key}), *(json.dumps(asdict(trial)) for trial in trials)]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def add(self, trial: Trial) -> None:
        """Append one, at once: whatever ends the tuning, it is not lost. Raises OSError."""
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(trial)) + "\n")

    def distrust(self, trials: Sequence[Trial]) -> None:
        """Keep them for `--show` only: the comparison contradicts the races, so the next tuning starts anew."""
        Table(self.path, "contradicted").start(trials)

    def known(self) -> list[Trial]:
        """Trials of this key; none if the table is another's. Those that failed may be tried again."""
        return [trial for trial in read_trials(self.path, self.key) if trial.fate != "failed"]


def read_trials(path: Path, key: str | None = None) -> list[Trial]:
    """All trials of a table (if it has this key). A last line that was cut off is left out."""
    found: list[Trial] = []
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        head, *lines = read_regular(path).decode().splitlines()
        if key is not None and json.loads(head)["key"] != key:
            return []
        for line in lines:
            fields = json.loads(line)
            found.append(Trial(**fields | {"parts": tuple(fields["parts"])}))
    return found
