/* Drafts by an assistant of Gemma 4: a port of edge/run/drafting/assistant.py and backends/reference/assistant.py. Its layers read
 * the model's rows, and all tokens of a draft have the position of the next one.
 *
 *     embedding | state before --pre--> x --layers, norm--> normed --centroids--> their rows of the head --> token
 *                                                             \--post--> state, of the next step
 *
 * Section ASSISTANT of the file in section DRAFT, made by edge/apps/sections/draft_file.py: an assistant_config, float
 * pre[own][2 * hidden], post[hidden][own], centroids[centroids][own] and scales[vocab], int32 order[vocab], the tokens of the rows of
 * int8 codes[vocab][own]. */
#include <math.h>
#include <string.h>

#include "beside.h"
#include "drafter.h"
#include "embed.h"
#include "matrix.h"
#include "model.h"
#include "norm.h"
#include "pass.h"

#if defined __GNUC__ && !defined __clang__
#pragma GCC optimize("O3") /* vectorizes, as clang does at -Os: a draft reads thousands of rows */
#endif

struct draft_layers {
    const edge_model *model, *layers;
    const assistant_config *config;
    pass *main, *pass;
    matrix pre, post, centroids;
    const float *scales;
    const int32_t *order;
    const int8_t *codes;
    float *joined, *x, *scores; /* [2 * hidden], [own], [centroids] */
    double *normed;             /* [the larger of hidden and own] */
    int16_t *rounded;           /* [own] */
};

static const assistant_config *config_of(const edge_model *layers)
{
    return (const assistant_config *)layers->sections[SECTION_ASSISTANT];
}

static uint64_t section_bytes(const assistant_config *c, uint64_t own)
{
    return sizeof *c + 4 * (own * 3 * c->hidden + own * c->centroids + 2ull * c->vocab) + own * c->vocab;
}

static edge_status check(const edge_model *layers, const edge_model *model, edge_error *error)
{
    const assistant_config *c = config_of(layers);
    const edge_config *own = layers->config, *main = model->config;
    const embed_config *norm = model_embed(layers);
    const uint64_t size = layers->sizes[SECTION_ASSISTANT];
    bool right = size >= sizeof *c && !own->vocab && norm && norm_is_possible(layers, norm) && c->hidden == main->hidden && c->vocab == main->vocab
        && c->vocab && !main->encoder && c->centroids <= c->vocab && size == section_bytes(c, own->hidden) && norm_is_possible(model, &c->norm)
        && own->kv_heads == main->kv_heads && own->head == main->head && own->kv_dtype == main->kv_dtype && c->sources <= main->layers
        && (!c->centroids || (c->vocab % c->centroids == 0 && c->used && c->used <= c->centroids));
    return right ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its assistant): copy or export it again");
}

static draft_layers *layout(arena *from, const edge_model *layers, const edge_model *model, pass *main, kv *rows, const char *isa)
{
    const assistant_config *c = config_of(layers);
    const uint32_t own = layers->config->hidden;
    const design_config *design;
    if (pass_choose(layers, isa, &design, NULL))
        return NULL;
    draft_layers *a = take(from, sizeof *a);
    float *joined = take(from, 2ull * c->hidden * sizeof *joined), *x = take(from, own * sizeof *x);
    float *scores = take(from, c->centroids * sizeof *scores);
    double *normed = take(from, (own > c->hidden ? own : c->hidden) * sizeof *normed);
    int16_t *rounded = take(from, own * sizeof *rounded);
    pass *p = beside_layout(from, layers, design, model, rows);
    if (!p || pass_start(p, 1, 0, NULL))
        return NULL;
    if (c->sources && model->sizes[SECTION_NORMALS])
        beside_normals(p, model->sections[SECTION_NORMALS], c->sources);
    const float *at = (const float *)(const void *)(c + 1);
    *a = (draft_layers){.model = model, .layers = layers, .config = c, .main = main, .pass = p, .joined = joined, .x = x,
                     .scores = scores, .normed = normed, .rounded = rounded};
    a->pre = (matrix){at, own, 2 * c->hidden, false};
    a->post = (matrix){at += (size_t)own * 2 * c->hidden, c->hidden, own, false};
    a->centroids = (matrix){at += (size_t)own * c->hidden, c->centroids, own, false};
    a->scales = at += (size_t)own * c->centroids;
    a->order = (const int32_t *)(const void *)(at + c->vocab);
    a->codes = (const int8_t *)(a->order + c->vocab);
    return a;
}

