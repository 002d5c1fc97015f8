"""Functions for kernels (`threads.call`) that GPU languages name differently, or lack.

Each is defined in front of a kernel that uses it. Float16 numbers are read and written as halves of uint32 words, which
needs no 16-bit types of the device.
"""

from __future__ import annotations

import re

# edge_half(word): the float16 in the low half. edge_halves(a, b): two float16, a in the low half. edge_bf16(a, b): two
# bfloat16. edge_bf16_of(codes, mask, minus): two codes (below 128) masked out of a word, as two bfloat16: 128 + code,
# plus `minus`, two bfloat16 that are −128 − center; the sum is exact. edge_fetch(to, at): to = at, of 1 or 4 words.
# edge_mma(c, a0 … a3, b0, b1): c += A · B by tensor cores, for the 32 threads of a warp, which hold 16 × 8 float32,
# 16 × 16 and 16 × 8 bfloat16 as PTX's mma.m16n8k16 wants them.
PRELUDES: dict[str, dict[str, str]] = {
    "wgsl": {
        "edge_half": "fn edge_half(word: u32) -> f32 { return unpack2x16float(word).x; }\n",
        "edge_halves": "fn edge_halves(a: f32, b: f32) -> u32 { return pack2x16float(vec2<f32>(a, b)); }\n",
    },
    # OpenCL converts float16 only in memory. As bytes, that memory may be read as any type.
    "opencl": {
        "edge_half": (
            "inline float edge_half(uint word) { uchar bits[2] __attribute__((aligned(2))); "
            "bits[0] = (uchar)word; bits[1] = (uchar)(word >> 8); "
            "return vload_half(0, (const __private half *)bits); }\n"
        ),
        "edge_halves": (
            "inline uint edge_halves(float a, float b) { uchar bits[4] __attribute__((aligned(2))); "
            "vstore_half(a, 0, (__private half *)bits); vstore_half(b, 1, (__private half *)bits); "
            "return (uint)bits[0] | (uint)bits[1] << 8 | (uint)bits[2] << 16 | (uint)bits[3] << 24; }\n"
        ),
    },
    "cuda": {
        "edge_half": (
            "static __device__ __forceinline__ float edge_half(unsigned int word) { float value; "
            'asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)word)); return value; }\n'
        ),
        "edge_halves": (
            "static __device__ __forceinline__ unsigned int edge_halves(float a, float b) { unsigned short x, y; "
            'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(a)); asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(b)); '
            "return (unsigned int)x | (unsigned int)y << 16; }\n"
        ),
        "edge_overlap": (
            "static __device__ __forceinline__ void edge_overlap() {\n#if __CUDA_ARCH__ >= 900\n"
            'asm volatile("griddepcontrol.launch_dependents;");\n#endif\n}\n'
        ),
        "edge_begin": (
            "static __device__ __forceinline__ void edge_begin() {\n#if __CUDA_ARCH__ >= 900\n"
            'asm volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n}\n'
        ),
        "edge_sum": (
            "static __device__ __forceinline__ float edge_sum(float value, int threads) { "
            "for (int by = threads >> 1; by; by >>= 1) value += __shfl_xor_sync(0xffffffffu, value, by); "
            "return value; }\n"
        ),
        "edge_prefetch": (
            "static __device__ __forceinline__ void edge_prefetch(const void *at) { "
            'asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }\n'
        ),
        "edge_fetch": (
            "static __device__ __forceinline__ void edge_fetch(uint4 *to, const uint4 *at) { "
            'asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" '
            ': "=r"(to->x), "=r"(to->y), "=r"(to->z), "=r"(to->w) : "l"(at) : "memory"); }\n'
            "static __device__ __forceinline__ void edge_fetch(unsigned int *to, const unsigned int *at) { "
            'asm volatile("ld.global.u32 %0, [%1];" : "=r"(*to) : "l"(at) : "memory"); }\n'
        ),
        "edge_bf16_of": (  # 128 + code is an exponent with the bits of the code behind it
            "static __device__ __forceinline__ unsigned int edge_bf16_of(unsigned int codes, unsigned int mask, "
            "unsigned int minus) { unsigned int both; "
            'asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(both) : "r"(codes), "r"(mask), "r"(0x43004300u)); '
            'asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(both), "r"(0x3f803f80u), "r"(minus)); '
            "return both; }\n"
        ),
        "edge_bf16": (
            "static __device__ __forceinline__ unsigned int edge_bf16(float a, float b) { unsigned int both; "
            'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a)); return both; }\n'
        ),
        "edge_mma": (
            "static __device__ __forceinline__ void edge_mma(float *c, unsigned int a0, unsigned int a1, "
            "unsigned int a2, unsigned int a3, unsigned int b0, unsigned int b1) { "
            'asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 '
            '{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" '
            ': "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) '
            ': "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }\n'
        ),
    },
    "metal": {
        "edge_half": "inline float edge_half(uint word) { return float(as_type<half2>(word).x); }\n",
        "edge_halves": "inline uint edge_halves(float a, float b) { return as_type<uint>(half2(half(a), half(b))); }\n",
    },
}

WITHOUT_PRELUDE = re.compile(r"using namespace metal;\n")  # where the prelude of a Metal kernel goes
