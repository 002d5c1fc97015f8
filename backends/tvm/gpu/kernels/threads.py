"""Workgroups and threads over TVM's IR builder, so that kernels read like their formulas.

A kernel is a Python function of a `Scope`: its buffers, its int32 scalars, and the numbers of the workgroup and the
thread. Python's control flow runs while a kernel is built, and so unrolls; `loop` and `when` are control flow of the
kernel itself. Indices are int32. All threads of a workgroup must reach each barrier: conditions around it may depend
only on scalars, workgroup numbers and buffers that the kernel does not write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

WARP = 32  # threads that CUDA runs in step

Value = Any  # a scalar expression of TVM
Buffer = Any  # memory of one element type


@dataclass(frozen=True)
class Built:
    """A kernel for `lowering.lower`: TVM's function, the fields of `program.Kernel`, and its dispatch.

    groups, per: as in `program.Dispatch`, which may also use other values.
    """

    name: str
    function: Any
    threads: int
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    scalars: tuple[str, ...]
    shared: int
    groups: tuple[int, int]
    per: int


class Scope:
    """The inputs of a kernel's body.

    group, row: the workgroup's numbers in x and y. thread: its number in the workgroup of `threads`. Buffers and
    scalars are attributes by their names: scope.floats[index].
    """

    def __init__(self, threads: int, buffers: Mapping[str, Buffer], scalars: Mapping[str, Value]) -> None:
        self.threads, self.shared_bytes = threads, 0
        self.group: Value = None
        self.row: Value = None
        self.thread: Value = None
        self._names = dict(buffers) | dict(scalars)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None

    def shared(self, count: int, dtype: str = "float32") -> Buffer:
        """Allocate workgroup memory of 4-byte elements, or of vectors of 4 of them."""
        self.shared_bytes += (16 if dtype.endswith("x4") else 4) * count
        return T.alloc_buffer((count,), dtype, scope="shared", layout=None)


def build(
    name: str, threads: int, reads: Mapping[str, str], writes: Mapping[str, str], scalars: Sequence[str],
    body: Callable[[Scope], None], groups: tuple[int, int] = (1 << 16, 1 << 16), per: int = 0,
) -> Built:  # fmt: skip
    """Build a kernel. reads, writes: buffers and their dtypes, such as uint32x4; writes are bound first, and may be
    read.

    groups: of a dispatch, or their maximum; TVM infers the range of indices from them.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        types = dict(writes) | dict(reads)
        pointers = {each: T.arg(each, T.ptr(dtype)) for each, dtype in types.items()}
        numbers = {each: T.arg(each, T.int32()) for each in scalars}
        buffers = {
            each: T.decl_buffer((1 << 30,), dtype, data=pointers[each], layout=None) for each, dtype in types.items()
        }
        scope = Scope(threads, buffers, numbers)
        with (
            T.launch_thread("blockIdx.x", groups[0]) as scope.group,
            T.launch_thread("blockIdx.y", groups[1]) as scope.row,
            T.launch_thread("threadIdx.x", threads) as scope.thread,
        ):
            body(scope)
    function, shared = builder.get(), scope.shared_bytes
    return Built(name, function, threads, tuple(types), tuple(writes), tuple(scalars), shared, groups, per)


def i32(value: int) -> Value:
    return T.int32(value)


def u32(value: int) -> Value:
    return T.uint32(value)


def f32(value: float) -> Value:
    return T.float32(value)


def let(value: Value) -> Value:
    """Compute the value once, at this place."""
    return T.Bind(value)


def call(dtype: str, function: str, *arguments: Value) -> Value:
    """Call a function of `intrinsics.py`, or one common to all languages."""
    return T.call_pure_extern(dtype, function, *arguments)


def lane(vector: Value, index: int) -> Value:
    """An element of a vector; the index is known at build time."""
    return T.Shuffle([vector], [index])


def as_float(word: Value) -> Value:
    """Reinterpret a uint32 as float32."""
    return T.reinterpret("float32", word)


def as_word(value: Value) -> Value:
    """Reinterpret a float32 or int32 as uint32."""
    return T.reinterpret("uint32", value)


def spread(value: Value) -> Value:
    """A vector of 4 equal elements."""
    return T.Broadcast(value, 4)


def join(values: Sequence[Value]) -> Value:
    """A vector of 4 elements."""
    return T.Shuffle(list(values), list(range(4)))


def is_vector(value: Value) -> bool:
    """Whether it is a vector of 4, not a scalar."""
    return str(value.ty.dtype).endswith("x4")


def total(vector: Value) -> Value:
    """The sum of a vector's 4 elements."""
    vector = let(vector)
    return (lane(vector, 0) + lane(vector, 1)) + (lane(vector, 2) + lane(vector, 3))


def to_float(value: Value) -> Value:
    """Convert an integer to float32."""
    return T.cast(value, "float32")


def to_int(value: Value) -> Value:
    """Convert any number to int32."""
    return T.cast(value, "int32")


def to_word(value: Value) -> Value:
    """Convert a non-negative int32 to uint32."""
    return T.cast(value, "uint32")


def half(word: Value, which: Value | int = 0) -> Value:
    """The float16 in the low (0) or high (1) half of a uint32, as float32."""
    if isinstance(which, int):
        return call("float32", "edge_half", T.shift_right(word, u32(16)) if which else word)
    return call("float32", "edge_half", T.shift_right(word, to_word(which) * u32(16)))


