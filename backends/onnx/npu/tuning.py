"""Tuning of static graphs: the fields of a `StaticForm` that change the speed and the size of what is compiled."""

from __future__ import annotations

from edge.backends.onnx.npu.form import make_form
from edge.backends.tuning import CHUNK, PARTS, Field, Values
from edge.formats.compiled import Place, StaticForm
from edge.model.spec import ModelSpec

_CHUNKS, _SHARDS = (8, 16, 32, 64, 128), (1, 2, 4)


def make_space(spec: ModelSpec, usual: StaticForm) -> tuple[Field, ...]:
    """usual: the form without tuning. It has as many shards as its contexts need, so no candidate has fewer; where its
    head is the host's, the NPU does not multiply by that matrix."""
    chunks = {each for each in _CHUNKS if each <= usual.rows // 2} | {usual.chunk}
    shards = {each for each in _SHARDS if usual.shards <= each <= spec.layers} | {usual.shards}
    heads = (0, 1) if usual.head == "npu" else (1,)
    return (
        Field("shards", "contexts that the layers are cut into", usual.shards, tuple(sorted(shards)), PARTS),
        Field("host_head", "whether the host multiplies by the last matrix", heads[0], heads, PARTS),
        Field("chunk", "tokens that run at once in prefill", usual.chunk, tuple(sorted(chunks)), (CHUNK,)),
    )


def form_of(spec: ModelSpec, usual: StaticForm, values: Values) -> StaticForm:
    """The form of a candidate."""
    head: Place = "host" if values["host_head"] else "npu"
    return make_form(spec, usual.rows, values["chunk"], usual.kv_dtype, shards=values["shards"], head=head)
