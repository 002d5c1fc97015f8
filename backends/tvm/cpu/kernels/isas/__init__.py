"""The differences between instruction sets: the dot product of bytes, and float16. Each set is a class."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.isas.arm import DotProd, I8mm, Neon
from edge.backends.tvm.cpu.kernels.isas.generic import Generic, Isa
from edge.backends.tvm.cpu.kernels.isas.wasm import Relaxed, Relaxed16, Simd128
from edge.backends.tvm.cpu.kernels.isas.x86 import Avx2, Avx512Bf16, Avx512Vnni, AvxVnni

ISAS: dict[str, Isa] = {
    "generic": Generic(), "avx2": Avx2(), "avxvnni": AvxVnni(), "avx512vnni": Avx512Vnni(),
    "avx512bf16": Avx512Bf16(),
    "neon": Neon(), "dotprod": DotProd(), "i8mm": I8mm(),
    "relaxed": Relaxed(), "relaxed16": Relaxed16(), "simd": Simd128(),
}  # fmt: skip
