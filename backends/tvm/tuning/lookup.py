"""Lookup of a run's tuned values. Every start does so, so this module imports little."""

from __future__ import annotations

from dataclasses import replace

from edge.backends.counts import Tuned
from edge.backends.tuning import model_shape, tuned_by
from edge.backends.tvm.compiler.compiled import is_installed
from edge.backends.tvm.targets import Target, choose_target, target_named
from edge.backends.tvm.tuning.added import find_added
from edge.backends.tvm.tuning.space import allowed
from edge.devices.host import processor, usable_cores
from edge.devices.profiles import HOST
from edge.devices.records import Record, Subject, nearest, read_records, set_aside, user_folder
from edge.model.structure.spec import ModelSpec


def find_tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    """Values from the record of this device and model, or of the most similar one.

    Without TVM, compiled values come from the image that was added to the cache, and only the others from a record.
    """
    record = find_record(spec, kv_dtype)
    found = None if record is None else _tuned(record)
    if is_installed():
        return found
    added = find_added(spec.label, model_shape(spec), kv_dtype, choose_target().name)
    threads, chunk = (found.threads, found.chunk) if found else (None, None)
    if added is not None and added.values:
        return Tuned(f"{added.about} (compiled elsewhere)", added.values, threads, added.chunk or chunk)
    if found is not None and found.values:
        return Tuned(f"{found.about}, without what is compiled in: TVM is not installed", {}, threads, chunk)
    return found


def find_tuned_for(spec: ModelSpec, kv_dtype: str, device: str, isa: str) -> Tuned | None:
    """Like `find_tuned`, for another device by name with code for `isa`; it was measured through a tracker."""
    if device == HOST:
        return find_tuned(spec, kv_dtype) if isa == choose_target().name else None
    target, shape = target_named(isa, f"isa {isa!r} is unknown"), model_shape(spec)
    known = (record for record in read_records() if record.subject.cpu == device and _usable(record, target))
    record = nearest(known, Subject(device, device, 0, isa, kv_dtype, shape))
    return None if record is None else replace(_tuned(record), threads=None)


def _tuned(record: Record) -> Tuned:
    """The values of a record. Threads are dropped unless the processor and its cores are the same."""
    found = tuned_by(record)
    same = (record.subject.cpu, record.subject.cores) == (processor().name, usable_cores())
    return found if same else replace(found, threads=None)


def find_record(spec: ModelSpec, kv_dtype: str) -> Record | None:
    """The record that `find_tuned` uses."""
    target = choose_target()
    known = (record for record in read_records() if _usable(record, target))
    return nearest(known, make_subject(spec, target, kv_dtype))


def make_subject(spec: ModelSpec, target: Target, kv_dtype: str) -> Subject:
    """The key under which this device would record a tuning."""
    cpu = processor()
    return Subject(cpu.name, cpu.family, usable_cores(), target.name, kv_dtype, model_shape(spec))


def _usable(record: Record, target: Target) -> bool:
    """False if a record of this instruction set has invalid values, which is logged once. Others are not checked."""
    if record.subject.isa != target.name or allowed(target, record.values):
        return True
    set_aside(user_folder() / f"{record.name}.json", "it has values that this version of edge does not know")
    return False
