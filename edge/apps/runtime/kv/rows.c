/* The layout and encoding of KV rows: a port of backends/tvm/kv/rows.py, row_formats.py and householder.py. Keys and scales
 * lie in tiles of 16 rows, [rows / 16, width, 16], values as [rows, width]. */
#include "bundle.h"
#include "model.h"
#include "rows.h"
#include "system.h"

#include <math.h>
#include <string.h>

enum { KEYS, VALUES, KEY_SCALES, VALUE_SCALES, ARRAYS };

uint16_t rows_to_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (size >= 0x38800000)
        return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    float shifted = fabsf(x) + 0.5f; /* its last bit is the unit of subnormal halves */
    memcpy(&bits, &shifted, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
}

float rows_from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | rest << 13;
    float x = (float)rest / 16777216.0f;
    if (exponent)
        memcpy(&x, &bits, 4);
    return exponent || !sign ? x : -x;
}

bool rows_scale(void *values, uint64_t bytes, bool exact, float scale)
{
    float *floats = values;
    uint16_t *halves = values;
    bool finite = true;
    for (uint64_t i = 0; exact && i < bytes / sizeof *floats; i++)
        finite = isfinite(floats[i] *= scale) && finite;
    for (uint64_t i = 0; !exact && i < bytes / sizeof *halves; i++) {
        halves[i] = rows_to_half(rows_from_half(halves[i]) * scale);
        finite = isfinite(rows_from_half(halves[i])) && finite;
    }
    return finite;
}

void rows_layout(arena *from, kv_rows *rows, const edge_model *model, row_shape shape, uint32_t count, bool elsewhere)
{
    static const uint8_t sizes[] = {4, 2, 1, 1}, scales[] = {0, 0, 1, 2};
    const edge_config *config = model->config;
    uint32_t dtype = config->kv_dtype, values = dtype == KV_INT4 ? 2 : 1; /* values: of an element */
    const uint32_t stored[] = {shape.key, shape.value, shape.key, shape.value};
    rows->device = NULL;
    rows->shape = shape, rows->dtype = dtype, rows->count = count, rows->stride = config->head;
    for (int array = 0; array < ARRAYS; array++) {
        bool scaled = array >= KEY_SCALES;
        rows->widths[array] = !scaled ? stored[array] / values : stored[array] ? scales[dtype] : 0;
        rows->item[array] = !scaled ? sizes[dtype] : dtype == KV_INT4 ? 2 : 4;
        uint64_t bytes = (uint64_t)rows->widths[array] * rows->item[array];
        rows->arrays[array] = take(from, elsewhere ? 0 : (count + (uint64_t)SPARE_ROWS) * bytes);
    }
    rows->changed = take(from, EDGE_PAGE ? count / TILE : 0);
    rows->normals = dtype == KV_INT4 ? (const float *)model->sections[SECTION_NORMALS] : NULL;
    rows->work = take(from, sizeof(float) * shape.key);
}

/* Returns the first element of a row in an array. *stride: bytes from one element to the next. */
static uint8_t *element(const kv_rows *rows, int array, uint32_t row, size_t *stride)
{
    size_t width = rows->widths[array], item = rows->item[array];
    *stride = array == VALUES ? item : TILE * item;
    return rows->arrays[array] + (array == VALUES ? row * width : row / TILE * TILE * width + row % TILE) * item;
}

static void copy(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride, uint32_t count, uint32_t item)
{
    if (to_stride == item && from_stride == item)
        memcpy(to, from, (size_t)count * item);
    else if (item == 4)
        for (; count; count--, to += to_stride, from += from_stride)
            memcpy(to, from, 4);
    else if (item == 2)
        for (; count; count--, to += to_stride, from += from_stride)
            memcpy(to, from, 2);
    else
        for (; count; count--, to += to_stride, from += from_stride)
            *to = *from;
}

void rows_written(kv_rows *rows, uint32_t first, uint32_t count)
{
    for (uint32_t tile = first / TILE; EDGE_PAGE && tile * TILE < first + count; tile++)
        rows->changed[tile] = 1;
}

void rows_move(kv_rows *rows, uint32_t source, uint32_t target)
{
    if (rows->device) {
        rows->device->work->move(rows->device, source, target);
        return;
    }
    rows_written(rows, target, 1);
    for (int array = 0; array < ARRAYS; array++) {
        size_t stride;
        uint8_t *from = element(rows, array, source, &stride), *to = element(rows, array, target, &stride);
        copy(to, stride, from, stride, rows->widths[array], rows->item[array]);
    }
}

