#include <math.h>
#include <string.h>

#include "encoder.h"
#include "eye.h"
#include "eyes.h"
#include "pixels.h"
#include "system.h"

static void fill_levels(eye *e)
{
    for (int colour = 0; colour < COLOURS; colour++)
        for (int level = 0; level < 256; level++)
            e->levels[colour][level] = ((float)(level * (1.0 / 255)) - (float)e->config->mean[colour]) / (float)e->config->std[colour];
}

/* Rows of the table of positions; 0: there is none. */
static uint32_t table_rows(const eyes_config *c)
{
    return c->positions == POSITIONS_NONE ? 0 : c->positions == POSITIONS_OF_A_GRID ? c->grid * c->grid
        : c->positions == POSITIONS_CROSSED ? 2 * c->table : c->table * c->table;
}

/* like: of model.edge, whose layout has the places of pixels and rows. */
static bool open_eye(eye *e, encoder *from, const eyes_config *like)
{
    const edge_model *file = encoder_model(from);
    const eyes_config *c = eyes_of(file);
    *e = (eye){.encoder = from, .config = c, .file = file};
    if (!c || memcmp(c, like, sizeof *c) || c->hidden != file->config->hidden || c->stops[c->stages - 1] != file->config->layers)
        return false;
    if (!eyes_matrix_of(file, c, EYES_MATRIX_PATCH, c->hidden, COLOURS * c->patch * c->patch, &e->patch) || !e->patch.data
        || !eyes_matrix_of(file, c, EYES_MATRIX_BASE, table_rows(c), c->hidden, &e->base) || !e->base.data != !table_rows(c)
        || !projector_is_possible(file, c, &e->widest))
        return false;
    fill_levels(e);
    e->widest = e->widest > c->projected ? e->widest : c->projected;
    e->widest = e->widest > e->patch.columns ? e->widest : e->patch.columns;
    const bool lines = c->positions == POSITIONS_RESIZED || c->positions == POSITIONS_STRETCHED;
    const uint64_t patches = file->config->capacity, line = (uint64_t)c->table * c->hidden;
    arena counted = {NULL, 0};
    for (int twice = 0; twice < 2; twice++) {
        arena from_here = {twice ? map_memory(counted.used) : NULL, 0};
        if (twice && !from_here.memory)
            break;
        e->cells = take(&from_here, patches * sizeof *e->cells);
        e->places = take(&from_here, patches * sizeof *e->places);
        e->windows = take(&from_here, patches * sizeof *e->windows);
        e->lines = take(&from_here, lines ? (c->join * line + c->table + c->hidden) * sizeof *e->lines : 0);
        e->block = take(&from_here, 2ull * BLOCK * e->widest * sizeof *e->block);
        counted = from_here;
    }
    e->bytes = counted.used;
    return true;
}

/* The picture with whole tiles, if there are several, and the whole picture. Returns false without memory. */
static bool resize(const eye *e, const edge_picture *picture, const eyes_layout *layout, pixels *tiled, pixels *whole)
{
    const eyes_config *c = e->config;
    pixels shown = {0}, near = {0}, *from = &shown;
    const bool square = c->family <= EYES_SQUARE;
    const uint32_t longest = layout->width > layout->height ? layout->width : layout->height;
    uint32_t width = picture->width, height = picture->height;
    bool made = pixels_copy(&shown, picture);
    if (c->family == EYES_TILES) { /* in three steps */
        within_side(&width, &height, longest);
        made = made && pixels_resize(&near, &shown, width, height, c->filter);
        pixels_free(&shown);
        made = made && pixels_resize(tiled, &near, layout->width, layout->height, c->filter);
        pixels_free(&near);
        from = tiled;
    } else if (layout->tiles > 1) {
        made = made && pixels_resize(tiled, &shown, layout->width, layout->height, c->filter);
    }
    made = made && pixels_resize(whole, from, square ? c->side : layout->last_across * c->patch,
                                 square ? c->side : layout->last_down * c->patch, c->filter);
    pixels_free(&shown);
    return made;
}

static bool are_finite(const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return false;
    return true;
}

typedef struct { uint32_t first, count, patches; uint32_t ends[64]; } group; /* tiles that run in one pass */

/* Patches of a tile, and its sides. */
static uint32_t sides_of(const eye *e, const eyes_layout *layout, uint32_t tile, uint32_t *down, uint32_t *across)
{
    const bool last = tile == layout->tiles - 1;
    *down = last ? layout->last_down : e->config->grid, *across = last ? layout->last_across : e->config->grid;
    return *down * *across;
}

