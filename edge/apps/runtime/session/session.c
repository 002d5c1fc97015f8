/* Sessions: beginning and end, options, readings, memory.
 *
 * A session is one block of memory, which begin_on allocates once: the edge_session, then all parts that it points to.
 *
 *     edge_session | tokenizer | sampler | stops x 2 | ids | run_ids | system | ears | accelerator | kv | policy | drafts | pass
 *
 *     text --tokenizer--> ids --pass--> logits --sampler--> token --utf8, stops--> text
 *                              |  ^
 *                           KV rows <-- policy
 *
 * Invariants between two calls of edge.h:
 *  - `busy` is FREE. A call holds it from `enter` to `leave`, so that one thread at a time changes the session; `cancelled`
 *    and `trim` may be set by any thread at any time.
 *  - `waiting` tokens, from ids[first] on, have not been run. All tokens before them are KV rows, or were evicted.
 *  - While an answer is generated, one token waits: the newest. The last `ahead` KV rows belong to verified drafts, or to
 *    tokens that an accelerator has chosen, which the answer has not reached; every call but edge_next, edge_read,
 *    edge_use and edge_tokenize drops them first.
 *  - Threads of the pass sleep or spin outside of passes. A forked child has none of them, hence `process`.
 *
 * Other files have the rest of a session: append.c the texts, turns.c the answers, rewind.c their end, context.c tokens and
 * rows, state.c saved conversations, begin.c the choice of an engine. */
#include <string.h>

#include "budgets.h"
#include "bundle.h"
#include "constraint.h"
#include "context.h"
#include "drafts.h"
#include "encoder.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "pass.h"
#include "policy.h"
#include "reclaim.h"
#include "sampler.h"
#include "session.h"
#include "stops.h"
#include "system.h"
#include "tokenizer.h"
#include "tools.h"
#include "usage.h"

/* ---- one thread at a time --------------------------------------------------------------------------------------- */

edge_status check_accelerator(const edge_session *s, edge_error *error)
{
    const accelerator *a = s->accelerator;
    const char *why = a ? a->kind->failure(a) : NULL;
    if (!why)
        return EDGE_OK;
    return edge_fail(error, EDGE_FAILED, "%s has failed (%s): end the session, and begin another",
                     a->kind->called, why);
}

edge_status check_threads(const edge_session *s, edge_error *error)
{
    if (!pass_lost_thread(s->pass))
        return EDGE_OK;
    return edge_fail(error, EDGE_FAILED, "the system has ended a thread of the session: end it, and begin another");
}

/* Values of `busy`. */
enum { FREE, LOOKED_AT, IN_USE };

enum { SHORT_TEXT = 1024 }; /* bytes that take less than a millisecond to encode */

static edge_status check_session(const edge_session *s, edge_error *error)
{
    if (!s)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the session is NULL: edge_begin makes one");
    if (s->process != process_id())
        return edge_fail(error, EDGE_BUSY, "the session belongs to process %d, and a forked child has none of its "
                         "threads: begin one in the child", s->process);
    edge_status status = model_is_whole(s->model, error);
    if (!status)
        status = check_threads(s, error);
    return status ? status : check_accelerator(s, error);
}

/* Returns false if another thread is inside a call. All memory orders are sequential: `trim` depends on it. */
static bool take_hold(edge_session *s, int32_t as)
{
    for (int32_t now = FREE;
         !__atomic_compare_exchange_n(&s->busy, &now, as, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); now = FREE) {
        if (now == IN_USE)
            return false;
        sleep_seconds(1e-6); /* edge_use, trims and texts for edge_tokenize are short: wait for them rather than fail */
    }
    return true;
}

static void let_go(edge_session *s)
{
    __atomic_store_n(&s->busy, FREE, __ATOMIC_SEQ_CST);
}

static edge_status claim(edge_session *s, int32_t as, edge_error *error)
{
    edge_status status = check_session(s, error);
    if (status)
        return status;
    if (take_hold(s, as)) {
        if (as == IN_USE)
            note_usage(s);
        return EDGE_OK;
    }
    return edge_fail(error, EDGE_BUSY, "another thread uses this session: call edge_cancel, and wait for it");
}

/* Trims as requested, unless another thread holds the session; that one trims before its next pass, or when it leaves. */
static void trim(edge_session *s)
{
    while (__atomic_load_n(&s->trim, __ATOMIC_SEQ_CST) && take_hold(s, LOOKED_AT)) {
        if (!s->accelerator)
            context_drop(s);
        reclaim_trim(s);
        let_go(s);
    }
}

edge_status enter_answer(edge_session *s, edge_error *error)
{
    return claim(s, IN_USE, error);
}

edge_status enter(edge_session *s, edge_error *error)
{
    edge_status status = claim(s, IN_USE, error);
    if (!status)
        context_drop(s);
    return status;
}

