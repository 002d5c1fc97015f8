/* The next token, drawn from logits. */
#ifndef EDGE_SAMPLER_H
#define EDGE_SAMPLER_H

#include "base.h"
#include "dry.h"

typedef struct sampler sampler;
sampler *sampler_layout(arena *from, uint32_t vocab);
#define MEMBER(type, name, ...) type name;
typedef struct { SAMPLING_OPTIONS(MEMBER, MEMBER, MEMBER) uint64_t seed; } sampling;
#undef MEMBER
/* What DRY looks at. Without, its options do nothing. */
void sampler_read(sampler *s, dry_breaks breaks, const void *vocabulary);
/* Begins an answer. banned, more: lists of tokens that are never drawn, valid as long as the answer. */
void sampler_start(sampler *s, const sampling *params, const int32_t *banned, uint32_t banned_count,
                   const int32_t *more, uint32_t more_count);
/* The bias of a token of the vocabulary, for all answers from here on. at: less than MOST_BIASES; later ones are forgotten. */
void sampler_bias(sampler *s, uint32_t at, int32_t token, float bias);
void sampler_unbias(sampler *s); /* forgets all */
void sampler_ban(const sampler *s, float *logits); /* as sampler_next does first */
/* Returns the next token of logits [vocab], which it changes; -1 for NaN. Draws the same tokens as
 * edge/run/sampling/sampler.py. */
int32_t sampler_next(sampler *s, float *logits);
/* Whether an accelerator may choose the next token: the likeliest of all but `banned` [MOST_BANS], which is written. */
bool sampler_picks(const sampler *s, int32_t *banned, uint32_t *count);
uint32_t sampler_candidates(const sampler *s); /* number of largest logits that suffice, at most MOST_TOP; 0: all are read */

#endif
