/* Policies that rank the rows of each head, h2o and kvzap: edge/kv/{policy,h2o,adakv,snapkv,kvzap}.py. */
#ifndef EDGE_SCORES_H
#define EDGE_SCORES_H

#include "base.h"
#include "kv.h"
#include "model.h"

typedef struct scores scores;
typedef struct {
    scores *(*layout)(arena *from, const edge_model *model);
    /* Evicts until heads have at most `budget` rows, with kvzap on average. Returns the number of evicted rows, on average. */
    uint32_t (*evict)(scores *s, kv *k, uint32_t budget, uint32_t pinned);
} scores_kind;

#endif
