"""Granite 3 and 4, dense (github.com/ibm-granite): Llama with scalar factors on embeddings, scores, residuals and
logits.

`rope.scaling.finetuned` is false in models without RoPE.
"""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_factor
from edge.model.cores import UNROTATED
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rotates = header.value("rope.scaling.finetuned") in (None, True)
    return decoder(
        header,
        spec,
        ropes=None if rotates else [UNROTATED] * spec.layers,
        query_scale=read_factor(header, "attention.scale", 0.0),
        embedding_scale=read_factor(header, "embedding_scale"),
        residual_scale=read_factor(header, "residual_scale"),
        logit_scale=1 / header.positive("logit_scale", 1.0, below=1e6),
    )
