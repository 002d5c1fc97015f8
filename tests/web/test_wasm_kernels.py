"""What WebAssembly computes for dot products of bytes, tables and float16, in Chromium, against NumPy.

(Node 20 computes the relaxed dot product in 32 bits wrongly.)
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import NEEDS_WASM, chromium

pytestmark = [pytest.mark.slow, NEEDS_WASM]

NAMES = ("relaxed", "relaxed16", "simd")
REGISTERS = 8  # of weights: a block of 32 columns
CODEBOOK = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
CASES = {"nibbles": 15, "fives": 31, "sixes": 63, "sevens": 127, "signed": None}

# Memory: the inputs one after the other, then the outputs, each with its bytes. Every function has two inputs.
SCRIPT = """(([code, calls]) => {
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const text = (bytes) => btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(''));
  const memory = new WebAssembly.Memory({ initial: 16, maximum: 16, shared: true });
  const { exports } = new WebAssembly.Instance(new WebAssembly.Module(bytes(code)), { env: { memory } });
  const result = {};
  for (const [label, [symbol, inputs, outputs]] of Object.entries(calls)) {
    let at = 65536;
    const places = inputs.map(bytes).map((each) => {
      new Uint8Array(memory.buffer).set(each, at);
      at += each.length;
      return at - each.length;
    });
    exports[symbol](...places, at);
    result[label] = text(new Uint8Array(memory.buffer).slice(at, at + outputs));
  }
  return result;
})"""


def functions(name: str) -> dict[str, Any]:
    """Functions of C for TVM's compiler, each of two inputs and an output."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T  # noqa: N812

    from edge.backends.tvm.cpu.kernels.isas import ISAS
    from edge.backends.tvm.cpu.kernels.vectors import LANES, i64, let, load, store

    isa, made = ISAS[name], dict[str, Any]()

    def add(symbol: str, types: tuple[str, str, str], emit: Callable[..., None]) -> None:
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name(symbol)
            T.func_attr({"global_symbol": symbol, "tirx.noalias": True})
            arguments = [T.arg(f"argument{at}", T.ptr(each)) for at, each in enumerate(types)]
            with T.attr(0, "device_id", 0), T.attr(0, "device_type", 1), T.attr(0, "pragma_import_llvm", isa.pins):
                emit(*(T.decl_buffer((1 << 20,), each, data=at) for each, at in zip(types, arguments, strict=True)))
        made[symbol] = builder.get()

    def dot(largest: int | None) -> Callable[..., None]:
        def emit(weights: Any, x: Any, out: Any) -> None:
            for token, lane in product((0, 1), range(0, LANES, 4)):
                sums = isa.sums(largest)
                for at in range(REGISTERS):
                    word = isa.operand(x[i64(REGISTERS * token + at)], largest)
                    sums.add(let(load(weights, i64(16 * at + lane), 4)), word)
                    if at % 3 == 2:
                        sums.pin()
                store(out, i64(16 * token + lane), sums.total(), 4)

        return emit

    for label, largest in CASES.items():
        add(f"dot_{label}", ("int32", "int32", "int32"), dot(largest))
    add(
        "lookup",
        ("int32", "int32", "int32"),
        lambda a, _b, out: store(out, i64(0), isa.lookup(CODEBOOK, load(a, i64(0)))),
    )

    def from_f16(stored: Any, _: Any, out: Any) -> None:
        with T.serial(i64(0), i64(4096)) as at:
            store(out, at * 16, isa.from_f16(load(stored, at * 16)))

    def to_f16(values: Any, _: Any, out: Any) -> None:
        with T.serial(i64(0), i64(512)) as at:
            store(out, at * 16, isa.to_f16(load(values, at * 16)))

    add("from_f16", ("uint16", "int32", "float32"), from_f16)
    add("to_f16", ("float32", "int32", "uint16"), to_f16)
    return made


