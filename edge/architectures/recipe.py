"""A recipe: what a decoder does between its matrices, as data that every engine of ours follows.

What a model *has* (biases, norms of queries and keys, norms behind attention and feed-forward) is seen from its
tensors; a recipe says what tensors do not tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge.header import Header

if TYPE_CHECKING:
    from edge.model import ModelSpec


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the first `dim` values of a head turn, pair i by position · base^(−2i / dim).

    scaling: linear divides positions by `factor`; yarn (arXiv:2309.00071) does so for long wavelengths only;
    longrope (arXiv:2402.13753) divides by factors in the file. Factors named `rope_freqs` in a file (llama3) apply
    whatever the scaling. magnitude: what cosines and sines are multiplied by.
    """

    dim: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0  # positions before scaling
    magnitude: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """ropes: none (learned positions), one, or two: of layers that see everything, and of layers with a window."""

    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]  # [layers]: positions that a token sees there, 0: all
    query_scale: float
    halves: bool = False  # RoPE turns value i with value i + dim / 2, not with its neighbour
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu"] = "silu"  # gelu in its tanh form
    gated: bool = True
    embedding_scale: float = 1.0
    score_cap: float = 0.0  # scores become cap · tanh(score / cap); 0: they stay
    logit_cap: float = 0.0

    @property
    def learned_positions(self) -> bool:
        """Positions are rows of a table, added to the embeddings."""
        return not self.ropes

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` a layer uses."""
        return int(len(self.ropes) > 1 and self.windows[layer] > 0)


def read_rope(header: Header, spec: ModelSpec) -> Rope:
    """The rotary positions that a header describes, with the names that all architectures share."""
    factor = header.positive("rope.scaling.factor", header.positive("rope.scale_linear", 1.0, below=1e4), below=1e4)
    return Rope(
        dim=spec.rope_dim,
        base=spec.rope_base,
        scaling=header.text("rope.scaling.type", "linear"),  # a factor alone means linear
        factor=factor,
        original_context=header.count("rope.scaling.original_context_length", "context", default=spec.context),
        magnitude=header.positive("rope.scaling.attn_factor", 1.0, below=1e3),
    )


def same_window(spec: ModelSpec) -> tuple[int, ...]:
    """Every layer sees as far as the header says."""
    return (spec.window,) * spec.layers


def window_but_every(period: int, spec: ModelSpec) -> tuple[int, ...]:
    """Windows in all layers but every `period`-th, which sees everything."""
    return tuple(spec.window if (layer + 1) % period else 0 for layer in range(spec.layers))
