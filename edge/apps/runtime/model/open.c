/* Opens, closes and describes models. */
#include <string.h>

#include "bundle.h"
#include "chat.h"
#include "model.h"
#include "system.h"
#include "tokenizer.h"
#include "trust.h"

static void close(edge_model *model)
{
    if (model->draft)
        unmap_memory(model->draft, sizeof *model->draft);
    unmap_file(&model->file);
}

static edge_status open_draft(edge_model *model, edge_error *error)
{
    if (!EDGE_DRAFTER || !model->sizes[SECTION_DRAFT])
        return EDGE_OK;
    edge_model *draft = model->draft = map_memory(sizeof *draft);
    if (!draft)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory is left to open what drafts");
    edge_status status = model_inside(model, SECTION_DRAFT, draft, error);
    draft->passes = EDGE_DRAFTS->passes;
    if (!status)
        status = check_trusted(draft, EDGE_DRAFTS->trusted, error);
    return status ? status : EDGE_DRAFTER->check(draft, model, error);
}

edge_status edge_open(const edge_source *source, edge_model **model, edge_error *error)
{
    if (!source || !model || source->size < sizeof *source)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_open needs an edge_source with its size, and a place for the "
                         "model");
    *model = NULL;
    if (source->path ? !*source->path : source->fd < 0)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_open needs a path or an open file");
    edge_model *made = map_memory(sizeof *made);
    if (!made)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory is left to open a model");
    edge_status status = model_map(source, made, error);
    if (!status) {
        status = check_trusted(made, EDGE_TRUSTED, error);
        if (!status)
            status = tokenizer_check(made, error);
        if (!status)
            status = chat_check(made, error);
        if (!status)
            status = open_draft(made, error);
        if (status)
            close(made);
    }
    if (status) {
        unmap_memory(made, sizeof *made);
        return status;
    }
    *model = made;
    return EDGE_OK;
}

edge_status edge_close(edge_model *model, edge_error *error)
{
    if (!model)
        return EDGE_OK;
    int32_t open = __atomic_load_n(&model->sessions, __ATOMIC_ACQUIRE);
    if (open)
        return edge_fail(error, EDGE_BUSY, "the model has open sessions (%d): end them first", (int64_t)open);
    close(model);
    unmap_memory(model, sizeof *model);
    return EDGE_OK;
}

/* The best instruction set that this CPU and the file have; "" if there is none. */
static const char *best_isa(const edge_model *model)
{
    const design_config *designs;
    uint32_t count = model_designs(model, &designs);
    for (uint32_t i = 0; i < count; i++)
        if (runs_isa(designs[i].isa))
            return designs[i].isa;
    return "";
}

uint32_t edge_dimensions(const edge_model *model)
{
    const embed_config *found = model ? model_embed(model) : NULL;
    return found ? found->dimensions : 0;
}

edge_status edge_info(const edge_model *model, edge_model_info *info, edge_error *error)
{
    if (!model || !info || info->size < sizeof *info)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_info needs a model, and an edge_model_info whose size is set");
    edge_status status = model_is_whole(model, error);
    if (status)
        return status;
    const edge_config *c = model->config;
    const adapters_config *room = model_adapters(model);
    *info = (edge_model_info){
        .size = info->size, .abi = EDGE_ABI, .name = model->name, .license = model->license, .policy = model->policy,
        .kv_dtype = model->kv_dtype, .isa = best_isa(model), .vocab = c->vocab, .context = c->context,
        .capacity = c->capacity, .threads = c->threads, .chat = c->chat, .weights = model->sizes[SECTION_WEIGHTS],
        .kv = c->kv_bytes, .scratch = c->scratch_bytes, .lora_rank = room ? room->rank : 0,
        .dimensions = edge_dimensions(model),
    };
    return EDGE_OK;
}
