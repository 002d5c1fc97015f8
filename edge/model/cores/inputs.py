"""Cores that read other inputs beside the hidden states."""

from __future__ import annotations

from collections.abc import Iterator

from edge.model.cores.parts import Tensor
from edge.records import dataclass


@dataclass(frozen=True)
class PerLayerInput:
    """A gate on the vector that a token has for this layer (Gemma 3n): gelu(`inp_gate` · x) ⊙ p.

    The vectors p of all layers are computed before the first layer, from the token t and its embedding x₀:

        p_l = (√size · T[t]_l + RMSNorm(W · x₀ / √hidden)_l) / √2

    with the table T = `per_layer_token_embd`, W = `per_layer_model_proj`, and the weights `per_layer_proj_norm`, the
    same for all layers.
    """

    size: int

    inputs = ("inp_gate",)
    output, kind = "proj", "per-layer embeddings"
    fixed_values = 0

    @property
    def width(self) -> int:
        return self.size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("inp_gate", self.size, hidden, bits="more")
        yield Tensor(self.output, hidden, self.size, bits="more")


@dataclass(frozen=True)
class NextToken:
    """The input of a layer for multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437, section 2.2): the embedding
    e of a token, and the hidden state h of the token before it, both normalised:

        `nextn.eh_proj` · [RMSNorm(e), RMSNorm(h)]

    Its block has no norm, and replaces the hidden states. h comes from the engine's caller.
    """

    hidden: int

    inputs = ()
    output, kind = "nextn.eh_proj", "layers for multi-token prediction"
    fixed_values = 0

    @property
    def width(self) -> int:
        return 2 * self.hidden

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("nextn.enorm", hidden)
        yield Tensor("nextn.hnorm", hidden)
        yield Tensor(self.output, hidden, 2 * hidden)


@dataclass(frozen=True)
class Features:
    """The input of an EAGLE-3 head (arXiv:2503.01840): the embedding e of a token, and features of the text before it:
    the hidden states f of another model, side by side, which enter some of its `layers`, or the head's own state g.

        g = `fc` · f;  joined = [RMSNorm(e), RMSNorm(g)]

    Its block has no norm. The hidden states become g or, if `normed`, its norm; attention reads `joined`. e, and f or
    g, come from the engine's caller.
    """

    hidden: int
    size: int  # of f
    normed: bool = False
    layers: tuple[int, ...] = ()  # of the other model

    inputs = ()
    output, kind = "fc", "EAGLE-3 heads"
    fixed_values = 0

    @property
    def width(self) -> int:
        return self.size

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        yield Tensor("attn_norm", hidden)
        yield Tensor("attn_norm_2", hidden)
        yield Tensor(self.output, hidden, self.size)
