"""A tower: an encoder of pictures or sounds, between pixels or samples and the rows that stand in a prompt in place of
tokens.

A picture is resized and may be divided into tiles, a tile into patches. The stem makes a row of each patch, layers that
an engine runs as any encoder's change them, and the projector makes the text model's rows of them. Stem and projector
are NumPy in float32: they take a few percent of the time. The tiles of a sound are windows, its patches frames.

A layout is known before a pixel is touched: so plans count what a picture costs from its size alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.cores import UNROTATED, Attention, Dense, Rope
from edge.model.parts.places import Places
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec
from edge.model.towers.mmproj import Mmproj, view
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

Tile = tuple[int, int]
"""Rows and columns of a tile's patches; 1 and the frames of a window of sound."""

BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Layout:
    """A picture's or a sound's place in a prompt, and its tiles."""

    parts: tuple[str | int, ...]  # texts with special tokens, and the numbers of rows between them
    tiles: tuple[Tile, ...]  # in the order of the rows
    height: int  # in pixels, of the picture before it is divided; 1 for sounds
    width: int  # samples of a sound
    grid: tuple[int, int] | None = None  # rows and columns of its rows, where their positions have several components
    whole: bool = False  # its rows see all of each other

    @property
    def tokens(self) -> int:
        """Rows of all parts."""
        return sum(part for part in self.parts if isinstance(part, int))

    @property
    def patches(self) -> int:
        """Patches of all tiles: the cost of encoding grows with them."""
        return sum(rows * columns for rows, columns in self.tiles)


@dataclass(frozen=True)
class Stage:
    """Layers that run one after the other, as a model of its own. kept: the projector reads its states."""

    file: GGUFFile
    spec: ModelSpec
    windowed: bool = False  # patches see those of their window
    kept: bool = True


@dataclass(frozen=True)
class Tower(ABC):
    """An encoder. A family's class has its preprocessing, stem, network and projector."""

    mmproj: Mmproj

    @property
    @abstractmethod
    def marker(self) -> str:
        """The text that the family's chat template has for a picture or a sound, in whose place the parts of a layout
        stand."""

    @property
    @abstractmethod
    def architectures(self) -> tuple[str, ...]:
        """Of its text models, in GGUF."""

    @property
    def kind(self) -> str:
        return self.mmproj.kind

    @property
    def identity(self) -> str:
        """See `Mmproj`."""
        return self.mmproj.identity

    @property
    @abstractmethod
    def network(self) -> Network:
        """The layers."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of stem and projector: see `view`."""

    @abstractmethod
    def rows(self, medium: Any, layout: Layout) -> Iterator[FloatArray]:
        """The rows of each tile, [n, hidden], before the layers, in the order of `places`. medium: pixels of a picture,
        uint8 [height, width, 3], or a Sound."""

    @abstractmethod
    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        """Rows for the text model, of the states of one tile behind each stage that is kept, [n, hidden]."""

    def places(self, tiles: Sequence[Tile], *, windowed: bool = False) -> Places:
        """The places of the tiles' patches: those of a tile see each other."""
        return Places.of_texts([rows * columns for rows, columns in tiles])

    def check(self) -> None:
        """Raise ModelFormatError or UnsupportedError for a file with other tensors."""
        assert self.stages

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All layers, in one or several parts."""
        return (self.whole,)

    @property
    def whole(self) -> Stage:
        """All layers in one part."""
        return Stage(*self._whole)

    @property
    def spec(self) -> ModelSpec:
        """All layers as a model."""
        return self._whole[1]

    @cached_property
    def _whole(self) -> tuple[GGUFFile, ModelSpec]:
        return view(self.mmproj, self.network, self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Of the layers."""
        return self.spec.weight_bytes

    @property
    def ends(self) -> int:
        """Bytes of stem and projector: as the file has them, and in float32 while they multiply."""
        layers = {info.offset for stage in self.stages for info in stage.file.tensors.values()}
        others = (info for info in self.mmproj.file.tensors.values() if info.offset not in layers)
        return sum(info.nbytes + 4 * info.elements for info in others)

    @property
    @abstractmethod
    def times(self) -> Mapping[str, float]:
        """How often the matrices of the stem, by the beginnings of their names, are multiplied for each patch."""

    def stage(self, first: int, stop: int, *, windowed: bool = False, kept: bool = False) -> Stage:
        """The layers from `first` to before `stop`; the last norm belongs to the last layer."""
        file, spec = self._whole
        last = stop == spec.layers
        network = replace(self.network, layers=self.network.layers[first:stop])
        if not last:
            network = replace(network, encoder_norm=False, output_norm_bias=False)
        tensors = {
            f"blk.{int(number) - first}.{rest}": info
            for name, info in file.tensors.items() if name.startswith("blk.")
            for number, rest in [name.removeprefix("blk.").split(".", 1)] if first <= int(number) < stop
        }  # fmt: skip
        tensors |= {name: info for name, info in file.tensors.items() if last and not name.startswith("blk.")}
        share = sum(info.nbytes for info in tensors.values())
        own = replace(spec, layers=stop - first, network=network, weight_bytes=share)
        return Stage(replace(file, tensors=tensors), own, windowed, kept)


