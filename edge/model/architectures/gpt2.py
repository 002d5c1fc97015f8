"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases everywhere, a feed-forward without a gate."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import same_window
from edge.model.spec import ModelSpec, Recipe


def recipe(_header: Header, spec: ModelSpec) -> Recipe:
    return Recipe(
        ropes=(),
        windows=same_window(spec),
        query_scale=spec.head_dim**-0.5,
        norm="layer",
        activation="gelu",
        gated=False,
    )
