"""Tables of rotary angles, in the order in which kernels read them.

A row holds, for every dimension of a head, cos of its pair's angle, and then −sin (first of a pair) or +sin (second).
Angles are float64, so that position 10^7 is as exact as position 10.
"""

from __future__ import annotations

import numpy as np

from edge.gguf_file import GGUFFile
from edge.model import ModelSpec
from edge.types import AnyArray, FloatArray


def frequencies(file: GGUFFile, spec: ModelSpec) -> AnyArray:
    """Radians per position of every pair, float64 [rope_dim / 2]; llama3's factors stretch the long wavelengths."""
    powers: AnyArray = spec.rope_base ** (-np.arange(0, spec.rope_dim, 2) / spec.rope_dim)
    info = file.tensors.get("rope_freqs.weight")
    return powers if info is None else powers / file.tensor_bytes(info).view(np.float32)


def rope_table(positions: AnyArray, radians: AnyArray, head: int) -> FloatArray:
    """float32 [positions, 2, head]. Dimensions beyond those that turn keep cos 1 and sin 0."""
    angles = positions[:, None].astype(np.float64) * radians
    table = np.zeros((len(positions), 2, head), np.float32)
    table[:, 0] = 1
    width = 2 * radians.size
    table[:, 0, 0:width:2] = table[:, 0, 1:width:2] = np.cos(angles)
    table[:, 1, 1:width:2] = np.sin(angles)
    table[:, 1, 0:width:2] = -table[:, 1, 1:width:2]
    return table


def turn(keys: FloatArray, by: AnyArray, radians: AnyArray) -> FloatArray:
    """Keys float32 [..., n, head], row i turned by `by[i]` more positions."""
    table = rope_table(by, radians, keys.shape[-1])
    swapped = keys.reshape(*keys.shape[:-1], -1, 2)[..., ::-1].reshape(keys.shape)
    return np.asarray(keys * table[:, 0] + swapped * table[:, 1])
