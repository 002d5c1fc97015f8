/* KV rows in the memory of a GPU. Saved rows are those of rows.c, so that a saved conversation continues on either engine.
 *
 * Rows are written to spare rows behind the arena's own (`staged` of gpu_config), from where a kernel moves them: one
 * copy for many rows. Writes and moves are deferred until another operation needs them. */
#include <string.h>

#include "gpu.h"
#include "rows.h"

enum { UNIT = 16 }; /* contiguous bytes of a key */

void arena_layout(arena *from, gpu_arena *rows, const edge_model *model, uint32_t number)
{
    const edge_config *c = model->config;
    const gpu_config *config = (const gpu_config *)model->sections[SECTION_GPU];
    gpu_arena made = {.number = number, .tile = -1};
    rows_layout(from, &made.converter, model, c->shapes[number], TILE, false);
    made.coded = made.converter.widths[0] * made.converter.item[0];
    made.row_bytes = config->row_bytes[number];
    made.scale = made.converter.widths[2] * made.converter.item[2];
    made.pairs = take(from, sizeof(int32_t) * 2 * config->most_moved);
    made.keys = take(from, (uint64_t)config->staged * made.row_bytes);
    made.values = take(from, (uint64_t)config->staged * made.row_bytes);
    made.scales = take(from, made.scale ? sizeof(float) * 2 * config->staged : 0);
    made.tile_keys = take(from, (uint64_t)TILE * made.row_bytes);
    made.tile_values = take(from, (uint64_t)TILE * made.row_bytes);
    made.tile_scales = take(from, sizeof(float) * 2 * TILE);
    made.row = take(from, 2ull * (made.coded + made.scale));
    if (from->memory)
        *rows = made;
}

void arena_forget(gpu_arena *rows)
{
    rows->tile = -1;
}

static enum gpu_passes move_pass(const gpu_arena *rows, enum gpu_which which)
{
    return (enum gpu_passes)((rows->number ? GPU_RING_MOVE_KEYS : GPU_MOVE_KEYS) + (int)which - MOVED_KEYS);
}

static void run_moves(gpu_arena *rows, uint32_t count, enum gpu_which which)
{
    gpu *g = rows->gpu;
    gpu_write(g, g->config->pairs[rows->number], 0, rows->pairs, sizeof(int32_t) * 2 * count, true);
    gpu_dispatch(g, move_pass(rows, which), count);
    arena_forget(rows);
}

void arena_flush(gpu_arena *rows)
{
    gpu *g = rows->gpu;
    const gpu_config *config = g->config;
    if (rows->staged) {
        uint64_t tiles = whole_tiles(rows->staged), first = rows->count;
        if (rows->which & MOVED_KEYS)
            gpu_write(g, config->keys[rows->number], first * rows->row_bytes, rows->keys, tiles * rows->row_bytes, true);
        if (rows->which & MOVED_VALUES)
            gpu_write(g, config->values[rows->number], first * rows->row_bytes, rows->values,
                      (uint64_t)rows->staged * rows->row_bytes, true);
        if (rows->scale)
            gpu_write(g, config->row_scales[rows->number], first * 2 * sizeof(float), rows->scales,
                      sizeof(float) * 2 * rows->staged, true);
        run_moves(rows, rows->staged, rows->which);
        rows->staged = 0;
    }
    if (rows->moved)
        run_moves(rows, rows->moved, MOVED_ROWS);
    rows->moved = 0;
}

/* Offset of a unit of a key. */
static uint64_t unit_at(const gpu_arena *rows, uint32_t row, uint32_t unit)
{
    return ((uint64_t)(row / TILE) * (rows->row_bytes / UNIT) + unit) * TILE * UNIT + row % TILE * UNIT;
}

/* Index in this engine's key of value `at` of a key of rows.c, where rotated pairs are neighbours. */
static uint32_t place_of(const gpu_arena *rows, uint32_t at)
{
    const gpu_config *config = rows->gpu->config;
    uint32_t rotated = config->rotated[rows->number];
    return config->halves && at < rotated ? at / 2 + at % 2 * (rotated / 2) : at;
}

