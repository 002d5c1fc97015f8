"""Serialization of ONNX's messages: only those of our graphs, in the order of their fields.

Equal graphs give equal bytes, whatever the version of the `onnx` package, which only checks written files.

Format: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum


class Type(IntEnum):
    """Element types of tensors."""

    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    INT32 = 6
    INT64 = 7
    FLOAT16 = 10
    BFLOAT16 = 16


Attribute = int | float | str | Sequence[int] | bytes
"""bytes: a tensor, serialized by `tensor`."""

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_EXTERNAL = 1


def model(
    nodes: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes], initializers: Iterable[bytes],
    *, opsets: Mapping[str, int], ir_version: int, name: str = "edge",
) -> bytes:  # fmt: skip
    """A complete file. opsets: versions of domains."""
    graph = [*(_field(1, each) for each in nodes), _field(2, name), *(_field(5, each) for each in initializers)]
    graph += [*(_field(11, each) for each in inputs), *(_field(12, each) for each in outputs)]
    imports = (_field(8, _field(1, domain) + _field(2, version)) for domain, version in opsets.items())
    return b"".join((_field(1, ir_version), _field(2, "edge"), _field(7, b"".join(graph)), *imports))


def node(
    op: str, inputs: Iterable[str], outputs: Iterable[str], name: str, domain: str, attributes: Mapping[str, Attribute]
) -> bytes:
    fields = [*(_field(1, each) for each in inputs), *(_field(2, each) for each in outputs), _field(3, name)]
    fields += [_field(4, op), *(_field(5, _attribute(*each)) for each in sorted(attributes.items()))]
    return b"".join((*fields, _field(7, domain)))


def value(name: str, kind: Type, shape: Iterable[int | str]) -> bytes:
    """An input or output of the graph; variable extents have names."""
    extents = (_field(1, _field(1 if isinstance(extent, int) else 2, extent)) for extent in shape)
    tensor_type = _field(1, kind) + _field(2, b"".join(extents))
    return _field(1, name) + _field(2, _field(1, tensor_type))


def tensor(name: str, kind: Type, shape: Iterable[int], values: Iterable[int] | Iterable[float]) -> bytes:
    """A few numbers as int64 or float32."""
    if kind == Type.FLOAT:
        data = _field(4, b"".join(struct.pack("<f", each) for each in values))
    else:
        data = _field(7, b"".join(_varint(int(each)) for each in values))
    return _dims(shape) + _field(2, kind) + data + _field(8, name)


def external_tensor(name: str, kind: Type, shape: Iterable[int], location: str, offset: int, length: int) -> bytes:
    """An array in a file beside the graph's."""
    where = {"location": location, "offset": str(offset), "length": str(length)}
    entries = (_field(13, _field(1, key) + _field(2, text)) for key, text in where.items())
    return b"".join((_dims(shape), _field(2, kind), _field(8, name), *entries, _field(14, _EXTERNAL)))


def _attribute(name: str, value: Attribute) -> bytes:
    start = _field(1, name)
    if isinstance(value, float):
        return start + _tag(2, _FIXED32) + struct.pack("<f", value) + _field(20, 1)
    if isinstance(value, int):
        return start + _field(3, value) + _field(20, 2)
    if isinstance(value, str):
        return start + _field(4, value) + _field(20, 3)
    if isinstance(value, bytes):
        return start + _field(5, value) + _field(20, 4)
    return start + b"".join(_field(8, each) for each in value) + _field(20, 7)


def _dims(shape: Iterable[int]) -> bytes:
    return b"".join(_field(1, extent) for extent in shape)


def _field(number: int, content: int | str | bytes) -> bytes:
    """A field with an integer, a text, or a serialized message."""
    if isinstance(content, int):
        return _tag(number, _VARINT) + _varint(content)
    data = content.encode() if isinstance(content, str) else content
    return _tag(number, _BYTES) + _varint(len(data)) + data


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(number: int) -> bytes:
    """A varint: seven bits per byte, lowest first; negative numbers as 64 bits."""
    number &= (1 << 64) - 1
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes((*data, number))
