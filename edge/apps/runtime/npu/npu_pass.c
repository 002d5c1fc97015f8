/* The pass of an NPU, by graphs of fixed sizes: a port of backends/onnx/npu/passes.py. The graphs read all rows; masks hide
 * free rows, and the padding before the tokens of a chunk. New rows are outputs of the graphs, and are copied behind the
 * others. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "model.h"
#include "npu.h"
#include "rows.h"

static const rows_work NPU_ROWS;

/* Sets the first row of each layer, as kv.c does: rings first. Returns the number of all rows. */
static uint64_t place_rows(npu *n)
{
    const edge_config *c = n->model->config;
    uint64_t at = 0;
    for (uint32_t ringed = 2; ringed--;)
        for (uint32_t layer = 0; layer < c->layers; layer++)
            if (n->model->layers[layer].ringed == ringed) {
                if (n->starts)
                    n->starts[layer] = at;
                at += (uint64_t)c->kv_heads * npu_layer_rows(n, layer);
            }
    return at;
}

/* Whether this layer is the first with its window; no window counts as one. */
static bool is_first(const edge_model *model, uint32_t layer)
{
    uint32_t before = 0;
    while (model->layers[before].window != model->layers[layer].window)
        before++;
    return before == layer;
}

/* Writes the first layer of each window; returns the number of windows. */
static uint32_t find_windows(const edge_model *model, uint32_t *first)
{
    uint32_t count = 0;
    for (uint32_t layer = 0; layer < model->config->layers; layer++)
        if (is_first(model, layer)) {
            if (first)
                first[count] = layer;
            count++;
        }
    return count;
}

static void lay_out(arena *from, npu *n, npu_arrays *arrays, uint32_t tokens)
{
    const edge_config *c = n->model->config;
    arrays->tokens = tokens;
    arrays->ids = take(from, sizeof(int64_t) * tokens);
    arrays->positions = take(from, sizeof(int64_t) * tokens);
    arrays->x = take(from, sizeof(float) * tokens * c->hidden);
    arrays->temperatures = take(from, sizeof(float) * tokens);
    arrays->tables = take(from, sizeof(float *) * 2 * c->rope_kinds);
    for (uint32_t each = 0; each < 2 * c->rope_kinds; each++) {
        float *table = take(from, sizeof(float) * tokens * (c->head / 2));
        if (arrays->tables)
            arrays->tables[each] = table;
    }
    arrays->masks = take(from, sizeof(float *) * n->windows);
    for (uint32_t layer = 0, each = 0; layer < c->layers; layer++) {
        if (!is_first(n->model, layer))
            continue;
        float *mask = take(from, sizeof(float) * tokens * (npu_layer_rows(n, layer) + tokens));
        if (arrays->masks)
            arrays->masks[each] = mask;
        each++;
    }
    arrays->rows = take(from, (uint64_t)c->layers * 2 * c->kv_heads * tokens * c->head * n->rows.item);
    arrays->graphs = take(from, sizeof(npu_graph) * (1 + n->config->shards));
    for (uint32_t each = 0; each < 1 + n->config->shards; each++) {
        const char **names = take(from, sizeof(char *) * n->tensor_count);
        ort_handle *values = take(from, sizeof(ort_handle) * n->tensor_count);
        if (arrays->graphs)
            arrays->graphs[each].names = names, arrays->graphs[each].values = values;
    }
}

static accelerator *layout(arena *from, const edge_model *model)
{
    const edge_config *c = model->config;
    npu *n = take(from, sizeof *n), made = {.base = {&edge_onnxruntime}, .model = model};
    uint64_t before = from->used;
    made.config = (const npu_config *)model->sections[SECTION_NPU];
    made.windows = find_windows(model, NULL);
    /* 6: tokens, positions, x, y, temperatures, logits */
    made.tensor_count = 6 + 2 * c->rope_kinds + made.windows + 4 * c->layers;
    made.rows = (npu_rows){{&NPU_ROWS}, NULL, NULL, c->head, 2 * find_angles(model, 0, false)->pairs, c->kv_dtype == KV_F16 ? 2 : 4};
    made.starts = take(from, sizeof *made.starts * c->layers);
    made.window_layers = take(from, sizeof *made.window_layers * made.windows);
    made.tensors = take(from, sizeof *made.tensors * made.tensor_count);
    uint64_t bytes = place_rows(&made) * c->head * made.rows.item;
    made.rows.keys = take(from, bytes);
    made.rows.values = take(from, bytes);
    made.logits = take(from, sizeof(float) * c->vocab);
    lay_out(from, &made, made.sizes + NPU_CHUNK, c->chunk);
    lay_out(from, &made, made.sizes + NPU_STEP, 1);
    made.bytes = from->used - before;
    if (n) {
        find_windows(model, made.window_layers);
        *n = made;
    }
    return (accelerator *)n;
}

