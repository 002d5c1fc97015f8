"""Products of a chunk on tensor cores: CUDA's source, on a CPU that does what the PTX ISA says, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("tvm")

from emulator import Emulator, has_compiler
from test_gpu_kernels import EPSILON, Packed, normal, normed, run, tables, zeros

from edge.backends.tvm.gpu.adapters import LowRank
from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.hosts.cuda import compile_source
from edge.backends.tvm.gpu.kernels.norms import Norm
from edge.backends.tvm.gpu.kernels.products import tensor_steps
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product
from edge.backends.tvm.gpu.kernels.products.steps import step
from edge.backends.tvm.gpu.kernels.products.tiles import chunk
from edge.backends.tvm.gpu.lowering import lower
from edge.backends.tvm.gpu.weights import pack_floats
from edge.backends.tvm.packing.blocks import BLOCKS, IntegerBlock

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")

TENSOR = Tuning(mma_rows=64, mma_tokens=32)
STEPS = Tuning(rows=2, split=16, workgroup=128, stage=48 << 10, ahead=12)
QUANTIZED = [name for name, block in sorted(BLOCKS.items()) if isinstance(block, IntegerBlock)]
CLOSE = 1e-4  # largest error of results whose deviation is about 2; TF32's would be 2e-3
MORE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q6_K", "F16"), *(pytest.param((kind,), marks=MORE) for kind in sorted(BLOCKS))], ids="-".join
)
def test_products_are_those_of_dequantized_weights(device: Emulator, kinds: tuple[str, ...]) -> None:
    """Of scaled integers, with scales for 32 and for 16 values, and of other weights; rows and tokens are no whole
    tiles, and activations are larger and smaller than float16."""
    packed, tokens = Packed(), 33
    factors = packed.factors(kinds, (70, 8, 16), 256)
    x = normal(tokens, 256, seed=20) * np.float32(10) ** np.arange(-16, tokens - 16, dtype=np.float32)[:, None]
    expected = packed.results(x)
    product = Product("edge_product", factors, Epilogue("store", expected.shape[1]))
    out = zeros(tokens + 1, expected.shape[1])
    arrays = {"out": out, "x": x, "w": packed.words, "tables": tables(tokens)}
    found = run(device, chunk(product, TENSOR, tokens), arrays, tokens)
    largest = np.maximum(1, np.abs(x).max(axis=1, keepdims=True))
    np.testing.assert_allclose(found[:tokens] / largest, expected / largest, rtol=0, atol=CLOSE)
    assert not found[tokens:].any()


def test_steps_keep_activations_in_shared_memory(device: Emulator) -> None:
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
        found = run(device, built, {"out": zeros(*expected.shape), "x": inputs, "w": packed.words})
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("ahead", "groups"), [(4, 2), (64, 256)])
@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q6_K", "Q4_K"), *(pytest.param((kind,), marks=MORE) for kind in QUANTIZED)], ids="-".join
)
def test_steps_go_through_tensor_cores(
    device: Emulator, kinds: tuple[str, ...], ahead: int, groups: int, monkeypatch: pytest.MonkeyPatch
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
    found = run(device, built, {"out": zeros(*expected.shape), "x": x, "w": packed.words})
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.skipif(not find_spec("cuda"), reason="no cuda-bindings")
def test_nvrtc_compiles_them() -> None:
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
def test_pairs_are_activated_and_adapted(device: Emulator) -> None:
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
    found = run(device, chunk(product, Tuning(mma_rows=256, mma_tokens=64, mma_groups=1), tokens), arrays, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=CLOSE)
