"""The table of current models, models.toml: short names, repositories, and shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field, write_outline
from edge.model.layout import tensors_of
from edge.model.mixtures import plan_types
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_EPSILON = "attention.layer_norm_rms_epsilon"  # bytes and speed do not depend on it, but llama.cpp insists on one
_NO_VOCABULARY = "no_vocab"
MIXTURES = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0")  # of a model that states none, the best first


@dataclass(frozen=True)
class KnownModel:
    """A row of the table."""

    name: str
    repository: str  # USER/REPO on the Hub, with GGUF files
    licence: str
    parameters: int  # as the publisher states them
    source: str
    architecture: str
    figures: dict[str, Any]  # like architecture, untied and factors: as in `edge.model.layout`
    tokenizer: str = "gpt2"
    pre: str = "default"
    untied: bool = False
    factors: tuple[str, ...] = ()
    types: tuple[str, ...] = field(default=MIXTURES)  # mixtures of its files

    @property
    def header(self) -> dict[str, Any]:
        """The header fields that plans depend on, with GGUF's keys."""
        figures = {_EPSILON: 1e-5, **_flat(self.figures)}
        own = {f"{self.architecture}.{key}": value for key, value in figures.items()}
        words = {"tokenizer.ggml.model": self.tokenizer, "tokenizer.ggml.pre": self.pre}
        return {"general.architecture": self.architecture, "general.name": self.name, **own, **words}


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by lower-case name."""
    text = (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: parse(KnownModel, {"name": name, **fields}, name, strict=True) for name, fields in table.items()}


def outline_model(model: KnownModel, mixture: str, path: Path, *, loadable: bool = False) -> GGUFFile:
    """A file for planning: the header of the model's GGUF file in a mixture, and holes for tensors, without vocabulary.

    loadable: mark the vocabulary as absent, which llama.cpp requires, instead of naming the tokenizer.
    """
    header = model.header | ({"tokenizer.ggml.model": _NO_VOCABULARY} if loadable else {})
    tensors = plan_types(tensors_of(header, untied=model.untied, factors=model.factors), mixture)
    return write_outline(path, {key: _field(value) for key, value in header.items()}, tensors)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a TOML table to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _field(value: Any) -> Field:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, list):
        kinds = {bool: np.bool_, int: np.uint32, float: np.float32}
        return np.array(value, kinds[type(value[0])])
    number: Field = np.float32(value) if isinstance(value, float) else np.uint32(value)
    return number
