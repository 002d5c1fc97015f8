"""MiniCPM up to version 4 (arXiv:2404.06395): Llama with factors of embeddings, additions and logits, as Granite's."""

from __future__ import annotations

import math
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import llama
from edge.model.architectures.common import read_factor
from edge.model.spec import ModelSpec, Recipe

_EMBEDDING, _DEPTH, _BASE = 12.0, 1.4, 256.0  # of the first models, whose files do not say


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return replace(
        llama.recipe(header, spec),
        embedding_scale=read_factor(header, "embedding_scale", _EMBEDDING),
        residual_scale=read_factor(header, "residual_scale", _DEPTH / math.sqrt(spec.layers)),
        logit_scale=1 / header.positive("logit_scale", spec.hidden / _BASE, below=1e6),
    )