edge_status leave(edge_session *s, edge_status status)
{
    let_go(s);
    trim(s);
    return status;
}

/* ---- options ---------------------------------------------------------------------------------------------------- */

/* Checks the ranges of constants.h. */
static edge_status check_ranges(const edge_options *options, edge_error *error)
{
#define VALUE(name, low, high, own, range) options->name,
#define LIMITS(name, low, high, own, range) {low, high, own},
#define WORDS(name, low, high, own, range) #name "\0" range "\0"
    const double values[] = {RANGED_OPTIONS(VALUE)};
    static const struct { double low, high; bool own; } limits[] = {RANGED_OPTIONS(LIMITS)};
    const char *name = RANGED_OPTIONS(WORDS), *range;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++, name = range + strlen(range) + 1) {
        range = name + strlen(name) + 1;
        if (!(limits[i].own && values[i] < 0) && !(values[i] >= limits[i].low && values[i] <= limits[i].high))
            return edge_fail(error, EDGE_BAD_ARGUMENT, "%s must be %s", name, range);
    }
    return EDGE_OK;
#undef VALUE
#undef LIMITS
#undef WORDS
}

edge_status check_generates(const edge_session *s, edge_error *error)
{
    if (s->ears)
        return edge_fail(error, EDGE_UNSUPPORTED,
                         "the model hears, and answers no prompts: call edge_listen and edge_hear");
    if (!s->model->config->encoder)
        return EDGE_OK;
    return edge_fail(error, EDGE_UNSUPPORTED, "the model is an encoder, which answers no prompts: call edge_embed");
}

edge_status check_options(const edge_model *model, const edge_options *options, edge_error *error)
{
    if (options->size < sizeof *options)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_options.size is %d: begin with EDGE_OPTIONS",
                         (int64_t)options->size);
    if (options->threads > model->config->threads)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "threads must be at most %d, for which the model was exported",
                         (int64_t)model->config->threads);
    if (options->stop_count > MOST_STOPS || (options->stop_count && !options->stop))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "stop must be at most %d texts", (int64_t)MOST_STOPS);
    if (options->speculate > EDGE_SPECULATE_OFF)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not an edge_speculate", (int64_t)options->speculate);
    if (options->engine > EDGE_ENGINE_NPU)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not an edge_engine", (int64_t)options->engine);
    return check_ranges(options, error);
}

/* threads: 0 ends them. */
static void start_drafter(edge_session *s, uint32_t threads, uint64_t cpu_mask)
{
    if (s->own_drafts && EDGE_DRAFTER->start)
        EDGE_DRAFTER->start(s->own_drafts, threads, cpu_mask);
}

/* Starts the number of threads of the options, or one for each fast core. */
static edge_status start_threads(edge_session *s, const edge_options *options, edge_error *error)
{
    uint32_t threads = options->threads ? options->threads : fastest_cores(), allowed = 0;
    for (uint64_t mask = options->cpu_mask; mask; mask &= mask - 1)
        allowed++;
    if (!options->threads && allowed && threads > allowed)
        threads = allowed;
    if (threads > s->model->config->threads)
        threads = s->model->config->threads;
    edge_status status = pass_start(s->pass, threads, options->cpu_mask, error);
    start_drafter(s, status ? 0 : threads, options->cpu_mask);
    return status;
}

/* Sets the options of the next answer; threads change at once. On failure threads may run, and nothing else has changed. */
static edge_status take_options(edge_session *s, const edge_options *options, edge_error *error)
{
    edge_status status = start_threads(s, options, error);
    if (!status)
        status = stops_set(s->next_stops, options->stop, options->stop_count, error);
    if (status)
        return status;
    s->new_stops = true;
    memcpy(&s->next_options, options, sizeof s->next_options);
    s->next_options.stop = NULL; /* copied: the app may free its texts */
    s->next_options.isa = NULL;
    s->next_options.cache = s->next_options.npu = NULL;
    return EDGE_OK;
}

edge_status edge_set(edge_session *s, const edge_options *options, edge_error *error)
{
    const edge_options as_exported = EDGE_OPTIONS;
    edge_status status = enter(s, error);
    if (status)
        return status;
    options = options ? options : &as_exported;
    status = check_options(s->model, options, error);
    if (!status) {
        pass_stop(s->pass);
        start_drafter(s, 0, 0); /* whose threads may be seats of the page */
        status = take_options(s, options, error);
        if (status && start_threads(s, &s->next_options, NULL))
            pass_start(s->pass, 1, 0, NULL); /* one thread needs no other, and cannot fail */
    }
    return leave(s, status);
}

/* ---- beginning and end ------------------------------------------------------------------------------------------ */

