/* The figures of edge_use. A thread that computes notes them before each pass, so that others read them without waiting
 * for it. */
#include "usage.h"

#include "budgets.h"
#include "constraint.h"
#include "drafts.h"
#include "encoder.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "pass.h"
#include "system.h"

edge_usage usage_of(const edge_session *s)
{
    const adapters_config *room = model_adapters(s->model);
    return (edge_usage){
        .size = sizeof(edge_usage),
        .rows = kv_used(s->rows) - s->ahead,
        .capacity = kv_capacity(s->rows),
        .threads = pass_threads(s->pass),
        .weights = s->model->sizes[SECTION_WEIGHTS],
        .kv = kv_bytes(s->rows) + kv_fixed(s->rows) + kv_remembered(s->rows),
        .scratch = pass_bytes(s->pass) + s->draft_bytes + (s->constraint ? constraint_bytes(s->constraint) : 0)
            + (s->tools ? s->tools->size : 0),
        .lora = room && !s->accelerator ? room->room : 0,
        .file = s->model->file.size,
        .tokens = s->ran,
        .evicted = s->all_evicted,
        .drafted = s->all_drafted,
        .accepted = s->accepted,
        .joules = s->started ? watch_joules(&s->watch) : s->joules,
        .seconds = s->started ? now_seconds() - s->watch.started : s->seconds,
        .measured = s->watch.measured,
        .engine = s->accelerator ? s->accelerator->kind->engine : EDGE_ENGINE_CPU,
        .engine_why = s->why,
        .gpu = s->accelerator ? s->accelerator->kind->name(s->accelerator) : "",
        .gpu_bytes = s->accelerator ? s->accelerator->kind->bytes(s->accelerator) : 0,
        .gain = s->drafts ? drafts_gain(s->drafts) : 0,
        .encoder = s->encoder ? encoder_bytes(s->encoder) : 0,
        .pictures = s->given ? given_bytes(s->given) : 0,
        .picture_joules = s->picture_joules,
        .picture_seconds = s->picture_seconds,
    };
}

void pass_note(edge_session *s, edge_usage *to, const edge_usage *from)
{
    for (int32_t now = 0; !__atomic_compare_exchange_n(&s->noting, &now, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED); now = 0)
        sleep_seconds(1e-6);
    *to = *from;
    __atomic_store_n(&s->noting, 0, __ATOMIC_RELEASE);
}

void note_usage(edge_session *s)
{
    const edge_usage now = usage_of(s);
    pass_note(s, &s->noted, &now);
}