static uint8_t *byte_of(const gpu_arena *rows, uint8_t *tiles, uint32_t row, uint32_t byte)
{
    return tiles + unit_at(rows, row, byte / UNIT) + byte % UNIT;
}

/* Copies a value of int4: a byte has two, the first in its low half. */
static void copy_half(uint8_t *to, uint32_t to_at, const uint8_t *from, uint32_t from_at)
{
    uint32_t half = *from >> from_at % 2 * 4 & 15, shift = to_at % 2 * 4;
    *to = (uint8_t)((*to & 0xf0 >> shift) | half << shift);
}

static void put_key(const gpu_arena *rows, uint8_t *tiles, uint32_t row, const uint8_t *key)
{
    uint32_t head = rows->converter.shape.key, item = rows->coded / head;
    for (uint32_t at = 0; at < head; at++) {
        uint32_t place = place_of(rows, at);
        if (item)
            memcpy(byte_of(rows, tiles, row, place * item), key + (size_t)at * item, item);
        else
            copy_half(byte_of(rows, tiles, row, place / 2), place, key + at / 2, at);
    }
}

static void get_key(const gpu_arena *rows, uint8_t *tiles, uint32_t row, uint8_t *key)
{
    uint32_t head = rows->converter.shape.key, item = rows->coded / head;
    for (uint32_t at = 0; at < head; at++) {
        uint32_t place = place_of(rows, at);
        if (item)
            memcpy(key + (size_t)at * item, byte_of(rows, tiles, row, place * item), item);
        else
            copy_half(key + at / 2, at, byte_of(rows, tiles, row, place / 2), place);
    }
}

/* Index, in half-bytes, of value `at` of an int4 row of rows.c. There the low halves have the first half of each 32 values,
 * or of the last 16 (backends/tvm/cpu/kernels/cache.py); here a byte has two neighbours. */
static uint32_t half_of(const gpu_arena *rows, uint32_t at)
{
    uint32_t width = at < rows->converter.shape.key / 32 * 32 ? 16 : 8, rest = at % (2 * width);
    return at - rest + rest % width * 2 + rest / width;
}

static bool has_halves(const gpu_arena *rows)
{
    return rows->coded < rows->converter.shape.key;
}

static void put_value(const gpu_arena *rows, uint8_t *to, const uint8_t *value)
{
    if (!has_halves(rows)) {
        memcpy(to, value, rows->coded);
        return;
    }
    for (uint32_t at = 0; at < rows->converter.shape.key; at++)
        copy_half(to + at / 2, at, value + half_of(rows, at) / 2, half_of(rows, at));
}

static void get_value(const gpu_arena *rows, const uint8_t *from, uint8_t *value)
{
    if (!has_halves(rows)) {
        memcpy(value, from, rows->coded);
        return;
    }
    for (uint32_t at = 0; at < rows->converter.shape.key; at++)
        copy_half(value + half_of(rows, at) / 2, half_of(rows, at), from + at / 2, at);
}

void arena_normals(gpu_arena *rows)
{
    const kv_rows *own = &rows->converter;
    const gpu_config *config = rows->gpu->config;
    const uint32_t *heads = (const uint32_t *)gpu_table(rows->gpu, config->numbers_at) + config->heads_at[rows->number];
    for (uint32_t i = 0; own->normals && i < config->heads[rows->number]; i++) {
        for (uint32_t at = 0; at < own->shape.key; at++)
            own->work[place_of(rows, at)] = own->normals[(size_t)heads[i] * own->stride + at];
        uint64_t first = config->normals + (uint64_t)heads[i] * config->largest_head;
        gpu_write(rows->gpu, config->tables, first * sizeof *own->work, own->work, own->shape.key * sizeof *own->work, true);
    }
}