/* design: of the compiled pass. NULL: an accelerator of this kind runs all passes. */
static void lay_out(arena *from, edge_session *s, edge_model *model, const design_config *design,
                    const accelerator_kind *kind)
{
    const edge_config *config = model->config;
    s->tokenizer = tokenizer_layout(from, model);
    s->vocabulary = s->tokenizer ? tokenizer_vocabulary(s->tokenizer) : NULL;
    s->sampler = sampler_layout(from, config->vocab);
    s->stops = stops_layout(from);
    s->next_stops = stops_layout(from);
    s->room = config->capacity + config->chunk + config->long_from + 4096; /* tokens_ahead, and the last block of a text */
    s->ids = take(from, s->room * sizeof *s->ids);
    s->run_ids = take(from, (config->states || config->ringed ? config->capacity : 0) * sizeof *s->run_ids);
    s->system = take(from, config->capacity * sizeof *s->system);
    const embed_config *vectors = model_embed(model);
    s->pooled = take(from, vectors ? 2ull * vectors->widest * sizeof *s->pooled : 0);
    s->ears = EDGE_EARS ? EDGE_EARS->layout(from, model) : NULL;
    s->accelerator = kind ? kind->layout(from, model) : NULL;
    s->rows = kv_layout(from, model, !design);
    if (s->accelerator)
        kv_attach(s->rows, s->accelerator);
    s->given = EDGE_EYES && model->sizes[SECTION_EYES] ? given_layout(from, config->vocab) : NULL;
    s->policy = policy_layout(from, model);
    s->pass = pass_layout(from, model, design, s->rows, s->accelerator);
    const uint64_t before = from->used;
    s->drafts = design && config->drafts ? drafts_layout(from) : NULL;
    s->own_drafts = NULL;
    if (design && config->drafts && model->draft)
        s->own_drafts = EDGE_DRAFTER->layout(from, model->draft, model, s->pass, s->rows, design->isa);
    s->draft_bytes = from->used - before;
    if (s->given)
        pass_see(s->pass, s->given);
}

edge_status begin_on(edge_model *model, const edge_options *options, const accelerator_kind *kind, edge_session **session,
                     edge_error *error)
{
    const design_config *design = NULL;
    edge_status status;
    *session = NULL; /* a race may leave an ended session here */
    if (!kind && (status = pass_choose(model, options->isa, &design, error)))
        return status;
    edge_session counted;
    arena count = {NULL, 0};
    take(&count, sizeof counted);
    lay_out(&count, &counted, model, design, kind);
    arena memory = {map_memory(count.used), 0};
    if (!memory.memory)
        return edge_fail(error, EDGE_NO_MEMORY, "a session needs %d KiB: end others, or export with fewer KV rows",
                         (int64_t)(count.used >> 10));
    edge_session *s = take(&memory, sizeof *s);
    lay_out(&memory, s, model, design, kind);
    s->model = model;
    s->process = process_id();
    s->turn = TURN_NEW;
    s->memory = memory.memory;
    s->size = count.used;
    s->chunk = model->config->chunk;
    s->needed = (double)model->config->peak;
    s->readings = (edge_readings)EDGE_READINGS;
    if (model->sizes[SECTION_PREFIX] && !kv_prefix(s->rows))
        status = edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged: its prefix");
    else
        status = EDGE_OK;
    if (status || (s->accelerator && (status = kind->open(s->accelerator, options, &s->cancelled, error)))
        || (status = take_options(s, options, error))) {
        pass_stop(s->pass);
        start_drafter(s, 0, 0);
        if (s->accelerator)
            kind->close(s->accelerator);
        unmap_memory(s->memory, s->size);
        return status;
    }
    context_reset(s); /* on an open device */
    note_usage(s); /* for edge_use while the first call computes */
    __atomic_fetch_add(&model->sessions, 1, __ATOMIC_RELAXED);
    *session = s;
    return EDGE_OK;
}

void edge_end(edge_session *s)
{
    if (!s)
        return;
    edge_model *model = s->model;
    if (s->process == process_id()) { /* a forked child has no threads to join */
        pass_stop(s->pass);
        start_drafter(s, 0, 0);
        if (s->accelerator)
            s->accelerator->kind->close(s->accelerator);
        if (s->ears)
            EDGE_EARS->end(s->ears);
    }
    if (s->given)
        given_clear(s->given);
    constraint_free(s->constraint);
    tools_free(s->tools);
    unmap_memory(s->memory, s->size);
    __atomic_fetch_sub(&model->sessions, 1, __ATOMIC_RELEASE);
}

/* ---- between answers -------------------------------------------------------------------------------------------- */

/* Returns -1 for values that are no quantity. */
static double reading_of(double value)
{
    return value >= 0 && value < 1e18 ? value : -1;
}

