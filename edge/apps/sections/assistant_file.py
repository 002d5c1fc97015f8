"""Section DRAFT of model.edge: a Gemma 4 assistant, whose layers read the model's rows (runtime/session/assistant.c).

The section is a file of its own in the container of model.edge, with the sections of passes without embedding and head.
What is around its layers is in section ASSISTANT: an ASSISTANT struct, then float32 pre_projection [own, 2 · hidden],
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
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.drafters.assistant import layers_of, plain_file, token_order
from edge.model.drafters.draft import DraftFile
from edge.model.model import Model
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, IntArray

PART = "draft"
_ROWS = 8192  # of the head, dequantized at once

# norm: of the model's states. hidden: values of these. used: the centroids whose tokens are looked at; 0 centroids: all
# tokens are. sources: the first layers of the model up to the last whose rows are read.
ASSISTANT = c_struct(norm=embedding.CONFIG, **dict.fromkeys(("hidden", "vocab", "centroids", "used", "sources"), "<u4"))
STRUCTS = {"assistant_config": ASSISTANT}  # by their names in C


class _Layers:
    """An assistant's layers as a source of weights."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self.file, self.spec = file, spec


def plan_assistant(
    model: Model, layout: PackedLayout, draft: DraftFile, profile: DeviceProfile, kv_dtype: str,
    isas: Sequence[str] | None,
) -> EncoderFile:  # fmt: skip
    """Plan an assistant's file; nothing is compiled. layout: the model's. Raises UnsupportedError."""
    source = _Layers(*layers_of(draft.file, draft.spec, find_network(model.spec)))
    check_cores("C runtime of apps", source.spec, app_cores)
    own = make_layout(source.file, source.spec, halve=profile.system != "web")
    if (own.shape.kv_heads, own.shape.padded_head) != (layout.shape.kv_heads, layout.shape.padded_head):
        raise UnsupportedError(f"--draft {draft.file.path}: its rows are not those of all of the model's layers")
    designs = exported_designs(own, kv_dtype, profile.arch, profile.system, None, isas, part=PART)
    section = {Section.ASSISTANT: _around(draft, layout, 1 + max(own.network.foreign.values()))}
    return EncoderFile(PART, source, own, EngineConfig(1, 1, kv_dtype, 1), designs, section)


def around_bytes(spec: ModelSpec) -> int:
    """Bytes of section ASSISTANT."""
    assists = find_network(spec).assists
    assert assists is not None
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
    values = {
        "norm": np.frombuffer(norm_section(layout), embedding.CONFIG)[0], "hidden": assists.hidden, "vocab": spec.vocab,
        "centroids": assists.centroids, "used": assists.used, "sources": sources,
    }  # fmt: skip
    floats = [weights[name].astype("<f4").tobytes() for name in names]
    return b"".join(
        [filled(ASSISTANT, values), *floats, scales.tobytes(), order.astype("<i4").tobytes(), codes.tobytes()]
    )


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
