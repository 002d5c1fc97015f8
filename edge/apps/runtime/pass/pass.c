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
 *     prepare ──> job ──> run_compiled by all threads ──> logits, and rows behind those in use ──> kv_appended
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
#include "places.h"
#include "system.h"

typedef struct { pass *pass; int64_t number; worker thread; } member;

/* left: tokens to come whose head runs as a whole. length: of the next run of such tokens; 0 counts as 1. */
typedef struct { uint32_t left, length; } head_stages;

struct pass {
    const edge_model *model;
    const design_config *design;                   /* NULL: compiled code runs none */
    kv *rows;
    const given *given;                            /* NULL: no pictures */
    accelerator *accelerator;                      /* NULL: compiled code runs all passes */
    compiled_run *run;
    pass_job *job;
    const int64_t *table;                          /* of the design; a copy if there is room for adapters, or rows across */
    adapter_room adapter;
    void *cross_keys, *cross_values;
    int32_t *lines;                                /* [threads][LINES][LINE] */
    float *floats;                                 /* scratch */
    float *inputs;                                 /* as a table_reader writes them */
    int32_t *integers;
    int32_t *tokens;
    places places;                                 /* of the pass's tokens; memory for positions where they have components */
    float *logits;
    float *rope;                                   /* tables of angles: see fill_angles */
    member *members;                               /* [threads]; 0 is the calling thread */
    kv_pointers cache;
    head_stages stages;
    uint64_t cpu_mask, bytes;
    int64_t first_angle;                           /* RoPE position of the first row of angles */
    uint32_t threads, angles;                      /* threads that run; rows of angles */
    bool lengthened;                               /* the angles have LongRoPE's long factors */
    bool placed, added;                            /* of this pass: `places` holds; given rows have parts for first layers */
    bool learned;                                  /* positions are rows of a learned table, `context` of them */
    uint32_t drafts;                               /* most drafts behind a token */
    uint32_t unsettled;                            /* tokens of the last pass that are not yet in the fixed state */
};

