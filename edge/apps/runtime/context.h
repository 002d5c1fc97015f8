/* The conversation: rows in the KV cache, and tokens that wait to run. */
#ifndef EDGE_CONTEXT_H
#define EDGE_CONTEXT_H

#include "session.h"

void context_reset(edge_session *s);         /* forgets all but the system's text */
void context_restart(edge_session *s);       /* the same, but keeps the rows of the system's text if it can */
void context_settle(edge_session *s);        /* an answer is over */
void context_drop(edge_session *s);          /* forgets the rows of drafts that the answer has not come to */
/* Adds tokens that wait to run. False: they do not fit, or the prompt was stopped. */
bool context_push(edge_session *s, const int32_t *ids, size_t count);
edge_finish context_prompt(edge_session *s); /* runs all that wait; sets `logits` */
edge_finish context_step(edge_session *s);   /* runs the token that was generated */
void context_pay(edge_session *s);           /* the answer has ended: waits for its power limit */
void context_trim(edge_session *s);          /* as edge_trim has asked; no drafts are there */
double context_spare(const edge_session *s); /* bytes that can be given back */
turn_mark context_mark(const edge_session *s);
bool context_rewind(edge_session *s, const turn_mark *mark);

#endif
