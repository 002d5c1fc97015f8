/* A port of backends/tvm/assistant.py. A step reads the row that it adds, too: here, the last one is that. */
#include <string.h>

#include "beside.h"
#include "kv.h"
#include "pass.h"
#include "pass_parts.h"
#include "system.h"

typedef struct { int32_t *starts, *lengths; } row_places; /* [layers of the model * heads] */

pass *beside_layout(arena *from, const edge_model *layers, const design_config *design, const edge_model *model, kv *rows)
{
    const uint64_t lists = (uint64_t)model->config->layers * model->config->kv_heads;
    const row_places own = {take(from, lists * sizeof *own.starts), take(from, lists * sizeof *own.lengths)};
    pass *p = pass_layout(from, layers, design, rows, NULL);
    if (p)
        p->cache.starts = own.starts, p->cache.lengths = own.lengths, p->lists = (uint32_t)lists;
    return p;
}

static bool run(pass *p, int64_t kind, uint32_t count)
{
    if (!p->threads || pass_lost_thread(p) || !file_is_whole(&p->model->file))
        return false;
    p->job->kind = kind;
    p->job->count = count;
    p->job->wanted = p->job->observed = p->job->drafts = p->job->before = p->job->behind = 0;
    run_job(p);
    return !pass_lost_thread(p);
}

const float *beside_run(pass *p, const float *x)
{
    const uint32_t hidden = p->model->config->hidden;
    uint32_t stride;
    float *state = pass_inputs(p, &stride);
    memcpy(state, x, hidden * sizeof *state);
    memset(state + hidden, 0, (stride - hidden) * sizeof *state);
    kv_prepare(p->rows, 0);
    const kv_pointers main = kv_arguments(p->rows);
    for (uint32_t list = 0; list < p->lists; list++) {
        p->cache.starts[list] = main.starts[list];
        p->cache.lengths[list] = main.lengths[list] - 1;
    }
    p->tokens[0] = -1; /* given */
    place_tokens(p, NULL, 1, 1, NULL);
    return run(p, JOB_STEP, 1) ? state : NULL;
}

const float *embed_tokens(pass *main, const int32_t *tokens, uint32_t count)
{
    uint32_t stride;
    memcpy(main->tokens, tokens, count * sizeof *tokens);
    return run(main, JOB_EMBED, count) ? pass_inputs(main, &stride) : NULL;
}

void beside_normals(pass *p, const uint8_t *normals, uint32_t layers)
{
    const edge_config *c = p->model->config;
    const uint64_t wanted = (uint64_t)layers * c->kv_heads * c->head, room = p->design->floats - p->design->normals;
    memcpy(p->floats + p->design->normals, normals, (size_t)(wanted < room ? wanted : room) * sizeof *p->floats);
}
