"""LFM2's mixtures, such as 8B-A1B: LFM2 with experts in all layers but the leading ones, which are dense.

A sigmoid of the router's logits gives the shares; a bias affects the choice only.
"""

from __future__ import annotations

from dataclasses import replace

from edge.errors import UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import leading_dense, read_experts
from edge.model.architectures.lfm2 import hybrid
from edge.model.cores import Dense
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

_SIGMOID = 2  # llama.cpp's number


def network(header: Header, spec: ModelSpec) -> Network:
    if header.value("expert_gating_func") not in (None, _SIGMOID):
        raise UnsupportedError(f"{header.file.path}: routers without a sigmoid run on llama.cpp only")
    dense = Dense(header.count("feed_forward_length", "ffn"))
    experts = replace(read_experts(header, "sigmoid"), choice_bias=True)
    leading = leading_dense(header)
    return hybrid(header, spec, [dense if layer < leading else experts for layer in range(spec.layers)])