void rows_settle(kv_rows *rows)
{
    if (rows->device)
        rows->device->work->settle(rows->device);
}

void rows_shift(kv_rows *rows, uint32_t source, uint32_t target, uint32_t count)
{
    rows_written(rows, target, count);
    for (int array = 0; array < ARRAYS; array++) {
        size_t bytes = (size_t)rows->widths[array] * rows->item[array];
        memmove(rows->arrays[array] + target * bytes, rows->arrays[array] + source * bytes, count * bytes);
    }
}

void rows_release(kv_rows *rows, uint32_t first, uint32_t count)
{
    for (int array = 0; array < ARRAYS; array++) {
        size_t bytes = (size_t)rows->widths[array] * rows->item[array];
        release_memory(rows->arrays[array] + first * bytes, count * bytes);
    }
}

size_t rows_bytes(const kv_rows *rows)
{
    size_t bytes = 0;
    for (int array = 0; array < ARRAYS; array++)
        bytes += (size_t)rows->widths[array] * rows->item[array];
    return bytes;
}

void rows_save(const kv_rows *rows, uint32_t row, uint8_t *out)
{
    if (rows->device) {
        rows->device->work->save(rows->device, row, out);
        return;
    }
    for (int array = 0; array < ARRAYS; array++) {
        size_t stride, item = rows->item[array];
        const uint8_t *from = element(rows, array, row, &stride);
        copy(out, item, from, stride, rows->widths[array], rows->item[array]);
        out += rows->widths[array] * item;
    }
}

void rows_restore(kv_rows *rows, uint32_t row, const uint8_t *saved)
{
    if (rows->device) {
        rows->device->work->restore(rows->device, row, saved);
        return;
    }
    rows_written(rows, row, 1);
    for (int array = 0; array < ARRAYS; array++) {
        size_t stride, item = rows->item[array];
        uint8_t *to = element(rows, array, row, &stride);
        copy(to, stride, saved, item, rows->widths[array], rows->item[array]);
        saved += rows->widths[array] * item;
    }
}

/* ---- keys in float32 -------------------------------------------------------------------------------------------- */

/* Multiplies x by a Hadamard matrix, in blocks of the largest power of two that divides the length; its own inverse. */
static void hadamard(float *x, uint32_t count)
{
    uint32_t block = count & (~count + 1);
    for (uint32_t distance = 1; distance < block; distance *= 2)
        for (uint32_t at = 0; at < count; at++)
            if (!(at & distance)) {
                float first = x[at], second = x[at + distance];
                x[at] = first + second, x[at + distance] = first - second;
            }
    float scale = (float)(1 / sqrt((double)block));
    for (uint32_t at = 0; at < count; at++)
        x[at] *= scale;
}