def halves(low: Value, high: Value) -> Value:
    """Pack two float32 as float16 into a uint32, rounded to nearest even."""
    return call("uint32", "edge_halves", low, high)


def quotient(value: Value, by: Value | int) -> Value:
    """value / by of non-negative int32. (`//` rounds down, for which TVM generates tests of signs.)"""
    if isinstance(by, int) and by & (by - 1) == 0:
        return T.shift_right(value, i32(by.bit_length() - 1))
    return T.truncdiv(value, i32(by) if isinstance(by, int) else by)


def remainder(value: Value, by: Value | int) -> Value:
    """value mod by of non-negative int32."""
    if isinstance(by, int) and by & (by - 1) == 0:
        return T.bitwise_and(value, i32(by - 1))
    return T.truncmod(value, i32(by) if isinstance(by, int) else by)


def select(condition: Value, one: Value, other: Value) -> Value:
    """`one` if the condition holds, else `other`; both are computed."""
    return T.Select(condition, one, other)


def store(buffer: Buffer, at: Value, value: Value) -> None:
    T.buffer_store(buffer, value, [at])


def store_four(buffer: Buffer, at: Value, vector: Value) -> None:
    """Store a vector's elements into a buffer of scalars."""
    vector = hold(vector, "float32x4")
    for index in range(4):
        T.buffer_store(buffer, lane(vector, index), [at + index])


def barrier() -> None:
    """Synchronize the workgroup: all threads wait, and see each other's writes to shared memory."""
    T.evaluate(T.tvm_storage_sync("shared"))


def warp_sum(value: Value, threads: int) -> Value:
    """In CUDA: the sum of every `threads` neighbouring threads, a power of two up to WARP. All threads take part."""
    return hold(call("float32", "edge_sum", value, i32(threads)))


def begin() -> None:
    """In CUDA: wait for the previous kernel, which may still run. Kernels that do not call it wait at their start."""
    T.evaluate(T.call_extern("int32", "edge_begin"))


def prefetch(buffer: Buffer, at: Value) -> None:
    """In CUDA: begin to read the line of an element that no kernel writes."""
    T.evaluate(T.call_extern("int32", "edge_prefetch", T.address_of(buffer[at])))


@contextmanager
def loop(start: Value | int, stop: Value | int) -> Iterator[Value]:
    with T.serial(start, stop) as index:
        yield index


@contextmanager
def strided(scope: Scope, count: int | Value) -> Iterator[Value]:
    """Distribute 0 … count − 1 over the workgroup: thread t takes t, t + threads, …"""
    steps = quotient(count + (scope.threads - 1), scope.threads)
    with T.serial(0, steps) as step:
        index = let(step * scope.threads + scope.thread)
        with T.If(index < count), T.Then():
            yield index


@contextmanager
def when(condition: Value) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


class Register:
    """A variable of a thread."""

    def __init__(self, value: Value, dtype: str = "float32") -> None:
        self._buffer = T.alloc_buffer((1,), dtype, scope="local", layout=None)
        self.value = value

    @property
    def value(self) -> Value:
        return self._buffer[0]

    @value.setter
    def value(self, value: Value) -> None:
        T.buffer_store(self._buffer, value, [0])

    def fetch(self, buffer: Buffer, at: Value) -> None:
        """In CUDA: load an element that no kernel writes; the load stays at this place, even before `begin`."""
        T.evaluate(T.call_extern("int32", "edge_fetch", T.address_of(self._buffer[0]), T.address_of(buffer[at])))


class Registers:
    """Four float32 variables of a thread, which a function of `intrinsics.py` may change by their address."""

    def __init__(self) -> None:
        self._buffer = T.alloc_buffer((4,), "float32", scope="local", layout=None)
        for index in range(4):
            self[index] = f32(0.0)

    def __getitem__(self, index: int) -> Value:
        return self._buffer[index]

    def __setitem__(self, index: int, value: Value) -> None:
        T.buffer_store(self._buffer, value, [index])

    def change(self, function: str, *arguments: Value) -> None:
        """Call function(address, …)."""
        T.evaluate(T.call_extern("int32", function, T.address_of(self._buffer[0]), *arguments))


def hold(value: Value, dtype: str = "float32") -> Value:
    """Compute a value once. TVM inlines the bindings of `let`, except loads."""
    return Register(value, dtype).value


def added(memory: Buffer, start: Value, count: int, step: int = 1) -> Value:
    """The sum of `count` values in shared memory, `step` elements apart."""
    start = let(start)
    return hold(fold(lambda one, other: one + other, [memory[start + at * step] for at in range(count)]))


def reduce(scope: Scope, memory: Buffer, value: Value, threads: int, combine: Callable[[Value, Value], Value]) -> Value:
    """Reduce by `combine` over every `threads` (a power of two) neighbouring threads; each gets the result.

    memory: shared, an element for each thread of the workgroup. All threads of the workgroup must take part.
    """
    store(memory, scope.thread, value)
    barrier()
    place = let(remainder(scope.thread, threads))
    distance = threads // 2
    while distance:
        with when(place < distance):
            store(memory, scope.thread, combine(memory[scope.thread], memory[scope.thread + distance]))
        barrier()
        distance //= 2
    result = let(memory[scope.thread - place])
    barrier()  # before the memory is used again
    return result
