"""llama.cpp's own quantization: of rows in this process, of whole files in a child process.

Rows: `ggml_quantize_chunk`, which weights a value's error by the importance of its column. Files: as `llama-quantize`,
which mixes block types by its own rules; its C code may abort, so it runs in a child.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.llamacpp.library import is_installed, library
from edge.devices.child import run_child
from edge.devices.output import new_file, work_folder
from edge.errors import EngineError, InputError, MissingExtraError, ModelFormatError, UnsupportedError
from edge.formats.blocks import TYPE_IDS, block_size, nbytes
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Planned
from edge.model.reader import read_spec
from edge.types import AnyArray, FloatArray

# Those that round without an importance, and whose code does not give up on rows that it cannot fit.
ROW_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

# Names of llama-quantize and numbers of `llama_ftype`. Left out: what edge cannot read (Q2_0), and COPY.
FTYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q1_0": 40, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K": 12, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K": 15, "Q4_K_S": 14,
    "Q4_K_M": 15, "Q5_K": 17, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19,
    "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25,
    "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37,
}  # fmt: skip
_NEED_IMPORTANCE = ("IQ1", "IQ2", "IQ3_XXS", "IQ3_XS", "Q2_K_S")  # beginnings of names
TRAINED = ("TQ1_0", "TQ2_0", "Q1_0")  # two or three values: for models that were trained with such weights
HAVE_NO_CHOICE = ("F32", "F16", "BF16", "Q8_0", *TRAINED)  # types that round in one way, whatever counts more
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


def quantize_rows(values: FloatArray, kind: str, importance: FloatArray | None = None) -> AnyArray:
    """Round float32 [rows, n] as llama.cpp does: uint8 [rows, bytes of n values].

    importance: float32 [n], ≥ 0, the weight of errors in each column (for llama.cpp its mean x²); None: by the type's
    own rule. Raises UnsupportedError for types not in ROW_KINDS, InputError for arrays that do not fit or hold NaN,
    MissingExtraError without llama-cpp-python.
    """
    if kind not in ROW_KINDS:
        raise UnsupportedError(f"llama.cpp's rounding to {kind} is not used here: choose {', '.join(ROW_KINDS)}")
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim != 2 or not values.size or values.shape[1] % block_size(kind):
        raise InputError(f"{kind} takes rows of blocks of {block_size(kind)} values, not an array {values.shape}")
    if not np.isfinite(values).all():
        raise InputError(f"weights that are no finite numbers cannot become {kind}")
    rows, columns = values.shape
    weights = None
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (columns,) or not (np.isfinite(importance) & (importance >= 0)).all():
            raise InputError(f"importance must be {columns} numbers from 0 on, one per column")
        weights = importance.ctypes.data
    data = np.empty((rows, nbytes(kind, columns)), np.uint8)
    written = _chunk_function()(TYPE_IDS[kind], values.ctypes.data, data.ctypes.data, 0, rows, columns, weights)
    if written != data.nbytes:
        raise EngineError(f"llama.cpp wrote {written} bytes of {kind} instead of {data.nbytes}")
    return data


@lru_cache(maxsize=1)
def _chunk_function() -> Any:
    """The C function, with its lookup tables initialized. Types that need an importance are not in ROW_KINDS."""
    function = library()._lib.ggml_quantize_chunk
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (
        [ctypes.c_int, pointer, pointer, count, count, count, pointer],
        ctypes.c_size_t,
    )
    return function


def find_ftype(name: str) -> str:
    """A type or mixture as llama-quantize spells it, from any letter case. Raises InputError."""
    if name.upper() not in FTYPES:
        raise InputError(f"there is no type {name!r}: choose {', '.join(FTYPES)}")
    return name.upper()


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
    these two (a tied head is the embedding). importance: by tensor name, float32 [columns]. dry_run: write nothing.
    Raises InputError for a type or a file that cannot be written, EngineError with llama.cpp's reason,
    MissingExtraError.
    """
    ftype = find_ftype(ftype)
    if not is_installed():
        raise MissingExtraError("llama-cpp-python", "llamacpp")
    file = read_gguf(source)
    read_spec(file)  # llama.cpp trusts what this checks
    if importance is None and ftype.startswith(_NEED_IMPORTANCE):
        raise InputError(
            f"{ftype} is too small for plain rounding: state a text that tells columns apart by --calibration"
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
        if info is None or np.shape(each) != info.shape[:1] or not np.isfinite(each).all():
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
        "edge.converters.ggml_child",
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
