"""Convert RoPE's settings from every layout of config.json to GGUF's fields and factor tensors, and back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import Sizes
from edge.converters.huggingface.architectures.settings import short
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field
from edge.model.architectures.angles import yarn_magnitude
from edge.model.structure.spec import ModelSpec
from edge.types import FloatArray

KEPT = "edge.rope_scaling"  # llama3's parameters as JSON: GGUF has only the factors computed from them
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LLAMA3_USUAL = (1.0, 4.0, 8192)
_SECTIONS = 4  # of M-RoPE, in GGUF
_PROPORTIONAL, _STOPPED = "proportional", 1e30  # Gemma 4's scaling; the divisor of frequencies that are to be 0
_BOUNDS = {"beta_fast": 32.0, "beta_slow": 1.0}  # of YaRN, by default


def read_rope(
    config: Config, scalings: tuple[str, ...], default_theta: float = 10_000.0, *, by_layers: bool = False,
    default_share: float = 1.0,
) -> Config:  # fmt: skip
    """The RoPE settings of layers with full attention under the current keys, with `rope_type` one of `scalings`.

    Older files have rope_theta, rope_scaling and partial_rotary_factor side by side. Where a file has both layouts,
    transformers' rules decide. by_layers: rope_parameters has a part for each type of layer. default_share: the share
    of a head that is rotated, where the file does not say. Raises UnsupportedError, ModelFormatError.
    """
    said: dict[str, Any] = {"rope_theta": config.get("rope_theta", default_theta)}
    said["partial_rotary_factor"] = config.get("partial_rotary_factor", default_share)
    said |= _full_attention(config) if by_layers else _for_all_layers(config)
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "longrope" in scalings):  # earlier names of longrope
        kind = "longrope"
    if kind == "mrope":  # an earlier name, beside mrope_section
        kind = "default"
    if kind == "dynamic" and "linear" in scalings:  # no change within the stated context
        kind = "default"
    if kind not in scalings:
        raise UnsupportedError(f"{config.path}: rope_type {kind!r} is not supported here ({', '.join(scalings)})")
    original = "original_max_position_embeddings"
    if kind == "longrope" and config.get(original) is None:  # transformers assumes 4096, regardless of rope_parameters
        raise ModelFormatError(f"{config.path}: {original} is missing")
    said[original] = config.get(original, said.get(original, config.get("max_position_embeddings")))
    return Config(config.path, said | {"rope_type": kind})


def rope_fields(rope: Config, sizes: Sizes, *, bounds: bool = False) -> dict[str, Field]:
    """Header fields; their keys lack the architecture's prefix.

    bounds: the architecture's readers know fields for YaRN's betas and multiplier.
    """
    kind = rope.values["rope_type"]
    fields: dict[str, Field] = {"rope.freq_base": np.float32(rope.positive("rope_theta"))}
    if kind in ("linear", "yarn"):
        fields["rope.scaling.type"] = str(kind)
        fields["rope.scaling.factor"] = np.float32(rope.positive("factor"))
    if kind == "yarn":
        fields |= _yarn_fields(rope, bounds=bounds)
    elif kind == "longrope":
        fields["rope.scaling.original_context_length"] = np.uint32(_original(rope))
        fields["rope.scaling.attn_factor"] = np.float32(_longrope_magnitude(rope, sizes))
    return fields


def section_fields(rope: Config, usual: tuple[int, ...] = ()) -> dict[str, Field]:
    """The pairs that go by each component of positions (M-RoPE). usual: where the file does not say. Raises
    ModelFormatError."""
    sections = rope.get("mrope_section", [*usual])
    if not isinstance(sections, list) or not all(isinstance(each, int) and 0 <= each < 1024 for each in sections):
        raise ModelFormatError(f"{rope.path}: mrope_section must be a list of numbers of pairs")
    padded = [*sections, *[0] * _SECTIONS][:_SECTIONS]
    return {"rope.dimension_sections": np.array(padded, np.int32)}


def rope_dimensions(rope: Config, sizes: Sizes) -> int:
    """The number of rotated values per head. With proportional scaling all of them, since factors stop some pairs."""
    if rope.values["rope_type"] == _PROPORTIONAL:
        return sizes.head_dim
    share = rope.positive("partial_rotary_factor")
    rotated = int(sizes.head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise ModelFormatError(f"{rope.path}: partial_rotary_factor is {share:g}, for heads of {sizes.head_dim}")
    return rotated


def rope_tensors(rope: Config, sizes: Sizes) -> dict[str, FloatArray]:
    """Divisors of the frequencies, float32 [rotated values / 2] each."""
    pairs = rope_dimensions(rope, sizes) // 2
    if rope.values["rope_type"] == _PROPORTIONAL:
        factors = np.full(pairs, _STOPPED, np.float32)
        factors[: int(rope.positive("partial_rotary_factor") * pairs)] = rope.positive("factor", 1.0)
        return {"rope_freqs.weight": factors}
    if rope.values["rope_type"] == "llama3":
        figures = [rope.positive(key) for key in _LLAMA3]
        return {"rope_freqs.weight": llama3_factors(rope.positive("rope_theta"), 2 * pairs, *figures)}
    if rope.values["rope_type"] == "longrope":
        return {f"rope_factors_{name}.weight": _factors(rope, f"{name}_factor", pairs) for name in ("long", "short")}
    return {}


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: float) -> FloatArray:
    """Llama 3.1's divisors: 1 for short wavelengths, `factor` for long ones, interpolated between them."""
    rotations = original * theta ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)  # within the original context
    share = np.clip((rotations - low) / max(high - low, 1e-6), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def kept_fields(rope: Config) -> dict[str, Field]:
    """Fields for parameters that only the conversion back needs."""
    if rope.values["rope_type"] != "llama3":
        return {}
    return {KEPT: json.dumps({key: rope.positive(key) for key in _LLAMA3})}


def described_rope(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    """rope_theta and rope_scaling of a GGUF model, in config.json's form. Raises UnsupportedError."""
    header = Header(file, spec.architecture)
    kind, scaling = header.text("rope.scaling.type", "none"), None
    original = header.count("rope.scaling.original_context_length", "context", default=spec.context)
    magnitude = short(header.positive("rope.scaling.attn_factor", 1.0, below=1e3))
    factor = short(header.positive("rope.scaling.factor", 1.0, below=1e4))
    if "rope_factors_long.weight" in file.tensors:
        scaling = {"rope_type": "longrope", "type": "longrope", "attention_factor": magnitude}
        scaling |= {f"{name}_factor": _listed(file, f"rope_factors_{name}.weight") for name in ("long", "short")}
    elif "rope_freqs.weight" in file.tensors:
        scaling = _described_llama3(file, spec)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        bounds = _described_bounds(spec)
        scaling |= bounds
        if magnitude != 1:
            usual = yarn_magnitude(factor) / yarn_magnitude(factor, bounds.get("mscale_all_dim", 0.0))
            scaling["attention_factor"] = magnitude * usual
    elif kind not in ("none", ""):
        raise UnsupportedError(f"{file.path}: RoPE scaling {kind} cannot be written as a Hugging Face folder")
    return {"rope_theta": short(spec.rope_base), "rope_scaling": scaling}


_LAYERS = ("full_attention", "sliding_attention")


def _for_all_layers(config: Config) -> dict[str, Any]:
    """rope_scaling if not empty, else rope_parameters."""
    scaling = config.part("rope_scaling")
    part = scaling if scaling and scaling.values else config.part("rope_parameters")
    if part and any(key in part.values for key in _LAYERS):
        raise UnsupportedError(f"{config.path}: RoPE that differs from layer to layer is not supported here")
    return _known(part)


def _full_attention(config: Config) -> dict[str, Any]:
    """The part for layers with full attention, merged with rope_scaling."""
    parameters, scaling = config.part("rope_parameters"), config.part("rope_scaling")
    if parameters and any(key not in _LAYERS for key in parameters.values):
        raise UnsupportedError(f"{config.path}: rope_parameters must have only {' and '.join(_LAYERS)} in it")
    if scaling and scaling.get("rope_type") is None and scaling.get("type") is not None:
        raise UnsupportedError(f"{config.path}: rope_scaling says type, and not rope_type, which is not supported here")
    return _known(parameters and parameters.part("full_attention")) | _known(scaling)


def _known(part: Config | None) -> dict[str, Any]:
    return {key: value for key, value in part.values.items() if value is not None} if part else {}


def _original(rope: Config) -> int:
    return rope.count("original_max_position_embeddings", "context")


def _yarn_fields(rope: Config, *, bounds: bool) -> dict[str, Field]:
    rope.must_be("truncate", True)
    factor = rope.positive("factor")
    if factor < 1:
        raise UnsupportedError(f"{rope.path}: yarn with a factor below 1 is not supported")
    usual = yarn_magnitude(factor)  # readers of GGUF multiply it by the file's value
    fields: dict[str, Field] = {"rope.scaling.original_context_length": np.uint32(_original(rope))}
    if bounds:
        for key, default in _BOUNDS.items():
            fields[f"rope.scaling.yarn_{key}"] = np.float32(rope.positive(key, default))
        if rope.get("mscale") and rope.get("mscale_all_dim"):  # transformers uses both, or neither
            rope.must_be("mscale", 1)
            multiplier = rope.positive("mscale_all_dim")
            fields["rope.scaling.yarn_log_multiplier"] = np.float32(multiplier)
            usual /= yarn_magnitude(factor, multiplier)
    else:
        for key, default in _BOUNDS.items():
            rope.must_be(key, default)
        rope.must_be("mscale")
        rope.must_be("mscale_all_dim")
    if rope.get("attention_factor") is not None:
        fields["rope.scaling.attn_factor"] = np.float32(rope.positive("attention_factor") / usual)
    return fields


def _described_bounds(spec: ModelSpec) -> dict[str, float]:
    """YaRN's betas and multiplier where they differ from the defaults."""
    if spec.network is None:
        return {}
    (rope, *_) = spec.network.ropes
    found = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    said = {key: short(value) for key, value in found.items() if value != _BOUNDS[key]}
    return said | ({"mscale": 1.0, "mscale_all_dim": short(rope.log_multiplier)} if rope.log_multiplier else {})


def _longrope_magnitude(rope: Config, sizes: Sizes) -> float:
    if rope.get("attention_factor") is not None:
        return rope.positive("attention_factor")
    longer = rope.positive("factor", sizes.context / _original(rope))
    return 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(max(2, _original(rope))))


def _factors(rope: Config, key: str, pairs: int) -> FloatArray:
    try:
        values = np.asarray(rope.get(key), np.float32)
    except (TypeError, ValueError, OverflowError):
        values = np.zeros(0, np.float32)
    if values.shape != (pairs,) or not (np.isfinite(values) & (values > 0)).all():
        raise ModelFormatError(f"{rope.path}: {key} must be {pairs} positive numbers")
    return values


def _listed(file: GGUFFile, name: str) -> list[float]:
    return [short(value) for value in file.tensor_bytes(file.tensors[name]).view(np.float32)]


def _described_llama3(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    stored = file.tensor_bytes(file.tensors["rope_freqs.weight"]).view(np.float32)
    try:
        kept = json.loads(str(file.metadata.get(KEPT, "{}")))
        figures = [float(kept[key]) for key in _LLAMA3]
    except (TypeError, ValueError, KeyError):
        figures = [float(stored.max()), *_LLAMA3_USUAL]
    if not np.allclose(llama3_factors(spec.rope_base, spec.rope_dim, *figures), stored, rtol=1e-5):
        raise UnsupportedError(f"{file.path}: no settings of llama3's scaling are known that give its RoPE factors")
    said: dict[str, Any] = dict(zip(_LLAMA3, figures, strict=True))
    return said | {"rope_type": "llama3", _LLAMA3[-1]: int(figures[-1])}
