/* The structs of a cache, which kv.c explains, for the files kv*.c. */
#ifndef EDGE_KV_PARTS_H
#define EDGE_KV_PARTS_H

#include "kv.h"
#include "model.h"
#include "rows.h"

static const int64_t ALL = -((int64_t)1 << 60); /* as `first`: the ring has dropped no row */

typedef struct { /* rows of the layers with a ring, or of all others */
    uint32_t heads, start, even, capacity, longest, length; /* start: first row in the arena; even: rows allocated for
                                                               each head, whole tiles; longest: the most that a head may
                                                               have; length: rows of the head that has most */
    uint32_t room;                 /* rows that this head has room for; all heads have the same number of free rows */
    uint32_t *starts, *lengths;    /* [heads]: first row in the arena, rows; NULL: all heads have equally many */
    uint32_t lists;                /* 1: one for all heads; or one for each head */
    int32_t *physical, *positions; /* [lists][longest], by logical row */
    const uint32_t *of;            /* [heads]: numbers among the heads of all layers */
    int64_t base, next;            /* RoPE position of position 0; position of the next token */
    bool windowed, observed, apart; /* apart: heads may keep different rows */
    kv_rows *rows;                 /* the arena */
} kv_part;

struct kv {
    const edge_model *model;
    kv_rows rows[2];        /* arenas: of all layers; or of layers without a ring, and of rings of another shape */
    kv_part whole, ring;
    int64_t first;          /* ring: position of its oldest row */
    uint32_t before, spare; /* ring: earlier rows that a token sees; rows that are dropped at once */
    int32_t *starts, *lengths; /* [layers * kv_heads]: arguments of passes */
    int32_t *positions;     /* by row of the arena that has windows */
    float *paid;            /* by row: attention that it has received */
    bool lengthened;
    fixed_states states;
    float *snapshots;              /* copies [held] of them */
    float *working;                /* before the states: copies that threads change in a pass over drafts */
    accelerator *device;           /* has the states, and `states` is a copy for reading and writing; NULL: there is none */
    uint32_t ends[SNAPSHOTS], held; /* length at each snapshot, ascending; number of snapshots */
    size_t state_bytes;
    uint32_t prefix;           /* rows of section PREFIX */
    uint32_t pinned, known;    /* first rows whose unrotated keys are kept: at most, and now */
    float *pinned_keys;        /* [heads][pinned][key] */
    int64_t *pinned_positions; /* RoPE positions of these keys */
    float *angles, *key;       /* [kinds][2][head / 2]: cosines and sines; [head] */
    uint8_t *occupied;         /* [longest]: working memory */
    uint32_t *scored;          /* [heads]: likewise, of kv_importance */
};

static inline uint32_t start_of(const kv_part *p, uint32_t head)
{
    return p->starts ? p->starts[head] : p->start + head * p->even;
}

static inline uint32_t length_of(const kv_part *p, uint32_t head) /* or of the only list */
{
    return p->lengths ? p->lengths[head] : p->length;
}

static inline uint32_t kv_part_used(const kv_part *p) /* rows that are not free, of its capacity */
{
    return p->capacity - (p->room - p->length);
}

static inline uint32_t row_of(const kv_part *p, uint32_t head, uint32_t logical) /* its row in the arena */
{
    uint32_t list = p->lists > 1 ? head : 0;
    return start_of(p, head) + (uint32_t)p->physical[(size_t)list * p->longest + logical];
}

static inline int32_t *position_of(const kv_part *p, uint32_t head, uint32_t logical)
{
    return p->positions + (p->lists > 1 ? (size_t)head * p->longest : 0) + logical;
}

static inline uint32_t heads_of(const kv_part *p, uint32_t list) /* one more than the last head of a list */
{
    return p->lists > 1 ? list + 1 : p->heads;
}

/* Copy the states from and to the device that has them; a page's GPU takes changed ones itself. */
static inline void kv_fetch_states(const kv *k)
{
    if (k->device && k->state_bytes)
        k->device->kind->read_states(k->device, k->states.values);
}

static inline void kv_send_states(kv *k)
{
    k->states.changed = 1, k->states.behind = 0;
    if (k->device && k->state_bytes)
        k->device->kind->write_states(k->device, k->states.values);
}

/* kv_regions.c */
void kv_place(kv *k, const kv_part *p);
/* Divides the arena anew among heads with different numbers of rows, and moves these; k: NULL if they are yet to come. */
void kv_share_out(kv *k, kv_part *p);

/* kv_keys.c. LongRoPE's short factors, its long ones, or the rotation from the first to the second. */
enum kv_factors { SHORT, LONG, BETWEEN };
enum kv_factors kv_factors(const kv *k);
/* Rotates the key of a logical row by this number of positions, in all heads that share the list. */
void kv_rotate_row(kv *k, kv_part *p, uint32_t list, uint32_t logical, int64_t by, enum kv_factors factors);
void kv_lengthen(kv *k, kv_part *p); /* rotates all keys from the short factors to the long ones */
/* Rotates the keys of logical rows of all heads from RoPE positions to others. rows: ascending. */
void kv_move_keys(kv *k, const uint32_t *rows, const int64_t *from, const int64_t *to, uint32_t count);

#endif
