"""ModelSpec of models that `reader.py` does not check in full: mixtures of experts, hybrids, layers of several kinds.

Figures are counted from tensors, so most new architectures need nothing here. Not all causes of aborts in llama.cpp are
known, so llama.cpp first loads the header in a child process (`backends/llamacpp/trial.py`), and the plan then uses
llama.cpp's own figures.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile
from edge.formats.gguf_fields import LIMITS, Header
from edge.model.cores import EXACT
from edge.model.structure.mtp import NEXTN_LAYERS
from edge.model.structure.spec import ModelSpec

_NOT_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}  # no engine multiplies by these

# Prefixes of the names of tensors in layers with a recurrent state: Mamba and DeltaNet, short convolutions, RWKV. The
# size of the state is known for all but RWKV.
_RECURRENT = ("ssm_", "shortconv", "time_mix")
_EXPERTS = "_exps"
_TABLES = ("per_layer_token_embd.weight",)  # Gemma 4's, the largest part of its small models
ENCODERS = (
    "bert",
    "nomic-bert",
    "modern-bert",
    "gemma-embedding",
)  # architectures of encoders, whose attention sees whole texts
_LACKING = {  # of other encoders
    "jina-bert-v2": "ALiBi's positions", "jina-bert-v3": "adapters that a task chooses",
    "nomic-bert-moe": "experts within an encoder",
}  # fmt: skip
_MOST_DIMENSIONS, _MOST_SECTIONS = 4, 4


def is_dense(header: Header) -> bool:
    """Whether `reader.py` can check this header in full, without `read_fallback`."""
    counts = ("expert_count", "expert_used_count", "expert_group_count", NEXTN_LAYERS)
    return all(header.value(key) in (None, 0) for key in counts)


def read_fallback(header: Header) -> ModelSpec:
    """Read the spec of any model that llama.cpp may run.

    Raises ModelFormatError if figures are missing, impossible or contradict the tensors; UnsupportedError for an
    encoder that edge does not run, or a tensor of too many dimensions.
    """
    file, (hidden, layers) = header.file, read_sizes(header)
    check_types(file, _MOST_DIMENSIONS)
    heads = max(per_layer(header, "attention.head_count", "heads", layers, 0))
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", layers, heads)
    head_dim = figure(header, "attention.key_length", "head_dim", hidden // max(1, heads))
    rope_dim = _check_rope(header, head_dim)
    recurrent = [any(name.startswith(_RECURRENT) for name in names) for names in _names(file, layers)]
    window = figure(header, "attention.sliding_window", "context", 0)
    experts = figure(header, "expert_count", "ffn", 0)
    used = min(experts, max(per_layer(header, "expert_used_count", "ffn", layers, 0)))
    of_experts = [tensor for name, tensor in file.tensors.items() if _EXPERTS in name]
    if experts == 1 and not of_experts:  # Jamba's dense models say so
        experts = used = 0
    if bool(of_experts) != bool(experts) or bool(experts) != bool(used):
        raise ModelFormatError(f"{file.path}: its experts are {experts}, used {used}, tensors {len(of_experts)}")
    return make_spec(
        header,
        heads=max(1, heads),
        kv_heads=max(1, *kv_heads),
        head_dim=max(1, head_dim),
        ffn=_widest(file, used),
        rope_dim=rope_dim,
        window=window,
        proven=False,
        layer_values=_row_values(file, kv_heads, head_dim, layers, recurrent),
        layer_windows=_windows(header, window, layers),
        recurrent=any(recurrent),
        state_bytes=sum(recurrent) * _state_bytes(header, hidden),
        experts=experts,
        experts_used=used,
        expert_parameters=sum(tensor.elements for tensor in of_experts),
        expert_bytes=sum(tensor.nbytes for tensor in of_experts),
    )


def read_sizes(header: Header) -> tuple[int, int]:
    """Values of a hidden state, and layers. Raises ModelFormatError if they are missing, impossible or contradict the
    embedding; UnsupportedError for an encoder that edge does not run."""
    file = header.file
    for key, value in file.metadata.items():
        if key.startswith(f"{header.architecture}.") and isinstance(value, float) and not math.isfinite(value):
            raise ModelFormatError(f"{file.path}: {key} is {value}")
    if header.value("attention.causal") not in (None, True) and header.architecture not in ENCODERS:
        lacks = _LACKING.get(header.architecture)
        why = f" (it lacks {lacks})" if lacks else ""
        raise UnsupportedError(
            f"{file.path}: its attention is not causal, and of encoders edge runs only {', '.join(ENCODERS)}{why}"
        )
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise ModelFormatError(f"{file.path}: token_embd.weight has {len(shape)} dimensions instead of 2")
    if shape[0] != header.count("embedding_length", "hidden"):
        raise ModelFormatError(
            f"{file.path}: embedding_length differs from the width of token_embd.weight ({shape[0]})"
        )
    return shape[0], header.count("block_count", "layers")


def make_spec(header: Header, **own: Any) -> ModelSpec:
    """The spec of a checked header. own: the fields that dense models state, and that are counted for others."""
    file = header.file
    hidden, vocab = file.tensors["token_embd.weight"].shape
    layer_norm_eps = header.positive("attention.layer_norm_epsilon", 1e-5, below=1.0)
    return ModelSpec(
        architecture=header.architecture,
        name="".join(filter(str.isprintable, str(file.metadata.get("general.name", file.path.stem))))[:100],
        layers=header.count("block_count", "layers"),
        hidden=hidden,
        vocab=vocab,
        context=header.count("context_length", "context", default=2048),
        norm_eps=header.positive("attention.layer_norm_rms_epsilon", layer_norm_eps, below=1.0),
        rope_base=header.positive("rope.freq_base", 10000.0, below=1e12),
        compiled=file.compiled,
        **own,
        **count_tensors(file),
    )


def count_tensors(file: GGUFFile) -> dict[str, Any]:
    """The fields of ModelSpec that are sums over tensors."""
    tensors = file.tensors.values()
    values_by_type, bytes_by_type, bytes_by_layer = Counter[str](), Counter[str](), Counter[str]()
    experts_by_type, expert_by_layer = Counter[str](), Counter[str]()
    for tensor in tensors:
        bytes_by_type[tensor.type] += tensor.nbytes
        if not tensor.name.startswith("blk."):
            continue
        values_by_type[tensor.type] += tensor.elements
        layer = tensor.name.split(".")[1]
        if _EXPERTS in tensor.name and len(tensor.shape) == 3:  # not biases
            experts_by_type[tensor.type] += tensor.nbytes
            expert_by_layer[layer] += -(-tensor.nbytes // max(1, tensor.shape[-1]))
        else:
            bytes_by_layer[layer] += tensor.nbytes
    tables = [tensor for tensor in tensors if tensor.name in _TABLES]
    return {
        "tied_head": "output.weight" not in file.tensors,
        "parameters": sum(tensor.elements for tensor in tensors),
        "weight_bytes": sum(tensor.nbytes for tensor in tensors),
        "largest_tensor": max(tensor.nbytes for tensor in tensors),
        "largest_layer": max(bytes_by_layer.values(), default=0),
        "embedding_bytes": file.tensors["token_embd.weight"].nbytes if "token_embd.weight" in file.tensors else 0,
        "weight_type": (values_by_type or bytes_by_type).most_common(1)[0][0],
        "type_bytes": tuple(bytes_by_type.items()),
        "expert_types": tuple(experts_by_type.items()),
        "largest_expert": max(expert_by_layer.values(), default=0),
        "table_parameters": sum(tensor.elements for tensor in tables),
        "table_bytes": sum(tensor.nbytes for tensor in tables),
        "table_type": tables[0].type if tables else "",
    }


def check_types(file: GGUFFile, most_dimensions: int) -> None:
    """Check types: vectors must be float32, as in every GGUF file; engines must be able to multiply by matrices."""
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        if len(tensor.shape) > most_dimensions:
            raise UnsupportedError(f"{file.path}: {name} has {len(tensor.shape)} dimensions: not supported yet")
        is_vector = len(tensor.shape) == 1 or kind != "weight" or stem.endswith(("_norm", *EXACT))
        if tensor.type in _NOT_WEIGHTS or (is_vector and tensor.type != "F32"):
            raise ModelFormatError(f"{file.path}: {name} is of type {tensor.type}, which no engine can use there")


def _check_rope(header: Header, head_dim: int) -> int:
    """The number of rotated values per head. Raises ModelFormatError if heads, or the heads of layers with a window,
    have fewer values: llama.cpp would abort only when it runs."""
    rope_dim = figure(header, "rope.dimension_count", "head_dim", head_dim)
    windowed = figure(header, "rope.dimension_count_swa", "head_dim", rope_dim)
    sizes = (rope_dim, head_dim), (windowed, figure(header, "attention.key_length_swa", "head_dim", head_dim))
    for rotated, size in sizes:
        if rotated % 2 or rotated > size:
            raise ModelFormatError(f"{header.file.path}: RoPE rotates {rotated} values of heads of {size}")
    sections = header.file.metadata.get(f"{header.architecture}.rope.dimension_sections")
    if isinstance(sections, ArrayRef) and sections.count <= _MOST_SECTIONS:
        parts = [int(number) for number in header.file.numbers(f"{header.architecture}.rope.dimension_sections")]
        if min(parts, default=0) < 0 or sum(parts) > head_dim:
            raise ModelFormatError(f"{header.file.path}: RoPE has sections {parts} in heads of {head_dim}")
    return rope_dim


def _names(file: GGUFFile, layers: int) -> list[set[str]]:
    """The names of each layer's tensors, without `blk.N.`. Raises ModelFormatError for other layers."""
    names: list[set[str]] = [set() for _ in range(layers)]
    for name in file.tensors:
        if name.startswith("blk."):
            _, number, rest = name.split(".", 2) if name.count(".") > 1 else ("", "", "")
            if not number.isdecimal() or not number.isascii() or len(number) > 4 or int(number) >= layers:
                raise ModelFormatError(f"{file.path}: {name} belongs to none of {layers} layers")
            names[int(number)].add(rest)
    return names


