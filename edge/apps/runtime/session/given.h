/* Rows that stand in a conversation in place of tokens: pictures. Their ids lie beyond the vocabulary, one behind the
 * other, from a hash of the picture on: the conversation compares them as tokens. */
#ifndef EDGE_GIVEN_H
#define EDGE_GIVEN_H

#include "base.h"

enum { MOST_PICTURES = 256 }; /* of a conversation */

typedef struct {
    uint8_t hash[32];       /* of the picture, its size and its encoder */
    int32_t first;          /* the ids of its rows: first, first + 1, … */
    uint32_t count, width;  /* rows; values of a row */
    float *rows;            /* [count][width], of map_memory; NULL: all have run, and need not run again */
    uint32_t down, across, each; /* tiles, and rows of each but the last */
    uint32_t grid_down, grid_across; /* of the rows, where their positions have several components; 0: consecutive ones */
    bool whole;             /* its rows see all of each other, and run in one pass */
} picture_rows;

typedef struct given given;
given *given_layout(arena *from, uint32_t vocab);
void given_clear(given *g); /* forgets all pictures */
/* Adds a picture, whose first id it sets; the rows belong to it now. Returns false, and takes nothing, if there are
 * MOST_PICTURES. */
bool given_add(given *g, picture_rows picture);
void given_put(given *g, picture_rows picture); /* likewise, of a saved state, with its id; there must be room */
uint32_t given_count(const given *g);
const picture_rows *given_picture(const given *g, uint32_t number);
void given_drop(given *g, uint32_t count); /* keeps the first `count` */
/* The number of the picture of an id, from 0 on; given_count if there is none. */
uint32_t given_find(const given *g, int32_t id);
uint64_t given_bytes(const given *g); /* of rows */
const float *given_row(const given *g, int32_t id); /* NULL: unknown, or given back */
/* These ids have run: gives back the rows of pictures that end with one of them. */
void given_ran(given *g, const int32_t *ids, uint32_t count);

#endif