/* ---- calls of rows.c ----------------------------------------------------------------------------------------------- */

static void move(rows_device *device, uint32_t source, uint32_t target)
{
    gpu_arena *rows = (gpu_arena *)device;
    if (rows->staged || rows->moved == rows->gpu->config->most_moved)
        arena_flush(rows);
    rows->pairs[2 * rows->moved] = (int32_t)source;
    rows->pairs[2 * rows->moved + 1] = (int32_t)target;
    rows->moved++;
}

static void settle(rows_device *device)
{
    arena_flush((gpu_arena *)device);
}

static void read_tile(gpu_arena *rows, uint32_t row, bool with_values)
{
    gpu *g = rows->gpu;
    int64_t tile = row / TILE;
    if (rows->staged || rows->moved)
        arena_flush(rows);
    if (rows->tile == tile && (rows->with_values || !with_values))
        return;
    uint64_t size = (uint64_t)TILE * rows->row_bytes, at = (uint64_t)tile * size;
    gpu_read(g, g->config->keys[rows->number], at, rows->tile_keys, size);
    if (with_values)
        gpu_read(g, g->config->values[rows->number], at, rows->tile_values, size);
    if (rows->scale)
        gpu_read(g, g->config->row_scales[rows->number], (uint64_t)tile * TILE * 2 * sizeof(float), rows->tile_scales,
                 TILE * 2 * sizeof(float));
    rows->tile = tile, rows->with_values = with_values;
}

/* Writes key, value and their scales, as rows_save. */
static void save(rows_device *device, uint32_t row, uint8_t *out)
{
    gpu_arena *rows = (gpu_arena *)device;
    read_tile(rows, row, true);
    get_key(rows, rows->tile_keys, row % TILE, out);
    get_value(rows, rows->tile_values + (size_t)(row % TILE) * rows->row_bytes, out + rows->coded);
    memcpy(out + 2 * (size_t)rows->coded, rows->tile_scales + 2 * (row % TILE), 2 * (size_t)rows->scale);
}

static void stage(gpu_arena *rows, uint32_t row, enum gpu_which which, const uint8_t *saved)
{
    if (rows->moved || rows->staged == rows->gpu->config->staged || (rows->staged && rows->which != which))
        arena_flush(rows);
    uint32_t at = rows->staged++;
    rows->which = which;
    put_key(rows, rows->keys, at, saved);
    put_value(rows, rows->values + (size_t)at * rows->row_bytes, saved + rows->coded);
    if (rows->scale)
        memcpy(rows->scales + 2 * at, saved + 2 * (size_t)rows->coded, 2 * (size_t)rows->scale);
    rows->pairs[2 * at] = (int32_t)(rows->count + at);
    rows->pairs[2 * at + 1] = (int32_t)row;
}

static void restore(rows_device *device, uint32_t row, const uint8_t *saved)
{
    stage((gpu_arena *)device, row, MOVED_ROWS, saved);
}

static void key(rows_device *device, uint32_t row, uint32_t head, float *out)
{
    gpu_arena *rows = (gpu_arena *)device;
    read_tile(rows, row, false);
    memset(rows->row, 0, 2 * (size_t)(rows->coded + rows->scale));
    get_key(rows, rows->tile_keys, row % TILE, rows->row);
    memcpy(rows->row + 2 * (size_t)rows->coded, rows->tile_scales + 2 * (row % TILE), 2 * (size_t)rows->scale);
    rows_restore(&rows->converter, 0, rows->row);
    rows_key(&rows->converter, 0, head, out);
}

static void set_key(rows_device *device, uint32_t row, uint32_t head, float *from)
{
    gpu_arena *rows = (gpu_arena *)device;
    rows_set_key(&rows->converter, 0, head, from);
    rows_save(&rows->converter, 0, rows->row);
    stage(rows, row, MOVED_KEYS, rows->row);
}

const rows_work GPU_ROWS = {move, settle, save, restore, key, set_key};