@dataclass(frozen=True)
class PictureTower(Tower):
    """An encoder of pictures."""

    @property
    def times(self) -> Mapping[str, float]:
        return {"v.patch_embd": 1}

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that one picture may have, ascending; where any number is possible, some of them."""

    @abstractmethod
    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        """The layout of a picture of this size in pixels. tokens: the most rows; None: as many as the family's own
        default. Raises InputError for fewer than a picture needs."""

    @abstractmethod
    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        """The values of each tile's pixels, float32 [height, width, 3], of a picture, uint8 [height, width, 3]."""

    @abstractmethod
    def stem(self, tile: FloatArray) -> FloatArray:
        """A row of each patch of a tile, [n, hidden], in the order of `places`."""

    def rows(self, medium: Any, layout: Layout) -> Iterator[FloatArray]:
        return map(self.stem, self.tiles(medium, layout))

    def check(self) -> None:
        assert self.sizes
        super().check()

    def for_text(self, _spec: ModelSpec) -> PictureTower:
        """The encoder, for this text model."""
        return self

    @property
    def default(self) -> int:
        """The most rows of a picture unless a number is chosen."""
        return self.sizes[-1]

    def fewest(self, rows: int) -> int:
        """The smallest of the sizes, or `rows` if that is fewer and any number is possible."""
        if rows < self.sizes[0]:
            with suppress(InputError):
                self.layout(1, 1, rows)
                return rows
        return self.sizes[0]

    def check_most(self, tokens: int | None, least: int) -> int:
        """The most rows of a picture. Raises InputError for fewer than `least`."""
        if tokens is not None and (not isinstance(tokens, int) or tokens < least):
            raise InputError(
                f"--image-tokens must be at least {least}, this model's fewest for such a picture, not {tokens}"
            )
        return self.default if tokens is None else tokens


@dataclass(frozen=True)
class SoundTower(Tower):
    """An encoder of sounds."""

    @abstractmethod
    def layout(self, samples: int) -> Layout:
        """The layout of a sound of `samples` samples at 16 kHz."""

    @abstractmethod
    def hearing(self, samples: int) -> int:
        """Bytes that the rows of a sound take while they are made: samples, spectrogram, convolutions."""


def layer(
    mmproj: Mmproj, dense: Dense, *, rope: Rope = UNROTATED, norm_bias: bool = True, biases: tuple[str, ...] = BIASED
) -> tuple[Block, Block]:
    """A layer of most encoders: norms before bidirectional attention and before a feed-forward network."""
    size = mmproj.hidden // mmproj.heads
    attention = Attention(mmproj.heads, mmproj.heads, size, size**-0.5, rope, biases=biases, causal=False)
    return Block("attn_norm", attention, norm_bias=norm_bias), Block("ffn_norm", dense, norm_bias=norm_bias)


def siglip(mmproj: Mmproj) -> Network:
    """SigLIP (arXiv:2303.15343): LayerNorm, GELU in its tanh form, biases everywhere."""
    dense = Dense(mmproj.ffn, "gelu", gated=False, biases=BIASED)
    return Network(
        mmproj.hidden, 0, (layer(mmproj, dense),) * mmproj.layers, norm="layer", norm_eps=mmproj.eps, encoder_norm=True,
        output_norm_bias=True,
    )  # fmt: skip


def embedding(mmproj: Mmproj) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrix that makes rows of patches, and its bias."""
    return {
        "v.patch_embd.weight": (mmproj.hidden, 3, mmproj.patch, mmproj.patch), "v.patch_embd.bias": (mmproj.hidden,)
    }  # fmt: skip
