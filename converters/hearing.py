"""Models that hear become GGUF: Whisper's, of the formats that `edge/model/whisper/checkpoint.py` reads."""

from __future__ import annotations

from pathlib import Path

from edge.converters.quantizers.rtn import quantize
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Planned, write_outline
from edge.model.whisper.checkpoint import read_checkpoint
from edge.model.whisper.writing import plan_tensors, write_whisper
from edge.types import Progress


def plan_hearing(path: Path, kind: str | None) -> list[Planned]:
    """The tensors of the GGUF file. kind: the block type of matrices; None: the checkpoint's floats."""
    return plan_tensors(read_checkpoint(path), kind)


def write_hearing(path: Path, target: Path, kind: str | None, progress: Progress) -> list[Planned]:
    """Write the GGUF file atomically, and return its tensors. Raises as `write_whisper`."""
    found = read_checkpoint(path)
    write_whisper(found, target, kind, quantize, progress)
    return plan_tensors(found, kind)


def outline_hearing(path: Path, target: Path) -> GGUFFile:
    """The header of the GGUF file, and holes for tensors."""
    found = read_checkpoint(path)
    return write_outline(target, found.fields, plan_tensors(found, None))
