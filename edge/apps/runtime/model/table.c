/* Reads per-layer embeddings: a table with a row for each token, the largest part of a model. It stays in the file, and a
 * pass reads the rows of its tokens. Blocks are GGUF's (edge/formats/blocks.py); values equal the gguf package's bit for
 * bit. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "model.h"
#include "rows.h"
#include "system.h"

enum { PIECE = 4096, MOST_BLOCK = 256 }; /* bytes of a row per read; values of a block */

typedef void decoder(const uint8_t *block, float *values);
typedef struct { uint32_t values, bytes; decoder *decode; } block_type;

static bool read_row(const edge_model *model, uint64_t at, uint32_t count, const block_type *type, float factor, float *out)
{
    uint32_t size = model->config->layer_inputs, padded = whole_tiles(size), value = 0;
    uint8_t piece[PIECE];
    float values[MOST_BLOCK];
    for (uint32_t blocks = count / type->values; blocks;) {
        uint32_t some = PIECE / type->bytes < blocks ? PIECE / type->bytes : blocks;
        if (!read_file(&model->file, at, piece, (uint64_t)some * type->bytes))
            return false;
        at += (uint64_t)some * type->bytes, blocks -= some;
        for (uint32_t block = 0; block < some; block++) {
            type->decode(piece + block * type->bytes, values);
            for (uint32_t each = 0; each < type->values; each++, value++)
                out[value / size * padded + value % size] = values[each] * factor;
        }
    }
    return true;
}

static bool read_rows(const edge_model *model, const int32_t *tokens, uint32_t count, float *inputs, block_type type)
{
    const edge_config *c = model->config;
    uint32_t width = c->layers * c->layer_inputs, stride = c->layers * whole_tiles(c->layer_inputs);
    uint64_t row = model->sizes[SECTION_TABLE] / c->vocab;
    float factor = (float)sqrt((double)c->layer_inputs / 2);
    for (uint32_t i = 0; i < count; i++)
        if (!read_row(model, model->table + (uint64_t)(tokens[i] < 0 ? 0 : tokens[i]) * row, width, &type, factor, inputs + (size_t)i * stride))
            return false;
    return true;
}

/* ---- types of blocks ---------------------------------------------------------------------------------------------- */

static float half_at(const uint8_t *bytes)
{
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return rows_from_half(half);
}

static void decode_f32(const uint8_t *block, float *values)
{
    memcpy(values, block, sizeof *values);
}

static void decode_f16(const uint8_t *block, float *values)
{
    *values = half_at(block);
}

static void decode_bf16(const uint8_t *block, float *values)
{
    uint8_t bytes[4] = {0, 0, block[0], block[1]};
    memcpy(values, bytes, sizeof bytes);
}

static void decode_q4_0(const uint8_t *block, float *values)
{
    float scale = half_at(block);
    for (int i = 0; i < 16; i++) {
        values[i] = scale * (float)((block[2 + i] & 15) - 8);
        values[i + 16] = scale * (float)((block[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *block, float *values)
{
    float scale = half_at(block), least = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        values[i] = scale * (float)(block[4 + i] & 15) + least;
        values[i + 16] = scale * (float)(block[4 + i] >> 4) + least;
    }
}

/* Value i of a block of 5 bits: 4 bytes of highest bits, then the lower four. */
static int five(const uint8_t *high, int i)
{
    int low = i < 16 ? high[4 + i] & 15 : high[4 + i - 16] >> 4;
    return low | (high[i / 8] >> i % 8 & 1) << 4;
}

static void decode_q5_0(const uint8_t *block, float *values)
{
    float scale = half_at(block);
    for (int i = 0; i < 32; i++)
        values[i] = scale * (float)(five(block + 2, i) - 16);
}

static void decode_q5_1(const uint8_t *block, float *values)
{
    float scale = half_at(block), least = half_at(block + 2);
    for (int i = 0; i < 32; i++)
        values[i] = scale * (float)five(block + 4, i) + least;
}

static void decode_q8_0(const uint8_t *block, float *values)
{
    float scale = half_at(block);
    for (int i = 0; i < 32; i++)
        values[i] = (float)(int8_t)block[2 + i] * scale;
}

/* Scale and minimum, 6 bits each, of part i of 8, in Q4_K and Q5_K. */
static void six_bits(const uint8_t *packed, int i, int *scale, int *least)
{
    if (i < 4) {
        *scale = packed[i] & 63, *least = packed[i + 4] & 63;
    } else {
        *scale = (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
        *least = packed[i + 4] >> 4 | packed[i] >> 6 << 4;
    }
}

static void decode_k(const uint8_t *block, const uint8_t *high, const uint8_t *low, float *values)
{
    float scales = half_at(block), minima = half_at(block + 2);
    for (int part = 0; part < 8; part++) {
        int scale, least;
        six_bits(block + 4, part, &scale, &least);
        float factor = scales * (float)scale, minimum = minima * (float)least;
        for (int i = 0; i < 32; i++) {
            int code = low[part / 2 * 32 + i] >> part % 2 * 4 & 15;
            code |= high ? (high[i] >> part & 1) << 4 : 0;
            values[part * 32 + i] = factor * (float)code - minimum;
        }
    }
}

static void decode_q4_k(const uint8_t *block, float *values)
{
    decode_k(block, NULL, block + 16, values);
}

static void decode_q5_k(const uint8_t *block, float *values)
{
    decode_k(block, block + 16, block + 48, values);
}

static void decode_q6_k(const uint8_t *block, float *values)
{
    const uint8_t *high = block + 128, *scales = block + 192;
    float scale = half_at(block + 208);
    for (int i = 0; i < 256; i++) {
        int part = i / 128, rest = i % 128;
        int low = block[part * 64 + rest % 64] >> rest / 64 * 4 & 15;
        int code = low | (high[part * 32 + rest % 32] >> rest / 32 * 2 & 3) << 4;
        values[i] = scale * (float)(int8_t)scales[i / 16] * (float)(code - 32);
    }
}

#define READER(name, values, bytes) \
    bool table_##name(const edge_model *model, const int32_t *tokens, uint32_t count, float *inputs) \
    { \
        return read_rows(model, tokens, count, inputs, (block_type){values, bytes, decode_##name}); \
    }
TABLE_TYPES(READER)
