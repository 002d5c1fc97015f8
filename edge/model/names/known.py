"""The table of current models, models.toml: short names, repositories, and shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field, Planned, write_outline
from edge.model.layout import list_tensors
from edge.model.mixtures import plan_types
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_EPSILON = "attention.layer_norm_rms_epsilon"
_ANY_EPSILON = 1e-5  # bytes and speed do not depend on it, but llama.cpp insists on one
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
    figures: dict[str, Any]  # header fields of its GGUF file
    tokenizer: str = "gpt2"
    pre: str = "default"  # the kind of pre-tokenizer
    untied: bool = False  # whether the output head is a matrix of its own
    factors: tuple[str, ...] = ()  # names of RoPE factor tensors
    types: tuple[str, ...] = field(default=MIXTURES)  # mixtures of its files
    epsilon: float | None = None  # of norms; None: not known here
    drafter: str = ""  # USER/REPO on the Hub, a checkpoint that drafts for it (`assistant.py`, `eagle.py`)

    @property
    def header(self) -> dict[str, Any]:
        """The header fields that plans depend on, with GGUF's keys."""
        figures = {_EPSILON: self.epsilon or _ANY_EPSILON, **_flat(self.figures)}
        figures = {key.replace("key", "value"): size for key, size in figures.items() if ".key_length" in key} | figures
        own = {f"{self.architecture}.{key}": value for key, value in figures.items()}
        words = {"tokenizer.ggml.model": self.tokenizer, "tokenizer.ggml.pre": self.pre}
        return {"general.architecture": self.architecture, "general.name": self.name, **own, **words}

    @property
    def stated(self) -> list[Planned]:
        """The tensors that no header implies. Only the embedding has its real shape."""
        embedding = self.figures["embedding_length"], self.figures["vocab_size"]
        shapes: dict[str, tuple[int, ...]] = {"token_embd": embedding}
        shapes |= dict.fromkeys((*self.factors, "output") if self.untied else self.factors, (1,))
        return [Planned(f"{name}.weight", shape, "F32") for name, shape in shapes.items()]


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by lower-case name: a family's values, overridden by those of its size."""
    text = (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    models = {name: _with(table.get(name.split(":")[0], {}), fields) for name, fields in table.items() if ":" in name}
    return {name: parse(KnownModel, {"name": name, **fields}, name, strict=True) for name, fields in models.items()}


def drafter_of(repository: str) -> str:
    """The repository of the drafter for the models of a repository; empty: there is none."""
    return next((each.drafter for each in known_models().values() if each.repository == repository), "")


def outline_model(model: KnownModel, mixture: str, path: Path, *, loadable: bool = False) -> GGUFFile:
    """Write a sparse file for planning: the header of the model's GGUF file in a mixture, without the vocabulary, and
    holes for tensors.

    loadable: mark the vocabulary as absent, which llama.cpp requires, instead of naming the tokenizer.
    """
    header = model.header | ({"tokenizer.ggml.model": _NO_VOCABULARY} if loadable else {})
    fields = {key: _field(value) for key, value in header.items()}
    bare = write_outline(path, fields, model.stated)
    return write_outline(path, fields, plan_types(list_tensors(bare), mixture))


def _with(family: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _with(family[key], value) for key, value in own.items() if isinstance(family.get(key), dict)}
    return {**family, **own, **nested}


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
