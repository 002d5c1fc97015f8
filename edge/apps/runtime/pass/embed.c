/* Texts to vectors: a port of edge/run/sequences/embedding.py, and of `Tail.embed` in edge/model/structure/tail.py. Section EMBED, made
 * by edge/apps/sections/embedding.py, is an embed_config, followed by its dense layers, each a dense_layer, float weights[rows][columns]
 * and a bias if it has one; then by the names and texts of its prompts, each with \0.
 *
 *     text --tokenizer--> ids --pass--> hidden states --norm, pooling--> pooled --dense layers--> first dimensions, scaled
 *
 * Short texts of an encoder run side by side; a decoder's text runs chunk by chunk, and its rows are dropped. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "context.h"
#include "embed.h"
#include "kv.h"
#include "model.h"
#include "norm.h"
#include "pass.h"
#include "policy.h"
#include "session.h"
#include "tokenizer.h"

typedef struct {
    edge_session *session;
    const embed_config *config;
    const edge_embedding *options;
    uint32_t pooling, dimensions;
    const char *prompt;
    float *out; /* the next vector */
} embedding;

/* ---- section EMBED -------------------------------------------------------------------------------------------------- */

/* Reads a dense layer and moves *at behind it; NULL: the section is damaged. */
static const dense_layer *next_dense(const uint8_t **at, const uint8_t *end, uint32_t widest)
{
    const dense_layer *found = (const dense_layer *)*at;
    if (end - *at < (ptrdiff_t)sizeof *found || found->rows > widest || found->columns > widest)
        return NULL;
    uint64_t bytes = sizeof *found + ((uint64_t)found->rows * found->columns + (found->biased ? found->rows : 0)) * 4;
    if ((uint64_t)(end - *at) < bytes)
        return NULL;
    *at += bytes;
    return found;
}

static const char *next_text(const uint8_t **at, const uint8_t *end)
{
    const char *found = (const char *)*at;
    const uint8_t *stop = *at < end ? memchr(*at, 0, (size_t)(end - *at)) : NULL;
    *at = stop ? stop + 1 : end;
    return stop ? found : NULL;
}

/* Checks the section, and finds a prompt's text: by its name, the model's own (NULL), or "". */
static edge_status find_prompt(embedding *e, const char *name, edge_error *error)
{
    const edge_model *model = e->session->model;
    const embed_config *c = e->config;
    const uint8_t *at = (const uint8_t *)(c + 1), *end = (const uint8_t *)c + model->sizes[SECTION_EMBED];
    uint32_t size = model->config->hidden;
    bool right = c->pooling <= POOL_LAST && c->widest >= size && norm_is_possible(model, c);
    for (uint32_t i = 0; right && i < c->dense; i++) {
        const dense_layer *layer = next_dense(&at, end, c->widest);
        right = layer && layer->columns == size;
        size = right ? layer->rows : 0;
    }
    e->prompt = name ? NULL : "";
    for (uint32_t i = 0; right && i < c->prompts; i++) {
        const char *found = next_text(&at, end), *text = next_text(&at, end);
        right = text && strlen(text) < TEXT_BLOCK;
        if (right && (name ? !strcmp(name, found) : c->prompt == (int64_t)i))
            e->prompt = text;
    }
    if (!right || size != c->dimensions)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its embedding): copy or export it again");
    if (!e->prompt)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the model has no prompt %s: leave it out", name);
    return EDGE_OK;
}

/* ---- states to vectors ---------------------------------------------------------------------------------------------- */

/* Adds a state to the pooled ones, or puts it in their place. */
static void pool(const embedding *e, const float *state, bool first)
{
    const uint32_t size = e->session->model->config->hidden;
    double *pooled = e->session->pooled, *normed = pooled + e->config->widest;
    norm_state(e->session->model, e->config, state, normed);
    for (uint32_t i = 0; i < size; i++)
        pooled[i] = normed[i] + (first || e->pooling != POOL_MEAN ? 0 : pooled[i]);
}

