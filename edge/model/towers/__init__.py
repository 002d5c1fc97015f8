"""Encoders of pictures and sounds: each family has a line here and a module, which is imported only for its models."""

from __future__ import annotations

from importlib import import_module

from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.model.towers.mmproj import AUDIO, VISION, is_mmproj, read_mmproj, senses_of
from edge.model.towers.tower import Layout, PictureTower, SoundTower, Stage, Tower
from edge.values import brief

__all__ = [
    "AUDIO", "VISION", "Layout", "PictureTower", "SoundTower", "Stage", "Tower", "is_mmproj", "open_ears", "open_tower",
    "read_ears", "read_tower", "senses_of",
]  # fmt: skip

_FAMILIES = {  # by sense and the kind of the projector
    VISION: {
        "idefics3": "idefics3:Idefics3",
        "gemma3": "gemma3:Gemma3",
        "lfm2": "lfm2:Lfm2",
        "qwen2.5vl_merger": "qwen25:Qwen25",
        "qwen3vl_merger": "qwen:Qwen3",
        "gemma4v": "gemma4:Gemma4",
    },
    AUDIO: {
        "ultravox": "whisper:Ultravox",
        "qwen2a": "whisper:Qwen2Audio",
        "voxtral": "whisper:Voxtral",
        "qwen3a": "qwen3a:Qwen3Asr",
        "gemma4a": "gemma4a:Gemma4Ears",
    },
}


def read_tower(file: GGUFFile) -> PictureTower:
    """The encoder of pictures of a file, with every tensor checked. Raises ModelFormatError, UnsupportedError."""
    tower = _read(file, VISION)
    assert isinstance(tower, PictureTower)
    return tower


def read_ears(file: GGUFFile) -> SoundTower:
    """As `read_tower`, of sounds."""
    tower = _read(file, AUDIO)
    assert isinstance(tower, SoundTower)
    return tower


def open_tower(file: GGUFFile, spec: ModelSpec) -> PictureTower:
    """The encoder of pictures for a text model. Raises the errors of `read_tower`, InputError for another model's."""
    tower = read_tower(file)
    _check_belongs(tower, spec)
    return tower.for_text(spec)


def open_ears(file: GGUFFile, spec: ModelSpec) -> SoundTower:
    """As `open_tower`, of sounds."""
    tower = read_ears(file)
    _check_belongs(tower, spec)
    return tower


def _read(file: GGUFFile, sense: str) -> Tower:
    mmproj, families = read_mmproj(file, sense), _FAMILIES[sense]
    if mmproj.kind not in families:
        does = "sees" if sense == VISION else "hears"
        raise UnsupportedError(
            f"{file.path}: edge {does} with {', '.join(families)}, not with the encoder {brief(mmproj.kind)}"
        )
    module, _, name = families[mmproj.kind].partition(":")
    tower: Tower = getattr(import_module(f"{__name__}.{module}"), name)(mmproj)
    tower.check()
    return tower


def _check_belongs(tower: Tower, spec: ModelSpec) -> None:
    if spec.architecture not in tower.architectures or tower.mmproj.projected != spec.hidden:
        raise InputError(
            f"{tower.mmproj.file.path}: an encoder for {' and '.join(tower.architectures)} models of "
            f"{tower.mmproj.projected} values, and {spec.name} is {spec.architecture} with {spec.hidden}: "
            "choose its own"
        )
