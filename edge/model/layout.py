"""The tensors of a file that is not here: names and shapes, as its header and its architecture's network imply them.

`edge models --fits` plans models from published figures. The header's keys are those of GGUF, and the tensors those
that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header
from edge.model.architectures import USUAL, find_network
from edge.model.fallback import figure, read_fallback
from edge.model.layers import Network
from edge.model.tensors import FUSED

Listed = tuple[str, tuple[int, ...]]
"""A tensor's name and its shape in ggml's order, the length of a row first."""


def list_tensors(bare: GGUFFile) -> list[Listed]:
    """All tensors of a model, layer by layer.

    bare: a file with the whole header, and of the tensors only those that no header implies: the token embedding, and
    by their names an output head of its own and factors of RoPE. Raises UnsupportedError for architectures without a
    network, ModelFormatError if a figure is missing or impossible.
    """
    architecture = bare.metadata["general.architecture"]
    usual = USUAL.get(architecture, ())
    header = Header(_with_first_layer(bare, usual), architecture)
    spec = read_fallback(header)
    network = find_network(header, replace(spec, ffn=figure(header, "feed_forward_length", "ffn", 0)))
    if network is None or network.norm != "rms":  # `USUAL` does not say which biases LayerNorm has
        raise UnsupportedError(f"the tensors of {architecture} models cannot be counted without their file")
    factors = [(name, (spec.rope_dim // 2,)) for name in bare.tensors if name.startswith("rope_")]
    return [*factors, *_stored(network, usual)]


def _with_first_layer(bare: GGUFFile, names: tuple[str, ...]) -> GGUFFile:
    """With tensors of the first layer, which show architectures what a header does not say."""
    shown = (f"blk.0.{name}" for name in names)
    return replace(bare, tensors=bare.tensors | {name: TensorInfo(name, (1,), "F32", 0, 0, 4) for name in shown})


def _stored(network: Network, usual: tuple[str, ...]) -> Iterator[Listed]:
    """The network's tensors as files hold them: some in one matrix, row behind row."""
    fused = {part: name for name, parts in FUSED.items() if f"{name}.weight" in usual for part in parts}
    fused["attn_q_gate"] = "attn_q"
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in network.tensors():
        whole = name.removesuffix(tensor.name) + fused.get(tensor.name, tensor.name)
        rows = tensor.rows + (found[whole][1] if whole in found else 0)
        found[whole] = tensor.stored or tuple(extent for extent in (tensor.columns, rows, tensor.experts) if extent)
    for name, shape in found.items():
        name = network.output_norm if name == "output_norm" else name
        yield name if name.endswith((".bias", ".ssm_a", ".ssm_d")) else f"{name}.weight", shape