/* Writes the vector of the pooled states of `count` tokens. Returns false for NaN. */
static bool finish(embedding *e, uint32_t count)
{
    const embed_config *c = e->config;
    const uint8_t *at = (const uint8_t *)(c + 1), *end = (const uint8_t *)c + e->session->model->sizes[SECTION_EMBED];
    double *from = e->session->pooled, *to = from + c->widest, length = 0;
    for (uint32_t i = 0; e->pooling == POOL_MEAN && i < e->session->model->config->hidden; i++)
        from[i] /= count;
    for (uint32_t layer = 0; layer < c->dense; layer++) {
        const dense_layer *found = next_dense(&at, end, c->widest);
        const float *weights = (const float *)(const void *)(found + 1);
        for (uint32_t row = 0; row < found->rows; row++) {
            double sum = 0;
            for (uint32_t i = 0; i < found->columns; i++)
                sum += (double)weights[(size_t)row * found->columns + i] * from[i];
            to[row] = sum + (found->biased ? (double)weights[(size_t)found->rows * found->columns + row] : 0);
        }
        double *other = from;
        from = to, to = other;
    }
    for (uint32_t i = 0; i < e->dimensions; i++)
        length += from[i] * from[i];
    length = sqrt(length);
    const double scale = e->options->unscaled || length == 0 ? 1 : length;
    for (uint32_t i = 0; i < e->dimensions; i++)
        *e->out++ = (float)(from[i] / scale);
    return isfinite(length);
}

/* ---- texts to states ------------------------------------------------------------------------------------------------ */

static edge_status failure(const edge_session *s, edge_error *error)
{
    edge_status status = model_is_whole(s->model, error);
    if (!status)
        status = check_threads(s, error);
    return status ? status : edge_fail(error, EDGE_FAILED, "the model computed no number (NaN): its file may be damaged");
}

static bool is_pooled(const embedding *e, uint32_t token, uint32_t count)
{
    return e->pooling == POOL_MEAN || token == (e->pooling == POOL_CLS ? 0 : count - 1);
}

/* Runs the texts of an encoder whose tokens end there, and writes their vectors. */
static bool run_texts(embedding *e, const uint32_t *ends, uint32_t texts)
{
    edge_session *s = e->session;
    uint32_t stride, at = 0;
    const float *states = pass_states(s->pass, s->ids, ends[texts - 1], &(text_places){.ends = ends}, &stride);
    if (!states)
        return false;
    s->ran += ends[texts - 1];
    for (uint32_t text = 0; text < texts; at = ends[text++]) {
        for (uint32_t token = at; token < ends[text]; token++)
            if (is_pooled(e, token - at, ends[text] - at))
                pool(e, states + (size_t)token * stride, token == at);
        if (!finish(e, ends[text] - at))
            return false;
    }
    return true;
}

/* Runs a text of a decoder, and writes its vector. */
static bool run_text(embedding *e, uint32_t count)
{
    edge_session *s = e->session;
    uint32_t stride;
    context_reset(s);
    kv_announce(s->rows, count);
    for (uint32_t at = 0, part; at < count; at += part) {
        part = smaller(s->model->config->chunk, count - at);
        bool fits = policy_make_room(s->policy, s->rows, part, &s->all_evicted);
        const float *states = fits ? pass_states(s->pass, s->ids + at, part, NULL, &stride) : NULL;
        if (!states)
            return false;
        s->ran += part;
        for (uint32_t token = 0; token < part; token++)
            if (is_pooled(e, at + token, count))
                pool(e, states + (size_t)token * stride, at + token == 0);
    }
    return finish(e, count);
}

/* Tokens of a text: ids[first], …. all: those that did not fit count, too. */
typedef struct { edge_session *session; uint32_t first, count, room; uint64_t all; int32_t bos; } collected;

static bool collect(void *to, const int32_t *ids, size_t count)
{
    collected *c = to;
    const int32_t bos = c->bos;
    c->bos = -1;
    if (bos >= 0 && (!count || ids[0] != bos))
        collect(to, &bos, 1);
    size_t fits = c->room - c->count < count ? c->room - c->count : count;
    memcpy(c->session->ids + c->first + c->count, ids, fits * sizeof *ids);
    c->count += (uint32_t)fits;
    c->all += count;
    return true;
}

/* Tokenizes a text behind `first` tokens of others, and cuts it if it may. Returns its tokens; 0: it has too many. */
static uint32_t take_text(const embedding *e, uint32_t first, const char *text, size_t length, uint32_t most, uint64_t *all)
{
    edge_session *s = e->session;
    collected c = {.session = s, .first = first, .room = s->room - first, .bos = s->vocabulary->config->bos};
    tokenizer_encode_after(s->tokenizer, e->prompt, text, length, collect, &c);
    if (c.bos >= 0)
        collect(&c, NULL, 0);
    if (e->config->end >= 0)
        collect(&c, &e->config->end, 1);
    *all = c.all;
    if (c.all <= most)
        return c.count;
    if (!e->options->truncate)
        return 0;
    if (e->config->end >= 0)
        s->ids[first + most - 1] = e->config->end;
    return most;
}

