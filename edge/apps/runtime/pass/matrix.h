/* Products with matrices outside of compiled passes: of section STEM, in float32 or float16. */
#ifndef EDGE_MATRIX_H
#define EDGE_MATRIX_H

#include "base.h"

typedef struct { const void *data; uint32_t rows, columns; bool half; } matrix;

/* Adds the products of `count` vectors [columns], one after the other, to out[i * stride + row]. */
void matrix_add(const matrix *m, const float *vectors, uint32_t count, float *out, size_t stride);
/* Adds a row of the matrix to values [columns]. */
void matrix_add_row(const matrix *m, uint32_t row, float *values);

#endif
