/* Memory that returns to the system: KV rows, pages that no row fills, scratch memory. A port of edge/run/reclaim.py. */
#include <math.h>

#include "encoder.h"
#include "kv.h"
#include "pass.h"
#include "policy.h"
#include "reclaim.h"

static uint32_t fewest_rows(const edge_session *s)
{
    uint32_t capacity = kv_capacity(s->rows), least = least_rows(policy_pinned(s->policy));
    if (least < SMALLEST_ROWS)
        least = SMALLEST_ROWS;
    uint32_t used = kv_used(s->rows);
    if (!policy_evicts(s->policy) && least < used)
        least = used;
    if (s->ears) /* a window of a sound may need all rows */
        least = capacity;
    return least < capacity ? least : capacity;
}

double reclaimable(const edge_session *s)
{
    uint64_t capacity = kv_capacity(s->rows), rows = s->accelerator ? 0 : capacity - fewest_rows(s); /* accelerators: 0 */
    return (double)(rows * kv_bytes(s->rows) / capacity);
}

static void give_rows(edge_session *s, double bytes)
{
    uint64_t before = kv_bytes(s->rows);
    for (;;) {
        uint64_t capacity = kv_capacity(s->rows), now = kv_bytes(s->rows), floor = fewest_rows(s);
        double lacking = bytes - (double)(before - now);
        if (!(lacking > 0) || capacity <= floor)
            break;
        uint64_t less = lacking < (double)now ? ((uint64_t)lacking * capacity + now - 1) / now : capacity;
        uint64_t rows = less < capacity ? (capacity - less) / ROWS_STEP * ROWS_STEP : 0;
        if (rows < floor)
            rows = floor;
        if (policy_evicts(s->policy) && kv_used(s->rows) > rows) {
            uint64_t kept = rows - evicted_share((uint32_t)rows);
            uint32_t gone = policy_shrink(s->policy, s->rows, (uint32_t)kept);
            s->evicted += gone;
            s->all_evicted += gone;
        }
        kv_shrink(s->rows, (uint32_t)rows);
        if (kv_capacity(s->rows) >= capacity)
            break;
    }
    s->needed -= (double)(before - kv_bytes(s->rows));
}

void reclaim(edge_session *s, double bytes)
{
    bool in_prompt = s->started && s->waiting && !s->generated;
    if (bytes > 0 && in_prompt && s->chunk > SMALLEST_CHUNK)
        s->chunk = s->chunk / 2 > SMALLEST_CHUNK ? s->chunk / 2 : SMALLEST_CHUNK; /* checks memory more often */
    give_rows(s, bytes);
}

void reclaim_trim(edge_session *s)
{
    int32_t asked = __atomic_exchange_n(&s->trim, 0, __ATOMIC_ACQUIRE);
    if (!asked)
        return;
    reclaim(s, rint((double)(asked - 1) / (double)EDGE_TRIM_ALL * reclaimable(s)));
    if (s->accelerator)
        return;
    kv_release(s->rows);
    pass_release(s->pass);
    if (s->encoder)
        encoder_release(s->encoder);
}
