/* In double precision: a few states of each text or picture are normalised. */
#include <math.h>

#include "norm.h"

bool norm_is_possible(const edge_model *model, const embed_config *c)
{
    uint64_t weights = model->sizes[SECTION_WEIGHTS], bytes = (uint64_t)model->config->hidden * sizeof(float);
    const uint64_t places[] = {c->norm_weight, c->norm_bias};
    for (int i = 0; i < 2; i++)
        if (places[i] != UINT64_MAX && (places[i] % 4 || places[i] > weights || bytes > weights - places[i]))
            return false;
    return c->norm <= NORM_LAYER && (!c->norm || places[0] != UINT64_MAX);
}

void norm_state(const edge_model *model, const embed_config *c, const float *state, double *out)
{
    const uint8_t *weights = model->sections[SECTION_WEIGHTS];
    const uint32_t size = model->config->hidden;
    double mean = 0, squares = 0;
    for (uint32_t i = 0; c->norm == NORM_LAYER && i < size; i++)
        mean += (double)state[i] / size;
    for (uint32_t i = 0; i < size; i++)
        squares += ((double)state[i] - mean) * ((double)state[i] - mean);
    const double scale = c->norm ? 1 / sqrt(squares / size + c->norm_eps) : 1;
    const float *weight = c->norm ? (const float *)(const void *)(weights + c->norm_weight) : NULL;
    const float *bias = c->norm && c->norm_bias != UINT64_MAX ? (const float *)(const void *)(weights + c->norm_bias) : NULL;
    for (uint32_t i = 0; i < size; i++)
        out[i] = ((double)state[i] - (weight ? mean : 0)) * scale * (weight ? (double)weight[i] : 1) + (bias ? (double)bias[i] : 0);
}
