/* Four rows at a time, which are made float32 in parts that stay in the cache. */
#include <string.h>

#include "matrix.h"

enum { PART = 512, ROWS = 4, LANES = 4 };
typedef float lanes __attribute__((vector_size(16), aligned(4), may_alias));

static float of_half(uint16_t half)
{
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f; /* the exponents of float32 begin 112 lower */
    return half & 0x8000 ? -value : value;
}

/* Writes `count` values of a row from column `at` on. */
static void read_row(const matrix *m, uint32_t row, uint32_t at, uint32_t count, float *out)
{
    const size_t place = (size_t)row * m->columns + at;
    if (m->half)
        for (uint32_t i = 0; i < count; i++)
            out[i] = of_half(((const uint16_t *)m->data)[place + i]);
    else
        memcpy(out, (const float *)m->data + place, count * sizeof *out);
}

void matrix_add_row(const matrix *m, uint32_t row, float *values)
{
    float own[PART];
    for (uint32_t at = 0; at < m->columns; at += PART) {
        const uint32_t count = smaller(PART, m->columns - at);
        read_row(m, row, at, count, own);
        for (uint32_t i = 0; i < count; i++)
            values[at + i] += own[i];
    }
}

static float sum_of(lanes v)
{
    return (v[0] + v[1]) + (v[2] + v[3]);
}

void matrix_add(const matrix *m, const float *vectors, uint32_t count, float *out, size_t stride)
{
    float weights[ROWS][PART];
    for (uint32_t row = 0; row < m->rows; row += ROWS)
        for (uint32_t at = 0; at < m->columns; at += PART) {
            const uint32_t rows = smaller(ROWS, m->rows - row), wide = smaller(PART, m->columns - at);
            const uint32_t whole = wide / LANES * LANES;
            memset(weights, 0, sizeof weights);
            for (uint32_t i = 0; i < rows; i++)
                read_row(m, row + i, at, wide, weights[i]);
            for (uint32_t vector = 0; vector < count; vector++) {
                const float *in = vectors + (size_t)vector * m->columns + at;
                lanes sums[ROWS] = {{0}};
                for (uint32_t i = 0; i < whole; i += LANES) {
                    const lanes value = *(const lanes *)(in + i);
                    for (uint32_t each = 0; each < ROWS; each++)
                        sums[each] += value * *(const lanes *)(weights[each] + i);
                }
                for (uint32_t each = 0; each < rows; each++) {
                    float sum = sum_of(sums[each]);
                    for (uint32_t i = whole; i < wide; i++)
                        sum += in[i] * weights[each][i];
                    out[vector * stride + row + each] += sum;
                }
            }
        }
}
