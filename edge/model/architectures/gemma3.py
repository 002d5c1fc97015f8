"""Gemma 3 (arXiv:2503.19786): norms of queries and keys; five layers with a sliding window and their own RoPE for each
layer with full attention."""

from __future__ import annotations

import math
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_rope, window_but_every
from edge.model.architectures.gemma2 import query_scale
from edge.model.cores import Rope
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

_LAYERS_OF_27B = 62


def network(header: Header, spec: ModelSpec) -> Network:
    windows = window_but_every(header.count("attention.sliding_window_pattern", "layers", default=6), spec)
    local = Rope(spec.rope_dim, header.positive("rope.freq_base_swa", 10000.0, below=1e12), halves=True)
    whole = replace(read_rope(header, spec), halves=True)
    found = decoder(
        header,
        spec,
        ropes=[local if window else whole for window in windows],
        windows=windows,
        query_scale=query_scale(spec, _LAYERS_OF_27B),
        activation="gelu",
        embedding_scale=math.sqrt(spec.hidden),
        logit_cap=header.positive("final_logit_softcapping", 0.0, below=1e6),
    )
    return replace(found, whole_pictures=True)
