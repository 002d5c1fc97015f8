"""Pictures to the rows that stand in a prompt in place of tokens, by a tower's layers on an engine.

The engine is loaded when a picture is looked at, and closed behind it: so the peak of memory is the larger of two
phases, not their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from edge.backends.base import Backend, EngineConfig, HiddenEngine
from edge.errors import EngineError, UnsupportedError
from edge.model.parts.given import GivenRows
from edge.model.structure.rounding import in_q8_0
from edge.model.towers.tower import Layout, Stage, Tile, Tower
from edge.types import FloatArray

_MARGIN = 16 << 20  # bytes of arrays that NumPy and Pillow make on the way
TOGETHER = 1024  # patches of tiles that run in one pass: with more, weights are read no less often for each


class Encoder:
    """Encodes pictures by a tower on an engine."""

    def __init__(
        self,
        tower: Tower,
        backend: Backend,
        threads: int,
        kv_dtype: str | None = None,
        *,
        frugal: bool = False,
        provider: str = "cpu",
    ) -> None:
        """kv_dtype: of the keys and values of patches; None: the engine's default; f32: all products in float32, while
        others round matrices of floats to Q8_0 where the engine can. frugal: compile in less memory.
        provider: of ONNX Runtime. Raises UnsupportedError for an engine that cannot run the tower."""
        self.tower, self._backend, self._threads, self.frugal = tower, backend, threads, frugal
        self._provider = provider
        self._kv_dtype = kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
        if not backend.CAPABILITIES.encodes:
            raise UnsupportedError(f"the {backend.NAME} engine encodes no pictures: use --backend=cpu")
        rounds = backend.CAPABILITIES.rounds and self._kv_dtype != "f32"
        self._specs = {
            id(stage): in_q8_0(stage.file, stage.spec) if rounds else stage.spec for stage in tower.stages
        }  # fmt: skip
        for stage in tower.stages:
            backend.check_supported(stage.file, self._specs[id(stage)])

    def need(self, layout: Layout) -> int:
        """Bytes that looking at a picture takes, beside those of the process and of the picture itself."""
        config = self._config(most_together(layout))
        stages = [self._backend.footprint(spec, config) for spec in self._specs.values()]
        states = 4 * self.tower.network.hidden * layout.patches
        largest = max((each.weights + each.kv + each.scratch + each.runtime for each in stages), default=0)
        return largest + 3 * states + self.tower.ends + _MARGIN

    def first_run(self, layout: Layout) -> int:
        """Bytes that a first picture takes to compile, mostly in a child; 0 if nothing is left to compile."""
        config = self._config(most_together(layout))
        stages = ((each.file, self._specs[id(each)]) for each in self.tower.stages)
        return max((self._backend.first_run(*each, config) for each in stages), default=0)

    def encode(self, medium: Any, layout: Layout) -> list[FloatArray]:
        """The rows of a picture, uint8 [height, width, 3], or of a Sound, for each part of its layout that has some,
        float32 [n, width]. Raises EngineError, the errors of `Backend.load`."""
        tower, found = self.tower, list[FloatArray]()
        rows, groups = tower.rows(medium, layout), list(_groups(layout.tiles))
        most = most_together(layout)
        with self._engines(most) as run:
            for group in groups:
                states = [np.concatenate([next(rows) for _ in group])]
                for stage in tower.stages:
                    states.append(run(stage, states[-1], group))
                kept = [each for each, stage in zip(states[1:], tower.stages, strict=True) if stage.kept] or states
                at = 0
                for tile in group:
                    part = slice(at, at + tile[0] * tile[1])
                    found.append(tower.project([each[part] for each in kept], tile))
                    at = part.stop
        rows_of_all = np.concatenate(found)
        if not np.isfinite(rows_of_all).all():
            raise EngineError("the encoder produced NaN: its weights are damaged or overflow")
        ends = np.cumsum([part for part in layout.parts if isinstance(part, int)])
        return np.split(rows_of_all, ends[:-1])

    @contextmanager
    def _engines(self, most: int) -> Iterator[Any]:
        """Runs a stage on rows of tiles; a single stage stays loaded for all groups."""
        loaded: dict[int, HiddenEngine] = {}

        def run(stage: Stage, rows: FloatArray, group: Sequence[Tile]) -> FloatArray:
            number = id(stage)
            if number not in loaded:
                close()
                loaded[number] = cast(
                    HiddenEngine, self._backend.load(stage.file, self._specs[number], self._config(most))
                )
            given = GivenRows(0, stage.spec.hidden)
            places = self.tower.places(group, windowed=stage.windowed)
            return loaded[number].hidden(given.add(rows), places, given)

        def close() -> None:
            for engine in loaded.values():
                engine.close()
            loaded.clear()

        try:
            yield run
        finally:
            close()

    def _config(self, patches: int) -> EngineConfig:
        return EngineConfig(
            patches, patches, self._kv_dtype, self._threads, provider=self._provider, frugal=self.frugal
        )


def most_together(layout: Layout) -> int:
    """Patches of the largest pass."""
    return max(sum(rows * columns for rows, columns in group) for group in _groups(layout.tiles))


def _groups(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Tiles that run in one pass."""
    group, patches = list[Tile](), 0
    for tile in tiles:
        if group and patches + tile[0] * tile[1] > TOGETHER:
            yield group
            group, patches = [], 0
        group.append(tile)
        patches += tile[0] * tile[1]
    yield group
