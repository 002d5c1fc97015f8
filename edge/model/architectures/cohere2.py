"""Command R7B (arXiv:2504.00698): attention and the feed-forward network read the same LayerNorm and are added side by
side; three of four layers have a window, and the fourth no RoPE."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_factor, read_rope, window_but_every
from edge.model.cores import UNROTATED
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

PERIOD = 4


def network(header: Header, spec: ModelSpec) -> Network:
    windows = window_but_every(PERIOD, spec)
    rope = read_rope(header, spec)
    ropes = [rope if window or not spec.window else UNROTATED for window in windows]
    usual = decoder(
        header, spec, ropes=ropes, windows=windows, norm="layer", logit_scale=read_factor(header, "logit_scale")
    )
    layers = tuple(
        (attention, replace(feeding, norm=attention.norm, beside=True)) for attention, feeding in usual.layers
    )
    return replace(usual, layers=layers)
