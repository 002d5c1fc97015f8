"""KV rows in device buffers, with the interface of `tvm/kv/rows.py`.

Rows are copied between host and device through contiguous staging rows after those of the arena, so that each array is
read or written by a single copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from edge.backends.tvm.gpu.design import KEYS, MOST_MOVED, VALUES, RowForm
from edge.backends.tvm.gpu.hosts import Buffer, Device
from edge.backends.tvm.gpu.program import Dispatch, Slice
from edge.backends.tvm.kv.householder import reflect
from edge.backends.tvm.kv.regions import TILE, Move
from edge.backends.tvm.kv.row_formats import FORMATS, decode, encode, pack_keys, unpack_keys
from edge.backends.tvm.memory import Array
from edge.types import AnyArray, FloatArray, IntArray

STAGED = 1024  # staging rows, after those of the arena


def arena_buffers(whole: int, ringed: int, form: RowForm, *, observes: bool = False) -> dict[str, Array]:
    """The buffers of an arena (`ArenaSize`), staging included."""
    widths = {"keys": form.words} | ({} if form.shared else {"values": form.words})
    widths |= ({"row_scales": 2} if form.scaled else {}) | ({"paid": 1} if observes else {})

    def buffer(width: int) -> Array:
        return Array((whole + ringed + STAGED, width), "uint32", whole * width, ringed * width, STAGED * width)

    moves = Array((MOST_MOVED, 2), "int32", scratch=2 * MOST_MOVED)
    return {name: buffer(width) for name, width in widths.items()} | {"pairs": moves}


def to_memory(form: RowForm, codes: AnyArray) -> AnyArray:
    """Codes [n, head] of `encode` as a row's bytes, uint8 [n, 4 · form.words]."""
    padded = np.pad(codes, ((0, 0), (0, form.stored - form.head)))
    return np.ascontiguousarray(pack_keys(form.dtype, padded)).view(np.uint8)


