"""Kernels of the GPU engine, one by one, against gguf's own dequantization and NumPy. Products on tensor cores are
CUDA's source, on a CPU that does what the PTX ISA says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, GPU_HOST, examples, first_adapter
from emulator import Emulator, has_compiler
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import UNWRITTEN, Small, random_quants, write_small

from edge.errors import UnsupportedError
from edge.formats.blocks import dequantize
from edge.model.model import open_model
from edge.model.tensors import find_tensors
from edge.types import AnyArray, FloatArray

pytest.importorskip("tvm")

from edge.backends.reference import read_weights
from edge.backends.tvm.gpu.adapters import LowRank
from edge.backends.tvm.gpu.design import State, Tables, Tuning
from edge.backends.tvm.gpu.hosts import Device, open_device
from edge.backends.tvm.gpu.hosts.cuda import compile_source
from edge.backends.tvm.gpu.kernels.embed import embed
from edge.backends.tvm.gpu.kernels.norms import Norm
from edge.backends.tvm.gpu.kernels.products import tensor_steps
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product
from edge.backends.tvm.gpu.kernels.products.steps import step
from edge.backends.tvm.gpu.kernels.products.tiles import chunk
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.lowering import lower
from edge.backends.tvm.gpu.program import Dispatch, Slice
from edge.backends.tvm.gpu.weights import (
    Matrix,
    Piece,
    Vector,
    make_weights,
    pack_floats,
    pack_rows,
    pack_weights,
    packed_bytes,
)
from edge.backends.tvm.packing.blocks import BLOCKS, IntegerBlock

CLOSE = 2e-4  # largest error of results whose deviation is about 1
SMALL = Tuning(rows=1, split=8, workgroup=32, gemm_tokens=8, gemm_rows=16)
EPSILON = 1e-5
MORE = pytest.mark.exhaustive


@cache
def device_of(host: str) -> Device:
    """One for all tests, closed with the process: opening takes longer than most kernels."""
    return open_device(first_adapter(host))


@pytest.fixture(params=[GPU_HOST, pytest.param("opencl", marks=MORE)])
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(request.param)


def run(
    device: Device, built: Built, arrays: Mapping[str, AnyArray], tokens: int = 1, read: str = "out",
    scalars: tuple[int, ...] = (),
) -> FloatArray:  # fmt: skip
    """What the kernel makes of the buffer `read`. arrays: by the parameters' names; `w` has w4, w1 and residual_w4,
    `rest` r4 and r1."""
    names = {"w4": "w", "w1": "w", "residual_w4": "w", "r4": "rest", "r1": "rest"}
    kernel = lower(built, device.adapter.language)
    device.prepare({kernel.name: kernel})
    buffers = {name: device.create(array.nbytes) for name, array in arrays.items()}
    try:
        for name, array in arrays.items():
            device.write(buffers[name], 0, array)
        slices = tuple(Slice(names.get(name, name)) for name in kernel.buffers)
        dispatch = Dispatch(kernel.name, slices, scalars, built.groups, "other", None, built.per)
        device.run(device.record([dispatch], buffers), tokens)
        out = arrays[read]
        return device.read(buffers[read], 0, out.nbytes).view(np.float32).reshape(out.shape)
    finally:
        for buffer in buffers.values():
            device.free(buffer)


def tables(count: int, wanted: int = 0, position: int = 0) -> AnyArray:
    words = np.zeros(State.WORDS, np.uint32)
    words[[State.COUNT, State.WANTED, State.POSITION]] = count, wanted, position
    return words


def zeros(*shape: int) -> FloatArray:
    return np.zeros(shape, np.float32)


def normal(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@dataclass
class Packed:
    """A buffer of weights in the making. expected: what its matrices are, float32 [rows, columns]."""

    def __init__(self) -> None:
        self.words, self.expected = np.zeros(0, np.uint32), list[FloatArray]()

    def matrix(self, kind: str, rows: int, columns: int) -> Matrix:
        seed = len(self.expected)
        if kind in UNWRITTEN:
            raw = random_quants(kind, rows, columns, columns**-0.5, seed)
        else:
            values = normal(rows, columns, seed=seed) * np.float32(columns**-0.5)
            raw = quantize(values, GGMLQuantizationType[kind]).view(np.uint8).reshape(rows, -1)
        self.expected.append(dequantize(raw, kind).reshape(rows, columns))
        matrix = Matrix(self.words.size, rows, -(-columns // 32) * 32, kind)
        self.words = np.concatenate([self.words, np.zeros(matrix.words, np.uint32)])
        for at, words, piece in zip(matrix.offsets, matrix.row_words, pack_rows(matrix, raw), strict=False):
            self.words[at : at + rows * words] = piece.reshape(-1)
        return matrix

    def vector(self, values: FloatArray) -> Vector:
        vector = Vector(self.words.size, values.size)
        padding = np.zeros(vector.words - values.size, np.uint32)
        self.words = np.concatenate([self.words, values.view(np.uint32), padding])
        return vector

    def factors(self, kinds: Sequence[str], rows: Sequence[int], columns: int) -> tuple[Factor, ...]:
        """Matrices of several block types, one behind the other in the results; behind the first with biases."""
        found = list[Factor]()
        for kind, count in zip(kinds, rows, strict=False):
            at = sum(each.matrix.rows for each in found)
            bias = self.vector(normal(count, seed=9)) if at else None
            found.append(Factor(self.matrix(kind, count, columns), bias, at))
        return tuple(found)

    def results(self, x: FloatArray) -> FloatArray:
        """Those of `factors`."""
        first, *others = self.expected
        return np.concatenate([x @ first.T, *(x @ each.T + normal(len(each), seed=9) for each in others)], axis=1)


def padded(x: FloatArray) -> FloatArray:
    return np.pad(x, [(0, 0), (0, -x.shape[1] % 32)])


def normed(x: FloatArray, kind: str, weight: FloatArray | float, bias: FloatArray | float) -> FloatArray:
    if kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    return np.asarray(x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * weight + bias)


def both(
    device: Device, product: Product, arrays: dict[str, AnyArray], tuning: Tuning = SMALL, together: int = 0
) -> None:
    """`arrays["expected"]` is what a chunk computes, its first row what a step does, and its first rows what a step of
    several tokens does."""
    expected = arrays.pop("expected")
    count = len(expected)
    kernels = [(1, step(product, tuning)), (count, chunk(product, tuning, count))]
    if together:
        kernels.append((together, step(product, tuning, tokens=together + 1)))
    for tokens, built in kernels:
        found = run(device, built, arrays | {"tables": tables(tokens)}, tokens)
        np.testing.assert_allclose(found[:tokens], expected[:tokens], rtol=0, atol=CLOSE)
        np.testing.assert_array_equal(found[tokens:], arrays["out"][tokens:])


MIXED = ("F32", "Q4_0", "Q6_K"), ("Q8_0", "Q5_1", "IQ4_NL"), ("IQ4_XS", "TQ2_0", "IQ1_M")  # products in make test


@pytest.mark.parametrize(
    "kinds", [*MIXED, *(pytest.param((kind,), marks=MORE) for kind in sorted(BLOCKS))], ids="-".join
)
def test_products_are_those_of_dequantized_weights(device: Device, kinds: tuple[str, ...]) -> None:
    """As of queries, keys and values."""
    packed, x = Packed(), normal(9, 256)
    factors, expected = packed.factors(kinds, (21, 8, 16), 256), packed.results(x)
    product = Product("edge_product", factors, Epilogue("store", expected.shape[1]))
    arrays = {"out": zeros(*expected.shape), "x": x, "w": packed.words, "expected": expected}
    both(device, product, arrays, together=2)


def test_products_add_what_adapters_change(device: Device) -> None:
    """Behind the biases of matrices side by side, of which one has no adapter; and inside an activation."""
    packed, rows, rank, tokens = Packed(), (21, 8, 16), 24, 9
    a = packed.matrix("F16", rank, 64)
    factors, expected, x, low = [], [], normal(tokens, 64), normal(tokens, 3 * rank, seed=4)
    for number, count in enumerate(rows):
        matrix, bias = packed.matrix("Q4_0", count, 64), normal(count, seed=9)
        factors.append(Factor(matrix, packed.vector(bias), sum(rows[:number])))
        expected.append(x @ packed.expected[-1].T + bias)
    store = np.zeros(0, np.uint32)
    for number in (0, 2):
        values = normal(rows[number], rank, seed=number + 5).astype(np.float16)
        expected[number] += low[:, number * rank :][:, :rank] @ values.astype(np.float32).T
        place = LowRank("", a, store.size, rows[number])
        words = pack_floats(values.view(np.uint8), place.row_words, BLOCKS["F16"])
        factors[number], store = replace(factors[number], low=place), np.concatenate([store, words.reshape(-1)])
    arrays = {"x": x, "w": packed.words, "low": low, "lora4": store}
    product = Product("edge_product", tuple(factors), Epilogue("store", sum(rows)))
    both(device, product, {**arrays, "out": zeros(tokens, sum(rows)), "expected": np.concatenate(expected, axis=1)})
    alone = Product("edge_product", (replace(factors[0], at=0),), Epilogue("activate", rows[0], activation="silu"))
    activated = expected[0] / (1 + np.exp(-expected[0]))
    low = np.ascontiguousarray(low[:, :rank])
    both(device, alone, {**arrays, "low": low, "out": zeros(tokens, rows[0]), "expected": activated})


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[MORE] * (each in sum(MIXED, ()))) for each in sorted(BLOCKS)]
)
def test_embeddings_are_dequantized_rows(device: Device, kind: str) -> None:
    """Of a piece; tokens of other pieces are left alone."""
    packed, columns = Packed(), 256 if BLOCKS[kind].values > 32 else 160
    piece = Piece("embed.1", 100, packed.matrix(kind, 7, columns))
    tokens, out = np.array([106, 3, 100, 107, 103], np.int32), normal(5, columns)
    built = embed("edge_embed", piece, Tables.of(1, 1, 1, 5, 16), 5)
    found = run(device, built, {"out": out, "tokens": tokens, "w": packed.words, "tables": tables(5)}, 5)
    out[[0, 2, 4]] = packed.expected[0][[6, 0, 3]]
    np.testing.assert_allclose(found, out, rtol=1e-6, atol=1e-7)


@settings(max_examples=examples(3), deadline=None)
@given(
    st.sampled_from(("Q4_1", "Q5_0", "F16", "Q8_0")), st.integers(1, 10), st.integers(1, 70), st.integers(1, 20),
    st.sampled_from((1, 2, 4)), st.sampled_from((1, 4, 16)),
)  # fmt: skip
def test_shapes(kind: str, parts: int, rows: int, tokens: int, at_once: int, split: int) -> None:
    device = device_of(GPU_HOST)
    columns = 32 * parts - (5 if kind == "F16" else 0)
    packed = Packed()
    product = Product("edge_shapes", (Factor(packed.matrix(kind, rows, columns)),), Epilogue("store", rows))
    x = normal(tokens, columns)
    arrays = {"out": zeros(tokens, rows), "x": padded(x), "w": packed.words, "expected": x @ packed.expected[0].T}
    both(device, product, arrays, replace(SMALL, rows=at_once, split=split))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("llama-gqa-tied", 1 << 27), ("phi3", 1 << 27), ("gpt2", 1 << 27), ("smollm3", 18_000), ("qwen35moe", 1 << 27)],
)
def test_weights_arrive_slice_by_slice(name: str, limit: int) -> None:
    """Every tensor, fused ones parted, in pieces where a binding is small; the size is known before."""
    model = open_model(GOLDEN / f"{name}.gguf")
    file, spec = model.file, model.spec
    weights = make_weights(file, spec, limit)
    assert len(weights.embedding) > 1 or limit == 1 << 27
    buffers = {buffer: np.zeros(size // 4, np.uint32) for buffer, size in weights.buffers.items()}
    for buffer, offset, words in pack_weights(file, spec, weights):
        place = slice(offset // 4, offset // 4 + words.size)
        assert words.nbytes <= 4 << 20
        assert not buffers[buffer][place].any()
        buffers[buffer][place] = words
    expected = read_weights(file, find_tensors(file, spec))
    assert weights.nbytes <= packed_bytes(spec) <= 1.15 * weights.nbytes
    assert max(weights.buffers.values()) <= limit

    def floats(buffer: str, where: Matrix | Vector) -> FloatArray:
        words = buffers[buffer][where.at :].view(np.float32)
        if isinstance(where, Vector):
            return words[: where.size]
        assert where.kind == "F32"  # other types: the tests above
        return words[: where.words].reshape(where.rows, -1)

    layouts = [(f"layer.{number}", f"blk.{number}.", layout) for number, layout in enumerate(weights.layers)]
    found = {
        prefix + tensor: floats(buffer, where)
        for buffer, prefix, layout in [*layouts, ("rest", "", weights.rest)] for tensor, where in layout.tensors
    }  # fmt: skip
    for layer, experts in enumerate(weights.experts):
        for tensor, where in experts[0].layout.tensors if experts else ():
            found[f"blk.{layer}.{tensor}"] = np.stack([
                floats(piece.buffer, piece.place(where, number)) for piece in experts for number in range(piece.count)
            ])  # fmt: skip
    found["token_embd"] = np.concatenate([floats(each.buffer, each.matrix) for each in weights.embedding])
    if weights.head != weights.embedding:
        found["output"] = np.concatenate([floats(each.buffer, each.matrix) for each in weights.head])
    assert found.keys() == expected.keys() - {"rope_freqs"}
    for tensor, values in found.items():
        wanted = expected[tensor].reshape(-1) if values.ndim == 1 else expected[tensor]
        np.testing.assert_array_equal(
            values[..., : wanted.shape[-1]], wanted.reshape(*values.shape[:-1], -1), err_msg=tensor
        )


def test_equal_layers_share_a_layout_and_unknown_types_are_refused(tmp_path: Path) -> None:
    mixed = Small(layers=3, types={"": "Q4_0", "blk.1.ffn_down": "Q8_0"}, tied=False)
    model = open_model(write_small(tmp_path / "mixed.gguf", mixed))
    weights = make_weights(model.file, model.spec, 1 << 27)
    assert weights.layers[0] == weights.layers[2] != weights.layers[1]
    assert weights.nbytes <= packed_bytes(model.spec) <= 1.2 * weights.nbytes
    tensors = model.file.tensors | {
        "blk.1.attn_q.weight": replace(model.file.tensors["blk.1.attn_q.weight"], type="Q8_K")
    }
    with pytest.raises(UnsupportedError, match="a layer has 0 MiB of weights, kernels of this GPU see 0: use"):
        make_weights(model.file, model.spec, 1 << 10)
    with pytest.raises(UnsupportedError, match=r"no kernels for Q8_K \(blk.1.attn_q.weight\)"):
        make_weights(replace(model.file, tensors=tensors), model.spec, 1 << 27)


# Tensor cores
TENSOR = Tuning(mma_rows=64, mma_tokens=32)
STEPS = Tuning(rows=2, split=16, workgroup=128, stage=48 << 10, ahead=12)
QUANTIZED = [name for name, block in sorted(BLOCKS.items()) if isinstance(block, IntegerBlock)]
NEAR = 1e-4  # largest error of results whose deviation is about 2; TF32's would be 2e-3


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if not has_compiler():
        pytest.skip("no g++")
    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q6_K", "F16"), *(pytest.param((kind,), marks=MORE) for kind in sorted(BLOCKS))], ids="-".join
)
def test_tensor_cores_give_products_of_dequantized_weights(emulator: Emulator, kinds: tuple[str, ...]) -> None:
    """Of scaled integers, with scales for 32 and for 16 values, and of other weights; rows and tokens are no whole
    tiles, and activations are larger and smaller than float16."""
    packed, tokens = Packed(), 33
    factors = packed.factors(kinds, (70, 8, 16), 256)
    x = normal(tokens, 256, seed=20) * np.float32(10) ** np.arange(-16, tokens - 16, dtype=np.float32)[:, None]
    expected = packed.results(x)
    product = Product("edge_product", factors, Epilogue("store", expected.shape[1]))
    out = zeros(tokens + 1, expected.shape[1])
    arrays = {"out": out, "x": x, "w": packed.words, "tables": tables(tokens)}
    found = run(emulator, chunk(product, TENSOR, tokens), arrays, tokens)
    largest = np.maximum(1, np.abs(x).max(axis=1, keepdims=True))
    np.testing.assert_allclose(found[:tokens] / largest, expected / largest, rtol=0, atol=NEAR)
    assert not found[tokens:].any()


def test_steps_keep_activations_in_shared_memory(emulator: Emulator) -> None:
    """Of which each thread brings some; sums are added within warps, and then over two of them."""
    packed, rows, columns = Packed(), 21, 2080
    matrix, other = packed.matrix("Q4_0", rows, columns), packed.matrix("Q6_K", 9, 2304)
    weight, x, wide = normal(columns, seed=1), normal(1, columns, seed=2), normal(1, 2304, seed=3)
    norm = Norm("rms", packed.vector(weight), None, columns, EPSILON)
    product = Product("edge_normed", (Factor(matrix),), Epilogue("store", rows), norm)
    tuning = Tuning(rows=2, split=64, workgroup=128, stage=48 << 10)
    for each, inputs, expected in (
        (product, x, normed(x, "rms", weight, 0.0) @ packed.expected[0].T),
        (Product("edge_plain", (Factor(other),), Epilogue("store", 9)), wide, wide @ packed.expected[1].T),
    ):
        built = step(each, tuning)
        assert built.shared > 4 * inputs.size
        found = run(emulator, built, {"out": zeros(*expected.shape), "x": inputs, "w": packed.words})
        np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("ahead", "groups"), [(4, 2), (64, 256)])
@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q6_K", "Q4_K"), *(pytest.param((kind,), marks=MORE) for kind in QUANTIZED)], ids="-".join
)
def test_steps_go_through_tensor_cores(
    emulator: Emulator, kinds: tuple[str, ...], ahead: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices whose types differ, whose rows are no whole tiles, and whose last parts not all threads have: read
    ahead as a whole or in rounds, by workgroups with one band of rows or several."""
    packed, columns = Packed(), 768
    factors = packed.factors(kinds, (70, 8, 16), columns)
    weight, x = normal(columns, seed=1), normal(1, columns, seed=2)
    expected = packed.results(normed(x, "rms", weight, 0.0))
    norm = Norm("rms", packed.vector(weight), None, columns, EPSILON)
    product = Product("edge_normed", factors, Epilogue("store", expected.shape[1]), norm)
    monkeypatch.setattr(tensor_steps, "GROUPS", groups)
    built = step(product, replace(STEPS, ahead=ahead))
    assert (built.groups[0] == 3) == (groups == 2)
    found = run(emulator, built, {"out": zeros(*expected.shape), "x": x, "w": packed.words})
    np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR)


