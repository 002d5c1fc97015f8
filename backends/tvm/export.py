"""Export of compiled passes to another device: a folder for an app's linker, or for edge's cache on that device.

run.o        the object file, for an app's linker
run.img      the linked image, which edge itself loads
weights.bin  the packed weights, if requested
design.json  a description of the others, with checksums; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edge.backends.tuning import model_shape
from edge.backends.tvm import ENGINE, KV_DTYPES
from edge.backends.tvm.compiler.compiled import compile_design, install
from edge.backends.tvm.compiler.folder import appearing, described
from edge.backends.tvm.cpu.elf import MOST_BYTES, parse
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import pack_weights
from edge.backends.tvm.sources import PASS, source_hash
from edge.backends.tvm.targets import Target, choose_target, target_named, with_tuning
from edge.backends.tvm.tuning.added import Added, note_added
from edge.backends.tvm.tuning.lookup import find_tuned_for
from edge.backends.tvm.tuning.space import allowed, compiled_values
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.storage.versions import own_versions

OBJECT, IMAGE, WEIGHTS, DESIGN = FILES = ("run.o", "run.img", "weights.bin", "design.json")


def export(
    file: GGUFFile, spec: ModelSpec, profile: DeviceProfile, folder: Path, *, kv_dtype: str = KV_DTYPES[0],
    weights: bool = False, force: bool = False, progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write `folder` for a device, with the values of its tuning record if there is one; return the content of
    design.json.

    Raises InputError if the folder holds other files (unless `force`) or cannot be written, MissingExtraError
    without TVM, EngineError if its compiler fails.
    """
    if kv_dtype not in KV_DTYPES:
        raise InputError(f"unknown KV dtype {kv_dtype!r} for the cpu engine: choose {', '.join(KV_DTYPES)}")
    layout, target = make_layout(file, spec, halve=True), target_of(profile)
    tuned = find_tuned_for(spec, kv_dtype, profile.name, target.name)
    design = Design.of(layout, kv_dtype, with_tuning(target, tuned.values if tuned else {}))
    with appearing(folder, FILES, force=force) as made:
        compile_design(design, made / IMAGE, made / OBJECT, progress=progress)
        if weights:
            pack_weights(file, layout, made / WEIGHTS)
        about = {
            "model": spec.label,
            "shape": model_shape(spec),
            "tuned": asdict(Added(tuned.about, tuned.values, tuned.chunk)) if tuned else None,
            "file": file.path.name,
            "device": asdict(profile),
            "design": json.loads(design.to_json()),
            "source": source_hash(*PASS),
            "versions": own_versions() | ENGINE.versions(),
            "files": described(made),
        }
        (made / DESIGN).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def add(folder: Path) -> Design:
    """Add an exported folder to this device's cache, which then needs no compiler for that model.

    Its code runs as this user from then on: checksums detect damage, not the author. Raises InputError if the folder is
    damaged or from another version of edge, UnsupportedError if it is for another instruction set or system,
    CacheError if the cache folder cannot be written.
    """
    try:
        about, image = json.loads(_read(folder / DESIGN)), _read(folder / IMAGE)
        design, source = Design.from_json(json.dumps(about["design"])), about["source"]
        if json.loads(design.to_json()) != about["design"] or type(design.target.name) is not str:
            raise ValueError(folder)
        added = Added(**about["tuned"]) if about["tuned"] else Added("default", {}, None)
        settings = added.values | ({} if added.chunk is None else {"chunk": added.chunk})
        if type(added.about) is not str or type(about["model"]) is not str:
            raise ValueError(folder)
        whole = about["files"][IMAGE] == {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{folder} holds nothing that edge compile has made") from None
    if not whole:
        raise InputError(f"{folder / IMAGE} does not match {DESIGN}: copy the folder again")
    try:
        parse(image)
    except ValueError as error:
        raise InputError(f"{folder / IMAGE} is no compiled pass: {error}") from None
    if source != source_hash(*PASS):
        raise InputError(f"{folder} was compiled by another version of edge: compile it with this one")
    # This device looks it up by the instruction set and the tuned values, not by the CPU that it was scheduled for.
    usual = choose_target(design.target.name)
    if design.target.system != usual.system:
        raise UnsupportedError(f"{folder} was compiled for {design.target.system}: compile it for this system")
    if not allowed(usual, settings) or compiled_values(design.target) != compiled_values(
        with_tuning(usual, added.values)
    ):
        raise InputError(f"{folder / DESIGN} does not say how its image was tuned: compile it again")
    design = replace(design, target=replace(design.target, llvm=usual.llvm))
    install(design, image)
    note_added(about["model"], about["shape"], design.kv_dtype, design.target.name, added)
    return design


def target_of(profile: DeviceProfile) -> Target:
    """The device's instruction set, scheduled for its CPU if that is known. Raises InputError for unknown sets."""
    if profile.isa is None:
        return choose_target()
    target = target_named(profile.isa, f"the profile of {profile.name} has the unknown isa {profile.isa!r}")
    return replace(target, llvm=target.llvm | {"mcpu": profile.cpu}) if profile.cpu else target


def _read(path: Path) -> bytes:
    """Read a small file. Raises OSError, and ValueError for anything else."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise ValueError(path)
    return path.read_bytes()
