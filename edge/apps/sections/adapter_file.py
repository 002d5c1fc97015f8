"""LoRA adapters of exported models: one small file each, which a session reads into its own memory.

A file has a header; for each matrix that may have an adapter, the offsets of A, A's scales and B (0, 0, 0: none); the
packed matrices (backends/tvm/adapters.py); for bundles with GPU programs, the matrices packed for the GPU
(backends/tvm/gpu/adapters.py); and the SHA-256 of all that. Section ADAPTERS of model.edge lists the CPU's matrices,
the GPU's programs those of a GPU. A file fits every bundle of its model with room for its rank; on a GPU, and in pages
with GPU programs, with the same rank.
Bundles with f32 KV rows need files of their own, whose matrices are float32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.gpu_programs import BUFFER_ALIGNMENT, matrices_in
from edge.apps.sections.model_file import CONFIG, ENTRY, HEADER, KV_DTYPES, MODEL, Section
from edge.apps.sections.model_file import MAGIC as MODEL_MAGIC
from edge.apps.sections.model_file import VERSION as MODEL_VERSION
from edge.backends.tvm.adapters import adaptable, pack_adapters
from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.gpu import adapters as gpu_adapters
from edge.backends.tvm.gpu.hosts import PORTABLE
from edge.backends.tvm.gpu.weights import make_weights
from edge.backends.tvm.packing.layout import ALIGNMENT, PackedLayout, make_layout
from edge.backends.tvm.packing.low_rank import padded_rank
from edge.devices.output import check_file, check_path, new_file
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.model.adapters.lora import MAX_RANK, Lora, open_lora
from edge.model.adapters.lora_file import LoraFile, parse_lora
from edge.model.model import Model, open_model
from edge.model.tensors import find_tensors
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint

VERSION = 3  # of the file and of the packed matrices in it
MAGIC = b"EDGELORA"
KINDS = ("I8", "F16", "F32")  # how B is stored, in the order of LORA_I8 …

# Section ADAPTERS, then an ADAPTED for each matrix. rank: padded, as in files. lora_rank: index of the rank in the
# table of the pass. room: bytes for an adapter. gpu: bytes of a file's part for the GPU, 0 without programs for one.
# layout: the hash of the matrices' sizes.
ADAPTERS = c_struct(rank="<u4", count="<u4", lora_rank="<u4", reserved="<u4", room="<u8", gpu="<u8", layout="V32")
# table: index of the three offsets in the table of the pass. a, a_scales, b: bytes per rank. b_scales: bytes.
ADAPTED = c_struct(table="<u4", kind="<u4", a="<u4", a_scales="<u4", b="<u4", b_scales="<u4")
# bytes, gpu_bytes: of the matrices, of the part for a GPU. model: SHA-256 of the model's file.
ADAPTER = c_struct(
    magic="S8", version="<u4", rank="<u4", count="<u4", reserved="<u4", bytes="<u8", gpu_bytes="<u8", model="V32",
    layout="V32",
)  # fmt: skip
STRUCTS = {"adapters_config": ADAPTERS, "adapted": ADAPTED, "adapter_header": ADAPTER}  # by their names in C


def check_rank(rank: int) -> int:
    """Return the rank. Raises InputError unless it is from 0 to MAX_RANK."""
    if not 0 <= rank <= MAX_RANK:
        raise InputError(f"--lora-rank must be from 0 to {MAX_RANK}, not {rank}")
    return rank


def adapters_section(layout: PackedLayout, rank: int, *, exact: bool, gpu: int = 0) -> bytes:
    """Section ADAPTERS. rank: the largest to have room for. exact: matrices are float32. gpu: bytes of a file's part
    for the GPU."""
    table, rows, matrices = Table.of(layout.shape), [], list(adaptable(layout, exact=exact))
    for each in matrices:
        place = table.place(each.layer, f"{each.name}.lora_a")
        values = {"table": place, "kind": KINDS.index(each.kind), "a": each.a, "a_scales": each.a_scales}
        rows.append(filled(ADAPTED, values | {"b": each.b, "b_scales": each.b_scales}))
    sizes = np.frombuffer(b"".join(rows), ADAPTED)[[name for name in ADAPTED.names or () if name != "table"]]
    digest = hashlib.sha256(repr((VERSION, sizes.tolist())).encode()).digest()
    head = {
        "rank": padded_rank(rank), "count": len(rows), "lora_rank": table.slot("lora_rank"),
        "room": ALIGNMENT + sum(each.nbytes(padded_rank(rank)) for each in matrices), "gpu": gpu,
        "layout": np.void(digest),
    }  # fmt: skip
    return filled(ADAPTERS, head) + b"".join(rows)


def export_adapter(
    model: str | Path | Model, lora: str | Path, bundle: str | Path, path: str | Path, *, force: bool = False
) -> dict[str, Any]:
    """Write the file of an adapter for a bundle that `edge.export` has made with room for it (lora_rank).

    lora: an adapter in GGUF, as FILE or FILE:SCALE; several, separated by commas, are combined into one. bundle: the
    folder, or its model.edge. force: replace an older file. Returns the file's path, rank and size in bytes.

    Raises InputError for adapters and bundles of another model and for ranks beyond the bundle's, UnsupportedError for
    bundles without room for adapters, ModelFormatError for bundles of another version, and the errors of `open_model`
    and `open_lora`.
    """
    check_path("path", path, "the path of a file")
    target, opened = Path(path), model if isinstance(model, Model) else open_model(model)
    files, found = parse_lora(lora), fingerprint(opened.file.path)
    check_file(target, force=force, magic=MAGIC, kind="adapter for bundles")
    room = _room_of(bundle)
    if room.model != bytes.fromhex(found.sha256):
        raise InputError(f"{bundle} was exported from another file than {opened.name}: name that one")
    data, rank = _packed(opened, files, room)
    with new_file(target) as made:
        made.write_bytes(data + hashlib.sha256(data).digest())
        found.check()
    return {"file": str(target), "rank": rank, "bytes": target.stat().st_size}


def _packed(model: Model, files: tuple[LoraFile, ...], room: _Room) -> tuple[bytes, int]:
    """The file without its hash, and the adapter's rank."""
    lora = open_lora(files, model.file, model.spec)
    rank = lora.size.rank if lora else 0
    if lora is None or padded_rank(rank) > room.rank:
        raise InputError(
            f"the adapter has rank {rank}, and {room.path} room for {room.rank}: export it with --lora-rank"
        )
    layout = make_layout(model.file, model.spec)
    own = np.frombuffer(adapters_section(layout, room.rank, exact=room.exact)[: ADAPTERS.itemsize], ADAPTERS)[0]
    if own["layout"].tobytes() != room.layout:
        raise InputError(f"{room.path} was made by another version of edge: export it again")
    data = np.zeros(room.nbytes, np.uint8)
    packed, names = pack_adapters(lora, layout, data, exact=room.exact), ("lora_a", "lora_a.scales", "lora_b")
    places, used = list[int](), 0
    for each in adaptable(layout, exact=room.exact):
        found = [packed[each.layer].get(f"{each.name}.{name}", 0) for name in names]
        places += found
        if found[2]:
            used = max(used, found[2] + padded_rank(rank) * each.b + each.b_scales)
    header = {
        "magic": MAGIC, "version": VERSION, "rank": padded_rank(rank), "count": len(places) // len(names),
        "bytes": used, "model": np.void(room.model), "layout": np.void(room.layout),
    }  # fmt: skip
    of_gpu = _packed_for_gpu(model, lora, room) if room.gpu else b""
    head = filled(ADAPTER, header | {"gpu_bytes": len(of_gpu)})
    return head + np.array(places, "<u8").tobytes() + data[:used].tobytes() + of_gpu, rank


