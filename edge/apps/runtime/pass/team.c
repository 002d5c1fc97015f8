/* The threads of a pass, which run compiled code and wait in it. */
#include <string.h>

#include "bundle.h"
#include "model.h"
#include "pass_parts.h"
#include "system.h"

/* Clocks for compiled code, in nanoseconds; backends/tvm/cpu/kernels/team.py explains their use. */
int64_t edge_now(void)
{
    return (int64_t)(1e9 * now_seconds());
}

int64_t edge_worked(void)
{
    return (int64_t)(1e9 * thread_seconds());
}

static const compiled_pass *passes_of(const edge_model *model)
{
    return model->passes ? model->passes : EDGE_PASSES;
}

edge_status pass_choose(const edge_model *model, const char *isa, const design_config **design, edge_error *error)
{
    for (const compiled_pass *each = passes_of(model); each->isa; each++)
        if ((!isa || !strcmp(isa, each->isa)) && runs_isa(each->isa) && find_design(model, each->isa, design, NULL) == EDGE_OK)
            return EDGE_OK;
    return edge_fail(error, EDGE_UNSUPPORTED, "this CPU runs no code of the bundle%s%s: export it for this device",
                     isa ? " for " : "", isa ? isa : "");
}

static void run_compiled(pass *p, int64_t number)
{
    const kv_pointers *cache = &p->cache;
    const uint8_t *weights = p->model->sections[SECTION_WEIGHTS] - p->model->config->beside;
    p->run((int64_t *)p->job, p->lines, weights, p->table, p->floats, p->integers,
           cache->keys, cache->values, cache->key_scales, cache->value_scales, cache->lengths, cache->positions,
           p->tokens, p->logits, p->rope, cache->paid, cache->starts, cache->ring_keys, cache->ring_values,
           cache->ring_key_scales, cache->ring_value_scales, cache->ring_positions, cache->states,
           p->adapter.memory, p->cross_keys, p->cross_values, number);
}

void run_alone(pass *p)
{
    run_compiled(p, 0);
}

void run_job(pass *p)
{
    cpu_binding before;
    bool bound = bind_thread(p->cpu_mask, &before);
    run_compiled(p, 0);
    if (bound)
        unbind_thread(&before);
}

static void *work(void *argument)
{
    const member *own = argument;
    own_line(own->pass->lines + own->number * LINE);
    run_compiled(own->pass, own->number);
#ifdef __wasm__ /* where it returns after every job */
    while (__atomic_load_n(&own->pass->job->kind, __ATOMIC_RELAXED) != JOB_QUIT)
        run_compiled(own->pass, own->number);
#endif
    return NULL;
}

/* Ends the first `count` threads. */
static void end_threads(pass *p, uint32_t count)
{
    p->job->kind = JOB_QUIT;
    run_compiled(p, 0);
    for (uint32_t i = 1; i < count; i++)
        join_worker(&p->members[i].thread);
    p->threads = 0;
}

edge_status pass_start(pass *p, uint32_t threads, uint64_t cpu_mask, edge_error *error)
{
    uint32_t most = p->model->config->threads;
    if (!p->design) {
        p->threads = 1; /* which waits */
        return EDGE_OK;
    }
    const compiled_pass *found = passes_of(p->model);
    while (found->isa && strcmp(found->isa, p->design->isa))
        found++;
    if (!found->isa)
        return edge_fail(error, EDGE_UNSUPPORTED, "the library has no code for %s: export it together with model.edge",
                         p->design->isa);
    if (!threads || threads > most)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "threads must be a number from 1 to %d, for which the bundle has "
                         "memory", (int64_t)most);
    pass_stop(p);
    p->run = found->run;
    p->cpu_mask = cpu_mask;
    memset(p->lines, 0, LINES * most * LINE * sizeof *p->lines); /* every thread begins to count at 0 */
    for (uint32_t i = 0; i < 2 * threads; i++) /* arrivals and jobs */
        prepare_line(p->lines + i * LINE);
    *p->job = (pass_job){.threads = threads, .parts = threads, .team = threads};
    for (uint32_t i = 1; i < threads; i++) {
        p->members[i] = (member){.pass = p, .number = i};
        if (!start_worker(&p->members[i].thread, work, p->members + i, cpu_mask)) {
            end_threads(p, i);
            return edge_fail(error, EDGE_NO_MEMORY, "the system starts only %d of %d threads: set fewer", (int64_t)i,
                             (int64_t)threads);
        }
    }
    p->threads = threads;
    return EDGE_OK;
}

void pass_start_some(pass *p, uint32_t threads, uint64_t cpu_mask)
{
    if (pass_start(p, threads, cpu_mask, NULL))
        pass_start(p, 1, 0, NULL); /* which cannot fail */
}

void pass_stop(pass *p)
{
    if (p->threads && p->design)
        end_threads(p, p->threads);
}

uint32_t pass_threads(const pass *p)
{
    return p->threads;
}

int32_t pass_thread_id(const pass *p, uint32_t number)
{
    int32_t own[LINE] = {0};
    own_line(own);
    const int32_t *line = number ? p->lines + number * LINE : own;
    while (line_owner(own) && !line_owner(line)) /* the thread has just been started */
        sleep_seconds(1e-5);
    return line_owner(line);
}

bool pass_lost_thread(const pass *p)
{
    for (uint32_t i = 1; i < p->threads; i++)
        if (owner_ended(p->lines + i * LINE))
            return true;
    return false;
}
