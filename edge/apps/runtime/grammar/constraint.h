/* The form of answers. */
#ifndef EDGE_CONSTRAINT_H
#define EDGE_CONSTRAINT_H

#include "base.h"
#include "call_rules.h"
#include "vocabulary.h"

typedef struct constraint constraint;
/* Returns NULL without memory. marks: tokens that only grammars of calls name. */
constraint *constraint_make(const vocabulary *in, const int32_t *marks, uint32_t mark_count);
void constraint_free(constraint *c);               /* c: may be NULL */
uint64_t constraint_bytes(const constraint *c);
bool constraint_holds(const constraint *c);        /* whether answers have a form */
/* Sets the form; if it is refused, answers have none. */
edge_status constraint_set(constraint *c, edge_form form, const char *text, size_t length, edge_error *error);
/* The form of answers with calls. write: call_rules */
edge_status constraint_calls(constraint *c, call_grammar *write, const call_choice *choice, edge_error *error);
void constraint_start(constraint *c);              /* begins an answer */
/* Removes tokens that the form does not allow from logits. Returns whether the answer may end here. *stuck: its tables do not
 * suffice. */
bool constraint_mask(constraint *c, float *logits, bool *stuck);
/* Takes an allowed token, or another if the answer cannot end behind it with `left` tokens in all. *ended: nothing can follow.
 * Returns the token that was taken; -1: its tables do not suffice. */
int32_t constraint_take(constraint *c, int32_t token, uint32_t left, bool *ended);
bool constraint_closed(const constraint *c); /* whether constraint_take has put other tokens in place of this answer's */
bool constraint_whole(const constraint *c);  /* whether the answer may end here, and none of those closed a value early */

#endif
