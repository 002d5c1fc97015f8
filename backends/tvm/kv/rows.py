"""NumPy's view of the KV cache's rows in memory, all heads together, in the layout of cpu/kernels/cache.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.tvm.kv.householder import normals_of, reflect
from edge.backends.tvm.kv.regions import TILE, Move
from edge.backends.tvm.kv.row_formats import FORMATS, decode, encode, pack_keys, unpack_keys
from edge.backends.tvm.memory import release
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from edge.backends.tvm.kv.memory import ArenaSize


class HostRows:
    """The ArenaRows protocol (store.py) in main memory. arrays: shared with compiled code.

    move_rows: compiled function that copies rows within these arrays by pairs (source, target), int32 [n, 2].
    normals: of the Householder reflections of keys (householder.py), [heads of all layers, head]; centred: means that
    stored keys lack.
    """

    def __init__(
        self, arena: ArenaSize, arrays: Mapping[str, AnyArray], dtype: str, normals: FloatArray,
        move_rows: Callable[[Iterable[AnyArray], IntArray], object], *, centred: bool = False,
    ) -> None:  # fmt: skip
        """arrays: `ArenaSize.stored`, allocated."""
        self.dtype, self.normals, self.count, self._move_rows = dtype, normals, arena.rows, move_rows
        self._centred = centred
        self._tiles, self._widths = arena.rows // TILE, FORMATS[dtype].widths(arena.row)
        self.arrays = {name: arrays[arena.prefix + name] for name in self._widths}
        self.row_bytes = sum(width * self.arrays[name].itemsize for name, width in self._widths.items())

    def width(self, name: str) -> int:
        """The number of an array's elements per row."""
        return self._widths[name]

    def gather(self, name: str, rows: AnyArray) -> AnyArray:
        """Read rows as stored, [..., width]."""
        view = self._view(name)
        return np.asarray(view[rows] if name == "values" else view[rows // TILE, :, rows % TILE])

    def scatter(self, name: str, rows: AnyArray, stored: AnyArray) -> None:
        if name == "values":
            self._view(name)[rows] = stored
        else:
            self._view(name)[rows // TILE, :, rows % TILE] = stored

    def move(self, pairs: IntArray) -> None:
        self._move_rows(self.arrays.values(), pairs)

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """Yield the bytes of each array in memory order: whole tiles of each head, then the remaining rows."""
        tiled, rest, tiles = _tiles(rows)
        for name in self.arrays:
            if self.width(name):
                whole = (
                    self._by_tile(name)[tiles]
                    if tiles is not None
                    else self._transposed(name, self.gather(name, tiled))
                )
                yield whole.tobytes() + self.gather(name, rest).tobytes()

    def restore(self, rows: AnyArray, saved: memoryview) -> None:
        at = 0
        for name, array in self.arrays.items():
            part = np.frombuffer(saved, array.dtype, rows.size * self.width(name), at)
            at += part.nbytes
            if part.size:
                self._restore(name, rows, part)

    def _restore(self, name: str, rows: AnyArray, saved: AnyArray) -> None:
        width, (tiled, rest, tiles) = self.width(name), _tiles(rows)
        whole, others = saved[: tiled.size * width], saved[tiled.size * width :]
        if tiles is not None:
            self._by_tile(name)[tiles] = whole.reshape(*tiles.shape, TILE * width)
        else:
            shape = (TILE, width) if name == "values" else (width, TILE)
            self.scatter(name, tiled, self._transposed(name, whole.reshape(*tiled.shape[:2], *shape)))
        self.scatter(name, rest, others.reshape(*rest.shape, width))

    def keys(self, rows: AnyArray, heads: AnyArray | int) -> FloatArray:
        """Keys of one head among those of all layers, float32 [n, head], or of several, [heads, n, head]."""
        codes = unpack_keys(self.dtype, self.gather("keys", rows))
        return self._placed(decode(self.dtype, codes, self.gather("key_scales", rows)), heads, 1)

    def set_keys(self, rows: AnyArray, keys: FloatArray, heads: AnyArray | int) -> None:
        codes, scales = encode(self.dtype, self._placed(keys, heads, -1))
        self.scatter("keys", rows, pack_keys(self.dtype, codes))
        self.scatter("key_scales", rows, scales)

    def give_means(self, rows: AnyArray, heads: AnyArray) -> None:
        """Store the keys of these rows as apps do, which keep means. Afterwards, compiled code cannot read them."""
        if self._centred:
            keys = self.keys(rows, heads)
            self.normals, self._centred = normals_of(self.normals), False
            self.set_keys(rows, keys, heads)

    def set_values(self, rows: AnyArray, values: FloatArray) -> None:
        """Write values, float32 [..., head], to rows [...]."""
        codes, scales = encode(self.dtype, values)
        self.scatter("values", rows, _pack_values(codes) if FORMATS[self.dtype].packed == 2 else codes)
        self.scatter("value_scales", rows, scales)

    def value_norms(self, rows: AnyArray) -> FloatArray:
        """See ArenaRows. Norms depend neither on the order of packed values nor on their transformation."""
        codes = unpack_keys(self.dtype, self.gather("values", rows))
        return np.asarray(np.linalg.norm(decode(self.dtype, codes, self.gather("value_scales", rows)), axis=-1))

    def _placed(self, keys: FloatArray, heads: AnyArray | int, sign: int) -> FloatArray:
        """Keys as they are stored (sign −1), or the other way (1)."""
        if self._centred:
            return keys + sign * self.normals[heads][..., None, :]
        return reflect(keys, self.normals[heads]) if FORMATS[self.dtype].transformed else keys

    def shift(self, move: Move) -> None:
        """Move consecutive rows; source and target begin a tile."""
        for name in self.arrays:
            view, unit = self._view(name), 1 if name == "values" else TILE
            count = -(-move.count // unit)
            source, target = move.source // unit, move.target // unit
            view[target : target + count] = view[source : source + count]

    def collect(self, paid: FloatArray) -> None:
        """See ArenaRows. Does nothing: compiled code adds to `paid` directly."""

    def release(self, first: int, last: int) -> None:
        """Return the memory of rows, which are whole tiles, to the system. Their content is lost."""
        for name, array in self.arrays.items():
            release(array[first * self.width(name) : last * self.width(name)])

    def _by_tile(self, name: str) -> AnyArray:
        """The array as [tiles, TILE · width], whatever the order within a tile."""
        return self.arrays[name].reshape(-1, TILE * self.width(name))

    def _transposed(self, name: str, tiles: AnyArray) -> AnyArray:
        """Convert [..., TILE, width] to the order in memory, or back."""
        return tiles if name == "values" else tiles.swapaxes(-1, -2)

    def _view(self, name: str) -> AnyArray:
        """The array as stored: values [rows, width], the others [rows / 16, width, 16]."""
        array, width = self.arrays[name], self.width(name)
        return array.reshape(self.count, width) if name == "values" else array.reshape(self._tiles, width, TILE)


def _pack_values(codes: AnyArray) -> AnyArray:
    """Pack codes of 4 bits, [..., head], as `write_value` in cpu/kernels/cache.py does: a byte has two that are 16
    apart, or 8 in an odd last part of 16."""
    whole = codes.shape[-1] // 32 * 32
    pairs = (
        codes[..., :whole].reshape(*codes.shape[:-1], -1, 2, 16),
        codes[..., whole:].reshape(*codes.shape[:-1], -1, 2, 8),
    )
    packed = ((each[..., 0, :] | each[..., 1, :] << 4).reshape(*codes.shape[:-1], -1) for each in pairs)
    return np.concatenate([*packed], axis=-1)


def _tiles(rows: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Split rows [heads, n] into [heads, tiles, TILE] and the rest, with the tiles' numbers if they are whole tiles of
    the arena, which makes copying much faster."""
    whole = rows.shape[1] // TILE * TILE
    tiled = rows[:, :whole].reshape(len(rows), -1, TILE)
    first = tiled[..., 0]
    fill = not (first % TILE).any() and bool((tiled == first[..., None] + np.arange(TILE)).all())
    return tiled, rows[:, whole:], first // TILE if fill else None
