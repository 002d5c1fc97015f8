"""Gemma 4's eyes: pictures of any shape, scaled until they fill a budget of rows, whose patches have positions by
column and row, learned and rotary; means of 3 × 3 neighbours become one row. Files may have bounds of all matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import floor, sqrt

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.model.cores import Attention, Dense, Rope
from edge.model.parts.places import Places
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec
from edge.model.towers.pixels import joined, normalized, patches_of, resize
from edge.model.towers.tower import Layout, PictureTower, Stage, Tile
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_SIZES = (70, 140, 280, 560, 1120)
_POOL = 3  # neighbours on a side that become one row
_BASE = 100.0  # of rotary positions


@dataclass(frozen=True)
class Gemma4(PictureTower):
    """Patches follow each other row by row. whole_rows: `Layout.whole`."""

    whole_rows: bool = False

    marker = "<|image|>"
    architectures = ("gemma4",)

    @cached_property
    def network(self) -> Network:
        clip, size = self.mmproj, self.mmproj.hidden // self.mmproj.heads
        rope = Rope(size, _BASE, halves=True, sections=(size // 4,) * 2, restarts=True, apart=True)
        attention = Attention(
            clip.heads, clip.heads, size, 1.0, rope, head_norms=True, unit_values=True, causal=False,
            clipped=self._clipped,
        )  # fmt: skip
        blocks = (
            Block("attn_norm", attention, "post_attention_norm"),
            Block("ffn_norm", Dense(clip.ffn, "gelu", clipped=self._clipped), "post_ffw_norm"),
        )
        return Network(clip.hidden, 0, (blocks,) * clip.layers, norm_eps=clip.eps)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Those whose longest picture has positions. Raises ModelFormatError if there are none."""
        found = tuple(size for size in _SIZES if _POOL * size <= self._positions)
        if not found:
            raise ModelFormatError(f"{self.mmproj.file.path}: {self._positions} positions are too few for a picture")
        return found

    def for_text(self, spec: ModelSpec) -> Gemma4:
        """E2B and E4B are causal, and have per-layer inputs; their header says no more about it. Pictures of larger
        models see all of themselves, in layers with windows (`Attention.spans`)."""
        whole = spec.network is not None and not all(core.spans for core in spec.network.attention if core)
        return replace(self, whole_rows=whole)

    @property
    def default(self) -> int:
        return min(280, self.sizes[-1])

    @property
    def _clipped(self) -> bool:
        return "v.blk.0.attn_q.input_min" in self.mmproj.file.tensors

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip = self.mmproj
        return {
            "v.patch_embd.weight": (clip.hidden, 3, clip.patch, clip.patch),
            "v.position_embd.weight": (2, self._positions, clip.hidden),
            "mm.input_projection.weight": (clip.projected, clip.hidden),
            "[v.std_bias]": (clip.hidden,), "[v.std_scale]": (clip.hidden,),
        }  # fmt: skip

    @property
    def _positions(self) -> int:
        """Rows of each table, of which the longest picture takes as many as it has patches on a side."""
        info = self.mmproj.file.tensors.get("v.position_embd.weight")
        return info.shape[1] if info and len(info.shape) > 1 else 0

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Raises UnsupportedError for matrices that read the same rows within different bounds."""
        found, clip = super().stages, self.mmproj
        for number in range(clip.layers if self._clipped else 0):
            for group in ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"):
                for end in ("min", "max"):
                    names = [f"v.blk.{number}.{name}.input_{end}" for name in group]
                    if len({clip.weights(name).item() for name in names}) > 1:
                        raise UnsupportedError(f"{clip.file.path}: {names[0]} differs from {names[1]}")
        return found

    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        most = self.check_most(tokens, self.sizes[0])
        budget, side = max(size for size in self.sizes if size <= most), _POOL * self.mmproj.patch
        scale = sqrt(budget * side**2 / (height * width))
        rows, columns = floor(scale * height / side), floor(scale * width / side)
        if not rows:
            rows, columns = 1, min(width // height, budget)
        elif not columns:
            rows, columns = min(height // width, budget), 1
        parts = ("<|image>", rows * columns, "<image|>")
        tiles = ((_POOL * rows, _POOL * columns),)
        return Layout(parts, tiles, rows * side, columns * side, whole=self.whole_rows)

    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        yield normalized(resize(pixels, layout.height, layout.width, "bicubic"), (0.0,) * 3, (1.0,) * 3)

    def places(self, tiles: Sequence[Tile], *, windowed: bool = False) -> Places:
        plain = super().places(tiles)
        cells = [np.mgrid[:rows, :columns].reshape(2, -1)[::-1].T for rows, columns in tiles]
        return Places(np.concatenate(cells).astype(np.int32), plain.sees, plain.begins)

    def stem(self, tile: FloatArray) -> FloatArray:
        rows = self.mmproj.linear("v.patch_embd", patches_of(2 * (tile - np.float32(0.5)), self.mmproj.patch))
        of_columns, of_rows = self.mmproj.weights("v.position_embd.weight")
        height, width = (side // self.mmproj.patch for side in tile.shape[:2])
        return np.asarray(rows + (of_rows[:height, None] + of_columns[None, :width]).reshape(rows.shape))

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, hidden = self.mmproj, self.mmproj.hidden
        means = joined(states[-1], *tile, _POOL).reshape(-1, _POOL**2, hidden).mean(axis=1) * np.float32(sqrt(hidden))
        if "v.std_bias" in clip.file.tensors:
            means = (means - clip.weights("v.std_bias")) * clip.weights("v.std_scale")
        normed = means / np.sqrt(np.mean(np.square(means), axis=1, keepdims=True) + np.float32(clip.eps))
        return clip.linear("mm.input_projection", normed)
