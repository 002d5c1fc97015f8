/* The pass of a GPU, by the programs of section GPU: a port of backends/tvm/gpu/engine.py. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "gpu.h"
#include "model.h"

extern const rows_work GPU_ROWS;

static accelerator *layout(arena *from, const edge_model *model)
{
    const gpu_config *config = (const gpu_config *)model->sections[SECTION_GPU];
    gpu *g = take(from, sizeof *g);
    gpu made = {.base = {&edge_gpu}, .model = model, .config = config, .section = model->sections[SECTION_GPU]};
    made.kernels = take(from, config->kernels * sizeof *made.kernels);
    made.buffers = take(from, config->buffers * sizeof *made.buffers);
    gpu_layout_drivers(from, &made);
    made.tables = take(from, config->angles * sizeof *made.tables);
    made.angles = take(from, (uint64_t)config->angle_rows * 2 * config->pairs_rotated * sizeof *made.angles);
    made.temperatures = take(from, model->config->chunk * sizeof *made.temperatures);
    made.inputs = take(from, (uint64_t)model->config->chunk * model->config->layers * config->input_stride * sizeof(float));
    made.positions = take(from, config->positions * sizeof *made.positions);
    made.changed = take(from, config->adapted * sizeof *made.changed);
    made.skipped = take(from, config->dispatches * sizeof *made.skipped);
    if (g)
        *g = made;
    gpu_arena none, *arenas = g ? g->arenas : &none;
    arena_layout(from, arenas, model, 0);
    if (config->keys[1] != GPU_NONE)
        arena_layout(from, g ? arenas + 1 : &none, model, 1);
    for (int i = 0; g && i < 2; i++)
        arenas[i].gpu = g, arenas[i].device.work = &GPU_ROWS;
    return (accelerator *)g;
}

static rows_device *rows_of(accelerator *a, bool ring, uint32_t count)
{
    gpu *g = (gpu *)a;
    g->arenas[ring].count = count;
    return &g->arenas[ring].device;
}

/* Fills a row for each position: cosines of all pairs, then their sines; 1 and 0 for pairs that these layers do not
 * rotate. */
static void fill_angles(gpu *g, const angles_config *angles, int64_t first, uint32_t count)
{
    uint32_t pairs = g->config->pairs_rotated;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t pair = 0; pair < pairs; pair++) {
            double radians;
            bool rotated = find_radians(angles, pair, &radians);
            double turned = (double)(first + i) * radians;
            g->angles[(size_t)i * 2 * pairs + pair] = rotated ? (float)(angles->magnitude * cos(turned)) : 1;
            g->angles[(size_t)i * 2 * pairs + pairs + pair] = rotated ? (float)(angles->magnitude * sin(turned)) : 0;
        }
}

/* Returns the row of the device's angles at which the next positions begin; writes new tables if they are not there. */
static uint32_t angle_row(gpu *g, const pass_input *input)
{
    const gpu_config *config = g->config;
    int64_t first = input->rope_position, count = most_rows(input->count, input->pick);
    if (g->lengthened != input->lengthened || first < g->first_angle
        || first + count > g->first_angle + g->known_angles) {
        uint64_t size = (uint64_t)config->angle_rows * 2 * config->pairs_rotated * sizeof *g->angles;
        g->first_angle = first, g->known_angles = config->angle_rows, g->lengthened = input->lengthened;
        for (uint32_t kind = 0; kind < g->model->config->rope_kinds; kind++) {
            fill_angles(g, find_angles(g->model, kind, g->lengthened), first, config->angle_rows);
            gpu_write(g, config->tables, config->angles * sizeof *g->tables + kind * size, g->angles, size, true);
        }
    }
    return (uint32_t)(first - g->first_angle);
}

/* Writes positions that have changed, which are few. */
static void write_positions(gpu *g, const int32_t *positions)
{
    uint32_t first = 0, last = g->config->positions;
    while (first < last && positions[first] == g->positions[first])
        first++;
    while (last > first && positions[last - 1] == g->positions[last - 1])
        last--;
    memcpy(g->positions + first, positions + first, (last - first) * sizeof *positions);
    gpu_write(g, g->config->tables, (g->config->positions_at + (uint64_t)first) * sizeof *positions, g->positions + first,
              (last - first) * sizeof *positions, false);
}

/* Writes the per-layer inputs of tokens, with the device's stride. */
static void write_inputs(gpu *g, const pass_input *input)
{
    const edge_config *c = g->model->config;
    uint32_t stride = g->config->input_stride, padded = whole_tiles(c->layer_inputs), vectors = input->count * c->layers;
    for (uint32_t i = 0; i < vectors; i++)
        memcpy(g->inputs + (size_t)i * stride, input->inputs + (size_t)i * padded, padded * sizeof *g->inputs);
    gpu_write(g, g->config->layer_inputs, 0, g->inputs, (uint64_t)vectors * stride * sizeof *g->inputs, false);
}

static void fill(float *logits, uint32_t vocab, float value)
{
    for (uint32_t i = 0; i < vocab; i++)
        logits[i] = value;
}

