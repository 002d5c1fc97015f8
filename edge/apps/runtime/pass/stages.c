/* A head in two stages, a port of backends/tvm/cpu/two_stages.py: bounds of the logits of each tile of the vocabulary tell
 * which tiles may hold the largest logits. backends/tvm/cpu/phases/estimate.py computes the bounds and runs both stages. */
#include <math.h>

#include "pass_parts.h"

/* Whether two stages are worth while for the `wanted` largest logits of the next token; 0: all are wanted. Called once for
 * each token; otherwise `left` decreases by one. */
bool head_pays(head_stages *h, const design_config *design, uint32_t wanted)
{
    if (wanted && wanted <= design->tiles / TILES_EACH && !h->left)
        return true;
    h->left -= h->left > 0;
    return false;
}

/* The k-th largest of at least k values. */
static float kth_largest(const float *values, uint64_t count, uint32_t k)
{
    float found[MOST_TOP]; /* the largest first */
    uint32_t held = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (held == k && values[i] <= found[k - 1])
            continue;
        uint32_t at = held < k ? held++ : k - 1;
        for (; at && found[at - 1] < values[i]; at--)
            found[at] = found[at - 1];
        found[at] = values[i];
    }
    return found[k - 1];
}

/* Lists the tiles that may hold one of the `wanted` largest logits, and returns their number. */
uint32_t head_survivors(head_stages *h, const design_config *design, uint32_t vocab, float *floats, int32_t *integers,
                        uint32_t wanted)
{
    float *upper = floats + design->head_upper, *lower = floats + design->head_lower;
    int32_t *tiles = integers + design->head_tiles;
    uint32_t found = 0, all = (uint32_t)design->tiles;
    if (vocab % HEAD_TILE) { /* some rows of the last tile are no tokens */
        upper[all - 1] = INFINITY;
        lower[all - 1] = -INFINITY;
    }
    const float threshold = kth_largest(lower, all, wanted);
    for (uint32_t tile = 0; tile < all; tile++)
        if (upper[tile] >= threshold)
            tiles[found++] = (int32_t)tile;
    bool many = found > FEW_TILES * all;
    uint32_t longer = h->length ? h->length : 1;
    h->left = many ? longer : 0;
    h->length = !many ? 1 : 2 * longer < LONGEST_WHOLE ? 2 * longer : LONGEST_WHOLE;
    return found;
}
