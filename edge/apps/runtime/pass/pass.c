/* The forward pass by compiled code: a port of backends/tvm/engine.py and cpu/workers.py.
 *
 * Compiled code works on arrays that a pass owns, and on the rows of a kv:
 *
 *     job        what to run: kind, count, position, …: read by all threads when it starts
 *     lines      LINES cache lines for each thread: arrivals at barriers, and numbers of jobs
 *     table      offsets of weights and scratch, a section of model.edge (a copy where adapters or rows across may change it)
 *     floats     scratch | normals | temperatures | layer inputs | bounds of the head: offsets are in the design
 *     integers   scratch
 *     tokens     [tokens]         of the chunk, and what belongs to each
 *     rope       [kinds][rows][2 * head]    cosines and signed sines, from position `first_angle` on
 *     logits     [1 + drafts][padded_vocab]
 *
 *     prepare ──> job ──> run_job, by all threads ──> logits, and rows behind those in use ──> kv_appended
 *
 * Invariants:
 *  - compiled code checks nothing: can_run has checked tokens, rows, positions and the file before;
 *  - threads 1 … sleep or spin in compiled code between jobs; they read `kind` and `threads` of the job at any time, so that
 *    kind is QUIT only to end them;
 *  - results do not depend on the number of threads: the design fixes the parts of each phase;
 *  - the tables of angles hold `angles` positions from first_angle on, or nothing (angles 0);
 *  - after pass_verify, `unsettled` tokens are in the rows but not in the fixed state, until pass_settle.
 *
 * An accelerator runs the pass instead where there is one; without a design, it runs every pass and has the rows. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "pass.h"
#include "pass_parts.h"
#include "places.h"
#include "rows.h"
#include "system.h"

/* Without memory for compiled code. */
static pass *layout_accelerated(arena *from, const edge_model *model, kv *rows, accelerator *runs_all)
{
    pass *p = take(from, sizeof *p);
    uint64_t bytes = model->config->padded_vocab * sizeof(float);
    float *logits = take(from, bytes);
    uint32_t count = whole_tiles(model->config->layer_inputs) * model->config->layers * model->config->chunk;
    float *inputs = take(from, count * sizeof *inputs);
    bytes += count * sizeof *inputs;
    if (p)
        *p = (pass){.model = model, .rows = rows, .accelerator = runs_all, .inputs = inputs, .logits = logits,
                    .cache = kv_arguments(rows), .bytes = bytes, .learned = has_learned_positions(model)};
    return p;
}

pass *pass_layout(arena *from, const edge_model *model, const design_config *design, kv *rows,
                  accelerator *runs_all)
{
    if (!design)
        return layout_accelerated(from, model, rows, runs_all);
    const edge_config *c = model->config;
    pass *p = take(from, sizeof *p);
    uint64_t before = from->used;
    pass_job *job = take(from, sizeof *job);
    int32_t *lines = take(from, LINES * c->threads * LINE * sizeof *lines);
    float *floats = take(from, design->floats * sizeof *floats);
    int32_t *integers = take(from, design->integers * sizeof *integers);
    int32_t *tokens = take(from, (c->encoder ? 5ull : 2ull) * design->tokens * sizeof *tokens); /* see place_texts */
    uint32_t most = c->drafts < design->gemm_tokens ? c->drafts : design->gemm_tokens - 1;
    most = most < c->chunk ? most : c->chunk - 1;
    float *logits = take(from, (uint64_t)c->padded_vocab * (1 + most) * sizeof *logits);
    float *rope = take(from, (uint64_t)c->rope_kinds * design->rope_size * sizeof *rope);
    member *members = take(from, c->threads * sizeof *members);
    const uint64_t placed = c->components && !c->encoder ? design->tokens : 0;
    places room_for_places = {.numbers = take(from, placed * sizeof(int32_t)),
                              .cells = take(from, placed * sizeof(int32_t[3]))};
    room_for_places.cells = placed ? room_for_places.cells : NULL;
    uint64_t bytes = from->used - before, size = design->numbers * sizeof(int64_t);
    const adapters_config *room = model_adapters(model);
    const bool changes = room || c->crossings || c->fuse_slot;
    adapter_room adapter = {take(from, changes ? size : 0), take(from, room ? room->room : 0)};
    const row_shape *shape = c->shapes;
    const uint64_t cross = (uint64_t)c->crossings * shape->heads * c->cross_stride + (c->crossings ? SPARE_ROWS : 0);
    const uint64_t value = c->kv_dtype == KV_F32 ? sizeof(float) : sizeof(uint16_t);
    void *cross_keys = take(from, cross * shape->key * value), *cross_values = take(from, cross * shape->value * value);
    if (!from->memory)
        return NULL;
    const uint8_t *table = model->sections[SECTION_DESIGNS] + design->table;
    if (changes)
        table = memcpy(adapter.table, table, (size_t)size);
    *p = (pass){.model = model, .design = design, .rows = rows, .job = job, .lines = lines, .floats = floats,
                .integers = integers, .tokens = tokens, .places = room_for_places, .logits = logits, .rope = rope,
                .members = members, .cache = kv_arguments(rows), .bytes = bytes, .table = (const int64_t *)table,
                .adapter = adapter, .cross_keys = cross_keys, .cross_values = cross_values,
                .accelerator = EDGE_PAGE ? EDGE_PAGE->layout(from, model) : NULL,
                .inputs = floats + design->layer_inputs, .learned = has_learned_positions(model), .drafts = most};
    if (model->sizes[SECTION_NORMALS])
        memcpy(floats + design->normals, model->sections[SECTION_NORMALS],
               (size_t)model->sizes[SECTION_NORMALS]);
    return p;
}

