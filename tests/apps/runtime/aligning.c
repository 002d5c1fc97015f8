/* Counts the partial passes that find the times of words, and those behind which a watch is told of bytes; may cancel the session in
 * the first. Linked with --wrap for both functions. */
#include "edge.h"
#include "budgets.h"
#include "pass.h"

uint32_t aligning, told;
static bool untold;
edge_session *cancelled;

const float *__real_pass_states(pass *p, const int32_t *tokens, uint32_t count, const text_places *texts, uint32_t *stride);
const float *__wrap_pass_states(pass *p, const int32_t *tokens, uint32_t count, const text_places *texts, uint32_t *stride);
const float *__wrap_pass_states(pass *p, const int32_t *tokens, uint32_t count, const text_places *texts, uint32_t *stride)
{
    if (texts && texts->stop) {
        aligning++, untold = true;
        if (cancelled)
            edge_cancel(cancelled);
    }
    return __real_pass_states(p, tokens, count, texts, stride);
}

void __real_watch_bytes(watch *w, double bytes);
void __wrap_watch_bytes(watch *w, double bytes);
void __wrap_watch_bytes(watch *w, double bytes)
{
    told += untold, untold = false;
    __real_watch_bytes(w, bytes);
}
