"""The tensors of a model as our own engines see them, independent of fusing in the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile, factors_of, input_factor_name
from edge.model.architectures import LACKING
from edge.model.cores import Attention, Tensor
from edge.model.structure.layers import Network
from edge.model.structure.mtp import without_mtp
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass
from edge.types import AnyArray

FUSED = {  # matrices that a file may fuse into one, row after row
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),  # of each expert
}
JOINED = "attn_kv_b"  # see `Latent.joined`
_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True)
class Source:
    """Rows of a tensor in the file, or values of a vector: runs of rows at a constant stride. The rows of one expert
    follow those of another."""

    tensor: str
    first: int  # row of the first run
    rows: int  # of all runs
    run: int = 0  # rows of a run; 0: a single run of all
    stride: int = 0  # rows between the starts of runs
    is_row: bool = False  # a matrix of one row, which the file stores as a vector
    is_flat: bool = False  # a vector, which the file stores as a matrix
    transposed: bool = False  # runs are matrices, whose columns are the tensor's rows

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Start and length of each run."""
        if not self.run:
            return [(self.first, self.rows)]
        return [(self.first + number * self.stride, self.run) for number in range(self.rows // self.run)]

    def runs_of(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Start and length of each run within `count` rows of this source, from its row `first` on."""
        for start, length in self.runs:
            skipped = min(first, length)
            if taken := min(count, length - skipped):
                yield start + skipped, taken
            first, count = first - skipped, count - taken

    @property
    def index(self) -> slice | AnyArray:
        """The array index that selects the rows."""
        if not self.run:
            return slice(self.first, self.first + self.rows)
        return np.concatenate([np.arange(first, first + count) for first, count in self.runs])


def find_network(spec: ModelSpec) -> Network:
    """The model's description of layers. Raises UnsupportedError for architectures that have none."""
    if spec.network is None:
        lacks = LACKING.get(spec.architecture)
        why = f", since edge's own engines lack {lacks}" if lacks else ""
        raise UnsupportedError(f"{spec.architecture} models run on llama.cpp only{why}: use --backend=llamacpp")
    return spec.network


def find_tensors(file: GGUFFile, spec: ModelSpec) -> dict[str, Source]:
    """The sources of every tensor of the model: `blk.0.attn_q` is a matrix or norm, `blk.0.attn_q.bias` its bias.

    Raises UnsupportedError if tensors are missing or unknown, ModelFormatError for a shape that contradicts the header.
    """
    network, file = find_network(spec), without_mtp(file)
    stored = {name.removesuffix(".weight"): name for name in file.tensors}
    for name, scale in factors_of(file.tensors).items():  # which the descriptions of matrices have
        stored.pop(scale.name)
        stored.pop(input_factor_name(name), None)
    for tensor in network.tail:
        name = stored.pop(tensor.name)
        info = file.tensors[name]
        is_row = tensor.rows == 1 and info.shape == (tensor.columns,)
        rows = 1 if is_row else info.rows if tensor.columns else info.elements
        _check_shape(file, tensor, Source(name, 0, rows, is_row=is_row))
    if network.output_norm in stored:
        stored["output_norm"] = stored.pop(network.output_norm)
    found: dict[str, Source] = {}
    wanted = dict(network.tensors())
    for layer, core in enumerate(network.attention):
        if core and core.gated:
            found.update(_split_gate(stored, layer, core))
        joined = stored.get(f"blk.{layer}.{JOINED}") if core and core.latent and core.latent.joined else None
        if core and joined:
            found |= _split_latent(file, joined, layer, core)
    for prefix in (f"blk.{layer}" for layer in range(len(network.layers))):
        for fused, parts in FUSED.items():
            if f"{prefix}.{parts[0]}" in wanted and f"{prefix}.{parts[0]}" not in stored:
                found |= _split(file, wanted, prefix, fused, parts)
    taken = {source.tensor for source in found.values()}
    for name, stored_name in stored.items():
        if stored_name not in taken:
            info = file.tensors[stored_name]
            is_row = name in wanted and wanted[name].rows == 1 and info.shape == (wanted[name].columns,)
            rows = info.rows if name not in wanted or wanted[name].columns else info.elements
            is_flat = name in wanted and bool(wanted[name].stored) and not wanted[name].columns
            found[name] = Source(stored_name, 0, 1 if is_row else rows, is_row=is_row, is_flat=is_flat)
    for name, tensor in wanted.items():
        if (same := name.removesuffix(tensor.name) + tensor.same_as) in found and tensor.same_as:
            found[name] = found[same]
    wanted |= {name: Tensor(name, spec.rope_dim // 2) for name in _FACTORS if name in found}
    if missing := sorted(set(wanted) - set(found)):
        name = missing[0] if missing[0].endswith(".bias") else f"{missing[0]}.weight"
        raise UnsupportedError(f"the model has no tensor {name}: use --backend=llamacpp")
    if unknown := sorted(set(found) - set(wanted)):
        raise UnsupportedError(f"our engines do not know the tensor {unknown[0]}: use --backend=llamacpp")
    for name, tensor in wanted.items():
        _check_shape(file, tensor, found[name])
    return found


def _check_shape(file: GGUFFile, tensor: Tensor, source: Source) -> None:
    """Check that a tensor has exactly the described shape, on which engines rely. Raises ModelFormatError."""
    if tensor.stored and source.run:  # `_split_latent` has checked it
        return
    shape = file.tensors[source.tensor].shape
    expected = tensor.stored or tuple(extent for extent in (tensor.columns, tensor.rows, tensor.experts) if extent)
    found = shape if tensor.stored else (*(shape if source.is_row else shape[:-1]), source.rows)
    if tensor.stored:  # in which writers differ by extents of 1
        expected, found = (tuple(extent for extent in each if extent > 1) for each in (expected, found))
    if tensor.experts:
        found = *shape[:-2], source.rows // shape[-1], shape[-1]
    if found != expected:
        raise ModelFormatError(f"{file.path}: {source.tensor} has shape {shape} instead of {expected}")


def _split(
    file: GGUFFile, wanted: dict[str, Tensor], prefix: str, fused: str, parts: tuple[str, ...]
) -> dict[str, Source]:
    found = {}
    for kind, suffix in (("weight", ""), ("bias", ".bias")):
        name = f"{prefix}.{fused}.{kind}"
        if (info := file.tensors.get(name)) is None:
            continue
        tensors = {part: wanted[f"{prefix}.{part}"] for part in parts}
        whole, first = sum(tensor.rows for tensor in tensors.values()), 0
        rows, experts = info.elements if suffix else info.rows, tensors[parts[0]].experts
        if rows != whole * max(1, experts):
            raise ModelFormatError(f"{file.path}: {name} has {rows} rows instead of {whole * max(1, experts)}")
        for part, tensor in tensors.items():
            runs = (tensor.rows * experts, tensor.rows, whole) if experts else (tensor.rows,)
            found[f"{prefix}.{part}{suffix}"] = Source(name, first, *runs)
            first += tensor.rows
    return found


def _split_latent(file: GGUFFile, name: str, layer: int, core: Attention) -> dict[str, Source]:
    """Sources of the heads' `attn_k_b`, transposed, and `attn_v_b`, whose rows alternate in one matrix, [heads, plain +
    value, rank]. Raises ModelFormatError."""
    assert core.latent
    plain, value = core.latent.plain, core.latent.value
    expected, found = (core.row.value, core.heads * (plain + value)), file.tensors[name].shape
    if found != expected:
        raise ModelFormatError(f"{file.path}: {name} has shape {found} instead of {expected}")
    return {
        f"blk.{layer}.attn_k_b": Source(name, 0, core.heads * plain, plain, plain + value, transposed=True),
        f"blk.{layer}.attn_v_b": Source(name, plain, core.heads * value, value, plain + value),
    }


def _split_gate(stored: dict[str, str], layer: int, core: Attention) -> Iterator[tuple[str, Source]]:
    """Sources of queries and their gate, whose rows alternate head by head."""
    tensor = stored.get(f"blk.{layer}.attn_q")
    if tensor:
        for number, name in enumerate(("attn_q", "attn_q_gate")):
            rows = Source(tensor, number * core.head_dim, core.width, core.head_dim, 2 * core.head_dim)
            yield f"blk.{layer}.{name}", rows