def _packed_for_gpu(model: Model, lora: Lora, room: _Room) -> bytes:
    """For each matrix a byte, 1 if the adapter changes it, up to a multiple of BUFFER_ALIGNMENT; then the content of
    the buffers."""
    file, spec = model.file, model.spec
    weights = make_weights(file, spec, PORTABLE.binding)
    adapters = gpu_adapters.Adapters.of(room.rank, "f32" if room.exact else "f16")
    buffers, changed = list[bytes](), set[tuple[int, str]]()
    for (_, _, packed), more in gpu_adapters.pack_adapters(lora, find_tensors(file, spec), weights, adapters):
        buffers.append(packed.tobytes() + bytes(-packed.nbytes % BUFFER_ALIGNMENT))
        changed |= more
    flags = bytes(each in changed for each in matrices_in(weights, adapters))
    return flags + bytes(-len(flags) % BUFFER_ALIGNMENT) + b"".join(buffers)


@dataclass(frozen=True)
class _Room:
    """The adapters that a bundle's model.edge has room for."""

    path: Path
    model: bytes
    layout: bytes
    rank: int
    nbytes: int  # of the packed matrices
    exact: bool  # whether the matrices are float32
    gpu: bool  # whether there are GPU programs, too


def _room_of(bundle: str | Path) -> _Room:
    """Raises ModelFormatError if there is no model.edge of this version, UnsupportedError if it has no room."""
    folder = Path(bundle)
    path = next(iter(sorted(folder.rglob(MODEL))), folder / MODEL) if folder.is_dir() else folder
    try:
        with path.open("rb") as file:
            (head,) = np.frombuffer(file.read(HEADER.itemsize), HEADER)
            entries = np.frombuffer(file.read(int(head["sections"]) * ENTRY.itemsize), ENTRY)
            sections = dict[int, bytes]()
            for each in entries:
                if each["kind"] in (Section.CONFIG, Section.ADAPTERS):
                    file.seek(int(each["offset"]))
                    sections[int(each["kind"])] = file.read(int(each["size"]))
        (config,) = np.frombuffer(sections[Section.CONFIG], CONFIG)
        if head["magic"] != MODEL_MAGIC or head["version"] != MODEL_VERSION:
            raise ValueError(path)
        if Section.ADAPTERS not in sections:
            raise UnsupportedError(f"{path} has no room for adapters: export it with --lora-rank")
        (found,) = np.frombuffer(sections[Section.ADAPTERS][: ADAPTERS.itemsize], ADAPTERS)
    except (OSError, ValueError, LookupError, OverflowError, MemoryError):
        raise ModelFormatError(f"{bundle} is no bundle of this version of edge export") from None
    exact = KV_DTYPES[config["kv_dtype"]] == "f32"
    layout, rank, nbytes = found["layout"].tobytes(), int(found["rank"]), int(found["room"])
    return _Room(path, head["hash"].tobytes(), layout, rank, nbytes, exact, bool(found["gpu"]))
