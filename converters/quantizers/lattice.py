"""Weights of quantization-aware training (QAT), which are whole multiples of a step already.

A checkpoint such as Gemma's `…-qat-q4_0-unquantized` stores them in bf16, as the training has rounded them to 4 bits.
Plain Q4_0 takes −1/8 of a block's extreme value as its step. Where the training used another, because no weight of the
block has the code −8, that moves every weight, and what the training gained is lost (ggml-org/llama.cpp#24603). So the
extreme value is tried as each of the codes: one is right if all weights become integers within the precision of bf16,
which 32 weights without a step never do by chance.
"""

from __future__ import annotations

import numpy as np

from edge.formats.blocks import BLOCK, QuantizedMatrix, find_grid, half
from edge.types import AnyArray, FloatArray

KIND = "Q4_0"
Codes = tuple[QuantizedMatrix, AnyArray]  # as `find_codes` returns them
_CODES = (-8, *range(7, 0, -1))  # of the extreme value; ggml's first, and signs are the step's
_ROUNDING = np.float32(2.0**-8)  # of bf16, relative
_FEW = 4  # weights of a block that rule out most steps
_MOST = 0.99  # of a matrix's blocks


@np.errstate(all="ignore")  # of weights that no step can hold
def find_codes(weight: FloatArray) -> Codes:
    """Q4_0 codes of float32 [rows, columns], and the blocks that they hold up to bf16's rounding, bool [rows, blocks].

    The other blocks' codes and scales mean nothing. Steps are the best for the codes by least squares.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(-1, BLOCK)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    codes, scales = np.zeros(blocks.shape, np.float32), np.zeros((len(blocks), 1), np.float32)
    left = np.flatnonzero(extreme)
    for code in _CODES:
        step = extreme / np.float32(code)
        likely = left[_integers(blocks[left, :_FEW], step[left])]
        found = likely[_integers(blocks[likely], step[likely])]
        codes[found] = np.rint(blocks[found] / step[found])
        squares, products = ((codes[found] * each).sum(axis=1) for each in (codes[found], blocks[found]))
        scales[found, 0] = half(products / squares)
        left = np.setdiff1d(left, found, assume_unique=True)
    kept = (np.abs(codes * scales - blocks) <= 1.5 * _ROUNDING * np.abs(blocks)).all(axis=1)  # 1.5: the step's, too
    grid = find_grid(KIND)
    matrix = QuantizedMatrix(
        grid, (codes - grid.levels[0]).astype(np.uint8).reshape(rows, columns), scales.reshape(rows, -1)
    )
    return matrix, (kept & (scales[:, 0] != 0)).reshape(rows, -1)  # not blocks of zeros, which say nothing


def trained_codes(weight: FloatArray) -> Codes | None:
    """The codes of float32 [rows, columns] if these are weights of Q4_0: nearly all blocks that are not zeros hold them
    as they are. None for other weights."""
    if weight.shape[1] % BLOCK:
        return None
    codes, full = find_codes(weight), weight.reshape(len(weight), -1, BLOCK).any(axis=-1)
    return codes if codes[1].sum() > _MOST * full.sum() else None


def is_trained(weight: FloatArray) -> bool:
    return trained_codes(weight) is not None


def _integers(values: FloatArray, step: FloatArray) -> AnyArray:
    """bool [rows]: whether a row's values are, up to rounding, multiples of its step that have codes in Q4_0. step:
    [rows, 1]."""
    multiples = values / step
    nearest = np.rint(multiples)
    close = np.abs(multiples - nearest) <= 2.1 * _ROUNDING * np.abs(nearest)  # the extreme value's, too
    return np.asarray((close & (nearest < 8)).all(axis=1))
