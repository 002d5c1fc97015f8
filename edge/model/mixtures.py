"""The block type of each tensor in the mixtures that GGUF files are published in, such as Q4_K_M.

These are the rules of llama.cpp's `llama-quantize` without an importance matrix, for the mixtures of `MIXTURES`. The
output head, or the embedding that serves as one, gets more bits. In the _M mixtures, so do the value and down
projections of half of the layers. Rows whose length is not a multiple of 256 get a type with blocks of 32.

Files that edge itself writes follow `bits_of`, which reads the description of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch

from edge.errors import InputError, UnsupportedError
from edge.formats.blocks import block_size
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Planned
from edge.model.cores import EXACT, Bits
from edge.model.layout import Listed
from edge.model.structure.layers import TABLE
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors

MIXTURES = {  # the type of most matrices, by name; the best first
    "F16": "F16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "Q4_1": "Q4_1", "Q4_0": "Q4_0",
    "MXFP4": "MXFP4",
}  # fmt: skip
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_KEPT = ("*_norm.weight", "*ffn_gate_inp.weight", *(f"*{name}.weight" for name in EXACT))
EMBEDDINGS = ("token_embd.weight", f"{TABLE}.weight")


def plan_types(tensors: Sequence[Listed], mixture: str) -> list[Planned]:
    """Assign a type to each tensor. In MXFP4, only experts are MXFP4 and other matrices Q8_0. Raises InputError."""
    if mixture not in MIXTURES:
        raise InputError(f"unknown mixture {mixture!r}: choose {', '.join(MIXTURES)}")
    tied = all(name != "output.weight" for name, _ in tensors)
    totals = Counter(_sensitive(name) for name, _ in tensors)
    seen, planned = Counter[str | None](), []
    for name, shape in tensors:
        sensitive = _sensitive(name)
        more = mixture in ("Q4_K_M", "Q5_K_M") and _has_more_bits(seen[sensitive], totals[sensitive])
        planned.append(Planned(name, shape, _type(name, shape, mixture, sensitive if more else None, tied=tied)))
        seen[sensitive] += 1
    return planned


def _type(name: str, shape: tuple[int, ...], mixture: str, sensitive: str | None, *, tied: bool) -> str:
    """The type of a tensor. sensitive: the kind of matrix, if it gets more bits in its layer."""
    if len(shape) < 2 or stays_exact(name):
        return "F32"
    kind = MIXTURES[mixture]
    if kind == "F16" or name == "per_layer_model_proj.weight":
        return "F16"
    if kind == "MXFP4":
        return kind if len(shape) > 2 else "Q8_0"
    if name == "output.weight" or (tied and name in EMBEDDINGS):
        kind = "Q8_0" if shape[0] % block_size(kind) else "Q8_0" if kind == "Q8_0" else "Q6_K"
    elif sensitive:
        kind = "Q6_K"
    if shape[0] % block_size(kind):
        kind = _SMALLER_BLOCKS.get(kind, kind)
    return "F16" if shape[0] % block_size(kind) else kind


def stays_exact(name: str) -> bool:
    """Whether a tensor keeps float32 in every mixture: engines do not multiply by it, or every bit of it counts."""
    return not name.endswith(".weight") or any(fnmatch(name, kept) for kept in _KEPT)


def bits_of(file: GGUFFile, spec: ModelSpec) -> dict[str, Bits]:
    """The bits that each matrix of the file needs, by name; empty for models that our engines do not run.

    Cores state the bits of their own matrices. In hybrids, attention needs more, since only few layers have it.
    """
    if spec.network is None:
        return {}
    try:
        sources = find_tensors(file, spec)
    except UnsupportedError:
        return {}
    hybrid = any(spec.network.fixed_values)
    attention = {
        f"blk.{layer}.{tensor.name}"
        for layer, core in enumerate(spec.network.attention) if core and hybrid
        for tensor in core.tensors(spec.hidden)
    }  # fmt: skip
    return {
        sources[name].tensor: "all" if tensor.exact else "more" if name in attention else tensor.bits
        for name, tensor in spec.network.tensors() if tensor.columns
    }  # fmt: skip


def _sensitive(name: str) -> str | None:
    """The kind of a matrix that mixtures count layer by layer: value projection, or down projection."""
    if "attn_v.weight" in name or "attn_qkv.weight" in name:
        return "values"
    return "down" if "ffn_down" in name and name.endswith(".weight") else None


def _has_more_bits(index: int, count: int) -> bool:
    """True for the first and the last eighth of the layers, and for every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