/* Adds in NumPy's order, so that sums equal the oracle's to the last bit. */
static float sum(const float *x, uint32_t count)
{
    if (count > 128) {
        uint32_t half = count / 2 - count / 2 % 8;
        return sum(x, half) + sum(x + half, count - half);
    }
    float parts[8];
    memcpy(parts, x, sizeof parts);
    for (uint32_t at = 8; at < count; at++) /* a key has a multiple of 16 values */
        parts[at % 8] += x[at];
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

/* out = x − 2 (n · x) n, a Householder reflection; its own inverse. */
static void reflect(const kv_rows *rows, uint32_t head, const float *x, float *out)
{
    const float *normal = rows->normals + (size_t)head * rows->stride;
    float *products = rows->work;
    for (uint32_t at = 0; at < rows->shape.key; at++)
        products[at] = x[at] * normal[at];
    float twice = 2 * sum(products, rows->shape.key);
    for (uint32_t at = 0; at < rows->shape.key; at++)
        out[at] = x[at] - twice * normal[at];
}

/* Decodes a key or value, but leaves int4's transformed. array: KEYS or VALUES. */
static void decode(const kv_rows *rows, int array, uint32_t row, float *key)
{
    size_t stride, scale_stride;
    const uint8_t *from = element(rows, array, row, &stride);
    const uint8_t *scale = element(rows, array + KEY_SCALES, row, &scale_stride);
    float scales[2] = {1, 0}; /* scale and offset */
    uint16_t halves[2];
    if (rows->dtype == KV_INT8)
        memcpy(scales, scale, 4);
    if (rows->dtype == KV_INT4)
        for (int each = 0; each < 2; each++) {
            memcpy(&halves[each], scale + each * scale_stride, 2);
            scales[each] = rows_from_half(halves[each]);
        }
    for (uint32_t at = 0; at < rows->widths[array]; at++, from += stride)
        if (rows->dtype == KV_F32) {
            memcpy(&key[at], from, 4);
        } else if (rows->dtype == KV_F16) {
            memcpy(halves, from, 2);
            key[at] = rows_from_half(halves[0]);
        } else if (rows->dtype == KV_INT8) {
            key[at] = (float)(int8_t)*from * scales[0];
        } else {
            key[2 * at] = (float)(*from & 15) * scales[0] + scales[1];
            key[2 * at + 1] = (float)(*from >> 4) * scales[0] + scales[1];
        }
}

float rows_value_norm(const kv_rows *rows, uint32_t row, float *work)
{
    const uint32_t count = rows->widths[VALUES] * (rows->dtype == KV_INT4 ? 2 : 1);
    double square = 0; /* which the transformation leaves as it is */
    decode(rows, VALUES, row, work);
    for (uint32_t at = 0; at < count; at++)
        square += (double)work[at] * work[at];
    return (float)sqrt(square);
}

void rows_key(const kv_rows *rows, uint32_t row, uint32_t head, float *key)
{
    if (rows->device) {
        rows->device->work->key(rows->device, row, head, key);
        return;
    }
    decode(rows, KEYS, row, key);
    if (rows->dtype == KV_INT4) {
        hadamard(key, rows->shape.key);
        reflect(rows, head, key, key);
    }
}

/* Rounds x to a code within [least, most]; 0 for NaN. */
static int32_t code(float x, float least, float most)
{
    float rounded = rintf(x);
    return rounded >= most ? (int32_t)most : rounded > least ? (int32_t)rounded : x == x ? (int32_t)least : 0;
}

static void set_int8(const kv_rows *rows, uint32_t row, const float *key)
{
    size_t stride, scale_stride;
    uint8_t *to = element(rows, KEYS, row, &stride), *scale = element(rows, KEY_SCALES, row, &scale_stride);
    float most = 0;
    for (uint32_t at = 0; at < rows->shape.key; at++)
        most = fabsf(key[at]) > most ? fabsf(key[at]) : most;
    most /= 127;
    memcpy(scale, &most, 4);
    for (uint32_t at = 0; at < rows->shape.key; at++, to += stride)
        *to = (uint8_t)code(key[at] / (most > 0 ? most : 1), -128, 127);
}

static void set_int4(const kv_rows *rows, uint32_t row, float *key)
{
    size_t stride, scale_stride;
    uint8_t *to = element(rows, KEYS, row, &stride), *scale = element(rows, KEY_SCALES, row, &scale_stride);
    hadamard(key, rows->shape.key);
    float least = key[0], most = key[0];
    for (uint32_t at = 1; at < rows->shape.key; at++) {
        least = key[at] < least ? key[at] : least;
        most = key[at] > most ? key[at] : most;
    }
    float scales[2] = {(most - least) * (float)(1.0 / (double)INT4_STEPS), least};
    for (int each = 0; each < 2; each++) { /* round them to half, as they will be read */
        float clipped = scales[each] > LARGEST_HALF ? LARGEST_HALF : scales[each];
        uint16_t half = rows_to_half(clipped < -LARGEST_HALF ? -LARGEST_HALF : clipped);
        memcpy(scale + each * scale_stride, &half, 2);
        scales[each] = rows_from_half(half);
    }
    float inverse = scales[0] > 0 ? 1 / scales[0] : 0;
    for (uint32_t at = 0; at < rows->shape.key; at += 2, to += stride) {
        int32_t low = code((key[at] - scales[1]) * inverse, 0, INT4_STEPS);
        *to = (uint8_t)(low | code((key[at + 1] - scales[1]) * inverse, 0, INT4_STEPS) << 4);
    }
}

void rows_set_key(kv_rows *rows, uint32_t row, uint32_t head, float *key)
{
    if (rows->device) {
        rows->device->work->set_key(rows->device, row, head, key);
        return;
    }
    size_t stride;
    uint8_t *to = element(rows, KEYS, row, &stride);
    rows_written(rows, row, 1);
    if (rows->dtype == KV_INT8)
        set_int8(rows, row, key);
    else if (rows->dtype == KV_INT4) {
        reflect(rows, head, key, key);
        set_int4(rows, row, key);
    } else
        for (uint32_t at = 0; at < rows->shape.key; at++, to += stride) {
            uint16_t half = rows_to_half(key[at]);
            if (rows->dtype == KV_F32)
                memcpy(to, &key[at], 4);
            else
                memcpy(to, &half, 2);
        }
}