def per_layer(header: Header, key: str, kind: str, layers: int, default: int) -> list[int]:
    """A header field with one number for all layers or one per layer, each possibly 0; [layers]. Raises
    ModelFormatError."""
    file, name = header.file, f"{header.architecture}.{key}"
    value = file.metadata.get(name)
    if not isinstance(value, ArrayRef):
        return [figure(header, key, kind, default)] * layers
    if value.count < layers or value.count > LIMITS["layers"]:
        raise ModelFormatError(f"{file.path}: {name} has {value.count} values for {layers} layers")
    numbers = [int(number) for number in file.numbers(name)[:layers]]
    if not all(0 <= number <= LIMITS[kind] for number in numbers):
        raise ModelFormatError(f"{file.path}: {name} must be from 0 to {LIMITS[kind]}")
    return numbers


def figure(header: Header, key: str, kind: str, default: int) -> int:
    """A number that may be 0, which architectures write for absent parts; of a list, the largest."""
    value = header.file.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, ArrayRef):
        return max(per_layer(header, key, kind, value.count, default), default=default)
    if value is None:
        return default
    return 0 if value == 0 and not isinstance(value, bool) else header.count(key, kind)


def _row_values(
    file: GGUFFile, kv_heads: list[int], head_dim: int, layers: int, recurrent: list[bool]
) -> tuple[int, ...]:
    """KV values per row, [layers], by the widths of the key and value matrices; DeltaNet's fused matrix adds none."""

    def width(layer: int, name: str) -> int:
        tensor = file.tensors.get(f"blk.{layer}.{name}.weight")
        return tensor.shape[-1] if tensor and len(tensor.shape) > 1 else 0

    values = []
    for layer in range(layers):
        keys = width(layer, "attn_k") or width(layer, "attn_kv_a_mqa")
        if not keys and width(layer, "attn_qkv") and not recurrent[layer]:
            keys = kv_heads[layer] * head_dim
        values.append(keys + (width(layer, "attn_v") or keys))
    return tuple(values)


