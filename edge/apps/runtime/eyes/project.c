/* States of patches to rows for the text model: `join` × `join` neighbours become one vector, or their mean, which one or two
 * matrices project. */
#include <math.h>
#include <string.h>

#include "eye.h"
#include "eyes.h"
#include "matrix.h"

typedef struct { matrix shift, scale, norm, norm_bias, one, one_bias, two, two_bias; } projector; /* shift, scale: of means */

static uint32_t joined_values(const eyes_config *c)
{
    return c->hidden * (c->means ? 1 : c->join * c->join);
}

/* Returns false if the file does not have the matrices of a part. */
static bool find_projector(const edge_model *file, const eyes_config *c, uint32_t part, projector *p)
{
    const stem_matrix *own = (const stem_matrix *)(const void *)(c + 1) + EYES_MATRICES + part * EYES_PART_MATRICES;
    const uint32_t first = EYES_MATRICES + part * EYES_PART_MATRICES, wide = joined_values(c);
    const bool second = own[EYES_PART_TWO].rows;
    const uint32_t between = second ? own[EYES_PART_ONE].rows : c->projected;
    return between <= MOST_EYE_VALUES && eyes_matrix_of(file, c, EYES_MATRIX_SHIFT, 1, c->hidden, &p->shift)
        && eyes_matrix_of(file, c, EYES_MATRIX_SCALE, 1, c->hidden, &p->scale)
        && !p->shift.data == !p->scale.data && (c->means || !p->shift.data)
        && eyes_matrix_of(file, c, first + EYES_PART_NORM, 1, wide, &p->norm)
        && eyes_matrix_of(file, c, first + EYES_PART_NORM_BIAS, 1, wide, &p->norm_bias)
        && eyes_matrix_of(file, c, first + EYES_PART_ONE, between, wide, &p->one) && p->one.data
        && eyes_matrix_of(file, c, first + EYES_PART_ONE_BIAS, 1, between, &p->one_bias)
        && eyes_matrix_of(file, c, first + EYES_PART_TWO, c->projected, between, &p->two)
        && eyes_matrix_of(file, c, first + EYES_PART_TWO_BIAS, 1, c->projected, &p->two_bias);
}

bool projector_is_possible(const edge_model *file, const eyes_config *c, uint32_t *widest)
{
    bool possible = true;
    *widest = joined_values(c);
    for (uint32_t part = 0; possible && part < c->parts; part++) {
        projector p;
        possible = find_projector(file, c, part, &p);
        *widest = possible && p.one.rows > *widest ? p.one.rows : *widest;
    }
    return possible;
}

/* Adds a vector of the file, if there is one, to each of `count` vectors. */
static void add_vector(const matrix *m, float *vectors, uint32_t count, size_t stride)
{
    for (uint32_t i = 0; m->data && i < count; i++)
        matrix_add_row(m, 0, vectors + i * stride);
}

/* Returns a vector of the file. own: room for it. */
static const float *read_vector(const matrix *m, float *own)
{
    memset(own, 0, m->columns * sizeof *own);
    matrix_add_row(m, 0, own);
    return own;
}

static void scale_by(const matrix *m, float *values, float *own)
{
    const float *by = read_vector(m, own);
    for (uint32_t i = 0; i < m->columns; i++)
        values[i] *= by[i];
}

static void subtract(const matrix *m, float *values, float *own)
{
    const float *less = read_vector(m, own);
    for (uint32_t i = 0; i < m->columns; i++)
        values[i] -= less[i];
}

/* x / 2 · (1 + erf(x / √2)), by the fit 7.1.26 of Abramowitz and Stegun, as in edge/model/towers/pixels.py. */
void gelu_erf(float *values, uint32_t count)
{
    static const double fit[] = {1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592};
    for (uint32_t i = 0; i < count; i++) {
        const double x = (double)values[i], size = fabs(x) * 0.70710678118654752440, t = 1 / (1 + 0.3275911 * size);
        double sum = 0;
        for (int term = 0; term < 5; term++)
            sum = (sum + fit[term]) * t;
        const double erf_of_size = 1 - sum * exp(-size * size);
        values[i] = (float)(x * 0.5 * (1 + (x < 0 ? -erf_of_size : erf_of_size)));
    }
}

/* Writes one vector of the states of a cell's patches. own: room for another. */
static void join(const eyes_config *c, const projector *p, const float *states, uint32_t stride, float *out, float *own)
{
    const uint32_t patches = c->join * c->join;
    if (!c->means) {
        for (uint32_t i = 0; i < patches; i++)
            memcpy(out + (size_t)i * c->hidden, states + (size_t)i * stride, c->hidden * sizeof *out);
        return;
    }
    for (uint32_t value = 0; value < c->hidden; value++) {
        double sum = 0;
        for (uint32_t i = 0; i < patches; i++)
            sum += (double)states[(size_t)i * stride + value];
        out[value] = (float)(sum / patches * c->factor);
    }
    if (p->shift.data) {
        subtract(&p->shift, out, own);
        scale_by(&p->scale, out, own);
    }
}

static void normalise(const eyes_config *c, const projector *p, float *values, float *own)
{
    const uint32_t size = p->norm.columns;
    double mean = 0, squares = 0;
    if (!p->norm.data)
        return;
    for (uint32_t i = 0; c->norm == NORM_LAYER && i < size; i++)
        mean += (double)values[i] / size;
    for (uint32_t i = 0; i < size; i++)
        squares += ((double)values[i] - mean) * ((double)values[i] - mean);
    const double by = 1 / sqrt(squares / size + c->eps);
    for (uint32_t i = 0; i < size; i++)
        values[i] = (float)(((double)values[i] - mean) * by);
    scale_by(&p->norm, values, own);
    add_vector(&p->norm_bias, values, 1, 0);
}

void project_tile(const eye *e, uint32_t part, const float *states, uint32_t stride, uint32_t down, uint32_t across, const cell *cells,
                  float *rows)
{
    const eyes_config *c = e->config;
    const uint32_t patches = c->join * c->join, each = down * across / patches, wide = joined_values(c);
    projector p;
    if (!find_projector(e->file, c, part, &p)) /* projector_is_possible has checked them */
        return;
    float *other = e->block + (size_t)BLOCK * e->widest;
    for (uint32_t first = 0, count; first < each; first += count) {
        count = smaller(BLOCK, each - first);
        for (uint32_t i = 0; i < count; i++) {
            float *joined = e->block + (size_t)i * wide;
            join(c, &p, states + (size_t)(first + i) * patches * stride, stride, joined, other);
            normalise(c, &p, joined, other);
        }
        float *in = e->block, *out = other;
        for (const matrix *m = &p.one, *bias = &p.one_bias; m; m = m == &p.one && p.two.data ? &p.two : NULL, bias = &p.two_bias) {
            if (m == &p.two) {
                gelu_erf(out, count * p.one.rows);
                float *before = in;
                in = out, out = before;
            }
            memset(out, 0, (size_t)count * m->rows * sizeof *out);
            add_vector(bias, out, count, m->rows);
            matrix_add(m, in, count, out, m->rows);
        }
        for (uint32_t i = 0; i < count; i++) {
            const cell at = cells[(first + i) * patches];
            float *row = rows + (size_t)(at.row / c->join * (across / c->join) + at.column / c->join) * eyes_width(c);
            memcpy(row + part * c->projected, out + (size_t)i * c->projected, c->projected * sizeof *row);
        }
    }
}
