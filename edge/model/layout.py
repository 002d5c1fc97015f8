"""The tensors of an absent file: names and shapes, derived from its header and its architecture's network.

`edge models --fits` plans models from published figures. The header's keys are those of GGUF, and the tensors those
that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import chain

from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header
from edge.model.architectures import UNSTATED, USUAL, USUAL_EXPERTS, find_network
from edge.model.cores import Tensor
from edge.model.structure.fallback import figure, read_fallback
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import FUSED, JOINED

Listed = tuple[str, tuple[int, ...]]
"""A tensor's name and its shape in ggml's order, the length of a row first."""


def list_tensors(bare: GGUFFile) -> list[Listed]:
    """All tensors of a model, layer by layer.

    bare: a file with the whole header, and only the tensors that no header implies: the token embedding, an untied
    output head, and RoPE factors; of the last two, only the names count. Raises UnsupportedError for architectures
    without a network, ModelFormatError if a figure is missing or impossible.
    """
    architecture = bare.metadata["general.architecture"]
    usual = USUAL.get(architecture, ())
    if bare.metadata.get(f"{architecture}.expert_count"):
        if architecture in UNSTATED:
            raise UnsupportedError(f"the tensors of {architecture}'s mixtures cannot be counted without their file")
        usual += USUAL_EXPERTS.get(architecture, ("ffn_down_exps.weight",))
    spec, network = network_of(_with_first_layer(bare, usual))
    if network is None or network.norm != "rms":  # `USUAL` does not say which biases LayerNorm has
        raise UnsupportedError(f"the tensors of {architecture} models cannot be counted without their file")
    factors = [(name, (spec.rope_dim // 2,)) for name in bare.tensors if name.startswith("rope_")]
    return [*factors, *((name, shape) for name, shape, _ in stored_tensors(network, set(usual)))]


def network_of(bare: GGUFFile) -> tuple[ModelSpec, Network | None]:
    """The spec and network of a file, which has a complete header, the shape of the token embedding, and the names of
    the other tensors. Raises ModelFormatError, UnsupportedError."""
    header = Header(bare, bare.metadata["general.architecture"])
    spec = read_fallback(header)
    return spec, find_network(header, replace(spec, ffn=figure(header, "feed_forward_length", "ffn", 0)))


def stored_tensors(network: Network, first: Set[str]) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """The network's tensors as files store them, some fused row after row: name, shape, and description.

    first: names of the first layer's tensors, which show which matrices are fused.
    """
    fused = {
        part: name
        for name, parts in FUSED.items() if f"{name}.weight" in first and f"{parts[0]}.weight" not in first
        for part in parts
    }  # fmt: skip
    fused["attn_q_gate"] = "attn_q"
    if any(core and core.latent and core.latent.joined for core in network.attention):
        fused |= dict.fromkeys(("attn_k_b", "attn_v_b"), JOINED)
    found: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for name, tensor in chain(network.tensors(), ((tensor.name, tensor) for tensor in network.tail)):
        if tensor.same_as:
            continue
        stem = tensor.name.removesuffix(".bias")
        whole = name.removesuffix(tensor.name) + fused.get(stem, stem) + tensor.name.removeprefix(stem)
        rows = tensor.rows + (_rows(found[whole]) if whole in found else 0)
        shape = tuple(extent for extent in (tensor.columns, rows, tensor.experts) if extent)
        found[whole] = tensor.stored or shape, tensor
    for name, (shape, tensor) in found.items():
        name = network.output_norm if name == "output_norm" else name
        yield name if name.endswith((".bias", ".scale", ".ssm_a", ".ssm_d")) else f"{name}.weight", shape, tensor


def _rows(found: tuple[tuple[int, ...], Tensor]) -> int:
    shape, tensor = found
    return shape[1 if tensor.columns else 0]


def _with_first_layer(bare: GGUFFile, names: tuple[str, ...]) -> GGUFFile:
    """Add tensors of the first layer, from which architectures infer facts that no header states."""
    shown = (f"blk.0.{name}" for name in names)
    return replace(bare, tensors=bare.tensors | {name: TensorInfo(name, (1,), "F32", 0, 0, 4) for name in shown})