def _windows(header: Header, window: int, layers: int) -> tuple[int, ...]:
    """Windows by the header's flags per layer, [layers]; 0 (all rows are visible) without flags, since the layers with
    a window are then unknown."""
    name = f"{header.architecture}.attention.sliding_window_pattern"
    if not isinstance(pattern := header.file.metadata.get(name), ArrayRef) or pattern.count < layers:
        return (0,) * layers
    return tuple(window * bool(flag) for flag in header.file.numbers(name)[:layers])


def _state_bytes(header: Header, hidden: int) -> int:
    """Bytes of state per layer and sequence: the convolution's memory, and the recurrent state."""
    short = figure(header, "shortconv.l_cache", "context", 0)
    if short:
        return 4 * hidden * (short - 1)
    if size := figure(header, "kda.head_dim", "head_dim", 0):
        inner = size * figure(header, "attention.head_count", "heads", 0)
        return 4 * inner * (3 * max(0, figure(header, "ssm.conv_kernel", "ffn", 0) - 1) + size)
    conv, inner, state, groups = (
        figure(header, f"ssm.{key}", "ffn", 0) for key in ("conv_kernel", "inner_size", "state_size", "group_count")
    )
    return 4 * (max(0, conv - 1) * (inner + 2 * groups * state) + state * inner)


def _widest(file: GGUFFile, used: int) -> int:
    """Values per token between gate and down, in the widest layer, over all its active experts."""
    by_layer: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        if ".ffn_down" in name and name.endswith(".weight") and len(tensor.shape) > 1:
            by_layer[name.split(".")[1]] += tensor.shape[0] * (used if _EXPERTS in name else 1)
    return max(by_layer.values(), default=1)
