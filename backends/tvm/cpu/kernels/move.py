"""Moving rows of the KV cache: eviction fills its holes with the last rows of each head."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.cache import scale_at
from edge.backends.tvm.cpu.kernels.codes import memory_types
from edge.backends.tvm.cpu.kernels.lanes import Buffer, Value, i64, let, loop, quotient, remainder
from edge.backends.tvm.kv.row_formats import FORMATS, RowFormat
from edge.backends.tvm.packing.layout import Shape


def move_rows(shape: Shape, kv_dtype: str) -> Any:
    """Copy rows of the cache: from where to where are pairs of int32, [count, 2]."""
    pointers = memory_types(kv_dtype) | {"pairs": "int32"}
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("move")
        T.func_attr({"global_symbol": "move", "tirx.noalias": True})
        arguments = {name: T.arg(name, T.ptr(dtype)) for name, dtype in pointers.items()}
        count = T.arg("count", T.int64())
        arrays = {name: T.decl_buffer((1 << 48,), dtype, data=arguments[name]) for name, dtype in pointers.items()}
        pairs = arrays.pop("pairs")
        with loop(i64(0), count) as index:
            source, target = (let(T.cast(pairs[index * 2 + end], "int64")) for end in (0, 1))
            _copy(FORMATS[kv_dtype], shape.padded_head, arrays, source, target)
    return builder.get()


def _copy(form: RowFormat, head: int, arrays: dict[str, Buffer], source: Value, target: Value) -> None:
    """Row `target` becomes a copy of row `source`; both count from the start of the arrays."""
    keys, values, width = arrays["keys"], arrays["values"], head // form.packed
    from_key, to_key = (let(quotient(row, 16) * 16 * width + remainder(row, 16)) for row in (source, target))
    with loop(i64(0), i64(width)) as element:
        T.buffer_store(keys, keys[from_key + element * 16], [to_key + element * 16])
        T.buffer_store(values, values[source * width + element], [target * width + element])
    for number in range(form.scales):
        from_scale, to_scale = (let(scale_at(row, number, form.scales)) for row in (source, target))
        for name in ("key_scales", "value_scales"):
            T.buffer_store(arrays[name], arrays[name][from_scale], [to_scale])
