/* Drafts by one layer behind a model's states. There are two kinds, which differ in what they read, `features` of the config tells
 * which: a model's own layer for multi-token prediction (0), whose tables find embedding and head among the model's weights, and an
 * EAGLE-3 head (else), which has a head of its own: a port of edge/run/drafting/mtp_layer.py and eagle_head.py.
 *
 *     model's pass --norm--> waiting states --given--> pass of the layer --> token
 *                                                \______ norm ______/   of the next step
 *
 * A head waits with the inputs of some of the model's layers, its features, and goes on from states that are not normalised. A row is
 * computed from a token and the model's state before it; those of a draft are dropped.
 *
 * Section ASSISTANT, made by edge/apps/sections/draft_file.py: an assistant_config; of heads, float norm[features], and int32
 * order[vocab], the model's tokens of the head's rows. */
#include <math.h>
#include <string.h>

#include "beside.h"
#include "drafter.h"
#include "kv.h"
#include "model.h"
#include "norm.h"
#include "pass.h"

struct draft_layers {
    const edge_model *model, *layers;
    const assistant_config *config;
    pass *main, *pass;
    kv *rows;
    double *normed;               /* [hidden] */
    float *states;                /* [most][width], a ring: of the newest tokens that the model has run */
    int32_t *tokens, *next;       /* [most]: these tokens; [chunk]: of a pass */
    uint32_t width;               /* hidden, or features */
    uint32_t most, first, count;  /* the oldest of `count` that wait for the token behind them */
    uint32_t kept;                /* rows, excluding those of a draft */
};

static const float *feature_norm(const assistant_config *c) { return (const float *)(const void *)(c + 1); }

/* NULL: they are the rows' numbers. */
static const int32_t *token_order(const draft_layers *d)
{
    const void *behind = feature_norm(d->config) + d->config->normed;
    return d->layers->config->features ? behind : NULL;
}

static bool head_is_possible(const edge_config *own, const edge_config *main, const assistant_config *c, uint64_t size)
{
    const int32_t *order = (const void *)(feature_norm(c) + c->normed);
    if (own->features != (uint64_t)main->taps * main->hidden || (c->normed && c->normed != own->features)
        || size != sizeof *c + 4ull * c->normed + 4ull * own->vocab || !own->fuse_slot || own->beside)
        return false;
    for (uint32_t i = 0; i < own->vocab; i++)
        if ((uint32_t)order[i] >= main->vocab)
            return false;
    return true;
}

static edge_status check(const edge_model *layers, const edge_model *model, edge_error *error)
{
    const edge_config *own = layers->config, *main = model->config;
    const assistant_config *c = (const assistant_config *)layers->sections[SECTION_ASSISTANT];
    const embed_config *norm = model_embed(layers);
    const uint64_t size = layers->sizes[SECTION_ASSISTANT];
    const bool right = size >= sizeof *c && norm && norm_is_possible(layers, norm)
        && own->hidden == main->hidden && own->capacity > 1 && own->chunk <= main->chunk && !own->states && !own->ringed
        && !own->layer_inputs && !main->encoder && norm_is_possible(model, &c->norm)
        && (own->features ? head_is_possible(own, main, c, size) : size == sizeof *c && own->beside && own->vocab == main->vocab);
    return right ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its layer that drafts): copy or export it again");
}

static draft_layers *layout(arena *from, const edge_model *layers, const edge_model *model, pass *main, kv *rows, const char *isa)
{
    (void)rows;
    const edge_config *c = layers->config;
    const uint32_t hidden = c->hidden, most = smaller(MTP_STATES, c->capacity / 2), width = c->features ? c->features : hidden;
    const design_config *design;
    if (pass_choose(layers, isa, &design, NULL))
        return NULL;
    draft_layers *d = take(from, sizeof *d);
    double *normed = take(from, hidden * sizeof *normed);
    float *states = take(from, (uint64_t)most * width * sizeof *states);
    int32_t *tokens = take(from, most * sizeof *tokens), *next = take(from, c->chunk * sizeof *next);
    kv *own = kv_layout(from, layers, false);
    pass *p = pass_layout(from, layers, design, own, NULL);
    if (!d)
        return NULL;
    kv_clear(own);
    *d = (draft_layers){.model = model, .layers = layers, .config = (const assistant_config *)layers->sections[SECTION_ASSISTANT],
                        .main = main, .pass = p, .rows = own, .normed = normed, .states = states, .tokens = tokens,
                        .next = next, .width = width, .most = most};
    return d;
}

static void start(draft_layers *d, uint32_t threads, uint64_t cpu_mask)
{
    pass_stop(d->pass);
    if (threads)
        pass_start_some(d->pass, smaller(threads, d->layers->config->threads), cpu_mask);
}

/* out = norm(state), [hidden]. */
static void normalise(const draft_layers *d, const edge_model *model, const embed_config *norm, const float *state, float *out)
{
    norm_state(model, norm, state, d->normed);
    for (uint32_t i = 0; i < model->config->hidden; i++)
        out[i] = (float)d->normed[i];
}

