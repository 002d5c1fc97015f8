/* What kv.c, kv_keys.c and kv_state.c know of each other. */
#ifndef EDGE_KV_PARTS_H
#define EDGE_KV_PARTS_H

#include "kv.h"
#include "model.h"
#include "rows.h"

static const int64_t ALL = -((int64_t)1 << 60); /* for `first`: no row has been forgotten */

typedef struct { /* the rows of layers without a ring, or of those with one */
    uint32_t heads, start, even, capacity, longest, length; /* start: row of the arena; even: rows of a head, in tiles;
                                                               longest: capacity before `kv_shrink` */
    uint32_t lists;                /* one for all heads, or one for each */
    int32_t *physical, *positions; /* [lists][longest], by logical row */
    const uint32_t *of;            /* the heads' numbers among those of all layers */
    int64_t base, next;            /* next: position of the next key */
    bool windowed, observed;
    kv_rows *rows;                 /* the arena */
} kv_part;

struct kv {
    const edge_model *model;
    kv_rows rows[2];        /* of all layers; or without rings, and of rings, whose heads are others */
    kv_part whole, ring;
    int64_t first;          /* ring: rows from this position on are here */
    uint32_t before, spare; /* ring: earlier rows that a token sees; rows that are freed at once */
    int32_t *starts, *lengths;
    int32_t *positions;     /* of the rows of the arena that has windows */
    float *paid;
    bool lengthened;
    float *states, *snapshots;     /* of layers that sum up all tokens, and copies [held] of them */
    float *working;                /* before `states`: the copies that threads change in a pass over drafts */
    uint32_t ends[SNAPSHOTS], held; /* rows that there were when each was made, ascending */
    size_t state_bytes;
    uint32_t pinned, known;    /* first rows, at most and now, whose keys are kept as they were before they were rotated */
    float *pinned_keys;        /* [heads][pinned][head] */
    int64_t *pinned_positions; /* RoPE's */
    float *angles, *key;       /* [kinds][2][head / 2], cosines and sines; [head] */
    uint8_t *occupied;
};

static inline uint32_t row_of(const kv_part *p, uint32_t head, uint32_t logical) /* of the arena */
{
    uint32_t list = p->lists > 1 ? head : 0;
    return p->start + head * p->even + (uint32_t)p->physical[(size_t)list * p->longest + logical];
}

static inline int32_t *position_of(const kv_part *p, uint32_t head, uint32_t logical)
{
    return p->positions + (p->lists > 1 ? (size_t)head * p->longest : 0) + logical;
}

static inline uint32_t heads_of(const kv_part *p, uint32_t list) /* of a list, the number behind its last head */
{
    return p->lists > 1 ? list + 1 : p->heads;
}

void kv_place(kv *k, const kv_part *p);

/* kv_keys.c: LongRoPE's short factors or its long ones, or from where the short ones rotate to where the long ones do */
enum kv_factors { SHORT, LONG, BETWEEN };
enum kv_factors kv_factors(const kv *k);
/* Rotates the key of a logical row, of all heads that share the list, by more positions. */
void kv_rotate_row(kv *k, kv_part *p, uint32_t list, uint32_t logical, int64_t by, enum kv_factors factors);
/* Rotates the keys of logical rows of all heads from RoPE positions to others. */
void kv_move_keys(kv *k, const uint32_t *rows, const int64_t *from, const int64_t *to, uint32_t count);

#endif