void pass_see(pass *p, const given *pictures)
{
    p->given = pictures;
}

uint64_t pass_bytes(const pass *p)
{
    return p->bytes;
}

adapter_room pass_adapter(const pass *p)
{
    return p->adapter;
}

void pass_release(pass *p)
{
    if (!p->design)
        return;
    const size_t first = (size_t)p->design->normals, normals = (size_t)p->model->sizes[SECTION_NORMALS];
    const size_t end = first + normals / sizeof *p->floats, floats = (size_t)p->design->floats;
    release_memory(p->floats, first * sizeof *p->floats);
    release_memory(p->floats + end, (floats - end) * sizeof *p->floats);
    release_memory(p->integers, (size_t)p->design->integers * sizeof *p->integers);
}

bool pass_reaches(const pass *p, uint32_t count)
{
    return !p->learned || kv_next_position(p->rows) + count <= p->model->config->context;
}

/* Whether these tokens may run: compiled code checks nothing. */
static bool can_run(const pass *p, const int32_t *tokens, uint32_t count)
{
    const edge_config *c = p->model->config;
    if (!p->threads || pass_lost_thread(p) || !count || count > c->chunk || count > kv_free(p->rows)
        || !pass_reaches(p, count) || !file_is_whole(&p->model->file))
        return false;
    for (uint32_t i = 0; tokens && i < count; i++)
        if (tokens[i] < 0 || ((uint32_t)tokens[i] >= c->vocab && (!p->given || !given_row(p->given, tokens[i]))))
            return false;
    return true;
}

/* An accelerator takes one token a pass if the host computes an input for each (a row of the table, a temperature), or if
 * tokens that it chose in vain would stay in the fixed state. */
uint32_t pass_picks(const pass *p)
{
    const edge_config *c = p->model->config;
    if (!p->accelerator || !p->accelerator->kind->picks)
        return 0;
    return EDGE_TABLE || c->tempered || c->states ? 1 : c->chunk < MOST_PICKS ? c->chunk : MOST_PICKS;
}

/* Prepares a pass that appends `rows` rows; a job's kind and what it wants are left to set. texts: of an
 * encoder. Returns false if the file was cut short. */
static bool prepare(pass *p, const int32_t *tokens, uint32_t count, uint32_t rows, const text_places *texts)
{
    if (p->design)
        write_tokens(p, tokens, count);
    if (EDGE_TABLE && p->model->config->layer_inputs
        && !EDGE_TABLE(p->model, p->design ? p->tokens : tokens, count, p->inputs))
        return false;
    kv_announce(p->rows, rows);
    kv_prepare(p->rows, rows);
    if (!p->design)
        return true;
    place_tokens(p, tokens, count, rows, texts);
    p->job->observed = p->job->drafts = p->job->before = p->job->behind = 0;
    return true;
}

uint32_t pass_drafts(const pass *p)
{
    return p->accelerator ? 0 : p->drafts;
}

float *pass_verify(pass *p, const int32_t *tokens, uint32_t count)
{
    if (count > 1 + pass_drafts(p) || !can_run(p, tokens, count) || !prepare(p, tokens, count, count, NULL))
        return NULL;
    pass_job *job = p->job;
    job->kind = JOB_VERIFY;
    job->wanted = count;
    job->drafts = DRAFTS_VERIFIED;
    run_job(p);
    if (pass_lost_thread(p))
        return NULL;
    kv_appended(p->rows, count);
    p->unsettled = count;
    return p->logits;
}

void pass_settle(pass *p, uint32_t dropped)
{
    uint32_t kept = p->unsettled - dropped;
    if (p->unsettled && p->model->config->states && file_is_whole(&p->model->file)) {
        p->job->kind = JOB_APPLY;
        p->job->count = kept;
        p->job->drafts = DRAFTS_APPLIED;
        run_job(p);
    }
    kv_drop(p->rows, dropped);
    p->unsettled = 0;
}

