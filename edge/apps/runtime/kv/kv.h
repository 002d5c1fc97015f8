/* The KV cache: which rows there are. A port of HeadKV, RowLists, PinnedKeys, Ring and Regions of backends/; kv.c shows how
 * they fit together. */
#ifndef EDGE_KV_H
#define EDGE_KV_H

#include "accelerator.h"
#include "base.h"
#include "model.h"
#include "rows.h"

typedef struct kv kv;
kv *kv_layout(arena *from, const edge_model *model, bool elsewhere); /* elsewhere: as in rows_layout */
void kv_attach(kv *k, accelerator *device); /* which holds rows and fixed states from now on */
void kv_clear(kv *k); /* leaves the rows of section PREFIX alone */
uint32_t kv_prefix(const kv *k); /* rows of section PREFIX, with which every conversation begins */

/* ---- rows in use -------------------------------------------------------------------------------------------------- */

uint32_t kv_length(const kv *k); /* logical rows, of the head that has most */
uint32_t kv_used(const kv *k);   /* rows that are not free, of kv_capacity */
uint32_t kv_free(const kv *k);
uint32_t kv_capacity(const kv *k);
int64_t kv_next_position(const kv *k);      /* position of the next token in the lists */
int64_t kv_next_rope_position(const kv *k); /* RoPE position of the next key */
uint64_t kv_bytes(const kv *k);      /* bytes of evictable rows at the present capacity */
uint64_t kv_fixed(const kv *k);      /* bytes of rings and of the fixed state */
uint64_t kv_remembered(const kv *k); /* bytes of snapshots; 0 for models without a fixed state */

/* ---- a pass -------------------------------------------------------------------------------------------------------- */

/* Announces `count` tokens. Past LongRoPE's original context, switches to the long factors and rotates cached keys. */
void kv_announce(kv *k, uint32_t count);
uint32_t kv_foresight(const kv *k); /* number of announced tokens that would switch the factors; 0 once they have switched */
bool kv_lengthened(const kv *k);    /* whether LongRoPE's long factors are in use */
/* Fills starts, lengths, positions and attention for a pass that appends `count` rows, at most a chunk and kv_free. */
void kv_prepare(kv *k, uint32_t count);
void kv_appended(kv *k, uint32_t count); /* the pass has appended its rows */
void kv_appended_at(kv *k, uint32_t count, const int32_t *positions, int64_t next); /* likewise, at these positions */
void kv_written(kv *k, uint32_t count);  /* compiled code has written `count` rows behind all others */
/* The most of `count` rows that one pass may append, if kv_drop must be able to remove all but the first. */
uint32_t kv_at_once(const kv *k, uint32_t count);
void kv_drop(kv *k, uint32_t count); /* removes the last rows, of those that kv_at_once allowed */
/* Arguments of compiled passes, in the order of generator.exported_pointers from "keys" on. */
typedef struct {
    void *keys, *values, *key_scales, *value_scales;
    int32_t *lengths, *positions;
    float *paid;
    int32_t *starts;
    void *ring_keys, *ring_values, *ring_key_scales, *ring_value_scales; /* the same arrays unless rings have their own */
    int32_t *ring_positions;
    float *states;
} kv_pointers;
kv_pointers kv_arguments(kv *k);
fixed_states *kv_states(kv *k);
void kv_forget(kv *k, uint32_t count); /* removes the newest rows, whose tokens are not in the states */
kv_rows *kv_arenas(kv *k); /* [2]: of all layers; or of layers without a ring, and of rings of another shape */

/* ---- eviction ------------------------------------------------------------------------------------------------------ */

void kv_keep(kv *k, const int32_t *rows, uint32_t count); /* evicts all but these rows, ascending; closes gaps in positions */
void kv_keep_newest(kv *k, uint32_t count); /* as kv_keep, for a cache whose heads have the same rows */
/* Evicts different rows in each head: `choose` writes the rows that stay, ascending, and returns their number, which differs
 * from head to head with kvzap alone. rows: [longest_head]. */
typedef uint32_t (*kv_choice)(void *from, uint32_t head, int32_t *rows);
void kv_keep_heads(kv *k, kv_choice choose, void *from, int32_t *rows);
void kv_renumber(kv *k); /* gives the rows of each list positions without gaps, which end alike, and rotates their keys */
uint32_t kv_heads(const kv *k); /* of layers without a ring */
uint32_t kv_most(const kv *k); /* the most rows that a head may have */
/* Likewise, before kv_shrink. */
static inline uint32_t longest_head(const edge_config *config)
{
    const uint32_t most = smaller(LONGEST_SHARE * config->capacity, config->context);
    const bool uneven = config->policy == POLICY_KVZAP && config->floor < 1;
    return uneven && most > config->capacity ? most : config->capacity;
}
uint32_t kv_head_length(const kv *k, uint32_t head);
/* For policies that observe: attention and age [length] of a head's rows, in logical order. */
void kv_attention(const kv *k, uint32_t head, float *paid, int32_t *ages);
/* For kvzap: the predicted importance of the rows of all heads, [heads][longest_head], in logical order; above 0. */
void kv_importance(kv *k, float *scores);
void kv_shrink(kv *k, uint32_t capacity); /* reduces the capacity, at least to the rows in use */
void kv_release(kv *k); /* returns unused pages to the system; they come back when they are written */

/* ---- earlier lengths ------------------------------------------------------------------------------------------------ */

bool kv_can_truncate(const kv *k, uint32_t length);
void kv_truncate(kv *k, uint32_t length); /* removes rows behind `length`; kv_can_truncate must hold */
/* Takes a snapshot of the fixed state, with which kv_truncate can return to the present length until rows are evicted or
 * SNAPSHOTS others have followed. kept: length of an earlier snapshot that stays; 0: none. */
void kv_remember(kv *k, uint32_t kept);
uint32_t kv_latest(const kv *k, uint32_t length); /* rows of the last usable snapshot of at most `length` rows; 0: none */

/* ---- saved conversations: kv_state.c ------------------------------------------------------------------------------- */

uint64_t kv_saved_bytes(const kv *k);
bool kv_save(const kv *k, bool (*out)(void *to, const void *bytes, size_t size), void *to);
edge_status kv_load(kv *k, bool (*in)(void *from, void *bytes, size_t size), void *from, edge_error *error);

#endif
