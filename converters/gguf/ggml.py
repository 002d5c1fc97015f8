"""llama.cpp's own quantization of whole files, as `llama-quantize`: it mixes block types by its own rules.

Its C code may abort, so it runs in a child process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from edge.backends.llamacpp.library import is_installed
from edge.converters.gguf.plain import plan_plain, write_plain
from edge.devices.child import run_child
from edge.devices.output import new_file, work_folder
from edge.errors import EngineError, InputError, MissingExtraError, ModelFormatError
from edge.formats.blocks import FILE_TYPES, FLOATS, PLAIN, TYPE_IDS
from edge.formats.gguf import GGUFFile, factors_of, read_gguf
from edge.formats.gguf_writer import Planned
from edge.model.reader import read_spec
from edge.types import FloatArray

# Names of llama-quantize and numbers of `llama_ftype`, without COPY.
FTYPES = FILE_TYPES | {
    "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17,
    "IQ2_M": 29, "IQ3_XS": 22, "IQ3_M": 27,
}  # fmt: skip
NEED_IMPORTANCE = ("IQ1", "IQ2", "IQ3_XXS", "IQ3_XS", "Q2_K_S")  # beginnings of names
TRAINED = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")  # two or three values: for models that were trained with such weights
HAVE_NO_CHOICE = (*FLOATS, "Q8_0", *TRAINED)  # types that round in one way, whatever the importance
_SLAB = 64 << 20  # bytes of rows that llama.cpp holds at once


@dataclass(frozen=True)
class Request:
    """The job of the child process."""

    source: str
    target: str
    ftype: int
    pure: bool
    allow_requantize: bool
    threads: int  # 0: all cores
    dry_run: bool
    embedding: int | None
    head: int | None
    importance: str | None  # an .npz with one array per tensor
    slab: int = _SLAB


def find_ftype(name: str) -> str:
    """A type or mixture as llama-quantize spells it, from any letter case. Raises InputError."""
    if name.upper() not in FTYPES:
        raise InputError(f"there is no type {name!r}: choose {', '.join(FTYPES)}")
    return name.upper()


def needs_importance(kind: str) -> bool:
    """Whether a type of FTYPES is too small for plain rounding."""
    return kind.startswith(NEED_IMPORTANCE)


def quantize_file(
    file: GGUFFile,
    target: Path,
    kind: str,
    *,
    pure: bool = False,
    importance: Mapping[str, FloatArray] | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[Planned]:
    """Write `file` in a type of FTYPES, atomically. edge itself rounds to plain types; llama.cpp rounds to others, and
    by an importance matrix. Arguments, result and errors as for `quantize_with_llamacpp` and `write_plain`."""
    if factors_of(file.tensors):
        raise InputError(f"{file.path}: its NVFP4 matrices have factors: use edge convert --type {kind.lower()}")
    if kind not in PLAIN or importance:
        return quantize_with_llamacpp(
            file.path, target, kind, pure=pure, threads=threads, dry_run=dry_run, importance=importance,
            progress=progress,
        )  # fmt: skip
    if dry_run:
        return plan_plain(file, kind, pure=pure)
    return write_plain(file, target, kind, pure=pure, progress=progress)


def quantize_with_llamacpp(
    source: Path,
    target: Path,
    ftype: str,
    *,
    pure: bool = False,
    allow_requantize: bool = True,
    embedding: str | None = None,
    head: str | None = None,
    importance: Mapping[str, FloatArray] | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[Planned]:
    """Write `source` as llama-quantize does, atomically. Returns the tensors, in the file's order.

    ftype: a name of FTYPES. pure: all matrices in its main type, without a mixture. embedding, head: block types for
    these two (a tied head is the embedding). importance: float32 [columns] by tensor name; for experts, one expert's
    columns after another's. dry_run: write nothing.
    Raises InputError for a type or a file that cannot be written, EngineError with llama.cpp's reason,
    MissingExtraError.
    """
    ftype = find_ftype(ftype)
    if not is_installed():
        raise MissingExtraError("llama-cpp-python", "llamacpp")
    file = read_gguf(source)
    read_spec(file)  # llama.cpp trusts what this checks
    if importance is None and needs_importance(ftype):
        raise InputError(
            f"{ftype} is too small for plain rounding: state an importance matrix, such as column_importance's"
        )
    _check_importance(file, importance or {})
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        written = stack.enter_context(nullcontext(folder / "none") if dry_run else new_file(target))
        if importance:
            np.savez(folder / "importance.npz", **{name: np.float32(each) for name, each in importance.items()})
        request = Request(
            source=str(source.absolute()),
            target=str(written.absolute()),
            ftype=FTYPES[ftype],
            pure=pure,
            allow_requantize=allow_requantize,
            threads=threads or 0,
            dry_run=dry_run,
            embedding=None if embedding is None else TYPE_IDS[embedding.upper()],
            head=None if head is None else TYPE_IDS[head.upper()],
            importance=str(folder / "importance.npz") if importance else None,
        )
        try:
            types = _run(request, folder, len(file.tensors), progress)
        except EngineError as error:
            if "iostream" in str(error):  # all that C++ says of a disk
                raise InputError(f"{target} cannot be written whole: is the disk full?") from None
            raise
        planned = [Planned(name, file.tensors[name].shape, types[name]) for name in types if name in file.tensors]
        if len(planned) != len(file.tensors):
            raise EngineError(f"llama.cpp wrote {len(planned)} of {len(file.tensors)} tensors")
        if not dry_run:
            _check(written, target, planned)
    return planned


def _check_importance(file: GGUFFile, importance: Mapping[str, FloatArray]) -> None:
    for name, each in importance.items():
        info = file.tensors.get(name)
        if info is None or np.shape(each) != (info.shape[0] * prod(info.shape[2:]),) or not np.isfinite(each).all():
            raise InputError(f"the importance of {name!r} does not fit {file.path}")


def _run(request: Request, folder: Path, tensors: int, progress: Callable[[float], None] | None) -> dict[str, str]:
    """Run the child; return tensor names and types in the order of writing.

    folder: its working folder, so that it imports no stray files.
    """
    known = 0

    def hear(message: dict[str, str]) -> None:
        nonlocal known
        known += 1
        if progress:
            progress(min(1.0, known / tensors))

    types: dict[str, str] = run_child(
        "edge.converters.gguf.ggml_child",
        vars(request),
        hear,
        failure=f"llama.cpp could not quantize {request.source}",
        environment={"GGML_NO_BACKTRACE": "1"},
        folder=folder,
    )
    return types


def _check(path: Path, target: Path, planned: list[Planned]) -> None:
    try:
        found = {each.name: (each.shape, each.type) for each in read_gguf(path).tensors.values()}
    except ModelFormatError:
        raise InputError(f"{target} cannot be written whole: is the disk full?") from None
    if found != {each.name: (each.shape, each.type) for each in planned}:
        raise EngineError("the file that llama.cpp wrote does not read back as the same model")
