/* DRY: a penalty on tokens that would continue a repetition within the answer. */
#ifndef EDGE_DRY_H
#define EDGE_DRY_H

#include "base.h"

typedef struct {
    uint32_t count; /* tokens of the answer; the last MOST_DRY are kept */
    int32_t tokens[MOST_DRY];
} dry_text;

typedef struct { double multiplier, base; uint32_t allowed_length, last_n; } dry_options;

/* Whether a token's text ends a repetition: it has a line's end, a colon, a quotation mark or an asterisk. */
typedef bool (*dry_breaks)(const void *vocabulary, int32_t token);

void dry_add(dry_text *text, int32_t token);
/* Subtracts from logits, as `dry` of edge/run/sampling/sampler.py. lengths [vocab]: memory to work in. */
void dry_penalize(const dry_text *text, dry_options how, dry_breaks breaks, const void *vocabulary, int32_t *lengths,
                  float *logits);

#endif
