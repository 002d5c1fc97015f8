"""Where our own engines find a model's tensors, whatever an architecture fuses or leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec, Recipe

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
BIASES = tuple(f"{name}.bias" for name in ("attn_norm", "ffn_norm", *MATRICES))
_FUSED = {"attn_qkv": MATRICES[:3], "ffn_up": MATRICES[4:6]}  # matrices that may lie in one, row behind row
_TABLES = ("token_embd", "position_embd", "output")
_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True)
class Source:
    """Rows of a tensor of the file, `rows` of them from `first` on; of a vector, its values."""

    tensor: str
    first: int
    rows: int


def find_recipe(spec: ModelSpec) -> Recipe:
    """Raises UnsupportedError for architectures that have none."""
    if spec.recipe is None:
        raise UnsupportedError(f"{spec.architecture} models run on llama.cpp only: use --backend llamacpp")
    return spec.recipe


def find_tensors(file: GGUFFile, spec: ModelSpec) -> dict[str, Source]:
    """Every tensor of the model: `blk.0.attn_q` is a matrix or norm, `blk.0.attn_q.bias` its bias.

    Raises UnsupportedError if tensors are missing, unknown, or not the same in all layers; ModelFormatError if a
    fused one has not the rows of its parts.
    """
    recipe, rows = find_recipe(spec), _row_counts(spec)
    matrices = [name for name in MATRICES if recipe.gated or name != "ffn_gate"]
    found: dict[str, Source] = {}
    for layer in range(spec.layers):
        for fused, parts in _FUSED.items():
            if f"blk.{layer}.{parts[0]}.weight" not in file.tensors and parts[0] in matrices:
                found |= _split(file, rows, f"blk.{layer}", fused, parts)
    taken = {source.tensor for source in found.values()}
    for name, info in file.tensors.items():
        if name not in taken:
            found[name.removesuffix(".weight")] = Source(name, 0, info.shape[-1])
    wanted = {"token_embd", "output_norm", *(["position_embd"] if recipe.learned_positions else [])}
    wanted |= {f"blk.{layer}.{name}" for layer in range(spec.layers) for name in ("attn_norm", "ffn_norm", *matrices)}
    if missing := sorted(wanted - set(found)):
        raise UnsupportedError(f"the model has no tensor {missing[0]}.weight: use --backend llamacpp")
    in_layers = {name for name in found if name.startswith("blk.")}
    known = {f"blk.{layer}.{name}" for layer in range(spec.layers) for name in (*matrices, *NORMS, *BIASES)}
    known |= wanted | {"output", "output_norm.bias", *_FACTORS}
    if unknown := sorted(set(found) - known):
        raise UnsupportedError(f"our engines do not know the tensor {unknown[0]}: use --backend llamacpp")
    for name, source in found.items():
        _check_shape(file, spec, rows, name, source)
    first = {name.removeprefix("blk.0.") for name in in_layers if name.startswith("blk.0.")}
    if odd := sorted(in_layers ^ {f"blk.{layer}.{name}" for layer in range(spec.layers) for name in first}):
        raise UnsupportedError(f"only some layers have {odd[0]}: use --backend llamacpp")
    return found


def _row_counts(spec: ModelSpec) -> dict[str, int]:
    """Rows of matrices and lengths of vectors that are not as long as a hidden state."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "ffn_gate": spec.ffn, "ffn_up": spec.ffn}
    rows |= {"token_embd": spec.vocab, "output": spec.vocab, "position_embd": spec.context}
    rows |= {"attn_q_norm": spec.head_dim, "attn_k_norm": spec.head_dim}
    return rows | dict.fromkeys(_FACTORS, spec.rope_dim // 2)


def _check_shape(file: GGUFFile, spec: ModelSpec, rows: dict[str, int], name: str, source: Source) -> None:
    """Engines read by the spec's figures, so each tensor must have just these."""
    stem = name.removesuffix(".bias").rpartition(".")[2]
    shape = file.tensors[source.tensor].shape
    expected: tuple[int, ...] = (rows.get(stem, spec.hidden),)
    if stem in MATRICES + _TABLES and not name.endswith(".bias"):
        columns = {"attn_output": rows["attn_q"], "ffn_down": rows["ffn_up"]}.get(stem, spec.hidden)
        expected = (columns, *expected)
    if (*shape[:-1], source.rows) != expected:
        raise ModelFormatError(f"{file.path}: {source.tensor} has shape {shape} instead of {expected}")


def _split(file: GGUFFile, rows: dict[str, int], layer: str, fused: str, parts: tuple[str, ...]) -> dict[str, Source]:
    found = {}
    for kind, suffix in (("weight", ""), ("bias", ".bias")):
        name = f"{layer}.{fused}.{kind}"
        if (info := file.tensors.get(name)) is None:
            continue
        first = 0
        for part in parts:
            found[f"{layer}.{part}{suffix}"] = Source(name, first, rows[part])
            first += rows[part]
        if info.shape[-1] != first:
            raise ModelFormatError(f"{file.path}: {name} has {info.shape[-1]} rows instead of {first}")
    return found