/* Writes the rows of the patches of as many tiles as fit into a pass. */
static void read_group(const eye *e, const pixels *tiled, const pixels *whole, const eyes_layout *layout, group *g)
{
    const eyes_config *c = e->config;
    const uint32_t most = e->file->config->capacity;
    uint32_t stride, down, across, *windows = e->windows;
    float *inputs = encoder_inputs(e->encoder, &stride);
    g->count = g->patches = 0;
    for (uint32_t tile = g->first; tile < layout->tiles && g->count < sizeof g->ends / sizeof *g->ends; tile++) {
        if (sides_of(e, layout, tile, &down, &across) > most - g->patches)
            return;
        const bool all = tile == layout->tiles - 1;
        const uint32_t left = all ? 0 : tile % layout->across * c->side, top = all ? 0 : tile / layout->across * c->side;
        cell *cells = e->cells + g->patches;
        const uint32_t count = order_patches(c, down, across, cells, g->patches, &windows);
        for (uint32_t i = 0; i < count; i++) {
            e->places[g->patches + i][0] = (int32_t)(c->columns_first ? cells[i].column : cells[i].row);
            e->places[g->patches + i][1] = (int32_t)(c->columns_first ? cells[i].row : cells[i].column);
        }
        patch_rows(e, all ? whole : tiled, left, top, down, across, cells, inputs + (size_t)g->patches * stride, stride);
        g->patches += count;
        g->ends[g->count++] = g->patches;
    }
}

/* Runs a group through all stages; writes the parts of its rows. Returns false if the file was cut short or a thread
 * was lost. */
static bool run_group(const eye *e, const eyes_layout *layout, const group *g, float *rows)
{
    const eyes_config *c = e->config;
    for (uint32_t stage = 0, part = 1; stage < c->stages; stage++) {
        text_places places = {c->windowed >> stage & 1 ? e->windows : g->ends, e->file->config->components ? e->places : NULL,
                              stage ? c->stops[stage - 1] : 0, c->stops[stage]};
        uint32_t stride, down, across, at = 0;
        const float *states = encoder_run(e->encoder, &places, g->patches, &stride);
        if (!states)
            return false;
        for (uint32_t i = 0; c->kept >> stage & 1 && i < g->count; i++) {
            const uint32_t count = sides_of(e, layout, g->first + i, &down, &across);
            project_tile(e, stage + 1 < c->stages ? part : 0, states + (size_t)at * stride, stride, down, across, e->cells + at,
                         rows + (size_t)(g->first + i) * layout->each * eyes_width(c));
            at += count;
        }
        part += c->kept >> stage & 1;
    }
    return true;
}

static edge_status encode(const eye *e, const pixels *tiled, const pixels *whole, const eyes_layout *layout,
                          const volatile int32_t *cancelled, float *rows, edge_error *error)
{
    for (group g = {0}; g.first < layout->tiles; g.first += g.count) {
        read_group(e, tiled, whole, layout, &g);
        if (!g.count)
            return edge_fail(error, EDGE_BAD_FILE, "eyes.edge is damaged (its eyes): copy or export it again");
        if (!run_group(e, layout, &g, rows))
            return edge_fail(error, EDGE_BAD_FILE, "eyes.edge was cut short while it was read, or a thread was lost: try again");
        if (__atomic_load_n(cancelled, __ATOMIC_RELAXED))
            return edge_fail(error, EDGE_BUSY, "edge_cancel has ended the picture: show it again");
    }
    if (!are_finite(rows, (size_t)eyes_tokens(layout) * eyes_width(e->config)))
        return edge_fail(error, EDGE_FAILED, "the encoder computed no number (NaN): eyes.edge may be damaged");
    return EDGE_OK;
}

edge_status eyes_encode(encoder *from, const eyes_config *like, const edge_picture *picture, const eyes_layout *layout,
                        const volatile int32_t *cancelled, float *rows, edge_error *error)
{
    eye e;
    pixels tiled = {0}, whole = {0};
    if (!open_eye(&e, from, like))
        return edge_fail(error, EDGE_BAD_FILE, "eyes.edge is damaged (its eyes): copy or export it again");
    bool made = e.block && resize(&e, picture, layout, &tiled, &whole);
    edge_status status = made ? encode(&e, &tiled, &whole, layout, cancelled, rows, error)
        : edge_fail(error, EDGE_NO_MEMORY, "no memory is left to look at a picture of %d x %d pixels: make it smaller",
                    (int64_t)picture->width, (int64_t)picture->height);
    pixels_free(&tiled);
    pixels_free(&whole);
    if (e.block)
        unmap_memory(e.cells, e.bytes);
    return status;
}