def link(name: str, folder: Path) -> None:
    from edge.backends.tvm.cpu.lowering import compile_object
    from edge.backends.tvm.targets import target_named

    made = functions(name)
    (folder / f"{name}.o").write_bytes(compile_object({}, made, target_named(name, "")))
    subprocess.run(
        [sys.executable, "-m", "ziglang", "wasm-ld", "--no-entry", "--import-memory", "--shared-memory",
         f"--max-memory={16 << 16}", *(f"--export={symbol}" for symbol in made), f"{folder / name}.o",
         "-o", f"{folder / name}.wasm"],
        check=True,
    )  # fmt: skip


def dot_inputs(largest: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [registers, 16 rows, 4] and activations [2, registers, 4], with extremes."""
    random = np.random.default_rng(seed)
    low, high = (-128, 127) if largest is None else (0, largest)
    weights = random.integers(low, high + 1, (REGISTERS, 16, 4))
    weights[:, 0], weights[:, 1] = low, high
    weights[:, 2] = random.choice([low, high], (REGISTERS, 4))
    x = random.integers(-127, 128, (2, REGISTERS, 4))
    x[1] = random.choice([-127, 127], x[1].shape) if seed else 127
    return weights.astype(np.int8), x.astype(np.int8)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What each instruction set's functions say of the same inputs."""
    folder = tmp_path_factory.mktemp("wasm")
    calls: dict[str, tuple[str, Sequence[np.ndarray], int]] = {
        f"{label} {seed}": (f"dot_{label}", dot_inputs(largest, seed), 2 * 16 * 4)
        for label, largest in CASES.items() for seed in range(4)
    }  # fmt: skip
    nothing = np.zeros(1, np.int32)
    calls["lookup"] = "lookup", (INDICES, nothing), 64
    calls["from_f16"] = "from_f16", (np.arange(65536, dtype=np.uint16), nothing), 4 * 65536
    calls["to_f16"] = "to_f16", (FLOATS, nothing), 2 * len(FLOATS)
    for name in NAMES:
        link(name, folder)
    told = {
        label: (symbol, [base64.b64encode(each.tobytes()).decode() for each in inputs], size)
        for label, (symbol, inputs, size) in calls.items()
    }
    with chromium(folder / "browser") as page:
        return {
            name: {
                label: base64.b64decode(text)
                for label, text in page.value(f"{SCRIPT}({json.dumps([_code(folder, name), told])})").items()
            }
            for name in NAMES
        }


def _code(folder: Path, name: str) -> str:
    return base64.b64encode((folder / f"{name}.wasm").read_bytes()).decode()


INDICES = np.random.default_rng(3).integers(0, 16, 64).astype(np.int8)
FLOATS = np.concatenate([
    np.array([0.0, -0.0, 65504.0, -65519.9, 65520.0, 1e9, np.inf, -np.inf, 2.0**-24, 2.0**-25, 6e-8, -6.1e-5]),
    np.random.default_rng(4).standard_normal(4084) * np.exp2(np.random.default_rng(5).integers(-26, 17, 4084)),
    np.arange(4096) + 0.5,
]).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_dot_products_are_exact(name: str, numbers: dict[str, dict[str, bytes]]) -> None:
    for label, largest in CASES.items():
        for seed in range(4):
            weights, x = (each.astype(np.int32) for each in dot_inputs(largest, seed))
            expected = np.einsum("rnb,trb->tn", weights, x)
            found = np.frombuffer(numbers[name][f"{label} {seed}"], np.int32).reshape(2, 16)
            np.testing.assert_array_equal(found, expected, err_msg=f"{label} {seed}")


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_looked_up(name: str, numbers: dict[str, dict[str, bytes]]) -> None:
    np.testing.assert_array_equal(np.frombuffer(numbers[name]["lookup"], np.int8), np.array(CODEBOOK, np.int8)[INDICES])


@pytest.mark.parametrize("name", NAMES)
def test_float16_is_converted_exactly(name: str, numbers: dict[str, dict[str, bytes]]) -> None:
    """All finite ones, and floats rounded to the nearest one, ties to even."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = np.isfinite(halves)
    found = np.frombuffer(numbers[name]["from_f16"], np.float32)
    np.testing.assert_array_equal(found[finite], halves[finite].astype(np.float32))
    assert np.all(np.abs(found[~finite]) >= 65536)
    with np.errstate(over="ignore"):
        expected = FLOATS.astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(numbers[name]["to_f16"], np.float16), expected)
