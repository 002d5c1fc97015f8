"""The GPU engine's side of tuning: the fields of `design.Tuning`, with records per adapter."""

from __future__ import annotations

from dataclasses import fields

from edge.backends.counts import Tuned
from edge.backends.tuning import CHUNK, PARTS, STEP, Field, model_shape, tuned_by
from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.hosts import Adapter, choose_adapter
from edge.devices.records import Record, Subject, nearest, read_records, set_aside, user_folder
from edge.errors import UnsupportedError
from edge.model.structure.spec import ModelSpec

_CHOICES: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {  # of the fields of Tuning
    "rows": ("rows of a matrix that a thread multiplies, decode", (1, 2, 4, 8), (STEP,)),
    "split": ("threads that share a row's columns, decode", (1, 2, 4, 8, 16, 32, 64), (STEP,)),
    "workgroup": ("threads of a product", (16, 32, 64, 128, 256), PARTS),
    "gemm_tokens": ("tokens of a tile, prefill", (8, 16, 32, 64), (CHUNK,)),
    "gemm_rows": ("rows of a tile, prefill", (16, 32, 64, 128), (CHUNK,)),
    "stage": ("bytes of shared memory for activations; attention reads ahead if any", (0, 48 << 10), PARTS),
    "ahead": ("loads of 16 bytes ahead of tensor cores, decode", (0, 8, 16, 24, 32), (STEP,)),
    "mma_rows": ("rows of a tile through tensor cores, prefill", (64, 128, 256), (CHUNK,)),
    "mma_tokens": ("tokens of such a tile", (32, 64, 128), (CHUNK,)),
    "mma_groups": ("workgroups below which such tiles become smaller", (1, 128, 256, 512), (CHUNK,)),
    "heads": ("query heads that a workgroup attends for, decode", (0, 1, 2, 4), (STEP,)),
    "row_splits": ("workgroups that share a head's rows behind many, decode", (1, 2, 4, 8, 16, 32), (STEP,)),
    "attend": ("threads that attend for a KV head", (32, 64, 128, 256), PARTS),
}


def make_space(adapter: Adapter, prompt: int) -> tuple[Field, ...]:
    """The search space for an adapter. prompt: tokens that are measured, the longest chunk."""
    usual = Tuning.of(adapter)
    unused = ("gemm_",) if usual.mma_rows else ("mma_", "stage", "ahead")
    space = [
        Field(name, about, int(getattr(usual, name)), choices, parts)
        for name, (about, choices, parts) in _CHOICES.items() if not name.startswith(unused)
    ]  # fmt: skip
    chunks = tuple(max(1, prompt >> shift) for shift in range(4, -1, -1))
    return (*space, Field("chunk", "tokens per prefill chunk", prompt, chunks, (CHUNK,), compiled=False))


def make_subject(spec: ModelSpec, adapter: Adapter, kv_dtype: str) -> Subject:
    """The key under which this adapter would record a tuning; includes the driver, which compiles the kernels."""
    maker = f"{adapter.vendor} {adapter.driver}".strip()
    return Subject(adapter.name, maker, 1, f"{adapter.host} {adapter.language}", kv_dtype, model_shape(spec))


def find_record(spec: ModelSpec, kv_dtype: str) -> Record | None:
    """The record that `find_tuned` uses; None also without a GPU."""
    try:
        adapter = choose_adapter()
    except UnsupportedError:
        return None
    subject = make_subject(spec, adapter, kv_dtype)
    return nearest((record for record in read_records() if _usable(record, subject)), subject)


def find_tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    """See `Backend.tuned`."""
    record = find_record(spec, kv_dtype)
    return None if record is None else tuned_by(record)


def _usable(record: Record, subject: Subject) -> bool:
    """Whether a record's values are valid: unchecked sizes from a file never reach a compiler."""
    if record.subject.isa != subject.isa:
        return False
    known = {field.name for field in fields(Tuning)}
    choices = {name: _CHOICES[name][1] for name in known & _CHOICES.keys()} | {"chunk": range(1, 8193)}
    if all(value in choices.get(name, ()) for name, value in record.values.items()):
        return True
    set_aside(user_folder() / f"{record.name}.json", "it has values that this version of edge does not know")
    return False
