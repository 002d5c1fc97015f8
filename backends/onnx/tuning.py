"""Tuning of static graphs: the fields of a `StaticForm` that affect speed and size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from edge.backends.base import EngineConfig
from edge.backends.onnx import ENGINE
from edge.backends.onnx.npu.form import make_form, place_of_head
from edge.backends.onnx.npu.lookup import CHUNKS, find_npu, make_subject
from edge.backends.rig import PROMPT, Depths, Rig
from edge.backends.tuning import CHUNK, PARTS, Field, Setting, Values
from edge.devices.host import usable_cores
from edge.formats.compiled import StaticForm
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec

LEAST_ROWS = 64  # of a cache in which a prompt and an answer can be timed
_SHARDS = (1, 2, 4)
_ENGINE = Path(__file__).parent


def make_space(spec: ModelSpec, usual: StaticForm) -> tuple[Field, ...]:
    """The search space. usual: the untuned form. Candidates have at least as many shards, since contexts have a size
    limit; if its head is on the host, the NPU cannot multiply by that matrix."""
    chunks = {each for each in CHUNKS if each <= usual.rows // 2} | {usual.chunk}
    shards = {each for each in _SHARDS if usual.shards <= each <= spec.layers} | {usual.shards}
    heads = (0, 1) if usual.head == "npu" else (1,)
    return (
        Field("shards", "contexts that the layers are cut into", usual.shards, tuple(sorted(shards)), PARTS),
        Field("host_head", "whether the host multiplies by the last matrix", heads[0], heads, PARTS),
        Field("chunk", "tokens that run at once in prefill", usual.chunk, tuple(sorted(chunks)), (CHUNK,)),
    )


def form_of(spec: ModelSpec, usual: StaticForm, values: Values) -> StaticForm:
    """The form of a candidate."""
    shards, head = values["shards"], place_of_head(values)
    return make_form(spec, usual.rows, values["chunk"], usual.kv_dtype, shards=shards, head=head)


def npu_setting(file: GGUFFile, spec: ModelSpec, provider: str, usual: StaticForm) -> Setting:
    """The setting to tune for a model on a static provider that runs here. usual: its untuned form."""
    from edge.backends.onnx.engine import OnnxEngine

    space, cores, rows = make_space(spec, usual), usable_cores(), usual.rows
    # A prompt of whole chunks, whichever they are. It stands for the usual one: a pass reads all rows, however many are
    # in use, so that each takes as long as the first.
    longest = max(space[-1].choices)
    depths = Depths(prompt=longest, short=rows // 8, long=rows // 2, times=max(1, PROMPT // longest))

    def load(values: Values) -> OnnxEngine:
        tuning = {name: values[name] for name in ("shards", "host_head")}
        config = EngineConfig(rows, values["chunk"], usual.kv_dtype, cores, provider=provider, tuning=tuning)
        return OnnxEngine(file, spec, config)

    def open_rig(on_compile: Callable[[], None]) -> Rig:
        return Rig(spec, space, load, on_compile, depths)

    subject = make_subject(spec, provider, find_npu(provider), usual.kv_dtype)
    return Setting(subject, space, f"{depths.about()} of {rows}", open_rig, _source_hash(), ENGINE.versions())


def _source_hash() -> str:
    """A hash of this engine's code."""
    digest = hashlib.sha256()
    for path in sorted(_ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