/* As run_greedy of backends/tvm/gpu/engine.py: each step writes the token of the next one, or -1 - token for NaN. */
static void pick_tokens(gpu *g, picking *pick, float *logits)
{
    for (uint32_t i = 0; i < pick->most; i++) {
        gpu_dispatch(g, GPU_STEP, 1);
        gpu_dispatch(g, GPU_PICKED, 1);
    }
    gpu_read(g, g->config->tokens, g->config->chunk * sizeof *pick->chosen, pick->chosen, pick->most * sizeof *pick->chosen);
    while (!g->failure && pick->count < pick->most && (uint32_t)pick->chosen[pick->count] < g->config->vocab)
        pick->count++;
    if (!pick->count) /* the first logits had a NaN */
        fill(logits, g->config->vocab, NAN);
}

/* Reads the largest logits; all others become -INFINITY. */
static void read_top(gpu *g, float *logits)
{
    uint32_t found[2 * MOST_TOP], vocab = g->model->config->vocab, count = vocab < MOST_TOP ? vocab : MOST_TOP;
    gpu_dispatch(g, GPU_TOP, 1);
    gpu_read(g, g->config->found, g->config->top_at, found, sizeof found);
    if (g->failure)
        return;
    fill(logits, vocab, -INFINITY);
    for (uint32_t i = 0; i < count; i++) { /* key and id: see kernels/pick.py */
        uint32_t key = found[2 * i], token = found[2 * i + 1], word = key >> 31 ? key ^ 1u << 31 : ~key;
        if (token < vocab) /* in case the driver compiled the kernel wrongly */
            memcpy(logits + token, &word, sizeof word);
    }
}

/* Arrays that are written without waiting stay unchanged until the results have been read. */
static accelerator_answer run(accelerator *a, const pass_input *input, float *logits)
{
    gpu *g = (gpu *)a;
    const gpu_config *config = g->config;
    const edge_config *c = g->model->config;
    uint32_t heads = c->layers * c->kv_heads;
    for (int i = 0; i < 2; i++) {
        arena_flush(g->arenas + i);
        arena_forget(g->arenas + i);
    }
    g->tables[GPU_STATE_ANGLE] = angle_row(g, input);
    g->tables[GPU_STATE_COUNT] = input->count;
    g->tables[GPU_STATE_POSITION] = (uint32_t)input->position;
    g->tables[GPU_STATE_WANTED] = 1;
    bool picks = input->pick && input->pick->most;
    if (picks) {
        g->tables[GPU_STATE_BANNED] = input->pick->banned_count;
        memcpy(g->tables + GPU_STATE_BANS, input->pick->banned, input->pick->banned_count * sizeof(int32_t));
    }
    memcpy(g->tables + config->starts, input->starts, heads * sizeof *input->starts);
    memcpy(g->tables + config->lengths, input->lengths, heads * sizeof *input->lengths);
    if (c->tempered) {
        for (uint32_t i = 0; i < input->count; i++)
            g->temperatures[i] = temperature_at(c, input->position + i);
        gpu_write(g, config->tables, config->temperatures * sizeof *g->tables, g->temperatures,
                  input->count * sizeof *g->temperatures, false);
    }
    if (c->windowed)
        write_positions(g, input->positions);
    if (input->inputs)
        write_inputs(g, input);
    gpu_write(g, config->tables, 0, g->tables, config->angles * sizeof *g->tables, false);
    gpu_write(g, config->tokens, 0, input->tokens, input->count * sizeof *input->tokens, false);
    if (picks) {
        pick_tokens(g, input->pick, logits);
        return g->failure ? DECLINED : COMPLETED;
    }
    if (!gpu_dispatch(g, input->count == 1 ? GPU_STEP : GPU_CHUNK, input->count))
        return DECLINED;
    if (input->count > 1)
        gpu_dispatch(g, GPU_LAST, 1);
    if (input->pick)
        read_top(g, logits);
    else
        gpu_read(g, config->logits, 0, logits, c->vocab * sizeof *logits);
    return g->failure ? DECLINED : COMPLETED;
}

static void read_states(accelerator *a, float *states)
{
    gpu *g = (gpu *)a;
    gpu_read(g, g->config->states, 0, states, g->model->config->states * sizeof *states);
}

static void write_states(accelerator *a, const float *states)
{
    gpu *g = (gpu *)a;
    gpu_write(g, g->config->states, 0, states, g->model->config->states * sizeof *states, true);
}

static edge_status open(accelerator *a, const edge_options *options, const volatile int32_t *cancelled, edge_error *error)
{
    gpu *g = (gpu *)a;
    edge_status status = gpu_open(g, options, cancelled, error);
    if (status)
        return status;
    choose_dispatches(g);
    for (int i = 0; i < 2; i++)
        arena_normals(g->arenas + i);
    return EDGE_OK;
}

static void close(accelerator *a) { gpu_close((gpu *)a); }
static const char *failure(const accelerator *a) { return ((const gpu *)a)->failure ? ((const gpu *)a)->failed_by : NULL; }
static uint64_t bytes(const accelerator *a) { return ((const gpu *)a)->bytes; }
static const char *name(const accelerator *a) { return ((const gpu *)a)->name; }

const accelerator_kind edge_gpu = {
    .engine = EDGE_ENGINE_GPU, .called = "the GPU", .picks = true, .layout = layout, .run = run, .rows = rows_of,
    .read_states = read_states, .write_states = write_states, .open = open, .close = close, .failure = failure, .bytes = bytes, .name = name,
    .adapt = read_gpu_adapter,
};
