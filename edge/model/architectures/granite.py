"""Granite 3 and 4, dense (github.com/ibm-granite): Llama with factors of embeddings, scores, additions and logits.

`rope.scaling.finetuned` is false in models without RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import llama
from edge.model.architectures.common import read_factor
from edge.model.spec import UNROTATED, ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    like = llama.recipe(header, spec)
    return replace(
        like,
        ropes=like.ropes if header.value("rope.scaling.finetuned") in (None, True) else (UNROTATED,),
        query_scale=read_factor(header, "attention.scale", like.query_scale),
        embedding_scale=read_factor(header, "embedding_scale"),
        residual_scale=read_factor(header, "residual_scale"),
        logit_scale=1 / header.positive("logit_scale", 1.0, below=1e6),
    )