/* Whether positions are learned: no kind of layers rotates keys. */
static bool has_learned_positions(const edge_model *model)
{
    for (uint32_t kind = 0; kind < model->config->rope_kinds; kind++)
        if (find_angles(model, kind, false)->pairs)
            return false;
    return true;
}

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
    places room_for_places = {.numbers = take(from, placed * sizeof(int32_t)), .cells = take(from, placed * sizeof(int32_t[3]))};
    room_for_places.cells = placed ? room_for_places.cells : NULL;
    uint64_t bytes = from->used - before, size = design->numbers * sizeof(int64_t);
    const adapters_config *room = model_adapters(model);
    adapter_room adapter = {take(from, room || c->crossings ? size : 0), take(from, room ? room->room : 0)};
    const row_shape *shape = c->shapes;
    const uint64_t cross = (uint64_t)c->crossings * shape->heads * c->cross_stride + (c->crossings ? SPARE_ROWS : 0);
    const uint64_t value = c->kv_dtype == KV_F32 ? sizeof(float) : sizeof(uint16_t);
    void *cross_keys = take(from, cross * shape->key * value), *cross_values = take(from, cross * shape->value * value);
    if (!from->memory)
        return NULL;
    const uint8_t *table = model->sections[SECTION_DESIGNS] + design->table;
    if (room || c->crossings)
        table = memcpy(adapter.table, table, (size_t)size);
    *p = (pass){.model = model, .design = design, .rows = rows, .job = job, .lines = lines, .floats = floats,
                .integers = integers, .tokens = tokens, .places = room_for_places, .logits = logits, .rope = rope, .members = members,
                .cache = kv_arguments(rows), .bytes = bytes, .table = (const int64_t *)table, .adapter = adapter, .cross_keys = cross_keys, .cross_values = cross_values,
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

/* ---- threads ----------------------------------------------------------------------------------------------------- */

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
    p->run((int64_t *)p->job, p->lines, p->model->sections[SECTION_WEIGHTS], p->table, p->floats, p->integers,
           cache->keys, cache->values, cache->key_scales, cache->value_scales, cache->lengths, cache->positions,
           p->tokens, p->logits, p->rope, cache->paid, cache->starts, cache->ring_keys, cache->ring_values,
           cache->ring_key_scales, cache->ring_value_scales, cache->ring_positions, cache->states,
           p->adapter.memory, p->cross_keys, p->cross_values, number);
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

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

/* One table is [positions, 2, head]: the cosines of all dimensions, then -sin and +sin of each pair. Pairs that the model
 * does not rotate have cosine 1 and sine 0. Writes row `row` of the tables of all kinds of layers. */
static void fill_angles(pass *p, uint32_t row, const int64_t position[3])
{
    const edge_config *c = p->model->config;
    for (uint32_t kind = 0; kind < c->rope_kinds; kind++) {
        const angles_config *angles = find_angles(p->model, kind, p->lengthened);
        const uint8_t *components = find_components(c, angles);
        float *cosines = p->rope + (size_t)kind * p->design->rope_size + (size_t)row * 2 * c->head, *sines = cosines + c->head;
        for (uint32_t pair = 0; pair < c->head / 2; pair++) {
            double radians;
            bool rotated = find_radians(angles, pair, &radians);
            double by = rotated ? (double)position[components[pair - angles->first]] * radians : 0;
            float cosine = rotated ? (float)(angles->magnitude * cos(by)) : 1;
            float sine = rotated ? (float)(angles->magnitude * sin(by)) : 0;
            cosines[2 * pair] = cosines[2 * pair + 1] = cosine;
            sines[2 * pair] = -sine;
            sines[2 * pair + 1] = sine;
        }
    }
}

/* Returns the row of the tables with the angles of the next `count` positions. */
static int64_t angle_row(pass *p, uint32_t count)
{
    int64_t first = kv_next_rope_position(p->rows);
    bool lengthened = kv_lengthened(p->rows);
    bool there = p->angles && lengthened == p->lengthened && p->first_angle <= first
        && first + count <= p->first_angle + p->angles;
    if (!there) {
        p->first_angle = first;
        p->angles = count > ROPE_AHEAD ? count : ROPE_AHEAD;
        p->lengthened = lengthened;
        for (uint32_t i = 0; i < p->angles; i++)
            fill_angles(p, i, (int64_t[3]){first + i, first + i, first + i});
    }
    return first - p->first_angle;
}

/* Writes the angles of tokens whose positions have components; returns the row of the first. */
static int64_t place_angles(pass *p, uint32_t count)
{
    const int64_t base = kv_next_rope_position(p->rows) - kv_next_position(p->rows);
    p->angles = 0; /* the table no longer has consecutive positions */
    p->lengthened = kv_lengthened(p->rows);
    for (uint32_t i = 0; i < count; i++) {
        const int32_t *cell = p->places.cells[i];
        fill_angles(p, i, (int64_t[3]){base + cell[0], base + cell[1], base + cell[2]});
    }
    return 0;
}

/* Writes the factors of the queries. */
static void fill_temperatures(pass *p, int64_t position, uint32_t count)
{
    for (uint32_t i = 0; i < count && p->model->config->tempered; i++)
        p->floats[p->design->temperatures + i] = temperature_at(p->model->config, position + i);
}

/* Writes what follows an encoder's tokens: the last and the first token that each sees, positions, and token types (0). */
static void place_texts(pass *p, uint32_t count, const text_places *texts)
{
    int32_t *sees = p->tokens + count, *begins = sees + count, *positions = begins + count;
    const uint32_t *ends = texts->ends;
    for (uint32_t token = 0, begin = 0; token < count; token++) {
        if (token == *ends)
            begin = *ends++;
        sees[token] = (int32_t)*ends - 1;
        begins[token] = (int32_t)begin;
        positions[token] = (int32_t)(token - begin);
        const int32_t *cell = texts->cells ? texts->cells[token] : (int32_t[2]){positions[token], positions[token]};
        if (!p->learned && (begin || texts->cells))
            fill_angles(p, token, (int64_t[3]){cell[0], cell[1], 0});
    }
    memset(positions + count, 0, count * sizeof *positions);
    if (!p->learned && (texts->cells || sees[0] + 1 < (int32_t)count)) {
        p->angles = 0; /* positions are not consecutive */
        p->job->angle = 0;
    }
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

/* What the host computes for each token, a row of the table or a temperature, limits an accelerator to one. */
uint32_t pass_picks(const pass *p)
{
    const edge_config *c = p->model->config;
    if (!p->accelerator || !p->accelerator->kind->picks)
        return 0;
    return EDGE_TABLE || c->tempered ? 1 : c->chunk < MOST_PICKS ? c->chunk : MOST_PICKS;
}

/* Runs the prepared job on all threads. */
static void run_job(pass *p)
{
    cpu_binding before;
    bool bound = bind_thread(p->cpu_mask, &before);
    run_compiled(p, 0);
    if (bound)
        unbind_thread(&before);
}

float *pass_inputs(pass *p, uint32_t *stride)
{
    *stride = (p->model->config->hidden + 31) / 32 * 32;
    return p->floats + p->design->x;
}

/* Writes tokens where compiled code reads them: -1 for given rows, which it finds in place of embeddings. NULL: all are given, and
 * there. */
static void write_tokens(pass *p, const int32_t *tokens, uint32_t count)
{
    const uint32_t hidden = p->model->config->hidden, parts = p->model->config->deepstack;
    uint32_t stride;
    float *inputs = pass_inputs(p, &stride), *later = p->floats + p->design->deepstack;
    p->added = false;
    for (uint32_t i = 0; i < count; i++) {
        p->tokens[i] = tokens && (uint32_t)tokens[i] < p->model->config->vocab ? tokens[i] : -1;
        if (!tokens || p->tokens[i] >= 0)
            continue;
        const float *row = given_row(p->given, tokens[i]);
        memcpy(inputs + (size_t)i * stride, row, hidden * sizeof *inputs);
        for (uint32_t part = 0; part < parts; part++)
            memcpy(later + ((size_t)i * parts + part) * stride, row + (1 + part) * hidden, hidden * sizeof *later);
        p->added = parts > 0;
    }
}

/* Prepares a pass that appends `rows` rows; a job's kind and what it wants are left to set. Returns false if the file was
 * cut short. */
static bool prepare(pass *p, const int32_t *tokens, uint32_t count, uint32_t rows)
{
    if (p->design)
        write_tokens(p, tokens, count);
    if (EDGE_TABLE && p->model->config->layer_inputs && !EDGE_TABLE(p->model, p->design ? p->tokens : tokens, count, p->inputs))
        return false;
    kv_announce(p->rows, rows);
    kv_prepare(p->rows, rows);
    if (!p->design)
        return true;
    int64_t position = kv_next_position(p->rows);
    p->places.sees = p->tokens + count;
    p->placed = p->given && given_count(p->given);
    if (p->placed)
        places_find(p->given, tokens, count, position, &p->places);
    for (uint32_t i = 0; !p->placed && i < count; i++)
        p->tokens[count + i] = (int32_t)i;
    p->placed = p->placed && p->places.cells;
    fill_temperatures(p, position, count);
    p->job->count = count;
    p->job->position = position;
    p->job->angle = p->placed ? place_angles(p, count) : angle_row(p, rows);
    p->job->observed = p->job->drafts = p->job->before = p->job->behind = 0;
    return true;
}

uint32_t pass_drafts(const pass *p)
{
    return p->accelerator ? 0 : p->drafts;
}

float *pass_verify(pass *p, const int32_t *tokens, uint32_t count)
{
    if (count > 1 + pass_drafts(p) || !can_run(p, tokens, count) || !prepare(p, tokens, count, count))
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

/* ---- a head in two stages ------------------------------------------------------------------------------------------- */

/* A head in two stages, a port of backends/tvm/cpu/two_stages.py: bounds of the logits of each tile of the vocabulary tell
 * which tiles may hold the largest logits. backends/tvm/cpu/phases/estimate.py computes the bounds and runs both stages. */
/* Whether two stages are worth while for the `wanted` largest logits of the next token; 0: all are wanted. Called once for
 * each token; otherwise `left` decreases by one. */
static bool head_pays(head_stages *h, const design_config *design, uint32_t wanted)
{
    if (wanted && wanted <= design->tiles / TILES_EACH && !h->left)
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
static uint32_t head_survivors(head_stages *h, const design_config *design, uint32_t vocab, float *floats, int32_t *integers,
                               uint32_t wanted)
{
    float *upper = floats + design->head_upper, *lower = floats + design->head_lower;
    int32_t *tiles = integers + design->head_tiles;
    uint32_t found = 0, all = (uint32_t)design->tiles;
    if (vocab % HEAD_TILE) { /* some rows of the last tile are no tokens */
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
    run_compiled(p, 0);
    p->job->kind = JOB_RESCORE;
    p->job->count = head_survivors(&p->stages, p->design, vocab, p->floats, p->integers, largest);
    p->job->wanted = 1;
    for (uint32_t token = 0; token < vocab; token++)
        p->logits[token] = -INFINITY;
    run_compiled(p, 0);
    if (bound)
        unbind_thread(&before);
}

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
    }
    accelerator_answer answer = p->accelerator->kind->run(p->accelerator, &input, p->logits);
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
    if (pick && !p->added && head_pays(&p->stages, p->design, pick->enough))
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
    if (p->model->config->encoder)
        kv_clear(p->rows);
    if (!p->design || !can_run(p, tokens, count) || !prepare(p, tokens, count, count))
        return NULL;
    if (p->model->config->encoder) {
        place_texts(p, count, texts);
        p->job->before = texts->first, p->job->behind = texts->stop ? p->model->config->layers - texts->stop : 0;
    }
    p->job->kind = p->model->config->encoder || count > 1 ? JOB_CHUNK : JOB_STEP;
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
    const uint32_t hidden = p->model->config->hidden, padded = (hidden + 31) / 32 * 32, most = p->model->config->chunk;
    if (!p->threads || pass_lost_thread(p) || !p->model->config->crossings || count > p->model->config->cross_stride)
        return false;
    for (uint32_t at = 0; at < count; at += most) {
        const uint32_t some = smaller(most, count - at);
        for (uint32_t row = 0; row < some; row++) {
            float *to = p->floats + p->design->x + (size_t)row * padded;
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

float *pass_run(pass *p, const int32_t *tokens, uint32_t count, uint32_t observed, picking *pick)
{
    if (!can_run(p, tokens, count) || !prepare(p, tokens, count, most_rows(count, pick)))
        return NULL;
    if (!p->accelerator || accelerate(p, tokens, count, pick) != COMPLETED) {
        if (!p->design)
            return NULL;
        run_on_cpu(p, count, observed < count ? observed : count, pick);
        if (pass_lost_thread(p))
            return NULL;
    }
    appended(p, pick && pick->count ? pick->count : count);
    return p->logits;
}
