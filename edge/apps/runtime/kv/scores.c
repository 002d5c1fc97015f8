/* Ranks the rows of each head: a port of edge/kv/{policy,h2o,adakv,snapkv,kvzap}.py. */
#include "bundle.h"
#include "kv.h"
#include "scores.h"

#include <math.h>
#include <string.h>

struct scores {
    const edge_config *config;
    int32_t *rows, *ages;  /* [longest], of a head; ages and paid: of h2o */
    float *paid;
    uint32_t *ranks;       /* [longest] */
    uint32_t *best;        /* of kvzap: ranks of the rows of all heads that may stay beyond the floor */
    float *importance;     /* [heads][longest]: likewise */
    uint32_t *shares;      /* [heads]: likewise, rows to keep beyond the floor */
    uint32_t heads, longest;
};

typedef struct { scores *scores; const kv *cache; uint32_t budget, floor, pinned; } eviction;

static scores *scores_layout(arena *from, const edge_model *model)
{
    const edge_config *config = model->config;
    scores counted = {0}, *taken = take(from, sizeof *taken), *s = taken ? taken : &counted;
    const bool observed = config->policy == POLICY_H2O;
    s->config = config;
    s->heads = config->whole * config->shapes[0].heads;
    s->longest = longest_head(config);
    const uint64_t longest = s->longest, all = observed ? 0 : s->heads * longest;
    s->rows = take(from, sizeof *s->rows * longest);
    s->ages = take(from, observed ? sizeof *s->ages * longest : 0);
    s->paid = take(from, observed ? sizeof *s->paid * longest : 0);
    s->ranks = take(from, sizeof *s->ranks * longest);
    s->best = take(from, sizeof *s->best * all);
    s->importance = take(from, sizeof *s->importance * all);
    s->shares = take(from, observed ? 0 : sizeof *s->shares * s->heads);
    return taken;
}

/* ---- ranks ----------------------------------------------------------------------------------------------------------- */

/* Maps a score to an integer that is smaller for better rows. */
static uint32_t rank(float score)
{
    uint32_t bits;
    score = 0 - score; /* also turns −0 into 0 */
    memcpy(&bits, &score, 4);
    return score != score ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000;
}

/* The count-th smallest rank, by radix selection. below: the number of smaller ranks. */
static uint32_t select_rank(const uint32_t *ranks, uint32_t length, uint32_t count, uint32_t *below)
{
    uint32_t found = 0, mask = 0;
    *below = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t counts[256] = {0}, byte = 0;
        for (uint32_t row = 0; row < length; row++)
            if ((ranks[row] & mask) == found)
                counts[ranks[row] >> shift & 255]++;
        while (*below + counts[byte] < count)
            *below += counts[byte++];
        found |= byte << shift, mask |= 255u << shift;
    }
    return found;
}

/* Writes the `budget` rows of the smallest ranks, ascending; of equal ranks the oldest. Returns their number. */
static uint32_t best_rows(const uint32_t *ranks, uint32_t length, uint32_t budget, int32_t *rows)
{
    uint32_t below, kept = 0;
    if (!budget)
        return 0;
    const uint32_t worst = select_rank(ranks, length, budget, &below);
    uint32_t equal = budget - below; /* rows of this rank to keep */
    for (uint32_t row = 0; row < length && kept < budget; row++)
        if (ranks[row] < worst || (ranks[row] == worst && equal && equal--))
            rows[kept++] = (int32_t)row;
    return kept;
}

/* The number of newest rows that stay: those of `recent`, cut if pinned ones leave less of the head's budget. */
static uint32_t newest(const eviction *e, uint32_t budget)
{
    return smaller((uint32_t)(e->scores->config->recent * e->budget), budget - smaller(e->pinned, budget));
}

/* ---- h2o --------------------------------------------------------------------------------------------------------------- */

/* Keeps the pinned rows, the last ones, and of the others those with the most attention for their age. */
static uint32_t choose_heavy(void *from, uint32_t head, int32_t *rows)
{
    const eviction *e = from;
    scores *s = e->scores;
    const uint32_t length = kv_head_length(e->cache, head), last = newest(e, e->budget);
    float aging = (float)s->config->aging;
    kv_attention(e->cache, head, s->paid, s->ages);
    for (uint32_t row = 0; row < length; row++) {
        float age = (float)(s->ages[row] > 1 ? s->ages[row] : 1);
        float divisor = aging == 1 ? age : (float)exp((double)aging * log((double)age));
        bool protected = row < e->pinned || row >= length - last;
        s->ranks[row] = protected ? rank(INFINITY) : rank(s->paid[row] / divisor);
    }
    return best_rows(s->ranks, length, e->budget, rows);
}

