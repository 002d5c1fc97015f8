"""Encoders of pictures: each family has a line here and a module, which is imported only for its models."""

from __future__ import annotations

from importlib import import_module
from reprlib import repr as brief

from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.model.towers.mmproj import is_mmproj, read_mmproj
from edge.model.towers.tower import Layout, Stage, Tower

__all__ = ["Layout", "Stage", "Tower", "is_mmproj", "open_tower", "read_tower"]

_FAMILIES = {  # by the kind of the projector
    "idefics3": "idefics3:Idefics3",
    "gemma3": "gemma3:Gemma3",
    "lfm2": "lfm2:Lfm2",
    "qwen2.5vl_merger": "qwen25:Qwen25",
    "qwen3vl_merger": "qwen:Qwen3",
    "gemma4v": "gemma4:Gemma4",
}


def read_tower(file: GGUFFile) -> Tower:
    """The encoder of a file, with every tensor checked. Raises ModelFormatError, UnsupportedError."""
    mmproj = read_mmproj(file)
    if mmproj.kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnsupportedError(f"{file.path}: edge sees with {known}, not with the encoder {brief(mmproj.kind)}")
    module, _, name = _FAMILIES[mmproj.kind].partition(":")
    tower: Tower = getattr(import_module(f"{__name__}.{module}"), name)(mmproj)
    assert tower.sizes
    assert tower.stages  # which checks all tensors
    return tower


def open_tower(file: GGUFFile, spec: ModelSpec) -> Tower:
    """The encoder of a file for a text model. Raises the errors of `read_tower`, InputError for another model's."""
    tower = read_tower(file)
    if spec.architecture not in tower.architectures or tower.mmproj.projected != spec.hidden:
        raise InputError(
            f"{file.path}: an encoder for {' and '.join(tower.architectures)} models of {tower.mmproj.projected} "
            f"values, and {spec.name} is {spec.architecture} with {spec.hidden}: choose its own"
        )
    return tower