/* ---- a head in two stages ------------------------------------------------------------------------------------------ */

/* A port of backends/tvm/cpu/two_stages.py: bounds of the logits of each tile of the vocabulary tell which tiles may hold
 * the largest logits. backends/tvm/cpu/phases/estimate.py computes the bounds and runs both stages. */

/* Whether two stages are worth while for the `wanted` largest logits of the next token; 0: all are wanted. Called once for
 * each token; otherwise `left` decreases by one. */
static bool head_pays(pass *p, uint32_t wanted)
{
    head_stages *h = &p->stages;
    if (wanted && wanted <= p->design->tiles / TILES_EACH && !h->left)
        return true;
    h->left -= h->left > 0;
    return false;
}

/* The k-th largest of at least k values. */
static float kth_largest(const float *values, uint64_t count, uint32_t k)
{
    float found[MOST_TOP]; /* the largest first */
    uint32_t held = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (held == k && values[i] <= found[k - 1])
            continue;
        uint32_t at = held < k ? held++ : k - 1;
        for (; at && found[at - 1] < values[i]; at--)
            found[at] = found[at - 1];
        found[at] = values[i];
    }
    return found[k - 1];
}

/* Lists the tiles that may hold one of the `wanted` largest logits, and returns their number. */
static uint32_t head_survivors(pass *p, uint32_t wanted)
{
    head_stages *h = &p->stages;
    float *upper = p->floats + p->design->head_upper, *lower = p->floats + p->design->head_lower;
    int32_t *tiles = p->integers + p->design->head_tiles;
    uint32_t found = 0, all = (uint32_t)p->design->tiles;
    if (p->model->config->vocab % HEAD_TILE) { /* some rows of the last tile are no tokens */
        upper[all - 1] = INFINITY;
        lower[all - 1] = -INFINITY;
    }
    const float threshold = kth_largest(lower, all, wanted);
    for (uint32_t tile = 0; tile < all; tile++)
        if (upper[tile] >= threshold)
            tiles[found++] = (int32_t)tile;
    bool many = found > FEW_TILES * all;
    uint32_t longer = h->length ? h->length : 1;
    h->left = many ? longer : 0;
    h->length = !many ? 1 : 2 * longer < LONGEST_WHOLE ? 2 * longer : LONGEST_WHOLE;
    return found;
}

/* Runs the prepared step, and computes the logits that may be among the `largest` largest; all others become -INFINITY. */
static void run_in_two_stages(pass *p, uint32_t largest)
{
    const uint32_t vocab = p->model->config->vocab;
    cpu_binding before;
    bool bound = bind_thread(p->cpu_mask, &before); /* for both stages */
    p->job->wanted = WANTED_BOUNDS;
    run_alone(p);
    p->job->kind = JOB_RESCORE;
    p->job->count = head_survivors(p, largest);
    p->job->wanted = 1;
    for (uint32_t token = 0; token < vocab; token++)
        p->logits[token] = -INFINITY;
    run_alone(p);
    if (bound)
        unbind_thread(&before);
}

/* ---- passes -------------------------------------------------------------------------------------------------------- */

/* Lets the accelerator run the pass that is prepared. */
static accelerator_answer accelerate(pass *p, const int32_t *tokens, uint32_t count, picking *pick)
{
    pass_input input = {
        .tokens = tokens, .count = count, .position = kv_next_position(p->rows),
        .rope_position = kv_next_rope_position(p->rows), .lengthened = kv_lengthened(p->rows), .starts = p->cache.starts,
        .lengths = p->cache.lengths, .positions = p->cache.positions, .inputs = EDGE_TABLE ? p->inputs : NULL, .pick = pick,
    };
    if (p->design) {
        input.angles = p->rope + p->job->angle * 2 * p->model->config->head;
        input.angles_stride = p->design->rope_size;
        input.temperatures = p->model->config->tempered ? p->floats + p->design->temperatures : NULL;
        input.normals = (const float *)(const void *)p->model->sections[SECTION_NORMALS];
        input.arenas = kv_arenas(p->rows);
        input.states = kv_states(p->rows);
        input.settles = count > 1 || input.states->behind == smaller(MOST_BEHIND, p->model->config->chunk)
            || !kv_length(p->rows) || kv_free(p->rows) == 1 /* rows are evicted next */ || p->model->config->ringed;
    }
    accelerator_answer answer = p->accelerator->kind->run(p->accelerator, &input, p->logits);
    if (answer == COMPLETED && p->model->config->states && p->design && !input.settles)
        p->ahead[input.states->behind++] = tokens[0];
    if (answer == OUT_OF_SERVICE)
        p->accelerator = NULL;
    return answer;
}

