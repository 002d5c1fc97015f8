/* Passes on the page's GPU, which JavaScript runs: see env.gpu in web.h. */
#include "bundle.h"

__attribute__((import_module("env"), import_name("gpu"))) int32_t host_gpu(const uint32_t *job);

static uint32_t address(const void *memory)
{
    return (uint32_t)(uintptr_t)memory;
}

device_answer run_on_page(const device_job *job)
{
    static const picking none;
    const picking *pick = job->pick ? job->pick : &none;
    uint32_t told[] = {
        address(job->tokens), job->count, (uint32_t)job->position, address(job->angles), job->angles_stride,
        address(job->temperatures), address(job->starts), address(job->lengths), address(job->positions),
        address(job->logits),
        job->pick != NULL, pick->most, address(pick->banned), pick->banned_count, address(pick->chosen),
        address(job->normals),
#define ARENA(a) (a)->count, address((a)->arrays[0]), address((a)->arrays[1]), address((a)->arrays[2]), \
        address((a)->arrays[3]), address((a)->changed)
        ARENA(job->arenas), ARENA(job->arenas + 1),
    };
    int32_t ran = host_gpu(told);
    if (ran > 0 && pick->most)
        job->pick->count = (uint32_t)ran;
    return ran > 0 ? DEVICE_RAN : ran ? DEVICE_LEFT : DEVICE_WAITS;
}
