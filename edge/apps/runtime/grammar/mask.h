/* The tokens that a grammar allows next. */
#ifndef EDGE_MASK_H
#define EDGE_MASK_H

#include "automaton.h"
#include "vocabulary.h"

typedef struct mask mask;
mask *mask_layout(arena *from, uint32_t vocab);
/* Sorts the vocabulary, in which these tokens, at most MOST_MARK_TOKENS, are marks. */
void mask_open(mask *m, const vocabulary *in, const int32_t *marks, uint32_t count);
/* Begins an answer of these rules. Returns false if they need more than the automaton's tables. */
bool mask_begin(mask *m, const rules *r, uint32_t start);
/* The next functions return false if the automaton's tables do not suffice. */
bool mask_accept(mask *m, int32_t token); /* which is allowed */
/* Sets logits of tokens that are not allowed to −∞; those that end a turn are allowed where the answer may end. */
bool mask_logits(mask *m, float *logits);
bool mask_complete(const mask *m); /* whether the answer may end here */
bool mask_ended(const mask *m);    /* whether nothing can follow */
/* An allowed token, if the answer can end behind it with `left` tokens in all; otherwise the next one of a short way to
 * its end, if that is short enough. */
int32_t mask_within(mask *m, int32_t token, uint32_t left);

#endif