static void run_on_cpu(pass *p, uint32_t count, uint32_t observed, const picking *pick)
{
    pass_job *job = p->job; /* threads read kind and threads between jobs, too: never QUIT or 0, even for a moment */
    job->kind = count == 1 && !p->added ? JOB_STEP : JOB_CHUNK; /* chunks add parts of rows */
    job->wanted = 1;
    job->observed = p->design->observed ? observed : 0;
    if (pick && !p->added && head_pays(p, pick->enough))
        run_in_two_stages(p, pick->enough);
    else
        run_job(p);
    kv_written(p->rows, count);
}

/* The pass has appended rows of `count` tokens. */
static void appended(pass *p, uint32_t count)
{
    if (p->placed)
        kv_appended_at(p->rows, count, p->places.numbers, p->places.next);
    else
        kv_appended(p->rows, count);
}

const float *pass_states(pass *p, const int32_t *tokens, uint32_t count, const text_places *texts, uint32_t *stride)
{
    const bool encoder = p->model->config->encoder;
    if (encoder)
        kv_clear(p->rows);
    if (!p->design || !can_run(p, tokens, count) || !prepare(p, tokens, count, count, encoder ? texts : NULL))
        return NULL;
    if (encoder)
        place_texts(p, count, texts);
    if (texts)
        p->job->before = texts->first, p->job->behind = texts->stop ? p->model->config->layers - texts->stop : 0;
    p->job->kind = encoder || count > 1 ? JOB_CHUNK : JOB_STEP;
    p->job->wanted = 0;
    run_job(p);
    kv_written(p->rows, count);
    if (pass_lost_thread(p))
        return NULL;
    appended(p, count);
    return pass_inputs(p, stride);
}

bool pass_cross(pass *p, const float *states, uint32_t count, uint32_t stride)
{
    const uint32_t hidden = p->model->config->hidden, most = p->model->config->chunk;
    if (!p->threads || pass_lost_thread(p) || !p->model->config->crossings || count > p->model->config->cross_stride)
        return false;
    uint32_t padded;
    float *inputs = pass_inputs(p, &padded);
    for (uint32_t at = 0; at < count; at += most) {
        const uint32_t some = smaller(most, count - at);
        for (uint32_t row = 0; row < some; row++) {
            float *to = inputs + (size_t)row * padded;
            memcpy(to, states + (size_t)(at + row) * stride, hidden * sizeof *to);
            memset(to + hidden, 0, (padded - hidden) * sizeof *to);
        }
        if (!file_is_whole(&p->model->file))
            return false;
        p->job->kind = JOB_CROSS;
        p->job->count = some;
        p->job->position = at;
        p->job->wanted = p->job->observed = p->job->drafts = 0;
        run_job(p);
        if (pass_lost_thread(p))
            return false;
    }
    p->adapter.table[p->model->config->cross_slot] = count;
    return true;
}

/* The GPU is lost, or has the newest states alone: their tokens run again. */
bool pass_catch_up(pass *p)
{
    const uint32_t count = kv_states(p->rows)->behind;
    if (!count)
        return true;
    kv_forget(p->rows, count);
    kv_states(p->rows)->behind = 0;
    if (!can_run(p, p->ahead, count) || !prepare(p, p->ahead, count, count, NULL))
        return false;
    run_on_cpu(p, count, 0, NULL);
    appended(p, count);
    return !pass_lost_thread(p);
}

void pass_cross_keys(const pass *p, uint32_t crossing, uint32_t head, uint32_t count, float *keys)
{
    const edge_config *c = p->model->config;
    const uint32_t width = c->shapes->key, size = c->head;
    const uint64_t first = ((uint64_t)crossing * c->shapes->heads + head) * c->cross_stride;
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t i = 0; i < size; i++) {
            const uint64_t at = ((first + row) / TILE * width + i) * TILE + row % TILE;
            const float *whole = p->cross_keys;
            const uint16_t *halves = p->cross_keys;
            keys[(size_t)row * size + i] = c->kv_dtype == KV_F32 ? whole[at] : rows_from_half(halves[at]);
        }
}

float *pass_run(pass *p, const int32_t *tokens, uint32_t count, uint32_t observed, picking *pick)
{
    if (!can_run(p, tokens, count) || !prepare(p, tokens, count, most_rows(count, pick), NULL))
        return NULL;
    if (!p->accelerator || accelerate(p, tokens, count, pick) != COMPLETED) {
        if (!p->design)
            return NULL;
        if (kv_states(p->rows)->behind
            && !(pass_catch_up(p) && prepare(p, tokens, count, most_rows(count, pick), NULL)))
            return NULL;
        run_on_cpu(p, count, observed < count ? observed : count, pick);
        if (pass_lost_thread(p))
            return NULL;
    }
    appended(p, pick && pick->count ? pick->count : count);
    return p->logits;
}