@pytest.mark.skipif(not find_spec("cuda"), reason="no cuda-bindings")
def test_nvrtc_compiles_products_on_tensor_cores() -> None:
    """As PTX of the first capability that has tensor cores, and of the first that overlaps launches; a step's first
    weights are read before it waits for the kernel before."""
    packed = Packed()
    product = Product("edge_product", (Factor(packed.matrix("Q4_0", 70, 64)),), Epilogue("store", 70))
    for built, has in (
        (chunk(product, TENSOR, 40), ["mma.sync"]),
        (step(product, STEPS), ["no_allocate", "mma.sync"]),
        (step(product, replace(STEPS, ahead=0)), ["prefetch.global.L2"]),
    ):
        for capability, overlaps in ((80, False), (90, True)):
            ptx = compile_source(built.name, lower(built, "cuda").source, f"compute_{capability}").decode()
            assert ("griddepcontrol.wait" in ptx) == overlaps
            assert all(each in ptx for each in has), has
            if overlaps and has[0] != "mma.sync":
                assert ptx.index(has[0]) < ptx.index("griddepcontrol.wait")


@pytest.mark.exhaustive
def test_pairs_are_activated_and_adapted(emulator: Emulator) -> None:
    """In large tiles, several of whose products belong to one warp."""
    packed, rows, columns, tokens, rank = Packed(), 130, 64, 67, 24
    a = packed.matrix("F16", rank, columns)
    gate, up = packed.matrix("Q4_0", rows, columns), packed.matrix("Q4_1", rows, columns)
    x, low = normal(tokens, columns), normal(tokens, 2 * rank, seed=4)
    values = normal(rows, rank, seed=5).astype(np.float16)
    place = LowRank("", a, 0, rows)
    store = pack_floats(values.view(np.uint8), place.row_words, BLOCKS["F16"])
    one, other = (x @ packed.expected[number].T for number in (1, 2))
    other = other + low[:, rank:] @ values.astype(np.float32).T
    out = normal(tokens, 160)
    expected = out.copy()  # padding stays
    expected[:, :rows] = one / (1 + np.exp(-one)) * other
    product = Product(
        "edge_active", (Factor(gate), replace(Factor(up), low=place)), Epilogue("activate", 160, activation="silu")
    )
    arrays = {"out": out, "x": x, "low": low, "lora4": store.reshape(-1), "w": packed.words, "tables": tables(tokens)}
    found = run(emulator, chunk(product, Tuning(mma_rows=256, mma_tokens=64, mma_groups=1), tokens), arrays, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=NEAR)
