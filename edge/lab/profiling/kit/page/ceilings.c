/* Ceilings of one thread of a page. Each function returns the bytes or operations done. */
#include <stdint.h>
#include <wasm_simd128.h>

#define PUBLIC(name) __attribute__((export_name(#name)))

enum { CHAINS = 10, BATCH = 100000 };

/* Grows the memory by this number of pages. Returns their address, or 0. */
PUBLIC(take) uintptr_t take(uint32_t pages)
{
    uintptr_t before = __builtin_wasm_memory_grow(0, pages);
    return before == (uintptr_t)-1 ? 0 : before << 16;
}

PUBLIC(read) double read(const v128_t *from, uint32_t bytes, int32_t *sink)
{
    v128_t sums[4] = {{0}, {0}, {0}, {0}};
    const v128_t *end = from + bytes / sizeof *from / 4 * 4;
    for (const v128_t *at = from; at < end; at += 4)
        for (int i = 0; i < 4; i++)
            sums[i] = wasm_v128_xor(sums[i], at[i]);
    *sink = wasm_i32x4_extract_lane(wasm_v128_xor(wasm_v128_xor(sums[0], sums[1]), wasm_v128_xor(sums[2], sums[3])), 0);
    return (double)(end - from) * sizeof *from;
}

/* Multiplies and adds in registers, in enough chains to hide latency. factor: unknown to the compiler. */
PUBLIC(floats) double floats(float factor, float *sink)
{
    v128_t chains[CHAINS], half = wasm_f32x4_splat(factor), one = wasm_f32x4_splat(1), sum = one;
    for (int i = 0; i < CHAINS; i++)
        chains[i] = wasm_f32x4_splat((float)i);
    for (int round = 0; round < BATCH; round++)
        for (int i = 0; i < CHAINS; i++)
            chains[i] = wasm_f32x4_add(wasm_f32x4_mul(chains[i], half), one);
    for (int i = 0; i < CHAINS; i++)
        sum = wasm_f32x4_add(sum, chains[i]);
    *sink = wasm_f32x4_extract_lane(sum, 0);
    return (double)BATCH * CHAINS * 8;
}
