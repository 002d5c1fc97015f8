"""Section DRAFT of model.edge: what drafts (runtime/drafting/). It is a file of its own in the container of model.edge.

A model's own layer for multi-token prediction is a model whose embedding and head are the outer file's: its tables
state offsets from the weights of that. In section ASSISTANT, an ASSISTANT struct says how the model's states are
normalised. An EAGLE-3 head has an output of its own, and reads inputs of the model's layers: behind the struct are
float32 norm [features], if it normalises these, and the model's tokens of its rows, int32 [vocab].

A small model is a whole one, but for its tokenizer.

The layers of a Gemma 4 assistant read the model's rows, and have neither embedding nor head. What is around them is in
section ASSISTANT: an ASSISTANT struct, then float32 pre_projection [own, 2 · hidden],
post_projection [hidden, own], centroids [centroids, own] and scales [vocab], the tokens of the head's rows int32
[vocab], and the rows in int8 [vocab, own], each to be multiplied by its scale: rounding a draft's logits changes no
answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections import embedding
from edge.apps.sections.encoder_file import EncoderFile, norm_section
from edge.apps.sections.model_file import Section
from edge.backends.base import EngineConfig
from edge.backends.checks import app_cores, check_cores
from edge.backends.reference.weights import read_weights
from edge.backends.tvm.compiler.exported import exported_designs
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.drafters.assistant import layers_of, plain_file, token_order
from edge.model.drafters.draft import DraftFile
from edge.model.drafters.eagle import EMBEDDING, norm_of_features, tokens_of
from edge.model.model import Model
from edge.model.structure.mtp import mtp_file
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, IntArray

PART = "draft"
_ROWS = 8192  # of the head, dequantized at once

# norm: of the model's states. hidden: values of these. used: the centroids whose tokens are looked at; 0 centroids: all
# tokens are. sources: the first layers of the model up to the last whose rows are read. normed: features of an EAGLE-3
# head that are normalised with feature_eps, all or none.
_NUMBERS = ("hidden", "vocab", "centroids", "used", "sources", "normed")
ASSISTANT = c_struct(norm=embedding.CONFIG, feature_eps="<f8", **dict.fromkeys(_NUMBERS, "<u4"))
STRUCTS = {"assistant_config": ASSISTANT}  # by their names in C


class _Layers:
    """Layers that draft as a source of weights."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self.file, self.spec = file, spec


def _designs(
    source: _Layers, kv_dtype: str, profile: DeviceProfile, isas: Sequence[str] | None
) -> tuple[PackedLayout, list[Design]]:
    own = make_layout(source.file, source.spec, halve=profile.system != "web")
    return own, exported_designs(own, kv_dtype, profile.arch, profile.system, None, isas, part=PART)


def _struct(layout: PackedLayout, **values: float) -> bytes:
    """An ASSISTANT struct. layout: of the model whose states are normalised."""
    return filled(ASSISTANT, {"norm": np.frombuffer(norm_section(layout), embedding.CONFIG)[0], **values})


def plan_assistant(
    model: Model, layout: PackedLayout, draft: DraftFile, profile: DeviceProfile, kv_dtype: str,
    isas: Sequence[str] | None,
) -> EncoderFile:  # fmt: skip
    """Plan an assistant's file; nothing is compiled. layout: the model's. Raises UnsupportedError."""
    source = _Layers(*layers_of(draft.file, draft.spec, find_network(model.spec)))
    check_cores("C runtime of apps", source.spec, app_cores)
    own, designs = _designs(source, kv_dtype, profile, isas)
    if (own.shape.kv_heads, own.shape.padded_head) != (layout.shape.kv_heads, layout.shape.padded_head):
        raise UnsupportedError(f"--draft {draft.file.path}: its rows are not those of all of the model's layers")
    section = {Section.ASSISTANT: _around(draft, layout, 1 + max(own.network.foreign.values()))}
    config = EngineConfig(1, 1, kv_dtype, 1)
    return EncoderFile(PART, source, own, config, designs, section, drafter="edge_assistant")


def plan_mtp_layer(
    model: Model, layout: PackedLayout, config: EngineConfig, profile: DeviceProfile, isas: Sequence[str] | None
) -> EncoderFile:
    """Plan the file of a model's own layer; nothing is compiled. layout: the model's. config: of the layer."""
    file, spec = mtp_file(model.file), model.spec.mtp
    assert file is not None
    assert spec is not None
    source = _Layers(file, spec)
    own, designs = _designs(source, config.kv_dtype, profile, isas)
    section = {Section.ASSISTANT: _struct(layout, hidden=spec.hidden, vocab=spec.vocab)}
    return EncoderFile(PART, source, own, config, designs, section, layout, "edge_mtp_layer")


