/* Drafts by a small model with the same tokens, greedily: a port of edge/run/drafting/draft_model.py. It has rows of its own, of the
 * text that it ran last and of its draft. */
#include <string.h>

#include "drafter.h"
#include "kv.h"
#include "model.h"
#include "pass.h"

struct draft_layers {
    const edge_model *model, *layers;
    pass *pass;
    kv *rows;
    int32_t *text, *run; /* [capacity]: the text, or its first tokens and an end that fits; tokens of the rows */
    uint32_t count, room; /* of the text's tokens; the most */
};

static edge_status check(const edge_model *layers, const edge_model *model, edge_error *error)
{
    const edge_config *own = layers->config, *main = model->config;
    const bool right = own->vocab && own->vocab == main->vocab && !own->encoder && !main->encoder && !own->states && !own->beside
        && !own->features && !own->layer_inputs && own->capacity > 2 * (main->drafts + DRAFT_SINKS);
    return right ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its model that drafts): copy or export it again");
}

static draft_layers *layout(arena *from, const edge_model *layers, const edge_model *model, pass *main, kv *rows, const char *isa)
{
    (void)main, (void)rows;
    const uint32_t capacity = layers->config->capacity;
    const design_config *design;
    if (pass_choose(layers, isa, &design, NULL))
        return NULL;
    draft_layers *d = take(from, sizeof *d);
    int32_t *text = take(from, capacity * sizeof *text), *run = take(from, capacity * sizeof *run);
    kv *own = kv_layout(from, layers, false);
    pass *p = pass_layout(from, layers, design, own, NULL);
    if (!d)
        return NULL;
    kv_clear(own);
    *d = (draft_layers){.model = model, .layers = layers, .pass = p, .rows = own, .text = text, .run = run,
                        .room = capacity - model->config->drafts};
    return d;
}

static void start(draft_layers *d, uint32_t threads, uint64_t cpu_mask)
{
    pass_stop(d->pass);
    if (threads)
        pass_start_some(d->pass, smaller(threads, d->layers->config->threads), cpu_mask);
}

/* The end begins at the same token for many drafts, so that rows can be used again. */
static void ran(draft_layers *d, const int32_t *tokens, uint32_t count)
{
    const uint32_t step = d->room / 2;
    if (!count)
        d->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        if ((uint32_t)tokens[i] >= d->model->config->vocab) /* of a picture */
            continue;
        if (d->count + 1 >= d->room) { /* the next token is to fit, too */
            d->count -= step;
            memmove(d->text + DRAFT_SINKS, d->text + DRAFT_SINKS + step, (d->count - DRAFT_SINKS) * sizeof *d->text);
        }
        d->text[d->count++] = tokens[i];
    }
}

static void drop(draft_layers *d, uint32_t count)
{
    d->count -= smaller(count, d->count);
}

/* Runs tokens behind the rows. Returns the likeliest after the last; -1: the file was cut short, or positions are not learned. */
static int32_t run(draft_layers *d, const int32_t *tokens, uint32_t count)
{
    const uint32_t chunk = d->layers->config->chunk;
    const float *logits = NULL;
    for (uint32_t at = 0, part; at < count; at += part) {
        picking pick = {.enough = 1};
        part = smaller(chunk, count - at);
        logits = pass_run(d->pass, tokens + at, part, 0, &pick);
        if (!logits)
            return -1;
    }
    return (int32_t)likeliest(logits, d->layers->config->vocab);
}

static uint32_t draft(draft_layers *d, int32_t token, uint32_t row, uint32_t most, int32_t *drafted)
{
    (void)row;
    const uint32_t rows = kv_length(d->rows), size = d->count + 1;
    uint32_t same = 0, count = 0;
    d->text[d->count] = token;
    while (same < rows && same < size - 1 && d->run[same] == d->text[same])
        same++;
    if (same < rows) /* sliding windows may have moved on */
        kv_truncate(d->rows, same = kv_can_truncate(d->rows, same) ? same : 0);
    memcpy(d->run + same, d->text + same, (size - same) * sizeof *d->run);
    int32_t found = run(d, d->run + same, size - same);
    for (uint32_t end = size; found >= 0; end++) {
        drafted[count++] = found;
        if (count == most)
            break;
        d->run[end] = found;
        found = run(d, d->run + end, 1);
    }
    return count;
}

const drafter_kind edge_draft_model = {layout, draft, weights_share, check, ran, drop, start};
