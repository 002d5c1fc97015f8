/* KV policies: which rows stay when the cache is full. */
#ifndef EDGE_POLICY_H
#define EDGE_POLICY_H

#include "base.h"
#include "kv.h"
#include "model.h"

typedef struct policy policy;
policy *policy_layout(arena *from, const edge_model *model);
bool policy_evicts(const policy *p);
bool policy_observes(const policy *p); /* whether it needs the attention of every query (h2o) */
/* Pins the first `count` rows of a conversation, as far as the plan and a cache of `capacity` rows have room, and at least
 * the sinks. */
void policy_pin(policy *p, uint32_t count, uint32_t capacity);
uint32_t policy_pinned(const policy *p);
uint32_t evicted_share(uint32_t rows); /* rows that a full cache of `rows` frees at once */
uint32_t least_rows(uint32_t pinned);  /* smallest cache: the pinned rows, as many recent ones, and a few to write to */
/* Notes the pictures of rows: a row's, from 1 on, 0 for text; policy_forget: all rows are gone. A picture's rows stay
 * together, or leave together. */
void policy_show(policy *p, uint32_t row, uint32_t picture);
void policy_forget(policy *p);
uint32_t policy_picture(const policy *p, uint32_t row);
/* Evicts until at most `budget` rows are left. Returns the number of evicted rows. */
uint32_t policy_shrink(policy *p, kv *k, uint32_t budget);
/* Evicts until `count` more rows fit, as Context.make_room, and adds the evicted ones to *evicted. Returns false if they do
 * not fit. */
bool policy_make_room(policy *p, kv *k, uint32_t count, uint64_t *evicted);

#endif