/* The features of a token of the model's last pass. */
static void read_features(const draft_layers *d, uint32_t row, float *out)
{
    const uint32_t hidden = d->layers->config->hidden, taps = d->model->config->taps;
    uint32_t stride;
    const float *kept = pass_taps(d->main, &stride) + (size_t)row * taps * stride;
    for (uint32_t tap = 0; tap < taps; tap++)
        memcpy(out + (size_t)tap * hidden, kept + (size_t)tap * stride, hidden * sizeof *out);
    double squares = 0;
    for (uint32_t i = 0; i < d->config->normed; i++)
        squares += (double)out[i] * (double)out[i];
    const double scale = 1 / sqrt(squares / d->width + d->config->feature_eps);
    for (uint32_t i = 0; i < d->config->normed; i++)
        out[i] = (float)((double)out[i] * scale * (double)feature_norm(d->config)[i]);
}

static void ran(draft_layers *d, const int32_t *tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if ((uint32_t)tokens[i] >= d->model->config->vocab) /* of a picture */
            count = 0;
    if (!count || d->count + count > d->most)
        d->kept = 0; /* there is a gap behind the rows */
    if (!count || count > d->most)
        d->count = 0;
    uint32_t stride, skipped = count > d->most ? count - d->most : 0;
    const float *states = pass_inputs(d->main, &stride);
    for (uint32_t i = skipped; i < count; i++) {
        if (d->count == d->most)
            d->first = (d->first + 1) % d->most, d->count--;
        const uint32_t at = (d->first + d->count++) % d->most;
        d->tokens[at] = tokens[i];
        if (d->layers->config->features)
            read_features(d, i, d->states + (size_t)at * d->width);
        else
            normalise(d, d->model, &d->config->norm, states + (size_t)i * stride, d->states + (size_t)at * d->width);
    }
}

static void drop(draft_layers *d, uint32_t count)
{
    if (count > d->count)
        d->kept = d->count = 0;
    else
        d->count -= count;
}

/* Makes room for `count` rows; if necessary, keeps only the newer rows, up to half of the cache. Returns false if
 * there are fewer in all. */
static bool make_room(draft_layers *d, uint32_t count)
{
    const uint32_t capacity = kv_capacity(d->rows);
    if (kv_length(d->rows) > d->kept)
        kv_truncate(d->rows, d->kept);
    const uint32_t length = kv_length(d->rows);
    if (kv_free(d->rows) >= count || count > capacity)
        return count <= capacity;
    kv_keep_newest(d->rows, smaller(smaller(length, capacity / 2), capacity - count));
    return true;
}

/* Writes the model's embeddings of tokens where a head's pass reads given rows. Returns false if the file was cut short. */
static bool give_embeddings(draft_layers *d, const int32_t *tokens, uint32_t count)
{
    uint32_t stride;
    const float *rows = embed_tokens(d->main, tokens, count);
    float *inputs = pass_inputs(d->pass, &stride);
    if (rows)
        memcpy(inputs, rows, (size_t)count * stride * sizeof *inputs);
    return rows;
}

/* Runs tokens behind the states that pass_given has. Returns the likeliest token after the last; -1: the file was cut short. */
static int32_t run(draft_layers *d, const int32_t *tokens, uint32_t count)
{
    const bool head = d->layers->config->features;
    if (head && !give_embeddings(d, tokens, count))
        return -1;
    picking pick = {.enough = 1};
    const float *logits = pass_run(d->pass, head ? NULL : tokens, count, 0, &pick);
    if (!logits)
        return -1;
    const uint32_t best = likeliest(logits, d->layers->config->vocab);
    return head ? token_order(d)[best] : (int32_t)best;
}

static uint32_t draft(draft_layers *d, int32_t token, uint32_t row, uint32_t most, int32_t *drafted)
{
    (void)row;
    const uint32_t hidden = d->layers->config->hidden, chunk = d->layers->config->chunk, waiting = d->count, width = d->width;
    const bool head = d->layers->config->features;
    float *inputs = pass_given(d->pass, head);
    most = smaller(most, kv_capacity(d->rows) / 2);
    if (!waiting || !most || !make_room(d, waiting + most))
        return 0;
    int32_t found = -1;
    for (uint32_t at = 0, part; at < waiting; at += part) {
        part = smaller(chunk, waiting - at);
        for (uint32_t i = 0; i < part; i++)
            memcpy(inputs + (size_t)i * width, d->states + (d->first + at + i) % d->most * (size_t)width, width * sizeof *inputs);
        for (uint32_t i = 0; i < part; i++) /* each with the state before it */
            d->next[i] = at + i + 1 < waiting ? d->tokens[(d->first + at + i + 1) % d->most] : token;
        found = run(d, d->next, part);
        if (found < 0)
            return 0;
    }
    d->count = 0;
    d->kept = kv_length(d->rows);
    inputs = pass_given(d->pass, false);
    uint32_t count = 0, last = (waiting - 1) % chunk, stride;
    for (;;) {
        drafted[count++] = found;
        if (count == most)
            return count;
        const float *state = pass_inputs(d->pass, &stride) + (size_t)last * stride;
        if (head)
            memcpy(inputs, state, hidden * sizeof *inputs);
        else
            normalise(d, d->layers, model_embed(d->layers), state, inputs);
        found = run(d, drafted + count - 1, 1);
        last = 0;
        if (found < 0)
            return count;
    }
}

const drafter_kind edge_mtp_layer = {layout, draft, weights_share, check, ran, drop, start};
