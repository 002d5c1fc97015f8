/* Positions of a pass's tokens, and what they see, where some are rows of pictures. */
#ifndef EDGE_PLACES_H
#define EDGE_PLACES_H

#include "base.h"
#include "given.h"

typedef struct {
    int32_t *sees;       /* [count]: the last token that each sees */
    int32_t *numbers;    /* [count]: the largest component so far, by which the cache orders rows */
    int32_t (*cells)[3]; /* [count]: positions of three components; NULL: they have one, and are consecutive */
    int64_t next;        /* position behind the tokens */
} places;

/* Finds the places of tokens that follow position - 1, perhaps in the middle of a picture. */
void places_find(const given *g, const int32_t *tokens, uint32_t count, int64_t position, places *found);

#endif
