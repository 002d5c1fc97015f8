"""Section EMBED of model.edge: how the hidden states of a text become its vector (runtime/pass/embed.c)."""

from __future__ import annotations

from typing import get_args

from edge.apps.c_struct import c_struct, filled
from edge.backends.tvm.packing.layout import PackedLayout
from edge.errors import InputError, UnsupportedError
from edge.model.model import DEFAULT_PROMPT, Model
from edge.model.structure.layers import DENSE, Network, Pooling
from edge.model.tensors import find_network

POOLINGS: tuple[str, ...] = get_args(Pooling)  # in the order of the numbers in the file
NORMS = ("", "rms", "layer")  # of hidden states, before they are pooled
_NONE = 2**64 - 1

# The config is followed by `dense` layers, each a DENSE_LAYER, float32 [rows, columns], and its bias if it has one, and
# by `prompts` names, each with its text. All texts end with \0.
CONFIG = c_struct(
    **dict.fromkeys(("pooling", "norm", "dimensions", "dense", "prompts"), "<u4"),
    end="<i4",  # the token behind a text, or -1
    prompt="<i4",  # the number of the prompt before texts for which none is chosen, or -1
    widest="<u4",  # the most values of a state, or of a dense layer's output
    norm_eps="<f8",
    **dict.fromkeys(("norm_weight", "norm_bias"), "<u8"),  # offsets in section WEIGHTS; the last one may be NONE
)
DENSE_LAYER = c_struct(rows="<u4", columns="<u4", biased="<u4", reserved="<u4")
STRUCTS = {"embed_config": CONFIG, "dense_layer": DENSE_LAYER}  # by their names in C


def makes_vectors(model: Model) -> bool:
    """Whether a model's bundle embeds texts: encoders, and decoders whose files say how, but for rerankers."""
    named = f"{model.spec.architecture}.pooling_type" in model.file.metadata
    return (model.spec.encoder or named) and not find_network(model.spec).ranks


def embed_section(model: Model, layout: PackedLayout) -> bytes:
    """Section EMBED; empty for a model that only generates. Raises UnsupportedError, InputError for its prompts."""
    if not makes_vectors(model):
        if model.spec.encoder:
            raise UnsupportedError("a reranker that reads pairs of texts cannot be exported: use edge rank")
        return b""
    network, tail, prompts = find_network(model.spec), model.tail, list(model.prompts.items())
    if any("\0" in each for prompt in prompts for each in prompt):
        raise InputError("a prompt of the model has a zero character")
    default = model.file.metadata.get(DEFAULT_PROMPT)
    names = [name for name, _ in prompts]
    values = {
        "pooling": POOLINGS.index(network.pooling),
        "dimensions": tail.size, "prompts": len(prompts), "end": -1 if model.text_end is None else model.text_end,
        "prompt": names.index(default) if default in names else -1, **norm_values(network, layout),
    }  # fmt: skip
    parts = list[bytes]()
    for name in DENSE:
        if (matrix := tail.values.get(name)) is not None:
            bias_of = tail.values.get(f"{name}.bias")
            rows, columns = matrix.shape
            parts.append(filled(DENSE_LAYER, {"rows": rows, "columns": columns, "biased": bias_of is not None}))
            parts += [each.astype("<f4").tobytes() for each in (matrix, bias_of) if each is not None]
    layers = [tail.values[name] for name in DENSE if name in tail.values]
    values |= {"dense": len(layers), "widest": max(network.hidden, *map(len, layers), 0)}
    texts = [each.encode() + b"\0" for prompt in prompts for each in prompt]
    return b"".join([filled(CONFIG, values), *parts, *texts])


def norm_values(network: Network, layout: PackedLayout) -> dict[str, object]:
    """Fields of CONFIG: the norm of hidden states behind the last layer."""
    norm, bias = (layout.places.get(name) for name in ("output_norm", "output_norm.bias"))
    return {
        "norm": NORMS.index(network.norm) if network.normed else 0, "norm_eps": network.norm_eps,
        "norm_weight": norm.quants if norm and network.normed else _NONE,
        "norm_bias": bias.quants if bias and network.normed else _NONE,
    }  # fmt: skip
