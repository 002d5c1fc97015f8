"""Gemma 2 (arXiv:2408.00118): GeGLU, norms before and after each block, soft caps, a window in every other layer."""

from __future__ import annotations

import math

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, window_but_every
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

_LAYERS_OF_27B = 46  # only this size divides scores by √(hidden / heads); no field of the file says so


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(
        header,
        spec,
        windows=window_but_every(header.count("attention.sliding_window_pattern", "layers", default=2), spec),
        query_scale=query_scale(spec, _LAYERS_OF_27B),
        halves=True,
        activation="gelu",
        embedding_scale=math.sqrt(spec.hidden),
        score_cap=header.positive("attn_logit_softcapping", 50.0, below=1e6),
        logit_cap=header.positive("final_logit_softcapping", 30.0, below=1e6),
    )


def query_scale(spec: ModelSpec, layers_of_27b: int) -> float:
    return float((spec.hidden / spec.heads if spec.layers == layers_of_27b else spec.head_dim) ** -0.5)
