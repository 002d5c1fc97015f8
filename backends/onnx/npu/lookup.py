"""Lookup of tuned values for static graphs. Every run of them does so, so this module imports little."""

from __future__ import annotations

from edge.backends.counts import Tuned
from edge.backends.tuning import model_shape, tuned_by
from edge.devices.host import processor, usable_cores
from edge.devices.profile import Npu
from edge.devices.profiles import host_npus
from edge.devices.records import Record, Subject, nearest, read_records, set_aside, user_folder
from edge.model.spec import ModelSpec

CHUNKS = (8, 16, 32, 64, 128)
_MOST_SHARDS = 1024


def find_npu(provider: str) -> Npu | None:
    """This device's NPU that a static provider runs on; None: it runs on the processor."""
    if provider == "cpu-static":
        return None
    return next((seen.npu for seen in host_npus() if seen.npu.provider == provider), Npu(provider, "NPU", provider))


def make_subject(spec: ModelSpec, provider: str, npu: Npu | None, kv_dtype: str) -> Subject:
    """The key under which this NPU would record a tuning, in any device. Its family is its instruction set."""
    if npu is None:
        cpu = processor()
        return Subject(cpu.name, cpu.family, usable_cores(), f"onnx {provider}", kv_dtype, model_shape(spec))
    chip = f", chip {npu.soc}" if npu.soc else ""
    return Subject(f"{npu}{chip}", str(npu), 1, f"onnx {provider} v{npu.arch or 0}", kv_dtype, model_shape(spec))


def find_record(spec: ModelSpec, provider: str, npu: Npu | None, kv_dtype: str) -> Record | None:
    """The record that `find_tuned` uses."""
    subject = make_subject(spec, provider, npu, kv_dtype)
    return nearest((record for record in read_records() if _usable(record, subject)), subject)


def find_tuned(spec: ModelSpec, provider: str, npu: Npu | None, kv_dtype: str) -> Tuned | None:
    """Tuned values for the model on an NPU; npu: from `find_npu`, or another device's."""
    record = find_record(spec, provider, npu, kv_dtype)
    return None if record is None else tuned_by(record)


def _usable(record: Record, subject: Subject) -> bool:
    """Whether a record's values are valid: unchecked sizes from a file never reach a compiler."""
    if record.subject.isa != subject.isa:
        return False
    choices = {"chunk": range(2, max(CHUNKS) + 1), "shards": range(1, _MOST_SHARDS + 1), "host_head": range(2)}
    if all(value in choices.get(name, ()) for name, value in record.values.items()):
        return True
    set_aside(user_folder() / f"{record.name}.json", "it has values that this version of edge does not know")
    return False