def plan_eagle_head(
    model: Model, layout: PackedLayout, draft: DraftFile, config: EngineConfig, profile: DeviceProfile,
    isas: Sequence[str] | None,
) -> EncoderFile:  # fmt: skip
    """Plan the file of an EAGLE-3 head; nothing is compiled. layout: the model's. config: of the head. Raises
    UnsupportedError."""
    if EMBEDDING in draft.whole.tensors or layout.network.embedding_scale != 1:
        whose = "an embedding of its own" if EMBEDDING in draft.whole.tensors else "a model that scales embeddings"
        raise UnsupportedError(f"--draft {draft.file.path}: exported models run no EAGLE-3 head with {whose}")
    source = _Layers(draft.file, draft.spec)
    own, designs = _designs(source, config.kv_dtype, profile, isas)
    norm, order = norm_of_features(draft.whole), tokens_of(draft.whole, model.spec.vocab)
    struct = _struct(
        layout, hidden=draft.spec.hidden, vocab=draft.spec.vocab, normed=0 if norm is None else norm.size,
        feature_eps=draft.spec.norm_eps,
    )  # fmt: skip
    order = np.arange(draft.spec.vocab, dtype=np.int32) if order is None else order
    parts = [] if norm is None else [norm.astype("<f4").tobytes()]
    section = b"".join([struct, *parts, order.astype("<i4").tobytes()])
    return EncoderFile(PART, source, own, config, designs, {Section.ASSISTANT: section}, drafter="edge_mtp_layer")


def plan_draft_model(
    draft: DraftFile, config: EngineConfig, profile: DeviceProfile, isas: Sequence[str] | None
) -> EncoderFile:
    """Plan the file of a small model; nothing is compiled. config: of that model. Raises UnsupportedError."""
    check_cores("C runtime of apps", draft.spec, app_cores)
    if find_network(draft.spec).layer_inputs:
        raise UnsupportedError(f"--draft {draft.file.path}: a model with per-layer embeddings drafts in no export")
    source = _Layers(draft.file, draft.spec)
    own, designs = _designs(source, config.kv_dtype, profile, isas)
    return EncoderFile(PART, source, own, config, designs, {}, drafter="edge_draft_model")


def around_bytes(spec: ModelSpec) -> int:
    """Bytes of section ASSISTANT of an assistant, or of an EAGLE-3 head."""
    assists = find_network(spec).assists
    if assists is None:
        return ASSISTANT.itemsize + 4 * ((spec.features.size if spec.features else 0) + spec.vocab)
    floats = spec.hidden * (3 * assists.hidden + assists.centroids) + 2 * spec.vocab
    return ASSISTANT.itemsize + 4 * floats + spec.vocab * spec.hidden


def _around(draft: DraftFile, layout: PackedLayout, sources: int) -> bytes:
    """Section ASSISTANT."""
    file, spec = plain_file(draft.file), draft.spec
    assists = find_network(spec).assists
    assert assists is not None
    tensors = find_tensors(file, spec)
    names = ["nextn.pre_projection", "nextn.post_projection", *["masked_embd_centroids"] * bool(assists.centroids)]
    weights = read_weights(file, {name: tensors[name] for name in names})
    order = token_order(draft.file, spec)
    if not order.size:
        order = np.arange(spec.vocab, dtype=np.int32)
    scales, codes = _head(draft.file, order)
    struct = _struct(
        layout, hidden=assists.hidden, vocab=spec.vocab, centroids=assists.centroids, used=assists.used, sources=sources
    )
    floats = [weights[name].astype("<f4").tobytes() for name in names]
    return b"".join([struct, *floats, scales.tobytes(), order.astype("<i4").tobytes(), codes.tobytes()])


def _head(file: GGUFFile, order: IntArray) -> tuple[AnyArray, AnyArray]:
    """Rows of the head in this order: their scales, float32 [rows], and codes, int8 [rows, columns]."""
    info = file.tensors["token_embd.weight"]
    stored = file.tensor_bytes(info).reshape(info.rows, -1)
    scales, codes = np.zeros(info.rows, "<f4"), np.zeros((info.rows, info.shape[0]), np.int8)
    for at in range(0, info.rows, _ROWS):
        rows = dequantize(stored[order[at : at + _ROWS]], info.type)
        largest = np.abs(rows).max(axis=1) / 127
        scales[at : at + _ROWS] = largest
        codes[at : at + _ROWS] = np.rint(rows / np.where(largest, largest, 1)[:, None])
    return scales, codes
