"""The eyes and ears of a session: rows of pictures and sounds by towers, within a share of the memory.

Rows are made when a pass needs them, so that a picture whose rows are in the KV cache is not encoded again, and those
of the last media are kept. `edge run` makes all of them before the text model is loaded: its peak is then the larger
of two phases, not their sum.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edge.budget import format_bytes
from edge.devices.memory import memory_use, release_free_memory
from edge.errors import BudgetError, InputError
from edge.media.mel import RATE
from edge.media.picture import Image
from edge.media.recording import Sound
from edge.model.parts.prompt import Looks
from edge.model.towers import Layout, PictureTower, SoundTower, Tower
from edge.records import dataclass
from edge.run.senses.sight import Encoder, most_together
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.run.budgets.meters import EnergyMeter

_SHAPES = ((2048, 2048), (8000, 8000), (10_000, 5_000), (10_000, 1_000), (20_000, 200))
"""Widths and heights of pictures, also upright, of which the costliest stands for any in a plan."""


_HEARD = 60 * RATE
"""Samples of a sound that a plan keeps memory for. Longer ones take what is left, or are refused."""


@dataclass(frozen=True)
class Room:
    """Bytes for media. pixels: of a picture, while it is decoded. kept: rows of the last media. limit: of the
    process."""

    pixels: int
    kept: int
    limit: int


class TowerSense(ABC):
    """`Sense` by a tower on an engine: see `edge.model.chat.media_parts`. eager: rows are made with the prompt."""

    _looking: str  # what the user is told
    _advice: str  # where the budget is too small

    def __init__(
        self, tower: Tower, encoder: Encoder, room: Room, *, eager: bool = False, meter: EnergyMeter | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """tell: told which medium will be encoded."""
        self._encoder = encoder
        self.eager, self._room, self._meter, self._tell = eager, room, meter, tell
        self._tower, self._kept = tower, OrderedDict[bytes, list[FloatArray]]()
        self.looks = Looks()

    @property
    def marker(self) -> str:
        return self._tower.marker

    @abstractmethod
    def layout(self, medium: Any) -> Layout: ...

    def name(self, medium: Any, layout: Layout) -> bytes:
        shape = repr((layout.parts, layout.height, layout.width))
        return self._digest(medium) + self._tower.mmproj.identity.encode() + shape.encode()

    @property
    def reserve(self) -> int:
        """Bytes that a plan keeps for a medium: those of its encoding, of itself, and rows of the last ones."""
        first = max(map(self._encoder.first_run, self._largest))
        return self.wants + max(0, first - self._encoding)

    @property
    def wants(self) -> int:
        """As `reserve`, once there is nothing left to compile."""
        return self._encoding + self._beside + self._room.kept

    @cached_property
    def _encoding(self) -> int:
        return max(map(self._encoder.need, self._largest))

    def check(self, medium: Any) -> None:
        self._content(medium)

    def look(self, medium: Any, layout: Layout) -> list[FloatArray]:
        name = self.name(medium, layout)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        self._check(medium)
        self._tell(f"{self._looking} {medium.name}")
        started = time.perf_counter()
        found = self._encoder.encode(self._content(medium), layout)
        counted = self._counted(layout.tokens, time.perf_counter() - started)
        self.looks += counted
        if self._meter is not None:
            self._meter.add_bytes(self._tower.weight_bytes)
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

    def _check(self, medium: Any) -> None:
        """Raise BudgetError for a medium that takes more than the limit; beside a text model, than the plan has
        reserved."""
        layout, (making, held) = self.layout(medium), self._sizes(medium)
        encoding, first = self._encoder.need(layout), self._encoder.first_run(layout)
        if not self.eager and max(encoding, making) + held <= self.wants - self._room.kept:
            return
        needed = memory_use().rss + max(making, encoding, first) + held
        if needed > self._room.limit:
            raise BudgetError(
                f"{self._looking} {medium.name} needs {format_bytes(needed)}"
                + (" in a first run, which compiles the encoder" if first > encoding else "")
                + f", the memory budget is {format_bytes(self._room.limit)}: use a larger --memory or {self._advice}",
                smallest=needed,
            )

    @property
    @abstractmethod
    def _largest(self) -> list[Layout]:
        """Layouts of media of different costs, of which the costliest stands for any in a plan."""

    @property
    @abstractmethod
    def _beside(self) -> int:
        """Bytes that a plan keeps for a medium itself."""

    @abstractmethod
    def _digest(self, medium: Any) -> bytes: ...

    @abstractmethod
    def _sizes(self, medium: Any) -> tuple[int, int]:
        """Bytes while the encoder's input is made, and bytes that are held all the time."""

    @abstractmethod
    def _content(self, medium: Any) -> Any:
        """The encoder's input."""

    @abstractmethod
    def _counted(self, tokens: int, seconds: float) -> Looks: ...


class TowerEyes(TowerSense):
    """Eyes. tokens: the most of a picture; None: as many as the family's own default."""

    _looking, _advice = "looking at", "fewer --image-tokens"

    def __init__(self, tower: PictureTower, *arguments: Any, tokens: int | None = None, **more: Any) -> None:
        super().__init__(tower, *arguments, **more)
        self.tower, self.tokens = tower, tokens

    def layout(self, medium: Image) -> Layout:
        return self.tower.layout(medium.width, medium.height, self.tokens)

    @cached_property
    def _largest(self) -> list[Layout]:
        """Layouts of pictures of some shapes, those of different costs."""
        found = dict[tuple[int, int], Layout]()
        for width, height in {*_SHAPES, *(each[::-1] for each in _SHAPES)}:
            with suppress(InputError):  # too few tokens for such a shape
                layout = self.tower.layout(width, height, self.tokens)
                found[layout.patches, most_together(layout)] = layout
        return [*found.values()] or [self.tower.layout(1, 1, self.tokens)]

    @property
    def _beside(self) -> int:
        return self._room.pixels

    def _digest(self, medium: Image) -> bytes:
        return self._within(medium).digest

    def _sizes(self, medium: Image) -> tuple[int, int]:
        within = self._within(medium)
        return within.decoding, within.nbytes

    def _content(self, medium: Image) -> Any:
        return self._within(medium).pixels

    def _counted(self, tokens: int, seconds: float) -> Looks:
        return Looks(1, tokens, seconds)

    def _within(self, picture: Image) -> Image:
        return picture.within(self._room.pixels)


class TowerEars(TowerSense):
    """Ears."""

    _looking, _advice = "listening to", "a shorter sound"

    def __init__(self, tower: SoundTower, *arguments: Any, **more: Any) -> None:
        super().__init__(tower, *arguments, **more)
        self.tower = tower

    def layout(self, medium: Sound) -> Layout:
        return self.tower.layout(medium.samples)

    @cached_property
    def _largest(self) -> list[Layout]:
        return [self.tower.layout(_HEARD)]

    @property
    def _beside(self) -> int:
        return self.tower.hearing(_HEARD)

    def _digest(self, medium: Sound) -> bytes:
        return medium.digest

    def _sizes(self, medium: Sound) -> tuple[int, int]:
        return 0, self.tower.hearing(medium.samples)

    def _content(self, medium: Sound) -> Sound:
        return medium

    def _counted(self, tokens: int, seconds: float) -> Looks:
        return Looks(0, tokens, seconds, sounds=1)
