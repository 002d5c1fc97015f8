"""Writer of Core ML models: a folder for apps on Apple's devices.

model.mlpackage                 the program (see program.py); Xcode compiles it, and so does `MLModel.compileModel`
embeddings.bin                  rows of `x`, already scaled, to be mapped into memory; see `embedding_bits`
positions.bin                   float16 [context, hidden], of models with learned positions: to be added to the rows
metadata.gguf, tokenizer.json   as beside a model in ONNX
coreml.json                     for the app that owns the cache: sizes, windows, the frequencies of RoPE; and
                                the names and hashes of all files
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.onnx.graph.forms import Blocks
from edge.backends.onnx.graph.layout import Layout, make_layout
from edge.backends.onnx.graph.static import HIDDEN, residual_factor
from edge.converters.coreml import supports
from edge.converters.coreml.sizes import ProgramSizes
from edge.converters.coreml.weights import Constants, to_float16
from edge.converters.onnx.tokenizer_file import write_tokenizer
from edge.converters.onnx.writer import write_metadata
from edge.devices.logs import only_from
from edge.devices.output import check_folder, new_folder, work_folder
from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.formats.blocks import BLOCK
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import METADATA
from edge.model.architectures.angles import find_angles
from edge.model.names.catalog import COREML_MANIFEST, is_coreml_folder
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.model.tokens.tokenizer import Tokenizer
from edge.storage.fingerprint import hash_file
from edge.types import Progress

FORMAT = 1
PACKAGE, TOKENIZER = "model.mlpackage", "tokenizer.json"
EMBEDDINGS, POSITIONS = "embeddings.bin", "positions.bin"
_ROWS = 4096  # of the embeddings, which are written at once
_SPECIFICATION = 9  # of iOS 18 and macOS 15, the first with int4 blocks and several functions


def check_target(folder: Path) -> None:
    """Raise InputError for a folder named like a package, which would hide the files beside it; MissingExtraError
    without coremltools."""
    if folder.suffix == ".mlpackage":
        raise InputError(f"{folder} becomes a folder that holds {PACKAGE}: state a name without .mlpackage")
    if find_spec("coremltools") is None:
        raise MissingExtraError("coremltools", "coreml")


def planned_files(file: GGUFFile, spec: ModelSpec) -> dict[str, int | None]:
    """Names and bytes of the files that would be written; None: unknown until written. Raises UnsupportedError."""
    bits = embedding_bits(_layout(file, spec))
    row = spec.hidden * bits // 8 + (spec.hidden // BLOCK * 2 if bits == 8 else 0)
    found: dict[str, int | None] = {PACKAGE: None, EMBEDDINGS: spec.vocab * row}
    if find_network(spec).learned_positions:
        found[POSITIONS] = spec.context * spec.hidden * 2
    return found | dict.fromkeys((METADATA, TOKENIZER, COREML_MANIFEST))


def _layout(file: GGUFFile, spec: ModelSpec) -> Layout:
    for reason in filter(None, map(supports, find_network(spec).cores)):
        raise UnsupportedError(f"Core ML programs do not run {reason} yet")
    return make_layout(file, spec)


def write_coreml(
    file: GGUFFile,
    spec: ModelSpec,
    folder: Path,
    sizes: ProgramSizes,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write the folder atomically; return names and bytes of its files.

    force: a folder that edge wrote may be replaced. Raises InputError if `folder` is in the way, MissingExtraError
    without coremltools, UnsupportedError for models without a program, ModelFormatError for weights that are not finite
    in float16.
    """
    check_target(folder)
    if file.folder is not None:
        raise InputError(f"{file.folder} is a model in ONNX already: convert what it was made of")
    layout = _layout(file, spec)
    check_folder(folder, is_coreml_folder, force=force)
    report = progress or (lambda part: None)
    quiet = only_from(logging.ERROR, "coremltools")  # which warns that this machine is no Mac
    with new_folder(folder) as target, open(file.path, "rb") as source, quiet:
        constants = Constants(file, source, layout)
        _write_package(constants, layout, spec, sizes, target / PACKAGE, report)
        _write_tables(constants, spec, residual_factor(find_network(spec)), target)
        write_metadata(file, target / METADATA)
        write_tokenizer(Tokenizer(file), target / TOKENIZER)
        (target / COREML_MANIFEST).write_text(
            json.dumps(_manifest(file, spec, embedding_bits(layout), sizes, target), indent=1) + "\n", encoding="utf-8"
        )
        report(1.0)
        return file_sizes(target)


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files, by path within the folder."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}


