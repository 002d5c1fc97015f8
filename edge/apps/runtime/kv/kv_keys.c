/* Rotates cached keys to other positions: a port of backends/rope.py, of PinnedKeys (row_lists.py), and of RowImportance
 * (backends/importance.py), which reads keys as they were before RoPE. Policies rank rows by it, or by attention. */
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

/* Rotates a key by the angles of `set_angles`. A key smaller than the largest uses the first angles. */
static void rotate(const kv *k, const kv_part *p, uint32_t head, float *key)
{
    const edge_config *config = k->model->config;
    uint32_t pairs = p->rows->shape.key / 2, kind = k->model->layers[head / config->kv_heads].rope;
    const float *cosines = k->angles + (size_t)kind * config->head, *sines = cosines + config->head / 2;
    for (uint32_t pair = 0; pair < pairs; pair++) {
        float one = key[2 * pair], other = key[2 * pair + 1];
        key[2 * pair] = one * cosines[pair] - other * sines[pair];
        key[2 * pair + 1] = one * sines[pair] + other * cosines[pair];
    }
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
        rotate(k, p, p->of[head], k->key);
        rows_set_key(p->rows, row, p->of[head], k->key);
    }
}

void kv_lengthen(kv *k, kv_part *p)
{
    for (uint32_t list = 0; list < p->lists; list++)
        for (uint32_t row = 0; row < length_of(p, list); row++)
            kv_rotate_row(k, p, list, row, p->base + *position_of(p, list, row), BETWEEN);
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
            rotate(k, p, p->of[each], k->key);
            rows_set_key(p->rows, row, p->of[each], k->key);
        }
        if (kept && !old)
            k->pinned_positions[first + at] = from[at], k->known = first + at + 1;
    }
}

/* ---- reads of policies -------------------------------------------------------------------------------------------- */

uint32_t kv_heads(const kv *k) { return k->whole.heads; }
uint32_t kv_head_length(const kv *k, uint32_t head) { return length_of(&k->whole, head); }

void kv_attention(const kv *k, uint32_t head, float *paid, int32_t *ages)
{
    const kv_part *p = &k->whole;
    for (uint32_t row = 0; row < p->length; row++) {
        paid[row] = k->paid[row_of(p, head, row)];
        ages[row] = (int32_t)(p->next - *position_of(p, head, row));
    }
}

/* The importance of a row whose position `set_angles` takes back: features of its key before RoPE and the logarithms of its
 * norms, by the head's linear model. Latent rows begin with their values. */
static float importance_of(kv *k, uint32_t head, uint32_t row)
{
    const kv_part *p = &k->whole;
    const uint32_t size = k->model->config->ranked;
    const float *weights = (const float *)k->model->sections[SECTION_IMPORTANCE] + (size_t)head * (size + IMPORTANCE_EXTRA);
    const layer_config *layer = k->model->layers + p->of[head] / k->model->config->kv_heads;
    double square = 0, found = 0, values = layer->latent ? 0 : rows_value_norm(p->rows, row, k->key);
    rows_key(p->rows, row, p->of[head], k->key);
    rotate(k, p, p->of[head], k->key);
    for (uint32_t at = 0; at < size; at++) {
        const double value = (double)k->key[at] * (layer->latent && at >= layer->latent ? layer->unbalance : 1);
        if (at && at == layer->latent)
            values = sqrt(square);
        square += value * value;
        found += value * weights[at];
    }
    found += weights[size] * log(sqrt(square) + NORM_FLOOR) + weights[size + 1] * log(values + NORM_FLOOR) + weights[size + 2];
    return (float)exp(found > LARGEST_IMPORTANCE ? LARGEST_IMPORTANCE : found);
}

/* Goes by position rather than by head: most heads share positions, whose angles take longer than the product of a row. */
void kv_importance(kv *k, float *scores)
{
    const kv_part *p = &k->whole;
    memset(k->scored, 0, sizeof *k->scored * p->heads);
    for (;;) {
        int32_t position = INT32_MAX;
        for (uint32_t head = 0; head < p->heads; head++)
            if (k->scored[head] < length_of(p, head) && *position_of(p, head, k->scored[head]) < position)
                position = *position_of(p, head, k->scored[head]);
        if (position == INT32_MAX)
            return;
        set_angles(k, -(p->base + position), kv_factors(k));
        for (uint32_t head = 0; head < p->heads; head++)
            for (uint32_t *row = k->scored + head; *row < length_of(p, head) && *position_of(p, head, *row) == position; ++*row)
                scores[(size_t)head * p->longest + *row] = importance_of(k, head, row_of(p, head, *row));
    }
}
