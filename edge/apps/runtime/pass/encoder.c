/* One block of memory: the encoder | kv | pass | a normalised state. The rows of the KV cache are the keys and values
 * of a pass, and last no longer. */
#include <string.h>

#include "encoder.h"
#include "kv.h"
#include "model.h"
#include "norm.h"
#include "pass.h"
#include "system.h"
#include "trust.h"

struct encoder {
    edge_model model;
    uint64_t size, cpu_mask;
    kv *rows;
    pass *pass;
    double *normed; /* [hidden] */
};

static encoder *lay_out(arena *from, encoder *counted, const edge_model *model, const design_config *design)
{
    encoder *taken = take(from, sizeof *taken), *e = taken ? taken : counted;
    if (taken)
        taken->model = *model, model = &taken->model;
    if (taken)
        taken->model.config = &taken->model.settings;
    e->rows = kv_layout(from, model, false);
    e->pass = pass_layout(from, model, design, e->rows, NULL);
    e->normed = take(from, model->config->hidden * sizeof *e->normed);
    return e;
}

/* Messages about model.edge are about this file. */
static edge_status named(edge_status status, const char *file, edge_error *error)
{
    static const char model[] = "model.edge";
    const size_t length = strlen(file), before = sizeof model - 1;
    const bool told = status && error && error->size > offsetof(edge_error, message);
    for (char *at = told ? error->message : NULL; at && strlen(at) >= before; at++)
        if (!memcmp(at, model, before)) {
            memcpy(at, file, length);
            memmove(at + length, at + before, strlen(at + before) + 1);
        }
    return status;
}

static edge_status begin(const edge_model *model, const char *isa, uint32_t threads, uint64_t cpu_mask, encoder **made,
                         edge_error *error)
{
    const embed_config *norm = model_embed(model);
    if (!model->config->encoder || model->config->vocab || !norm || !norm_is_possible(model, norm))
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its settings): copy or export it again");
    const design_config *design;
    edge_status status = pass_choose(model, isa, &design, error);
    if (status)
        return status;
    encoder counted;
    arena count = {NULL, 0};
    lay_out(&count, &counted, model, design);
    arena memory = {map_memory(count.used), 0};
    if (!memory.memory)
        return edge_fail(error, EDGE_NO_MEMORY, "an encoder needs %d KiB: end other sessions", (int64_t)(count.used >> 10));
    encoder *e = lay_out(&memory, NULL, model, design);
    e->size = count.used, e->cpu_mask = cpu_mask;
    status = pass_start(e->pass, smaller(threads, model->config->threads), cpu_mask, error);
    if (status)
        unmap_memory(e, e->size);
    else
        *made = e;
    return status;
}

edge_status encoder_open(const encoder_kind *kind, const edge_source *source, const char *isa, uint32_t threads, uint64_t cpu_mask,
                         encoder **made, edge_error *error)
{
    edge_model model;
    *made = NULL;
    edge_status status = model_map(source, &model, error);
    if (status)
        return named(status, kind->file, error);
    model.passes = kind->passes;
    status = check_trusted(&model, kind->trusted, error);
    if (!status)
        status = begin(&model, isa, threads, cpu_mask, made, error);
    if (status)
        unmap_file(&model.file);
    return named(status, kind->file, error);
}

void encoder_close(encoder *e)
{
    if (!e)
        return;
    pass_stop(e->pass);
    unmap_file(&e->model.file);
    unmap_memory(e, e->size);
}

const edge_model *encoder_model(const encoder *e)
{
    return &e->model;
}

uint64_t encoder_bytes(const encoder *e)
{
    return e->size + e->model.file.size;
}

void encoder_use_threads(encoder *e, uint32_t threads, uint64_t cpu_mask)
{
    threads = smaller(threads, e->model.config->threads);
    if (pass_threads(e->pass) == threads && e->cpu_mask == cpu_mask)
        return;
    pass_stop(e->pass);
    pass_start_some(e->pass, threads, cpu_mask);
    e->cpu_mask = cpu_mask;
}

int32_t encoder_thread_id(const encoder *e, uint32_t number)
{
    return number < pass_threads(e->pass) ? pass_thread_id(e->pass, number) : 0;
}

void encoder_release(encoder *e)
{
    kv_release(e->rows);
    pass_release(e->pass);
}

float *encoder_inputs(encoder *e, uint32_t *stride)
{
    return pass_inputs(e->pass, stride);
}

float *encoder_run(encoder *e, const text_places *places, uint32_t count, uint32_t *stride)
{
    const embed_config *norm = model_embed(&e->model);
    if (!pass_states(e->pass, NULL, count, places, stride))
        return NULL;
    float *states = pass_inputs(e->pass, stride);
    const bool last = !places->stop || places->stop == e->model.config->layers;
    for (uint32_t row = 0; last && norm->norm && row < count; row++) {
        float *state = states + (size_t)row * *stride;
        norm_state(&e->model, norm, state, e->normed);
        for (uint32_t i = 0; i < e->model.config->hidden; i++)
            state[i] = (float)e->normed[i];
    }
    return states;
}