def embedding_bits(layout: Layout) -> int:
    """8: a row is `hidden` int8 values and a float16 scale for every 32 of them; 16: a row is float16 values."""
    return 8 if isinstance(layout.matrices["token_embd"].form, Blocks) else 16


def _write_package(
    constants: Constants, layout: Layout, spec: ModelSpec, sizes: ProgramSizes, package: Path, report: Progress
) -> None:
    from coremltools.converters.mil.backend.mil.load import load
    from coremltools.models.utils import save_spec

    from edge.converters.coreml.check import check_package
    from edge.converters.coreml.program import make_program

    network = find_network(spec)
    program = make_program(constants, layout, spec, network, sizes)
    report(0.3)
    with work_folder(package) as weights:
        program._check_early_error_out_for_invalid_program()
        try:
            model = load(program, str(weights), specification_version=_SPECIFICATION)
            del program
            report(0.6)
            save_spec(model, str(package), weights_dir=str(weights))
        except RuntimeError as error:  # of writing files, where coremltools does not know more
            why = str(error).splitlines()[0].rstrip(".")
            raise InputError(f"{package.name} cannot be written ({why}): is the disk full?") from None
    for path in _files(package):
        path.chmod(0o666 & package.stat().st_mode)  # some were private, as temporary files are
    report(0.7)
    check_package(constants, layout, package)


def _write_tables(constants: Constants, spec: ModelSpec, factor: float, target: Path) -> None:
    network = find_network(spec)
    embeddings, scale = constants.matrix("token_embd"), np.float32(network.embedding_scale * factor)
    with open(target / EMBEDDINGS, "wb") as out:
        for first in range(0, spec.vocab, _ROWS):
            rows = embeddings.part(first, _ROWS)
            factors = to_float16((rows.data if rows.scales is None else rows.scales) * scale, "token_embd")
            if rows.scales is not None:
                factors = np.concatenate([rows.data.view(np.uint8), factors.view(np.uint8)], axis=1)
            out.write(factors.tobytes())
    if network.learned_positions:
        with open(target / POSITIONS, "wb") as out:
            for values in constants.vector_rows("position_embd"):
                out.write(to_float16(values * np.float32(factor), "position_embd").tobytes())


def _manifest(file: GGUFFile, spec: ModelSpec, bits: int, sizes: ProgramSizes, target: Path) -> dict[str, Any]:
    network = find_network(spec)
    ropes = []
    for rope in network.ropes:
        short = find_angles(file, rope)
        said: dict[str, Any] = {"frequencies": short.radians.tolist(), "magnitude": short.magnitude}
        if rope.has_long:
            said["long_frequencies"] = find_angles(file, rope, long=True).radians.tolist()
            said["original_context"] = rope.original_context
        ropes.append(said)
    heat = network.temperature
    return {
        "format": FORMAT,
        "source": file.path.name,
        "rows": sizes.rows,
        "chunk": sizes.chunk,
        "layers": spec.layers,
        "kv_heads": spec.kv_heads,
        "head": spec.head_dim,
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "embedding_bits": bits,
        "masked": HIDDEN,
        "windows": list(network.windows),
        "ropes": ropes,
        "layer_ropes": [network.rope_of(layer) for layer in range(spec.layers)] if ropes else [],
        "temperature": {"slope": heat.slope, "period": heat.period} if heat else None,
        "files": {
            path.relative_to(target).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)}
            for path in _files(target)
        },
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
