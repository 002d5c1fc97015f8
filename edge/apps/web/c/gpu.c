/* The GPU of a page as an accelerator: JavaScript runs its passes, see env.gpu in web.h. */
#include "bundle.h"

__attribute__((import_module("env"), import_name("gpu"))) int32_t host_gpu(const uint32_t *job);

static uint32_t address(const void *memory)
{
    return (uint32_t)(uintptr_t)memory;
}

typedef struct { /* JavaScript has the rest of the state */
    accelerator base;
    const edge_config *model;
} page_gpu;

static accelerator *layout(arena *from, const edge_model *model)
{
    static page_gpu page = {.base = {&edge_page}};
    page.model = model->config;
    (void)from;
    return &page.base;
}

static accelerator_answer run(accelerator *a, const pass_input *input, float *logits)
{
    static const picking none;
    const picking *pick = input->pick ? input->pick : &none;
    const edge_config *c = ((page_gpu *)a)->model;
    uint32_t told[] = {
        address(input->tokens), input->count, (uint32_t)input->position, address(input->angles), input->angles_stride,
        address(input->temperatures), address(input->starts), address(input->lengths), address(input->positions),
        address(logits),
        input->pick != NULL, pick->most, address(pick->banned), pick->banned_count, address(pick->chosen),
        address(input->normals),
        address(input->inputs), input->count * c->layers, whole_tiles(c->layer_inputs),
#define ARENA(a) (a)->count, address((a)->arrays[0]), address((a)->arrays[1]), address((a)->arrays[2]), \
        address((a)->arrays[3]), address((a)->changed)
        ARENA(input->arenas), ARENA(input->arenas + 1),
    };
    int32_t ran = host_gpu(told);
    if (ran > 0 && pick->most)
        input->pick->count = (uint32_t)ran;
    return ran > 0 ? COMPLETED : ran ? OUT_OF_SERVICE : DECLINED;
}

const accelerator_kind edge_page = {.engine = EDGE_ENGINE_GPU, .called = "the GPU", .picks = true, .layout = layout, .run = run};