static rows_device *rows_of(accelerator *a, bool ring, uint32_t count)
{
    (void)ring, (void)count; /* one arena: all layers have the same heads */
    return &((npu *)a)->rows.device;
}

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

static void fill_tables(const npu *n, const npu_arrays *arrays, const pass_input *input)
{
    uint32_t half = n->model->config->head / 2, first = arrays->tokens - input->count;
    for (uint32_t kind = 0; kind < n->model->config->rope_kinds; kind++) {
        const angles_config *angles = find_angles(n->model, kind, input->lengthened);
        for (uint32_t i = 0; i < input->count; i++) {
            double position = (double)(input->rope_position + i);
            size_t at = (size_t)(first + i) * half;
            float *cosines = arrays->tables[2 * kind] + at, *sines = arrays->tables[2 * kind + 1] + at;
            for (uint32_t pair = 0; pair < half; pair++) {
                double radians;
                bool rotated = find_radians(angles, pair, &radians);
                cosines[pair] = rotated ? (float)(angles->magnitude * cos(position * radians)) : 1;
                sines[pair] = rotated ? (float)(angles->magnitude * sin(position * radians)) : 0;
            }
        }
    }
}

/* Fills a mask: 0 where a token sees a row or token. Padding sees itself. */
static void fill_mask(const npu *n, const npu_arrays *arrays, const pass_input *input, uint32_t layer, float *mask)
{
    uint32_t tokens = arrays->tokens, rows = npu_layer_rows(n, layer), filled = tokens - input->count;
    uint32_t window = n->model->layers[layer].window, head = layer * n->model->config->kv_heads;
    uint32_t length = (uint32_t)input->lengths[head];
    const int32_t *positions = input->positions + (window ? input->starts[head] : 0);
    for (uint32_t i = 0; i < tokens; i++, mask += rows + tokens) {
        for (uint32_t at = 0; at < rows + tokens; at++)
            mask[at] = (float)NPU_HIDDEN;
        mask[rows + i] = 0;
        for (uint32_t row = 0; i >= filled && row < length; row++)
            if (!window || (uint32_t)(positions[length + i - filled] - positions[row]) < window)
                mask[row] = 0;
        for (uint32_t at = filled; i >= filled && at < i; at++)
            if (!window || i - at < window)
                mask[rows + at] = 0;
    }
}

static void keep_rows(npu *n, const npu_arrays *arrays, const pass_input *input)
{
    const edge_config *c = n->model->config;
    size_t width = (size_t)c->head * n->rows.item, first = arrays->tokens - input->count;
    const uint8_t *from = arrays->rows + first * width;
    for (uint32_t layer = 0; layer < c->layers; layer++)
        for (int values = 0; values < 2; values++)
            for (uint32_t head = layer * c->kv_heads; head < (layer + 1) * c->kv_heads; head++, from += arrays->tokens * width) {
                size_t row = (size_t)input->starts[head] + (size_t)input->lengths[head];
                memcpy((values ? n->rows.values : n->rows.keys) + row * width, from, input->count * width);
            }
}

static accelerator_answer run(accelerator *a, const pass_input *input, float *logits)
{
    npu *n = (npu *)a;
    const edge_config *c = n->model->config;
    const npu_arrays *arrays = n->sizes + (input->count == 1 ? NPU_STEP : NPU_CHUNK);
    uint32_t first = arrays->tokens - input->count;
    if (__atomic_load_n(n->cancelled, __ATOMIC_RELAXED))
        return DECLINED;
    memset(arrays->ids, 0, sizeof *arrays->ids * first);
    memset(arrays->positions, 0, sizeof *arrays->positions * first);
    for (uint32_t i = 0; i < input->count; i++) {
        arrays->ids[first + i] = input->tokens[i];
        arrays->positions[first + i] = input->position + i;
        arrays->temperatures[first + i] = c->tempered ? temperature_at(c, input->position + i) : 1;
    }
    fill_tables(n, arrays, input);
    for (uint32_t each = 0; each < n->windows; each++)
        fill_mask(n, arrays, input, n->window_layers[each], arrays->masks[each]);
    for (uint32_t each = 0; each < 1 + n->config->shards; each++)
        if (!npu_run(n, arrays->graphs + each))
            return DECLINED;
    keep_rows(n, arrays, input);
    memcpy(logits, n->logits, sizeof *logits * c->vocab);
    return COMPLETED;
}