static double share(const edge_model *layers, const edge_model *model)
{
    const assistant_config *c = config_of(layers);
    const double own = layers->config->hidden, rows = c->centroids ? (double)c->vocab / c->centroids * c->used : c->vocab;
    const double around = 4 * own * (3.0 * c->hidden + c->centroids) + rows * own;
    return weights_share(layers, model) + around / (double)model->config->weight_bytes;
}

static void multiply(const matrix *m, const float *x, float *out)
{
    memset(out, 0, m->rows * sizeof *out);
    matrix_add(m, x, 1, out, 0);
}

/* Rounds x for products with rows of the head, whose sums fit 32 bits. */
static void round_inputs(draft_layers *a)
{
    const uint32_t own = a->layers->config->hidden;
    const double most = fmin(INT16_MAX, (double)INT32_MAX / (128.0 * own));
    float largest = 0;
    for (uint32_t i = 0; i < own; i++)
        largest = fabsf(a->x[i]) > largest ? fabsf(a->x[i]) : largest;
    for (uint32_t i = 0; i < own; i++) {
        const double part = (double)a->x[i] / (double)largest * most;
        a->rounded[i] = (int16_t)(isfinite(part) ? part : 0); /* all are 0, or the file is damaged */
    }
}

/* The best of `count` rows of the head from `first` on, if it is better than *best. */
static void look(const draft_layers *a, uint32_t first, uint32_t count, float *best, int32_t *token)
{
    const uint32_t own = a->layers->config->hidden;
    for (uint32_t row = first; row < first + count; row++) {
        const int8_t *codes = a->codes + (size_t)row * own;
        int32_t sum = 0;
        for (uint32_t i = 0; i < own; i++)
            sum += codes[i] * a->rounded[i];
        const float score = (float)sum * a->scales[row];
        if (score > *best)
            *best = score, *token = a->order[row];
    }
}

/* The likeliest token for the normalised state in x. */
static int32_t choose(draft_layers *a)
{
    const assistant_config *c = a->config;
    float best = -INFINITY;
    int32_t token = -1;
    round_inputs(a);
    if (!c->centroids)
        look(a, 0, c->vocab, &best, &token);
    else
        multiply(&a->centroids, a->x, a->scores);
    const uint32_t each = c->centroids ? c->vocab / c->centroids : 0;
    for (uint32_t used = 0; c->centroids && used < c->used; used++) {
        uint32_t centroid = 0;
        for (uint32_t i = 1; i < c->centroids; i++)
            centroid = a->scores[i] > a->scores[centroid] ? i : centroid;
        a->scores[centroid] = -INFINITY;
        look(a, centroid * each, each, &best, &token);
    }
    return token;
}

static void round_to_floats(const double *from, uint32_t count, float *to)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] = (float)from[i];
}

static uint32_t draft(draft_layers *a, int32_t token, uint32_t row, uint32_t most, int32_t *drafted)
{
    const uint32_t hidden = a->config->hidden, own = a->layers->config->hidden;
    uint32_t stride, count = 0;
    norm_state(a->model, &a->config->norm, pass_inputs(a->main, &stride) + (size_t)row * stride, a->normed);
    round_to_floats(a->normed, hidden, a->joined + hidden);
    for (; count < most; count++) {
        const float *embedding = embed_tokens(a->main, &token, 1);
        if (!embedding)
            break;
        memcpy(a->joined, embedding, hidden * sizeof *embedding);
        multiply(&a->pre, a->joined, a->x);
        const float *state = beside_run(a->pass, a->x);
        if (!state)
            break;
        norm_state(a->layers, model_embed(a->layers), state, a->normed);
        round_to_floats(a->normed, own, a->x);
        token = choose(a);
        if (token < 0 || (uint32_t)token >= a->config->vocab) /* NaN, or a damaged file */
            break;
        multiply(&a->post, a->x, a->joined + hidden);
        drafted[count] = token;
    }
    return count;
}

const drafter_kind edge_assistant = {layout, draft, share, check, NULL, NULL, NULL};
