"""Export of a model's GPU program to apps and pages, which then need neither edge nor TVM.

program.json  the kernels with their sources, the sizes of buffers, and the dispatches of every pass (`Program`)
weights.bin   if requested, the buffers of weights, concatenated
design.json   the program's inputs, places of tensors, checksums; written last
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from edge.backends.base import EngineConfig
from edge.backends.tvm import ENGINE
from edge.backends.tvm.compiler.folder import appearing, described
from edge.backends.tvm.gpu import KV_DTYPES
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import Design, RowForm, State
from edge.backends.tvm.gpu.hosts import ALIGNMENT, PORTABLE, Adapter
from edge.backends.tvm.gpu.program import LANGUAGES
from edge.backends.tvm.gpu.weights import pack_weights
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.sources import source_hash
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.storage.versions import own_versions

PROGRAM, WEIGHTS, DESIGN = FILES = ("program.json", "weights.bin", "design.json")
CHUNK = 64  # tokens of a prompt that run at once


def export(
    file: GGUFFile, spec: ModelSpec, language: str, folder: Path, *, kv_dtype: str = KV_DTYPES[0],
    weights: bool = False, force: bool = False, progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write `folder` for any GPU with WebGPU's limits; returns the content of design.json.

    Raises InputError for an unknown language or KV dtype, and if the folder holds other files (unless `force`) or
    cannot be written; UnsupportedError for models without kernels; MissingExtraError without TVM.
    """
    if language not in LANGUAGES:
        raise InputError(f"GPUs speak {', '.join(LANGUAGES)}, not {language!r}")
    if kv_dtype not in KV_DTYPES:
        raise InputError(f"no programs for KV dtype {kv_dtype!r}: choose {', '.join(KV_DTYPES)}")
    config = EngineConfig(capacity=CHUNK, chunk=CHUNK, kv_dtype=kv_dtype, threads=1)
    design = Design.of(file, spec, config, any_gpu(language))
    with appearing(folder, FILES, force=force) as made:
        program = program_of(design, progress)
        (made / PROGRAM).write_text(program.to_json(), encoding="utf-8")
        places = places_of(design.weights.buffers)
        if weights:
            with open(made / WEIGHTS, "wb") as out:
                write_weights(out, 0, file, spec, design, places)
        rows = RowForm.of(design.shape.attention, kv_dtype)
        about = {
            "model": spec.label,
            "file": file.path.name,
            "language": language,
            "design": asdict(design),
            "tables": asdict(design.tables),
            "state": {name.lower(): word for name, word in vars(State).items() if name.isupper()},
            "rows": {"dtype": kv_dtype, "head": rows.head, "words": rows.words, "scaled": rows.scaled},
            "weights": {name: {"offset": at, "bytes": size} for name, (at, size) in places.items()},
            "source": source_hash("gpu"),
            "versions": own_versions() | ENGINE.versions(),
            "files": described(made),
        }
        (made / DESIGN).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def any_gpu(language: str) -> Adapter:
    """An adapter of which only the language is known, with WebGPU's limits."""
    return Adapter("", language, 0, "any", "", "", "unknown", False, None, PORTABLE, frozenset())


def places_of(buffers: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Offset and size of each buffer in the file, in bytes."""
    places, at = dict[str, tuple[int, int]](), 0
    for name, size in buffers.items():
        places[name] = at, size
        at += round_up(size, ALIGNMENT)
    return places


def write_weights(
    out: BinaryIO, start: int, file: GGUFFile, spec: ModelSpec, design: Design, places: dict[str, tuple[int, int]]
) -> None:
    """Write the buffers of weights to their places from byte `start` of a file on, which ends with them."""
    out.truncate(start + max(at + size for at, size in places.values()))
    for name, offset, words in pack_weights(file, spec, design.weights):
        out.seek(start + places[name][0] + offset)
        out.write(words.tobytes())
