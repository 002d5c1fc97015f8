/* The GPU of a page as an accelerator: JavaScript runs its passes and keeps its adapter, see env.gpu and env.adapt in web.h. */
#include "bundle.h"
#include "web.h"

enum { PIECE = 16 << 10 }; /* bytes of an adapter, a multiple of GPU_ALIGNMENT */

__attribute__((import_module("env"), import_name("gpu"))) int32_t host_gpu(const uint32_t *job);
__attribute__((import_module("env"), import_name("adapt"))) int32_t host_adapt(double at, void *piece, uint32_t size, double scale);

static uint32_t address(const void *memory)
{
    return (uint32_t)(uintptr_t)memory;
}

typedef struct { /* JavaScript has the rest of the state */
    accelerator base;
    const edge_model *model;
} page_gpu;

static page_gpu page = {.base = {&edge_page}};

static accelerator *layout(arena *from, const edge_model *model)
{
    page.model = model;
    (void)from;
    return &page.base;
}

static accelerator_answer run(accelerator *a, const pass_input *input, float *logits)
{
    static const picking none;
    const picking *pick = input->pick ? input->pick : &none;
    const edge_config *c = page.model->config;
    (void)a;
    uint32_t told[] = {
        address(input->tokens), input->count, (uint32_t)input->position, address(input->angles), input->angles_stride,
        address(input->temperatures), address(input->starts), address(input->lengths), address(input->positions),
        address(logits),
        input->pick != NULL, pick->most, address(pick->banned), pick->banned_count, address(pick->chosen),
        address(input->normals),
        address(input->inputs), input->count * c->layers, whole_tiles(c->layer_inputs),
        address(input->states->values), (uint32_t)c->states, address(&input->states->changed), address(&input->states->behind),
        input->settles,
#define ARENA(a) (a)->count, address((a)->arrays[0]), address((a)->arrays[1]), address((a)->arrays[2]), \
        address((a)->arrays[3]), address((a)->changed)
        ARENA(input->arenas), ARENA(input->arenas + 1),
    };
    int32_t ran = host_gpu(told);
    if (ran > 0 && pick->most)
        input->pick->count = (uint32_t)ran;
    return ran > 0 ? COMPLETED : ran ? OUT_OF_SERVICE : DECLINED;
}

static bool adapt(accelerator *a, adapter_source in, void *from, float scale, bool *finite)
{
    _Alignas(GPU_ALIGNMENT) uint8_t piece[PIECE];
    const uint64_t bytes = in ? model_adapters(page.model)->gpu : 0;
    *finite = true;
    (void)a;
    host_adapt(0, NULL, 0, 1);
    for (uint64_t at = 0, size; at < bytes; at += size) {
        size = bytes - at < PIECE ? bytes - at : PIECE;
        if (!in(from, piece, (size_t)size))
            return false;
        *finite = host_adapt((double)at, piece, (uint32_t)size, scale) && *finite;
    }
    return true;
}

const accelerator_kind edge_page = {
    .engine = EDGE_ENGINE_GPU, .called = "the GPU", .picks = true, .layout = layout, .run = run, .adapt = adapt,
};
