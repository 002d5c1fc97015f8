"""Notes of an unfinished transcript that goes into a file: a line of JSON for each window, from which the same command
continues after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge.errors import InputError
from edge.records import dataclass
from edge.run.speech.segments import Segment
from edge.run.speech.transcript import Place
from edge.values import parse

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class _Line:
    place: Place
    segments: tuple[Segment, ...]


class Unfinished:
    """The file NAME.part beside a transcript. key: what the transcript depends on.

    Entering it as a context opens the file to be written, leaving it closes the file, and removes it after an exception
    before the first window.
    """

    def __init__(self, target: Path, key: Mapping[str, Any], *, force: bool = False) -> None:
        """force: replace windows of another key. Raises InputError for them without it, and for other files."""
        self.path = target.with_name(f"{target.name}.part")
        self.place: Place | None = None  # behind the last window
        self._head, self._whole, head, lines = json.dumps(dict(key)).encode() + b"\n", 0, b"", 0
        with suppress(OSError, ValueError), open(self.path, "rb") as file:
            head = file.readline(_MOST_BYTES)
            if head == self._head:
                self._whole = file.tell()
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it was being written
                    found = parse(_Line, json.loads(line))
                    self.place, self._whole = found.place, self._whole + len(line)
            else:
                lines = sum(line.endswith(b"\n") for line in file)
        if head and not head.startswith(self._head.partition(b":")[0]):
            raise InputError(f"{self.path} is no unfinished transcript, and stays: choose another -o")
        if lines and not force:
            raise InputError(
                f"{self.path} is begun, but of another model or sound or with other options: those go on from there, "
                "--force begins anew"
            )

    def add(self, place: Place, segments: Sequence[Segment]) -> None:
        """Keep a window. It is on the disk when this returns."""
        self.place = place
        self._file.write(json.dumps(asdict(_Line(place, tuple(segments)))).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def segments(self) -> Iterator[Segment]:
        """Those of all windows, read from the file."""
        with open(self.path, "rb") as file:
            file.readline()
            for line in file:
                yield from parse(_Line, json.loads(line)).segments

    def __enter__(self) -> Unfinished:
        """Raises InputError if it cannot be written."""
        try:
            self._file = open(self.path, "r+b" if self._whole else "wb")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written ({error.strerror})") from None
        if self._whole:
            self._file.truncate(self._whole)
            self._file.seek(self._whole)
        else:
            self._file.write(self._head)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None and self.place is None:
            self.path.unlink(missing_ok=True)

    def finish(self) -> None:
        """The transcript is whole and written: remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
