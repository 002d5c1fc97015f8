"""The tensors of a checkpoint that see or hear, apart from those of its text model."""

from __future__ import annotations

from collections.abc import Mapping

from edge.converters.huggingface.checkpoint import CheckpointTensor

TOWERS = (  # beginnings of names
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("visual.", "model.visual.", "vision_model.", "model.vision_model.", "connector.", "model.connector."),
    *("audio_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
)


def of_towers(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """The tensors of towers and their projectors, by name."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(TOWERS)}
