"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases everywhere, a feed-forward without a gate."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.cores import UNROTATED
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    ropes = [UNROTATED] * spec.layers
    return decoder(header, spec, ropes=ropes, learned_positions=True, norm="layer", activation="gelu", gated=False)
