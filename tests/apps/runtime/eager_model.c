/* drafts.c for tests: the model drafts as many tokens as may be, whatever that costs; and its drafts behind any token. */
#define drafts_propose copies
#include "drafts.c"
#undef drafts_propose
#include "bundle.h"
#include "session.h"

uint32_t drafts_propose(drafts *d, uint32_t most, uint32_t behind, const drafter *by, int32_t *draft)
{
    (void)behind;
    d->kind = OF_MODEL;
    return most ? ask(d, by, most, draft) : 0;
}

uint32_t assist(edge_session *s, int32_t token, uint32_t most, int32_t *draft)
{
    return EDGE_DRAFTER->draft(s->own_drafts, token, s->state_row, most, draft);
}