/* ---- calls of rows.c ---------------------------------------------------------------------------------------------- */

static uint8_t *row_at(const npu_rows *rows, uint8_t *array, uint32_t row)
{
    return array + (size_t)row * rows->head * rows->item;
}

/* Index of value `at` of a key of rows.c, where rotated pairs are neighbours. Values that are not rotated follow in both
 * halves. */
static uint32_t place_of(const npu_rows *rows, uint32_t at)
{
    uint32_t half = rows->head / 2, pairs = rows->rotated / 2, other = at - rows->rotated;
    if (at < rows->rotated)
        return at / 2 + at % 2 * half;
    return other < half - pairs ? pairs + other : half + other - (half - pairs) + pairs;
}

static void move(rows_device *device, uint32_t source, uint32_t target)
{
    const npu_rows *rows = (const npu_rows *)device;
    size_t width = (size_t)rows->head * rows->item;
    memcpy(row_at(rows, rows->keys, target), row_at(rows, rows->keys, source), width);
    memcpy(row_at(rows, rows->values, target), row_at(rows, rows->values, source), width);
}

static void settle(rows_device *device)
{
    (void)device;
}

static void save(rows_device *device, uint32_t row, uint8_t *out)
{
    const npu_rows *rows = (const npu_rows *)device;
    const uint8_t *key = row_at(rows, rows->keys, row);
    for (uint32_t at = 0; at < rows->head; at++, out += rows->item)
        memcpy(out, key + (size_t)place_of(rows, at) * rows->item, rows->item);
    memcpy(out, row_at(rows, rows->values, row), (size_t)rows->head * rows->item);
}

static void restore(rows_device *device, uint32_t row, const uint8_t *saved)
{
    const npu_rows *rows = (const npu_rows *)device;
    uint8_t *key = row_at(rows, rows->keys, row);
    for (uint32_t at = 0; at < rows->head; at++, saved += rows->item)
        memcpy(key + (size_t)place_of(rows, at) * rows->item, saved, rows->item);
    memcpy(row_at(rows, rows->values, row), saved, (size_t)rows->head * rows->item);
}

static void get_key(rows_device *device, uint32_t row, uint32_t head, float *out)
{
    const npu_rows *rows = (const npu_rows *)device;
    const uint8_t *key = row_at(rows, rows->keys, row);
    (void)head;
    for (uint32_t at = 0; at < rows->head; at++) {
        const uint8_t *from = key + (size_t)place_of(rows, at) * rows->item;
        uint16_t half;
        memcpy(&half, from, 2);
        if (rows->item == 4)
            memcpy(out + at, from, 4);
        else
            out[at] = rows_from_half(half);
    }
}

static void set_key(rows_device *device, uint32_t row, uint32_t head, float *from)
{
    const npu_rows *rows = (const npu_rows *)device;
    uint8_t *key = row_at(rows, rows->keys, row);
    (void)head;
    for (uint32_t at = 0; at < rows->head; at++) {
        uint8_t *to = key + (size_t)place_of(rows, at) * rows->item;
        uint16_t half = rows_to_half(from[at]);
        if (rows->item == 4)
            memcpy(to, from + at, 4);
        else
            memcpy(to, &half, 2);
    }
}

static const rows_work NPU_ROWS = {move, settle, save, restore, get_key, set_key};

static const char *failure(const accelerator *a) { return ((const npu *)a)->failure ? ((const npu *)a)->failed_by : NULL; }
static uint64_t bytes(const accelerator *a) { return ((const npu *)a)->bytes; }
static const char *name(const accelerator *a) { return ((const npu *)a)->name; }

const accelerator_kind edge_onnxruntime = {
    .engine = EDGE_ENGINE_NPU, .called = "ONNX Runtime", .layout = layout, .run = run, .rows = rows_of, .open = npu_open,
    .close = npu_close, .failure = failure, .bytes = bytes, .name = name,
};