/* ---- kvzap ------------------------------------------------------------------------------------------------------------- */

/* The importance of a row or of the most important of its neighbours; NaN if that of one is. */
static float pooled(const float *importance, uint32_t length, uint32_t row, uint32_t half)
{
    float most = importance[row];
    for (uint32_t at = row > half ? row - half : 0; at < length && at <= row + half; at++)
        most = importance[at] > most || importance[at] != importance[at] ? importance[at] : most;
    return most;
}

/* Writes the ranks of a head's rows. */
static void rank_rows(scores *s, uint32_t head, uint32_t length)
{
    const float *importance = s->importance + (size_t)head * s->longest;
    for (uint32_t row = 0; row < length; row++)
        s->ranks[row] = rank(pooled(importance, length, row, s->config->kernel / 2));
}

/* Writes the `most` best of `s->ranks`, but not those of NaN. Returns their number. */
static uint32_t write_best(const scores *s, uint32_t length, uint32_t most, uint32_t *out)
{
    uint32_t below = 0, count = 0;
    const uint32_t worst = most && most < length ? select_rank(s->ranks, length, most, &below) : most ? UINT32_MAX : 0;
    for (uint32_t row = 0, equal = most - below; row < length; row++)
        if (s->ranks[row] != UINT32_MAX && (s->ranks[row] < worst || (s->ranks[row] == worst && equal && equal--)))
            out[count++] = s->ranks[row];
    return count;
}

/* Sets `s->shares` to the number of each head's rows among the best of all heads, `mean` for each of them; of a head, at most
 * `longest` rows with the floor compete. Among equals, those of the first heads. */
static void share_rows(const eviction *e, uint32_t mean, uint32_t longest)
{
    scores *s = e->scores;
    uint32_t total = 0, below = 0;
    for (uint32_t head = 0; head < s->heads; head++) {
        const uint32_t length = kv_head_length(e->cache, head), most = smaller(length, longest);
        rank_rows(s, head, length);
        s->shares[head] = write_best(s, length, most > e->floor ? most - e->floor : 0, s->best + total);
        total += s->shares[head];
    }
    const uint32_t count = (uint64_t)mean * s->heads < total ? mean * s->heads : total;
    const uint32_t worst = count ? select_rank(s->best, total, count, &below) : 0;
    uint32_t equal = count - below;
    for (uint32_t head = 0, at = 0; head < s->heads; head++) {
        const uint32_t end = at + s->shares[head];
        for (s->shares[head] = 0; at < end; at++)
            s->shares[head] += s->best[at] < worst || (s->best[at] == worst && equal && equal--);
    }
}

/* Keeps the pinned rows, the last ones, and of the others the most important and their neighbours. */
static uint32_t choose_important(void *from, uint32_t head, int32_t *rows)
{
    const eviction *e = from;
    scores *s = e->scores;
    const uint32_t length = kv_head_length(e->cache, head), budget = smaller(e->floor + s->shares[head], length);
    const uint32_t first = smaller(e->pinned, budget), last = newest(e, budget);
    rank_rows(s, head, length);
    for (uint32_t row = 0; row < length; row++)
        if (row < first || row >= length - last)
            s->ranks[row] = rank(INFINITY);
    return best_rows(s->ranks, length, budget, rows);
}

/* ---- evictions --------------------------------------------------------------------------------------------------------- */

/* The rows of a head on average, rounded to the nearest, a half to the even. */
static uint32_t mean_rows(const scores *s, const kv *k)
{
    uint64_t sum = 0;
    for (uint32_t head = 0; head < s->heads; head++)
        sum += kv_head_length(k, head);
    const uint64_t mean = sum / s->heads, rest = 2 * (sum % s->heads);
    return (uint32_t)(mean + (rest > s->heads || (rest == s->heads && mean % 2)));
}

static uint32_t scores_evict(scores *s, kv *k, uint32_t budget, uint32_t pinned)
{
    eviction e = {s, k, budget, 0, pinned};
    const uint32_t before = mean_rows(s, k), floor = (uint32_t)(s->config->floor * budget);
    if (s->config->policy == POLICY_KVZAP) {
        e.floor = floor > smaller(pinned, budget) ? floor : smaller(pinned, budget);
        kv_importance(k, s->importance);
        share_rows(&e, budget - e.floor, s->longest - smaller(kv_capacity(k) - budget, s->longest));
    }
    kv_keep_heads(k, s->config->policy == POLICY_KVZAP ? choose_important : choose_heavy, &e, s->rows);
    return before - mean_rows(s, k);
}

const scores_kind edge_scores = {scores_layout, scores_evict};