static edge_status embed_all(embedding *e, const char *const *texts, const size_t *lengths, size_t count, edge_error *error)
{
    edge_session *s = e->session;
    const bool encoder = s->model->config->encoder, evicts = policy_evicts(s->policy) && !e->options->truncate;
    const uint32_t most = evicts ? s->room : smaller(kv_capacity(s->rows), s->room), together = smaller(TEXTS_TOGETHER, most);
    uint32_t ends[TEXTS_TOGETHER], waiting = 0, tokens = 0;
    for (size_t text = 0; text < count; text++) {
        uint64_t all;
        uint32_t found = take_text(e, tokens, texts[text], lengths ? lengths[text] : strlen(texts[text]), most, &all);
        if (!found)
            return edge_fail(error, EDGE_FULL, "text %d has %d tokens, and at most %d fit: split it, or set truncate",
                             (int64_t)text + 1, (int64_t)all, (int64_t)most);
        if (waiting && tokens + found > together) {
            if (!run_texts(e, ends, waiting))
                return failure(s, error);
            memmove(s->ids, s->ids + tokens, found * sizeof *s->ids);
            waiting = tokens = 0;
        }
        ends[waiting++] = tokens += found;
        if (!encoder) {
            if (!run_text(e, tokens))
                return failure(s, error);
            waiting = tokens = 0;
        }
    }
    return waiting && !run_texts(e, ends, waiting) ? failure(s, error) : EDGE_OK;
}

edge_status embed_texts(edge_session *s, const char *const *texts, const size_t *lengths, size_t count,
                        const edge_embedding *options, float *vectors, edge_error *error)
{
    embedding e = {.session = s, .config = model_embed(s->model), .options = options, .out = vectors};
    edge_status status = find_prompt(&e, options->prompt, error);
    if (status)
        return status;
    e.dimensions = options->dimensions ? options->dimensions : e.config->dimensions;
    e.pooling = options->pooling ? options->pooling - 1 : e.config->pooling;
    status = embed_all(&e, texts, lengths, count, error);
    context_reset(s);
    return status;
}

/* ---- calls ---------------------------------------------------------------------------------------------------------- */

static edge_status check_embedding(const edge_session *s, const char *const *texts, const size_t *lengths, size_t count,
                                   const edge_embedding *options, const float *vectors, size_t capacity, edge_error *error)
{
    const uint32_t size = edge_dimensions(s->model);
    if (!size || !EDGE_EMBED)
        return edge_fail(error, EDGE_UNSUPPORTED, "the bundle makes no embeddings: export a model whose file says how to pool");
    if (s->accelerator)
        return edge_fail(error, EDGE_UNSUPPORTED, "%s hands out no hidden states to embed by: begin the session with engine cpu",
                         s->accelerator->kind->called);
    if (options->size < sizeof *options)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_embedding.size is %d: begin with EDGE_EMBEDDING",
                         (int64_t)options->size);
    if (options->dimensions > size || options->pooling > EDGE_POOLING_LAST)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "dimensions must be at most %d, and pooling an edge_pooling", (int64_t)size);
    if (capacity / (options->dimensions ? options->dimensions : size) < count || (count && (!texts || !vectors)))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_embed needs texts, and room for their vectors: %d values each",
                         (int64_t)(options->dimensions ? options->dimensions : size));
    for (size_t i = 0; i < count; i++)
        if (!texts[i] || !(lengths ? lengths[i] : *(const uint8_t *)texts[i]) || check_length(lengths ? lengths[i] : 0, 1, NULL))
            return edge_fail(error, EDGE_BAD_ARGUMENT, "text %d is empty", (int64_t)i + 1);
    return EDGE_OK;
}

edge_status edge_embed(edge_session *s, const char *const *texts, const size_t *lengths, size_t count,
                       const edge_embedding *options, float *vectors, size_t capacity, edge_error *error)
{
    const edge_embedding as_exported = EDGE_EMBEDDING;
    edge_status status = enter(s, error);
    if (status)
        return status;
    options = options ? options : &as_exported;
    status = check_embedding(s, texts, lengths, count, options, vectors, capacity, error);
    if (status || !count)
        return leave(s, status);
    context_reset(s);
    s->turn = s->system_count ? TURN_SYSTEM : TURN_NEW;
    return leave(s, EDGE_EMBED(s, texts, lengths, count, options, vectors, error));
}
