"""MiniCPM up to version 4 (arXiv:2404.06395): Llama with scalar factors on embeddings, residuals and logits, as
Granite."""

from __future__ import annotations

import math

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_factor
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

_EMBEDDING, _DEPTH, _BASE = 12.0, 1.4, 256.0  # of the first models, whose files do not say


@dataclass(frozen=True)
class Factors:
    """Scalar factors of embeddings, of what a block adds, and of logits."""

    embedding: float
    residual: float
    logits: float


def network(header: Header, spec: ModelSpec) -> Network:
    found = factors(header, spec)
    return decoder(
        header, spec, embedding_scale=found.embedding, residual_scale=found.residual, logit_scale=found.logits
    )


def factors(header: Header, spec: ModelSpec) -> Factors:
    return Factors(
        read_factor(header, "embedding_scale", _EMBEDDING),
        read_factor(header, "residual_scale", _DEPTH / math.sqrt(spec.layers)),
        1 / header.positive("logit_scale", spec.hidden / _BASE, below=1e6),
    )
