"""Notes for the user where weights did not get the requested type, or the file grew."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from edge.budget import format_bytes
from edge.converters.gguf.ggml import HAVE_NO_CHOICE
from edge.converters.quantizers import lattice
from edge.formats.blocks import BLOCK, FLOATS, block_size, dequantize
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Planned
from edge.model.structure.mtp import without_mtp
from edge.model.structure.spec import ModelSpec

_MAIN = {"IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S"}  # of llama-quantize's mixtures

_SAMPLE = 256  # rows of a matrix that tell how it was trained


def type_counts(types: Iterable[str]) -> str:
    """For example `210 × Q4_0, 61 × F32`."""
    return ", ".join(f"{count} × {kind}" for kind, count in Counter(types).most_common())


def again_notes(spec: ModelSpec, asked: str) -> list[str]:
    """A warning if the source's weights are quantized already."""
    if spec.weight_type in FLOATS or asked in (*FLOATS, spec.weight_type):
        return []
    return [f"the weights are {spec.weight_type} already: rounding again loses more than rounding once"]


def has_choice(file: GGUFFile, kind: str) -> bool:
    """Whether a file's weights can be rounded to a type or mixture in several ways, so that importance matters."""
    return kind not in HAVE_NO_CHOICE and not (kind == lattice.KIND and is_trained_q4_0(file))


def is_trained_q4_0(file: GGUFFile) -> bool:
    """Whether quantization-aware training has left the values of Q4_0 in float weights, by the largest matrix."""
    tensors = without_mtp(file).tensors.items()
    matrices = [each for name, each in tensors if name.startswith("blk.") and len(each.shape) > 1]
    info = max(matrices, key=lambda each: each.elements, default=None)
    if info is None or info.type not in FLOATS:
        return False
    rows = file.tensor_bytes(info).reshape(prod(info.shape[1:]), -1)[:_SAMPLE]
    return lattice.is_trained(dequantize(rows, info.type))


def trained_notes(file: GGUFFile, planned: Sequence[Planned], group_size: int = BLOCK) -> list[str]:
    """A line if quantization-aware training has left the weights on Q4_0's steps, and they become a quantized type."""
    kinds = {each.type for each in planned if each.name.startswith("blk.") and len(each.shape) > 1}
    if kinds <= set(FLOATS) or not is_trained_q4_0(file):
        return []
    kept = lattice.KIND in kinds and group_size == BLOCK
    what = "keeps them as they are" if kept else "in blocks of 32 would keep them as they are; others round them again"
    return [f"the weights are values of Q4_0 already, as quantization-aware training leaves them: Q4_0 {what}"]


def notes_on(file: GGUFFile, planned: Sequence[Planned], asked: str) -> list[str]:
    """A line for each surprise of `file` in the requested type or mixture, such as Q4_K_M."""
    before, after = (sum(each.nbytes for each in tensors) for tensors in (file.tensors.values(), planned))
    notes = _odd_rows(planned, _MAIN.get(asked, re.sub("_K_[SML]$", "_K", asked)))
    if asked not in FLOATS and after > before:
        notes.append(f"the weights grow, from {format_bytes(before)} to {format_bytes(after)}: choose a smaller type")
    return notes


def _odd_rows(planned: Sequence[Planned], kind: str) -> list[str]:
    """Matrices that do not get this block type because their rows are not whole blocks of it."""
    size = block_size(kind)
    matrices = [each for each in planned if len(each.shape) > 1 and each.name.endswith(".weight")]
    odd = [each for each in matrices if each.shape[0] % size and each.type not in (kind, "F32")]
    if not odd:
        return []
    rows = ", ".join(map(str, sorted({each.shape[0] for each in odd})))
    missing = "" if any(each.type == kind for each in planned) else f"; no tensor is {kind}"
    notes = [
        f"blocks of {kind} have {size} values, and {len(odd)} of {len(matrices)} matrices have rows of {rows}, no "
        f"multiple of that: they became {type_counts(each.type for each in odd)}{missing}"
    ]
    values = Counter[str]()
    for each in matrices:
        values[each.type] += prod(each.shape) if each.name.startswith("blk.") else 0
    called = values.most_common(1)[0][0]
    if called != kind:
        notes.append(f"edge calls the model {called}, as most weights of its layers are")
    return notes