edge_status edge_read(edge_session *s, const edge_readings *readings, edge_error *error)
{
    edge_status status = enter_answer(s, error); /* keeps drafts */
    if (status)
        return status;
    if (!readings || readings->size < sizeof *readings)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_readings must begin with EDGE_READINGS"));
    s->readings = (edge_readings){
        sizeof s->readings, reading_of(readings->joules), reading_of(readings->celsius), reading_of(readings->headroom),
        readings->available,
    };
    watch_read(&s->watch, &s->readings, s->started);
    return leave(s, EDGE_OK);
}

edge_status edge_trim(edge_session *s, edge_trim_level level, edge_error *error)
{
    edge_status status = check_session(s, error);
    if (status)
        return status;
    if (level < EDGE_TRIM_SOFT || level > EDGE_TRIM_ALL)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not an edge_trim_level", (int64_t)level);
    for (int32_t asked = 0; asked <= level
         && !__atomic_compare_exchange_n(&s->trim, &asked, level + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);)
        ;
    trim(s);
    return EDGE_OK;
}

edge_status edge_use(const edge_session *session, edge_usage *usage, edge_error *error)
{
    edge_session *s = (edge_session *)session; /* only `busy` and `noting` change */
    edge_status status = check_session(s, error);
    if (status)
        return status;
    if (!usage || usage->size < sizeof *usage)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_use needs an edge_usage whose size is set");
    const uint32_t size = usage->size;
    if (take_hold(s, LOOKED_AT)) {
        *usage = usage_of(s);
        leave(s, EDGE_OK);
    } else { /* another thread computes */
        pass_note(s, usage, &s->noted);
    }
    usage->size = size;
    private_bytes(&usage->anonymous, &usage->swapped);
    return EDGE_OK;
}

int64_t edge_thread_ids(const edge_session *session, int32_t *ids, size_t capacity, edge_error *error)
{
    edge_session *s = (edge_session *)session; /* only `busy` changes */
    edge_status status = claim(s, LOOKED_AT, error);
    if (status)
        return status;
    if (capacity && !ids)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_thread_ids needs room for ids"));
    uint32_t count = 0, own = 1; /* the encoder's first thread is the caller, too */
    for (int32_t id; count < pass_threads(s->pass) && (id = pass_thread_id(s->pass, count)); count++)
        if (count < capacity)
            ids[count] = id;
    for (int32_t id; s->encoder && (id = encoder_thread_id(s->encoder, own)); own++, count++)
        if (count < capacity)
            ids[count] = id;
    leave(s, EDGE_OK);
    return count;
}

double paused_seconds(const edge_session *s)
{
    return s->watch.paused;
}

edge_status check_length(size_t count, size_t size, edge_error *error)
{
    if (count <= PTRDIFF_MAX / size)
        return EDGE_OK;
    return edge_fail(error, EDGE_BAD_ARGUMENT, "the text has more bytes than there can be: check its length");
}

typedef struct { int32_t *ids; size_t capacity, count; } id_list;

static bool list_ids(void *to, const int32_t *ids, size_t count)
{
    id_list *list = to;
    if (list->count < list->capacity) {
        size_t fits = list->capacity - list->count < count ? list->capacity - list->count : count;
        memcpy(list->ids + list->count, ids, fits * sizeof *ids);
    }
    list->count += count;
    return true;
}

/* Encodes with a tokenizer of its own, in memory for this call, so that other threads may use the session's. */
static edge_status tokenize_aside(const edge_model *model, const char *text, size_t length, bool special, id_list *list,
                                  edge_error *error)
{
    arena count = {NULL, 0};
    tokenizer_layout(&count, model);
    arena memory = {map_memory(count.used), 0};
    if (!memory.memory)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory is left to encode a text aside from the session");
    tokenizer_encode(tokenizer_layout(&memory, model), text, length, special, true, list_ids, list);
    unmap_memory(memory.memory, count.used);
    return EDGE_OK;
}

int64_t edge_tokenize(edge_session *s, const char *text, size_t length, uint32_t special, int32_t *ids, size_t capacity,
                      edge_error *error)
{
    edge_status status = check_session(s, error);
    if (status)
        return status;
    if ((length && !text) || (capacity && !ids))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_tokenize needs a text, and room for ids");
    if ((status = check_length(length, 1, error)))
        return status;
    id_list list = {ids, capacity, 0};
    if (!length)
        return 0;
    if (length <= SHORT_TEXT && take_hold(s, LOOKED_AT)) { /* which others wait for, rather than fail */
        tokenizer_encode(s->tokenizer, text, length, special != 0, true, list_ids, &list);
        leave(s, EDGE_OK);
    } else {
        status = tokenize_aside(s->model, text, length, special != 0, &list, error);
    }
    return status ? status : (int64_t)list.count;
}
