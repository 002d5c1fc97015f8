"""EXAONE 4 (arXiv:2507.11407): norms of heads, and norms behind each block instead of before it. In the 32B, three of
four layers have a window, and the fourth no RoPE."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_rope, window_but_every
from edge.model.cores import UNROTATED
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

PERIOD = 4


def network(header: Header, spec: ModelSpec) -> Network:
    windows = window_but_every(PERIOD, spec)
    rope = replace(read_rope(header, spec), halves=True)
    ropes = [rope if window or not spec.window else UNROTATED for window in windows]
    usual = decoder(header, spec, ropes=ropes, windows=windows)
    layers = tuple(tuple(replace(block, norm="") for block in layer) for layer in usual.layers)
    return replace(usual, layers=layers)
