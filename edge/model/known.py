"""The table of current models, models.toml: short names, where their files lie, and their shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class KnownModel:
    """A line of the table. repository: USER/REPO on the Hub, with GGUF files. parameters: values of all tensors.

    The figures from `layers` on are those of the architecture; 0 where the table does not state them.
    """

    name: str
    repository: str
    licence: str
    parameters: int
    layers: int = 0
    hidden: int = 0
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    context: int = 0


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by names, which are in lower case."""
    text = (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    return {name: KnownModel(name, **fields) for name, fields in tomllib.loads(text).items()}
