/* Included by every file of the runtime: types, generated constants, errors and the arena. */
#ifndef EDGE_BASE_H
#define EDGE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "constants.h"
#include "edge.h"

#ifdef __clang__ /* for packages that others compile; GCC has -ffp-contract=off, and warns about this pragma */
#pragma STDC FP_CONTRACT OFF /* products and sums are rounded separately, as in NumPy */
#endif

/* Writes code and message to *error and returns code. The format knows %s (const char *) and %d (int64_t); a message that
 * is too long is cut. error: may be NULL. */
edge_status edge_fail(edge_error *error, edge_status code, const char *format, ...);

static inline uint32_t smaller(uint32_t one, uint32_t other)
{
    return one < other ? one : other;
}

static inline uint32_t likeliest(const float *logits, uint32_t count) /* the lowest among equals */
{
    uint32_t found = 0;
    for (uint32_t token = 1; token < count; token++)
        if (logits[token] > logits[found])
            found = token;
    return found;
}

static inline uint32_t whole_tiles(uint32_t count) /* rounded up to a multiple of TILE */
{
    return (count + TILE - 1) / TILE * TILE;
}

/* Every part of a session has a function `x_layout` that takes its memory from an arena. It runs twice: with memory NULL,
 * to count bytes, and with memory. */
typedef struct { uint8_t *memory; uint64_t used; } arena;

#ifdef __SANITIZE_ADDRESS__
void __asan_poison_memory_region(const volatile void *at, size_t size);
void __asan_unpoison_memory_region(const volatile void *at, size_t size);
#endif

/* Returns `size` zero bytes, 64-byte aligned; NULL while counting. Under AddressSanitizer a poisoned gap follows. */
static inline void *take(arena *from, uint64_t size)
{
    uint64_t at = (from->used + 63) / 64 * 64;
    from->used = at + size;
#ifdef __SANITIZE_ADDRESS__
    from->used += 64;
    if (from->memory)
        __asan_poison_memory_region(from->memory + at + size, 64);
#endif
    return from->memory ? from->memory + at : NULL;
}

#endif
