"""A GGUF file without weights: a model's hyperparameters, tokenizer and chat template, for our own readers."""

from __future__ import annotations

from pathlib import Path

from edge.converters.writers.gguf import copy_gguf
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import FACTORS


def write_metadata(file: GGUFFile, target: Path) -> None:
    """Copy the header's metadata as it is, and RoPE's factors. Raises InputError."""
    copy_gguf(file, target, (info for name, info in file.tensors.items() if name.startswith(FACTORS)))
