/* Rotates cached keys to other positions: a port of backends/rope.py, and of PinnedKeys (row_lists.py). */
#include "kv_parts.h"
#include "model.h"
#include "rows.h"

#include <math.h>
#include <string.h>

/* Sets `k->angles`, cosines and sines without magnitude, to a rotation by this number of positions. */
static void set_angles(kv *k, int64_t by, enum kv_factors factors)
{
    const edge_config *config = k->model->config;
    uint32_t pairs = config->head / 2;
    for (uint32_t kind = 0; kind < config->rope_kinds; kind++) {
        const angles_config *angles = find_angles(k->model, kind, factors != SHORT);
        const angles_config *less = factors == BETWEEN ? find_angles(k->model, kind, false) : NULL;
        float *cosines = k->angles + (size_t)kind * config->head, *sines = cosines + pairs;
        for (uint32_t pair = 0; pair < pairs; pair++) {
            double radians;
            if (!find_radians(angles, pair, &radians)) {
                cosines[pair] = 1, sines[pair] = 0;
                continue;
            }
            double before = 0;
            if (less && find_radians(less, pair, &before))
                radians -= before;
            cosines[pair] = (float)cos((double)by * radians), sines[pair] = (float)sin((double)by * radians);
        }
    }
}

/* Rotates a key by the angles of `set_angles` and stores it. A key smaller than the largest uses the first angles. */
static void rotate(kv *k, const kv_part *p, uint32_t row, uint32_t head, float *key)
{
    const edge_config *config = k->model->config;
    uint32_t pairs = p->rows->shape.key / 2, kind = k->model->layers[head / config->kv_heads].rope;
    const float *cosines = k->angles + (size_t)kind * config->head, *sines = cosines + config->head / 2;
    for (uint32_t pair = 0; pair < pairs; pair++) {
        float one = key[2 * pair], other = key[2 * pair + 1];
        key[2 * pair] = one * cosines[pair] - other * sines[pair];
        key[2 * pair + 1] = one * sines[pair] + other * cosines[pair];
    }
    rows_set_key(p->rows, row, head, key);
}

enum kv_factors kv_factors(const kv *k)
{
    return k->lengthened ? LONG : SHORT;
}

void kv_rotate_row(kv *k, kv_part *p, uint32_t list, uint32_t logical, int64_t by, enum kv_factors factors)
{
    set_angles(k, by, factors);
    for (uint32_t head = list; head < heads_of(p, list); head++) {
        uint32_t row = row_of(p, head, logical);
        rows_key(p->rows, row, p->of[head], k->key);
        rotate(k, p, row, p->of[head], k->key);
    }
}

static void lengthen(kv *k, kv_part *p)
{
    for (uint32_t list = 0; list < p->lists; list++)
        for (uint32_t row = 0; row < p->length; row++)
            kv_rotate_row(k, p, list, row, p->base + *position_of(p, list, row), BETWEEN);
}

uint32_t kv_foresight(const kv *k)
{
    uint32_t from = k->model->config->long_from;
    return from && !k->lengthened && k->whole.next <= from ? (uint32_t)(from + 1 - k->whole.next) : 0;
}

void kv_announce(kv *k, uint32_t count)
{
    uint32_t from = k->model->config->long_from;
    if (!from || k->lengthened || k->whole.next + count <= from)
        return;
    lengthen(k, &k->whole);
    lengthen(k, &k->ring);
    k->lengthened = true;
    k->known = 0, k->held = 0;
}

/* Every eviction rotates the first rows. To round their keys only once, each rotation begins at their first values. */
void kv_move_keys(kv *k, const uint32_t *rows, const int64_t *from, const int64_t *to, uint32_t count)
{
    kv_part *p = &k->whole;
    uint32_t size = p->rows->shape.key, first = rows[0], have = k->known;
    uint32_t end = first + count < k->pinned ? first + count : k->pinned;
    uint32_t known = end > first && first <= have ? end - first : 0;
    for (uint32_t at = 0; at < known; at++)
        known = rows[at] == first + at ? known : 0;
    for (uint32_t at = 0; at < count; at++) {
        bool kept = at < known, old = kept && first + at < have;
        set_angles(k, to[at] - (old ? k->pinned_positions[first + at] : from[at]), kv_factors(k));
        for (uint32_t each = 0; each < p->heads; each++) {
            float *first_key = k->pinned_keys + ((size_t)each * k->pinned + first + at) * size;
            uint32_t row = row_of(p, each, rows[at]);
            if (old)
                memcpy(k->key, first_key, sizeof(float) * size);
            else
                rows_key(p->rows, row, p->of[each], k->key);
            if (kept && !old)
                memcpy(first_key, k->key, sizeof(float) * size);
            rotate(k, p, row, p->of[each], k->key);
        }
        if (kept && !old)
            k->pinned_positions[first + at] = from[at], k->known = first + at + 1;
    }
}