class DeviceRows:
    """`count` rows of all heads in device memory. changed: buffers were replaced (see `release`). observed: `paid` may
    hold attention that `collect` has not fetched. normals: see `HostRows`; kernels read theirs from `Tables`. kernel:
    name of the one that moves rows."""

    def __init__(
        self, device: Device, count: int, form: RowForm, *, observes: bool = False,
        normals: FloatArray | None = None, kernel: str = "edge_move",
    ) -> None:  # fmt: skip
        self.dtype, self.count, self.changed, self.observed = form.dtype, count, False, False
        self.normals = np.zeros((0, form.head), np.float32) if normals is None else normals
        self._device, self._form, self._kernel = device, form, kernel
        self._kinds = (KEYS,) if form.shared else (KEYS, VALUES)
        self.row_bytes = self._form.row_bytes
        self.buffers: dict[str, Buffer] = {
            name: device.create(buffer.nbytes)
            for name, buffer in arena_buffers(count, 0, form, observes=observes).items()
        }

    def record(self) -> None:
        """Record the row moves again; needs their kernel. Call it after buffers have changed."""
        self.changed = False
        names = (
            "keys",
            *([] if self._form.shared else ["values"]),
            *(["row_scales"] if self._form.scaled else []),
            "pairs",
        )
        slices = tuple(Slice(name) for name in names)
        self._moves = {
            which: self._device.record(
                [Dispatch(self._kernel, slices, (which,), (1, MOST_MOVED), "other", per=1)], self.buffers
            )
            for which in {*self._kinds, sum(self._kinds)}
        }

    def move(self, pairs: IntArray, which: int = KEYS + VALUES) -> None:
        """Copy rows of the arena by pairs, int32 [n, 2]: (source, target). No row may be in two pairs."""
        for start in range(0, len(pairs), MOST_MOVED):
            part = np.ascontiguousarray(pairs[start : start + MOST_MOVED], np.int32)
            self._device.write(self.buffers["pairs"], 0, part)
            self._device.run(self._moves[which & sum(self._kinds)], len(part))

    def shift(self, move: Move) -> None:
        """Move consecutive rows; source and target begin a tile. Overlapping moves go through the staging rows."""
        distance = abs(move.source - move.target)
        step = max(distance, STAGED)
        starts = range(0, move.count, step)
        for start in starts if move.target < move.source else reversed(starts):
            rows = np.arange(start, min(start + step, move.count))
            stops = [move.source + rows, move.target + rows]
            if rows.size > distance:
                stops.insert(1, self._staging(rows.size))
            for source, target in pairwise(stops):
                self.move(np.stack([source, target], axis=1).astype(np.int32))

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """Yield the bytes of rows [heads, n]."""
        for part in _parts(rows):
            for which in self._kinds:
                codes, scales = self._read(part, which)
                yield codes.tobytes()
                yield scales.tobytes()

    def restore(self, rows: AnyArray, saved: memoryview) -> None:
        """The inverse of `save`."""
        form, at = self._form, 0
        for part in _parts(rows):
            for which in self._kinds:
                size = 4 * form.words * part.size
                codes = np.frombuffer(saved, np.uint8, size, at).reshape(part.size, -1)
                at += size
                scales = np.frombuffer(saved, np.uint32, part.size * form.scaled, at)
                at += scales.nbytes
                self._write(part, which, codes, scales)

    def keys(self, rows: AnyArray, heads: AnyArray | int) -> FloatArray:
        """Keys of one head among those of all layers, float32 [n, head], or of several, [heads, n, head]."""
        return self._reflected(self._numbers(rows, KEYS), heads)

    def values(self, rows: AnyArray) -> FloatArray:
        """Values of rows [heads, n], float32 [heads, n, head]."""
        return self._numbers(rows, self._kinds[-1])

    def _numbers(self, rows: AnyArray, kind: int) -> FloatArray:
        found = [self._decoded(*self._read(part, kind)) for part in _parts(rows)]
        numbers: FloatArray = np.concatenate([np.zeros((0, self._form.head), np.float32), *found])
        return numbers.reshape(*rows.shape, self._form.head)

    def value_norms(self, rows: AnyArray) -> FloatArray:
        """See ArenaRows."""
        found = [np.linalg.norm(self._decoded(*self._read(part, self._kinds[-1])), axis=-1) for part in _parts(rows)]
        return np.concatenate([np.zeros(0, np.float32), *found])

    def set_keys(self, rows: AnyArray, keys: FloatArray, heads: AnyArray | int) -> None:
        self._set(rows, self._reflected(keys, heads), KEYS)

    def set_values(self, rows: AnyArray, values: FloatArray) -> None:
        """Values, float32 [heads, n, head], as `set_keys`."""
        self._set(rows, values, VALUES)

    def _set(self, rows: AnyArray, numbers: FloatArray, kind: int) -> None:
        form = self._form
        codes, scales = encode(self.dtype, numbers.reshape(rows.size, form.head))
        words = np.ascontiguousarray(scales).view(np.uint32) if form.scaled else np.zeros((rows.size, 0), np.uint32)
        stored, at = to_memory(form, codes), 0
        for part in _parts(rows):
            own = slice(at, at + part.size)
            self._write(part, kind, stored[own], words[own].reshape(-1))
            at += part.size

    def collect(self, paid: FloatArray) -> None:
        """See ArenaRows. Reads 4 bytes for every row of the arena, if something was observed."""
        if self.observed:
            paid[: self.count] += self._device.read(self.buffers["paid"], 0, 4 * self.count).view(np.float32)
            self._device.write(self.buffers["paid"], 0, np.zeros(self.count, np.float32))
            self.observed = False

    def release(self, first: int, last: int) -> None:
        """See ArenaRows. A buffer can only end earlier: of several sequences, this frees the memory of the last one."""
        if last < self.count:
            return
        device, form = self._device, self._form
        buffers = arena_buffers(first, 0, form, observes="paid" in self.buffers)
        for name in self.buffers.keys() - {"pairs"}:
            kept = buffers[name].bytes("kv")
            content, old = device.read(self.buffers[name], 0, kept), self.buffers[name]
            device.free(old)
            self.buffers[name] = device.create(buffers[name].nbytes)
            device.write(self.buffers[name], 0, content)
        self.record()
        self.count, self.changed = first, True

    def _reflected(self, keys: FloatArray, heads: AnyArray | int) -> FloatArray:
        return reflect(keys, self.normals[heads]) if self._form.transformed and len(self.normals) else keys

    def _decoded(self, codes: AnyArray, scales: AnyArray) -> FloatArray:
        form, stored = self._form, FORMATS[self.dtype]
        values = unpack_keys(self.dtype, codes.view(stored.memory))[:, : form.head]
        return decode(self.dtype, values, scales.view(stored.scale).reshape(len(codes), -1))

    def _read(self, rows: AnyArray, which: int) -> tuple[AnyArray, AnyArray]:
        """Codes, uint8 [n, bytes], and words of scales, uint32 [n] or [0], of at most `STAGED` rows."""
        form, count = self._form, rows.size
        self.move(np.stack([rows, self._staging(count)], axis=1).astype(np.int32), which)
        at, size = 4 * form.words * self.count, 4 * form.words * -(-count // TILE) * TILE
        codes = self._device.read(self.buffers["keys" if which == KEYS else "values"], at, size)
        if which == KEYS:
            codes = np.ascontiguousarray(codes.reshape(-(-count // TILE), form.units, TILE, 16).swapaxes(1, 2))
        scales = np.zeros(0, np.uint32)
        if form.scaled:
            pairs = self._device.read(self.buffers["row_scales"], 8 * self.count, 8 * count).view(np.uint32)
            scales = np.ascontiguousarray(pairs.reshape(-1, 2)[:, which - 1])
        return codes.reshape(-(-count // TILE) * TILE, 4 * form.words)[:count], scales

    def _write(self, rows: AnyArray, which: int, codes: AnyArray, scales: AnyArray) -> None:
        """The inverse of `_read`."""
        form, count = self._form, rows.size
        tiles = -(-count // TILE)
        padded = np.zeros((tiles * TILE, 4 * form.words), np.uint8)
        padded[:count] = codes
        if which == KEYS:
            padded = np.ascontiguousarray(padded.reshape(tiles, TILE, form.units, 16).swapaxes(1, 2))
        name = "keys" if which == KEYS else "values"
        self._device.write(self.buffers[name], 4 * form.words * self.count, padded)
        if form.scaled:
            pairs = np.zeros((count, 2), np.uint32)
            pairs[:, which - 1] = scales
            self._device.write(self.buffers["row_scales"], 8 * self.count, pairs)
        self.move(np.stack([self._staging(count), rows], axis=1).astype(np.int32), which)

    def _staging(self, count: int) -> AnyArray:
        return np.arange(self.count, self.count + count)


def _parts(rows: AnyArray) -> Iterator[AnyArray]:
    """Split rows into pieces [n] that fit the staging rows."""
    flat = rows.reshape(-1)
    for start in range(0, flat.size, STAGED):
        yield flat[start : start + STAGED]
