"""The eyes of a session by llama.cpp's mtmd, for encoders that edge does not run. A picture's texts and rows are known
once mtmd has encoded it, in a child process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends.llamacpp.eyes import Seen, see
from edge.errors import UnsupportedError
from edge.media.picture import Image
from edge.model.model import Model
from edge.model.parts.prompt import Looks
from edge.model.towers import Layout
from edge.run.senses.seeing import Room
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.run.budgets.meters import EnergyMeter


class MtmdEyes:
    """`Sense` by mtmd. Rows of the last pictures are kept; eager: of all."""

    marker = "<__media__>"  # which no template writes: pictures stand in their places within a message

    def __init__(
        self, model: Model, mmproj: Path, room: Room, threads: int, tokens: int | None = None, *, eager: bool = False,
        meter: EnergyMeter | None = None, tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._model, self._mmproj, self._room, self._threads, self._tokens = model, mmproj, room, threads, tokens
        self.eager, self._meter, self._tell, self.looks = eager, meter, tell, Looks()
        self._layouts, self._rows = dict[bytes, Layout](), OrderedDict[bytes, list[FloatArray]]()

    @property
    def reserve(self) -> int:
        return self._room.pixels + self._room.kept

    def check(self, medium: Image) -> None:
        assert medium.within(self._room.pixels).pixels.size

    def layout(self, medium: Image) -> Layout:
        key = medium.within(self._room.pixels).digest
        if key not in self._layouts:
            self._see(medium, key)
        return self._layouts[key]

    def name(self, medium: Image, layout: Layout) -> bytes:
        stated = self._mmproj.stat()
        encoder = f"mtmd {self._mmproj.name} {stated.st_size} {stated.st_mtime_ns} {layout.parts}"
        return medium.within(self._room.pixels).digest + encoder.encode()

    def look(self, medium: Image, layout: Layout) -> list[FloatArray]:
        key = medium.within(self._room.pixels).digest
        return self._rows[key] if key in self._rows else self._see(medium, key).rows

    def _see(self, medium: Image, key: bytes) -> Seen:
        """Encode a picture, and keep its layout and rows. Raises UnsupportedError, the errors of `see`."""
        self._tell(f"looking at {medium.name}")
        started, model = time.perf_counter(), self._model
        pixels = medium.within(self._room.pixels).pixels
        found = see(model.file.path, self._mmproj, pixels, self._threads, self._tokens)
        components = model.spec.network.components if model.spec.network else 0
        if found.grid and not components:
            raise UnsupportedError(f"{model.name}: edge does not know the positions of this model's pictures")
        self._layouts[key] = Layout(found.parts, (), medium.height, medium.width, found.grid, found.whole)
        self._rows[key] = found.rows
        sizes = {each: sum(part.nbytes for part in rows) for each, rows in self._rows.items()}
        while not self.eager and len(self._rows) > 1 and sum(sizes.values()) > self._room.kept:
            del sizes[self._rows.popitem(last=False)[0]]
        tokens = self._layouts[key].tokens
        self.looks += replace(Looks(), pictures=1, tokens=tokens, seconds=time.perf_counter() - started)
        if self._meter is not None:
            self._meter.add_bytes(self._mmproj.stat().st_size)
        return found
