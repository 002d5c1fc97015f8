/* Drafts of the next tokens, copied from repeated text or made by a model. */
#ifndef EDGE_DRAFTS_H
#define EDGE_DRAFTS_H

#include "base.h"

typedef struct drafts drafts;
drafts *drafts_layout(arena *from);
void drafts_clear(drafts *d); /* forgets the text */
void drafts_begin(drafts *d); /* begins an answer, whose gain is counted anew */
void drafts_add(drafts *d, const int32_t *tokens, uint32_t count); /* appends tokens to the text */
/* A model that drafts. share: its bytes read for a token divided by those of the model that verifies. ask: writes at
 * most `most` tokens, returns their number, and in *seconds the time that they took. */
typedef struct { double share; void *of; uint32_t (*ask)(void *of, uint32_t most, int32_t *draft, double *seconds); } drafter;
/* Writes a draft of at most `most` tokens and returns its length; 0 if verifying one would not pay. behind: KV rows that
 * the pass reads. by: NULL if no model drafts. */
uint32_t drafts_propose(drafts *d, uint32_t most, uint32_t behind, const drafter *by, int32_t *draft);
void drafts_time(drafts *d, uint32_t tokens, uint32_t behind, double seconds); /* notes the time of a pass over tokens */
void drafts_judge(drafts *d, uint32_t drafted, uint32_t accepted); /* the first `accepted` of the last draft were right */
double drafts_gain(const drafts *d); /* speed-up of the answer over one token per pass; 0: not known */

#endif
