"""The eyes of a session: rows of pictures by a tower, within a share of the memory.

Rows are made when a pass needs them, so that a picture whose rows are in the KV cache is not encoded again, and those
of the last pictures are kept. `edge run` makes all of them before the text model is loaded: its peak is then the larger
of two phases, not their sum.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from edge.backends.base import Backend
from edge.budget import format_bytes
from edge.devices.memory import memory_use, release_free_memory
from edge.errors import BudgetError, InputError
from edge.media.picture import Image
from edge.model.prompt import Looks
from edge.model.towers import Layout, PictureTower
from edge.records import dataclass
from edge.run.sight import Encoder, most_together
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.run.budgets.meters import EnergyMeter

_SHAPES = ((2048, 2048), (8000, 8000), (10_000, 5_000), (10_000, 1_000), (20_000, 200))
"""Widths and heights of pictures, also upright, of which the costliest stands for any in a plan."""


@dataclass(frozen=True)
class Room:
    """Bytes for pictures. pixels: of one, while it is decoded. kept: rows of the last ones. limit: of the process."""

    pixels: int
    kept: int
    limit: int


class TowerEyes:
    """`Eyes` by a tower on an engine: see `edge.model.picture_parts`. eager: rows are made with the prompt."""

    def __init__(
        self, tower: PictureTower, backend: Backend, threads: int, room: Room, *, tokens: int | None = None,
        eager: bool = False, frugal: bool = False, meter: EnergyMeter | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """tokens: the most of a picture; None: as many as the family's own default. frugal: compile in less memory.
        tell: told what is looked at."""
        self.tower, self._encoder = tower, Encoder(tower, backend, threads, frugal=frugal)
        self.tokens, self.eager, self._room, self._meter, self._tell = tokens, eager, room, meter, tell
        self._kept = OrderedDict[bytes, list[FloatArray]]()
        self.looks = Looks()

    @property
    def marker(self) -> str:
        return self.tower.marker

    def layout(self, picture: Image) -> Layout:
        return self.tower.layout(picture.width, picture.height, self.tokens)

    def name(self, picture: Image, layout: Layout) -> bytes:
        shape = repr((layout.parts, layout.height, layout.width))
        return self._within(picture).digest + self.tower.mmproj.identity.encode() + shape.encode()

    @property
    def reserve(self) -> int:
        """Bytes that a plan keeps for a picture: those of its encoding, its pixels, and rows of the last ones."""
        first = max(map(self._encoder.first_run, self._largest))
        return self.wants + max(0, first - self._encoding)

    @property
    def wants(self) -> int:
        """As `reserve`, once there is nothing left to compile."""
        return self._encoding + self._room.pixels + self._room.kept

    @cached_property
    def _encoding(self) -> int:
        return max(map(self._encoder.need, self._largest))

    @cached_property
    def _largest(self) -> list[Layout]:
        """Layouts of pictures of some shapes, those of different costs."""
        found = dict[tuple[int, int], Layout]()
        for width, height in {*_SHAPES, *(each[::-1] for each in _SHAPES)}:
            with suppress(InputError):  # too few tokens for such a shape
                layout = self.tower.layout(width, height, self.tokens)
                found[layout.patches, most_together(layout)] = layout
        return [*found.values()] or [self.tower.layout(1, 1, self.tokens)]

    def look(self, picture: Image, layout: Layout) -> list[FloatArray]:
        name = self.name(picture, layout)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        self._check(picture)
        self._tell(f"looking at {picture.name}")
        started = time.perf_counter()
        found = self._encoder.encode(self._within(picture).pixels, layout)
        seconds = time.perf_counter() - started
        self.looks = Looks(self.looks.pictures + 1, self.looks.tokens + layout.tokens, self.looks.seconds + seconds)
        if self._meter is not None:
            self._meter.add_bytes(self.tower.spec.weight_bytes)
        self._keep(name, found)
        release_free_memory()
        return found

    def _keep(self, name: bytes, rows: list[FloatArray]) -> None:
        """Keep the rows, and of others the last that fit beside them."""
        self._kept[name] = rows
        sizes = {each: sum(part.nbytes for part in parts) for each, parts in self._kept.items()}
        while not self.eager and len(self._kept) > 1 and sum(sizes.values()) > self._room.kept:
            first, _ = self._kept.popitem(last=False)
            del sizes[first]

    def _within(self, picture: Image) -> Image:
        return picture.within(self._room.pixels)

    def _check(self, picture: Image) -> None:
        """Raise BudgetError for a picture that takes more than the limit; beside a text model, than the plan has
        reserved."""
        layout, within = self.layout(picture), self._within(picture)
        encoding, first = self._encoder.need(layout), self._encoder.first_run(layout)
        if not self.eager and max(encoding, within.decoding) + within.nbytes <= self.wants - self._room.kept:
            return
        needed = memory_use().rss + max(within.decoding, encoding, first) + within.nbytes
        if needed > self._room.limit:
            raise BudgetError(
                f"looking at {picture.name} needs {format_bytes(needed)}"
                + (" in a first run, which compiles the encoder" if first > encoding else "")
                + f", the memory budget is {format_bytes(self._room.limit)}: use a larger --memory or fewer "
                "--image-tokens",
                smallest=needed,
            )
