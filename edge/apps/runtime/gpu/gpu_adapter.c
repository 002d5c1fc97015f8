/* LoRA adapters in buffers of the device. The part for GPUs of an adapter's file (edge/apps/sections/adapter_file.py) is a byte for
 * each matrix that may have an adapter, 1 if it has one, zeros up to FLAGS, and the content of these buffers. Other matrices run
 * their plain dispatches. */
#include <string.h>

#include "gpu.h"
#include "rows.h"

enum { PIECE = 16 << 10, FLAGS = GPU_ALIGNMENT }; /* bytes per write; of which the flags are a multiple */

static const gpu_adapted *matrices_of(const gpu *g)
{
    return gpu_table(g, g->config->adapted_at);
}

static uint64_t buffer_bytes(const gpu *g, uint32_t number)
{
    return ((const gpu_buffer *)gpu_table(g, g->config->buffers_at))[number].size;
}

/* Whether matrix `i` is the first one of its buffer. */
static bool begins_buffer(const gpu *g, uint32_t i)
{
    return !i || matrices_of(g)[i].buffer != matrices_of(g)[i - 1].buffer;
}

void choose_dispatches(gpu *g)
{
    const gpu_dispatch_config *dispatches = gpu_table(g, g->config->dispatches_at);
    for (uint32_t i = 0; i < g->config->dispatches; i++) {
        const gpu_dispatch_config *each = dispatches + i;
        const uint32_t *matrices = (const uint32_t *)gpu_table(g, g->config->numbers_at) + each->numbers + each->parts +
                                   each->scalars;
        bool changed = false;
        for (uint32_t at = 0; at < each->matrices; at++)
            changed = changed || g->changed[matrices[at]];
        g->skipped[i] = each->matrices && changed != (each->adapted != 0);
    }
}

/* Multiplies the values of B among the `size` bytes at `at`. Returns false if a value overflows its type. */
static bool scale_piece(const gpu *g, const gpu_adapted *matrix, uint8_t *piece, uint64_t at, uint64_t size, float scale)
{
    uint64_t first = matrix->at > at ? matrix->at : at, end = matrix->at + matrix->size;
    end = end < at + size ? end : at + size;
    return first >= end || rows_scale(piece + (first - at), end - first, g->model->config->kv_dtype == KV_F32, scale);
}

/* Reads the buffer of matrix `first`, which may hold further matrices. */
static bool read_buffer(gpu *g, uint32_t first, adapter_source in, void *from, float scale, bool *finite)
{
    const gpu_adapted *matrices = matrices_of(g);
    uint32_t buffer = matrices[first].buffer;
    uint64_t size = buffer_bytes(g, buffer);
    _Alignas(FLAGS) uint8_t piece[PIECE];
    for (uint64_t at = 0; at < size; at += PIECE) {
        uint64_t count = size - at < PIECE ? size - at : PIECE;
        if (!in(from, piece, count))
            return false;
        for (uint32_t i = first; scale != 1 && i < g->config->adapted && matrices[i].buffer == buffer; i++)
            *finite = scale_piece(g, matrices + i, piece, at, count, scale) && *finite;
        gpu_write(g, buffer, at, piece, count, true);
    }
    return true;
}

bool read_gpu_adapter(accelerator *a, adapter_source in, void *from, float scale, bool *finite)
{
    gpu *g = (gpu *)a;
    uint32_t count = g->config->adapted;
    uint8_t padding[FLAGS];
    bool whole = !in || (in(from, g->changed, count) && in(from, padding, (FLAGS - count % FLAGS) % FLAGS));
    *finite = true;
    for (uint32_t i = 0; in && whole && i < count; i++)
        whole = !begins_buffer(g, i) || read_buffer(g, i, in, from, scale, finite);
    if (!in || !whole)
        memset(g->changed, 0, count);
    choose_dispatches(g);
    return whole;
}
