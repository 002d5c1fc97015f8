/* Chooses the rows that stay when the cache is full: a port of edge/kv/{full,streaming,window}.py and of shrink and make_room
 * in edge/run/sequences/rows.py. Policies that rank rows are in scores.c. */
#include "bundle.h"
#include "given.h"
#include "kv.h"
#include "policy.h"
#include "scores.h"

#include <string.h>

struct policy {
    const edge_config *config;
    int32_t *rows;     /* [capacity] */
    scores *ranked;    /* NULL: the policy ranks no rows */
    uint32_t pinned;
    uint16_t *shown;   /* [capacity]: pictures of rows; NULL: the bundle has no eyes */
    uint8_t *kept;     /* [capacity] */
    uint32_t pictures; /* the highest of the conversation's */
    struct { uint32_t rows, chosen; bool must, done; } *each; /* [MOST_PICTURES + 1] */
};

policy *policy_layout(arena *from, const edge_model *model)
{
    const edge_config *config = model->config;
    policy counted = {0}, *taken = take(from, sizeof *taken), *p = taken ? taken : &counted;
    p->config = config;
    p->rows = take(from, sizeof *p->rows * config->capacity);
    const bool ranks = EDGE_SCORES && (config->policy == POLICY_H2O || config->policy == POLICY_KVZAP);
    p->ranked = ranks ? EDGE_SCORES->layout(from, model) : NULL;
    const bool sees = model->sizes[SECTION_EYES];
    p->shown = take(from, sees ? sizeof *p->shown * config->capacity : 0);
    p->kept = take(from, sees ? config->capacity : 0);
    p->each = take(from, sees ? sizeof *p->each * (MOST_PICTURES + 1) : 0);
    p->pinned = config->sinks;
    return taken;
}

bool policy_evicts(const policy *p) { return p->config->policy != POLICY_FULL; }
bool policy_observes(const policy *p) { return p->config->policy == POLICY_H2O; }

uint32_t policy_pinned(const policy *p) { return p->pinned; }
uint32_t evicted_share(uint32_t rows) { return rows / EVICTED_SHARE ? rows / EVICTED_SHARE : 1; }
uint32_t least_rows(uint32_t pinned) { return 2 * pinned + WRITABLE_ROWS; }

void policy_pin(policy *p, uint32_t count, uint32_t capacity)
{
    uint32_t most = capacity > least_rows(0) ? (capacity - least_rows(0)) / 2 : 0;
    count = smaller(count, smaller(most, p->config->pinned));
    p->pinned = count > p->config->sinks ? count : p->config->sinks;
}

/* ---- pictures -------------------------------------------------------------------------------------------------------- */

void policy_show(policy *p, uint32_t row, uint32_t picture)
{
    p->shown[row] = (uint16_t)picture;
    p->pictures = picture > p->pictures ? picture : p->pictures;
}

void policy_forget(policy *p)
{
    if (p->pictures)
        memset(p->shown, 0, sizeof *p->shown * p->config->capacity);
    p->pictures = 0;
}

uint32_t policy_picture(const policy *p, uint32_t row) { return p->pictures ? p->shown[row] : 0; }

/* Of the pictures left, the next to keep: those that must stay, then those of which most was chosen, then the latest;
 * 0: none. */
static uint32_t next_picture(const policy *p)
{
    uint32_t best = 0;
    for (uint32_t i = p->pictures; i > 0; i--) {
        if (p->each[i].done || !(p->each[i].must || p->each[i].chosen))
            continue;
        uint64_t share = best ? (uint64_t)p->each[i].chosen * p->each[best].rows : 0;
        uint64_t others = best ? (uint64_t)p->each[best].chosen * p->each[i].rows : 0;
        bool before = p->each[i].must != p->each[best].must ? p->each[i].must : share > others;
        best = !best || before ? i : best;
    }
    return best;
}

/* Drops the oldest `count` rows of text that are not pinned, if there are as many. Returns how many were dropped. */
static uint32_t drop_text(policy *p, uint32_t length, uint32_t count)
{
    uint32_t found = 0;
    for (uint32_t row = p->pinned; row < length; row++)
        found += p->kept[row] && !p->shown[row];
    if (found < count)
        return 0;
    for (uint32_t row = p->pinned, left = count; left; row++)
        if (p->kept[row] && !p->shown[row])
            p->kept[row] = 0, left--;
    return count;
}

/* Changes the `budget` chosen rows such that each picture stays whole, or leaves: `whole_pictures` of
 * edge/run/sequences/whole_pictures.py. Returns their number. */
static uint32_t keep_whole(policy *p, uint32_t length, uint32_t budget)
{
    memset(p->each, 0, (p->pictures + 1) * sizeof *p->each);
    memset(p->kept, 0, length);
    uint32_t free = budget, count = 0;
    for (uint32_t row = 0; row < length; row++)
        p->each[p->shown[row]].rows++;
    for (uint32_t i = 0; i < budget; i++) {
        const uint32_t row = (uint32_t)p->rows[i];
        p->each[p->shown[row]].chosen++;
        p->kept[row] = !p->shown[row];
        free -= p->kept[row];
    }
    for (uint32_t row = 0; row < smaller(p->pinned, length); row++)
        p->each[p->shown[row]].must = true;
    p->each[p->shown[length - 1]].must = true;
    for (uint32_t picture; (picture = next_picture(p)) != 0;) {
        const uint32_t rows = p->each[picture].rows;
        p->each[picture].done = true;
        if (p->each[picture].must && rows > free)
            free += drop_text(p, length, rows - free);
        if (rows > free)
            continue;
        for (uint32_t row = 0; row < length; row++)
            p->kept[row] |= p->shown[row] == picture;
        free -= rows;
    }
    for (uint32_t row = length; row-- > 0 && free;)
        if (!p->kept[row] && !p->shown[row])
            p->kept[row] = 1, free--;
    for (uint32_t row = 0; row < length; row++)
        if (p->kept[row]) {
            p->shown[count] = p->shown[row];
            p->rows[count++] = (int32_t)row;
        }
    return count;
}

uint32_t policy_shrink(policy *p, kv *k, uint32_t budget)
{
    uint32_t length = kv_length(k), pinned = smaller(p->pinned, budget);
    if (length <= budget || !policy_evicts(p))
        return 0;
    if (p->ranked) {
        const uint32_t evicted = EDGE_SCORES->evict(p->ranked, k, budget, p->pinned);
        if (kv_next_position(k) + kv_free(k) > p->config->context) /* otherwise gaps may stay open */
            kv_renumber(k);
        return evicted;
    }
    for (uint32_t row = 0; row < budget; row++)
        p->rows[row] = (int32_t)(row < pinned ? row : row + length - budget);
    kv_keep(k, p->rows, p->pictures ? keep_whole(p, length, budget) : budget);
    return length - kv_length(k);
}

bool policy_make_room(policy *p, kv *k, uint32_t count, uint64_t *evicted)
{
    uint32_t capacity = kv_capacity(k);
    if (count <= kv_free(k))
        return true;
    if (!policy_evicts(p) || count > capacity)
        return false;
    uint32_t step = smaller(p->config->evict_step, evicted_share(capacity));
    *evicted += policy_shrink(p, k, capacity - (count > step ? count : step));
    return true;
}
