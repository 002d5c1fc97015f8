"""The table of trials beside a record, one JSON line each, which `--show` explains and later tunings start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edge.devices.private import make_private_folder
from edge.devices.regular import read_regular
from edge.lab.tuning.races import Trial
from edge.values import parse

_MOST_BYTES = 16 << 20  # a trial takes half a kilobyte
_TOO_LARGE = 1e9  # of a ratio of times


@dataclass(frozen=True)
class Table:
    """A table of trials."""

    path: Path
    key: str  # conditions of the trials; trials with another key are not reused

    def start(self, trials: Sequence[Trial]) -> None:
        """Replace the table by these trials. Raises OSError."""
        make_private_folder(self.path.parent)
        lines = [json.dumps({"key": self.key}), *(json.dumps(asdict(trial)) for trial in trials)]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def add(self, trial: Trial) -> None:
        """Append a trial immediately, so that no interruption loses it. Raises OSError."""
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(trial)) + "\n")

    def distrust(self, trials: Sequence[Trial]) -> None:
        """Keep trials for `--show` only: the comparison contradicts the races, so the next tuning starts anew."""
        Table(self.path, "contradicted").start(trials)

    def known(self) -> list[Trial]:
        """Trials with this key, except failed ones, which may be retried; none if the table has another key."""
        return [trial for trial in read_trials(self.path, self.key) if trial.fate != "failed"]


def read_trials(path: Path, key: str | None = None) -> list[Trial]:
    """The trials of a table (with this key), up to the first invalid line: the last one may have been cut off."""
    found: list[Trial] = []
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        head, *lines = read_regular(path, _MOST_BYTES).decode().splitlines()
        if key is not None and json.loads(head)["key"] != key:
            return []
        for line in lines:
            trial = parse(Trial, json.loads(line))
            if not _is_sound(trial) or (found and trial.against.keys() != found[0].against.keys()):
                break
            found.append(trial)
    return found


def _is_sound(trial: Trial) -> bool:
    """Whether each value raced against another, and times are plausible."""
    ratios = (trial.ratio, trial.score, *trial.part_ratios.values())
    return trial.changes.keys() <= trial.against.keys() and all(r is None or 0 < r < _TOO_LARGE for r in ratios)
