/* The conversation: rows in the KV cache, and tokens that wait to run. */
#ifndef EDGE_CONTEXT_H
#define EDGE_CONTEXT_H

#include "session.h"

void context_reset(edge_session *s);         /* forgets all but the system prompt's tokens */
void context_restart(edge_session *s);       /* the same, but keeps the system prompt's rows where possible */
void context_settle(edge_session *s);        /* ends an answer */
void context_truncate(edge_session *s, uint32_t rows); /* kv_truncate: other tokens may follow */
void context_drop(edge_session *s);          /* drops the rows of drafts that the answer has not reached */
/* Appends tokens to those that wait. Returns false if they do not fit, or the prompt was stopped. */
bool context_push(edge_session *s, const int32_t *ids, size_t count);
typedef struct { edge_session *session; int32_t bos; } appending; /* bos: token that must begin the prompt; -1: none */
static inline bool push_ids(void *to, const int32_t *ids, size_t count) /* context_push as an ids_out; to: an appending */
{
    appending *own = to;
    int32_t bos = own->bos;
    own->bos = -1;
    if (bos >= 0 && (!count || ids[0] != bos) && !context_push(own->session, &bos, 1))
        return false;
    return context_push(own->session, ids, count);
}
edge_finish context_prompt(edge_session *s); /* runs a chunk of the waiting tokens; sets `logits` */
edge_finish context_step(edge_session *s);   /* runs the generated token; sets `logits` */
/* For transcripts: begin one; look at budgets before `tokens` run; end it. */
void context_begin(edge_session *s);
edge_finish context_look(edge_session *s, uint32_t tokens);
/* Notes that a pass through a share of the layers has read that of the weights and of all rows. */
void context_note_share(edge_session *s, double share);
void context_end(edge_session *s);
void context_pay(edge_session *s);           /* at the end of an answer: waits for its power limit */
turn_mark context_mark(const edge_session *s);
bool context_rewind(edge_session *s, const turn_mark *mark);

/* Whether the cache has a tail (a fixed state, a ring), so that it cannot return to every length: some tokens may have
 * to run again. */
static inline bool context_has_tail(const edge_session *s)
{
    return s->model->config->states || s->model->config->ringed;
}

#endif
