/* The state that eyes.c shares with patches.c and project.c: the work before and behind the encoder. */
#ifndef EDGE_EYE_H
#define EDGE_EYE_H

#include "base.h"
#include "encoder.h"
#include "eyes.h"
#include "matrix.h"
#include "model.h"
#include "pixels.h"

enum { COLOURS = 3, BLOCK = 64 /* vectors at a time */, MOST_EYE_VALUES = 1 << 20 /* of a vector */ };

typedef struct { uint32_t row, column; } cell;

typedef struct {
    encoder *encoder;
    const eyes_config *config;
    const edge_model *file;
    matrix patch, base;
    float levels[COLOURS][256]; /* values of a colour's bytes */
    cell *cells;                /* [patches of a pass]: of each patch within its tile, in the order of rows */
    int32_t (*places)[2];       /* [patches of a pass]: their positions */
    uint32_t *windows;          /* [patches of a pass]: the patches up to the end of each window */
    float *lines;               /* of resized positions: [join][table][hidden], [table], [hidden] */
    float *block;               /* [2][BLOCK][widest] */
    uint32_t widest;            /* values of a vector */
    uint64_t bytes;             /* from `cells` on */
} eye;

/* Returns false if section STEM does not have matrix `number` of section EYES. One without rows has no data. */
bool eyes_matrix_of(const edge_model *file, const eyes_config *c, uint32_t number, uint32_t rows, uint32_t columns, matrix *m);
/* Writes the cells of a tile of down × across patches, `join` × `join` neighbours side by side, window by window; then
 * the ends of windows, from `first` on, at *windows, which it moves on. Returns the number of patches. */
uint32_t order_patches(const eyes_config *c, uint32_t down, uint32_t across, cell *cells, uint32_t first, uint32_t **windows);
/* Writes the rows of the patches of a tile, `cells` long, [count][stride]. */
void patch_rows(const eye *e, const pixels *from, uint32_t left, uint32_t top, uint32_t down, uint32_t across, const cell *cells,
                float *rows, uint32_t stride);
bool projector_is_possible(const edge_model *file, const eyes_config *c, uint32_t *widest);
/* Writes part `part` of the rows of a tile for the text model, of the states of its patches. */
void project_tile(const eye *e, uint32_t part, const float *states, uint32_t stride, uint32_t down, uint32_t across, const cell *cells,
                  float *rows);
void gelu_erf(float *values, uint32_t count);

#endif
