"""What cores are made of: tensors, rotations, the shape of a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import Literal

from edge.records import dataclass

Activation = Literal["silu", "gelu", "gelu_erf", "relu2"]
Router = Literal["softmax", "sigmoid"]
Bits = Literal["usual", "more", "all"]
# Matrices that stay in float32, even in models without a `Network`
EXACT = ("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ssm_a", "shortconv.conv")


@dataclass(frozen=True)
class Tensor:
    """A matrix [rows, columns] or, with 0 columns, a vector of `rows` values.

    name: within its layer, without `.weight`: `attn_q`, `attn_q.bias`. experts: the number of experts, each with a
    matrix or vector of this shape; 0: a single one. bits: those that quantizers keep: more than usual, or all, where
    rounding does harm out of proportion to the tensor's bytes. stored: the shape in files, in ggml's order, where it
    has more dimensions. same_as: the tensor of the layer that files have in its place.
    """

    name: str
    rows: int
    columns: int = 0
    experts: int = 0
    bits: Bits = "usual"
    stored: tuple[int, ...] = ()
    same_as: str = ""

    @property
    def exact(self) -> bool:
        return self.name in EXACT


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `dim` values of a head, from `first` on, are rotated, pair i by position · base^(−2i / dim).

    dim is 0 where nothing is rotated. halves: value i pairs with value i + dim / 2, not with its neighbour.

    sections: positions have several components (M-RoPE: time, height, width), and so many pairs go by each. The first
    section has the first pairs or, if `interleaved`, pair i belongs to component i mod 3 while that has pairs left, and
    the rest to the first component. restarts: the frequencies of each section begin again, pair j of its n pairs with
    base^(−j / n), as of pictures' rows and columns. apart: a section of n pairs has 2 n values of its own, whose halves
    pair.

    scaling: linear divides positions by `factor`; yarn (arXiv:2309.00071) does so for long wavelengths only; longrope
    (arXiv:2402.13753) divides by factors from the file, with a second set for long texts. Factors named `rope_freqs`
    (llama3) apply with every scaling. magnitude: multiplies all cosines and sines.

    yarn: pairs that rotate more than `beta_fast` times in the original context keep their frequency, and pairs that
    rotate less than `beta_slow` times are stretched. log_multiplier: yarn's own magnitude is divided by the magnitude
    for this multiplier (DeepSeek's `mscale_all_dim`).
    """

    dim: int
    base: float
    halves: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0  # positions before scaling
    magnitude: float = 1.0
    has_long: bool = False  # the file has longrope's factors for texts beyond the original context
    has_freqs: bool = True  # factors named `rope_freqs` apply, if the file has them
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0
    first: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    restarts: bool = False
    apart: bool = False

    @property
    def still(self) -> bool:
        """Whether no position rotates anything."""
        return not self.dim or self.factor == inf

    @property
    def components(self) -> tuple[int, ...]:
        """The component of the position that rotates each pair, [dim / 2]; empty if positions have only one."""
        if not self.interleaved:
            return tuple(index for index, count in enumerate(self.sections) for _ in range(count))
        number = len(self.sections)
        return tuple(
            pair % number if pair // number < self.sections[pair % number] else 0 for pair in range(self.dim // 2)
        )


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
SLOPE = 1.702  # of the sigmoid with which clamped experts approximate GELU
UNROTATED = Rope(dim=0, base=1.0)  # of layers whose keys have no position (NoPE, arXiv:2305.19466)


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + slope · log(1 + ⌊p / period⌋), as in Llama 4.

    p is the position in `KVCache.positions`, which decreases when gaps before it are closed. Keys have no
    temperature, so rows of the cache stay as they are when their positions change.
    """

    slope: float
    period: int


@dataclass(frozen=True)
class RowShape:
    """The row that a token has in the KV cache of a layer: a key and a value for each KV head.

    rotated: the part of a key that RoPE rotates, as its first value and its length. shared: a value is the beginning of
    its key, and has no memory of its own (latent attention).
    """

    heads: int  # KV heads; 1: all query heads read the same row
    key: int  # values of a key
    value: int  # values of a value
    rotated: tuple[int, int] = (0, 0)
    shared: bool = False

    @property
    def stored_value(self) -> int:
        """Values of a value that have memory of their own."""
        return 0 if self.shared else self.value

    @property
    def mixed(self) -> int:
        """Values that attention mixes: where memory is shared, whole keys, whose ends it drops."""
        return self.key if self.shared else self.value

    @property
    def values(self) -> int:
        """Stored values of all heads."""
        return self.heads * (self.key + self.stored_value)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What memory depends on: layers with the same sizes can share it."""
        return self.heads, self.key, self.stored_value

    def padded(self, step: int) -> RowShape:
        """With keys and values of whole multiples of `step` values."""
        return replace(self, key=-(-self.key // step) * step, value=-(-self.value // step) * step)


def bounds(matrices: Iterable[str]) -> Iterator[Tensor]:
    """The least and the greatest values of what matrices read and write."""
    return (Tensor(f"{name}.{bound}", 1) for name in matrices for bound in BOUNDS)


def with_biases(matrices: Iterator[Tensor] | list[Tensor], biases: tuple[str, ...]) -> Iterator[Tensor]:
    for matrix in matrices:
        yield matrix
        if matrix.name in biases:
            yield Tensor(f"{matrix.name}.bias", matrix.rows, experts=matrix.experts)
