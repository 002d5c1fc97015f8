/* Marks of turns, by which the conversation returns to an earlier length. */
#include <string.h>

#include "context.h"
#include "kv.h"
#include "policy.h"

turn_mark context_mark(const edge_session *s)
{
    turn_mark mark = {.evicted = s->evicted, .rows = kv_length(s->rows), .count = s->waiting, .pictures = s->shown,
                      .asked = s->turn == TURN_ASKED};
    if (mark.count <= MOST_LEFT) {
        memcpy(mark.left, s->ids + s->first, mark.count * sizeof *s->ids);
    } else { /* an earlier conversation that has not run */
        mark.rows += mark.count;
        mark.count = 0;
    }
    return mark;
}

bool context_rewind(edge_session *s, const turn_mark *mark)
{
    uint32_t length = kv_length(s->rows);
    if (mark->evicted != s->evicted)
        return false;
    if (length <= mark->rows) { /* the turns to take back have not run */
        uint64_t left = (uint64_t)mark->rows - length + mark->count;
        if (left > s->waiting)
            return false;
        s->waiting = (uint32_t)left;
        return true;
    }
    if (mark->rows && policy_observes(s->policy))
        return false;
    uint32_t rows = mark->rows;
    if (!kv_can_truncate(s->rows, rows)) {
        if (!context_has_tail(s) || s->evicted) /* the tokens in between are unknown */
            return false;
        rows = kv_latest(s->rows, rows);
    }
    context_truncate(s, rows);
    uint32_t again = mark->rows - rows;
    s->first = 0;
    s->waiting = again + mark->count;
    if (again)
        memcpy(s->ids, s->run_ids + rows, again * sizeof *s->ids);
    memcpy(s->ids + again, mark->left, mark->count * sizeof *s->ids);
    return true;
}
