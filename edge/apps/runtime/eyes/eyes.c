#include <math.h>
#include <string.h>

#include "encoder.h"
#include "eyes.h"
#include "matrix.h"
#include "pixels.h"
#include "system.h"

enum { COLOURS = 3, MOST_SIDE = 1 << 14, MOST_PATCH = 256, MOST_GRID = 1 << 10, BLOCK = 64 }; /* BLOCK: vectors at a time */
static const uint32_t MOST_PIXELS = 64000000, MOST_RATIO = 200; /* as edge/media/picture.py has them */
static const uint32_t LONGEST = 4096; /* pixels of a side of a divided picture */

/* ---- section EYES --------------------------------------------------------------------------------------------------- */

static bool is_possible(const eyes_config *c)
{
    bool figures = c->family <= EYES_IDEFICS3 && c->patch && c->patch <= MOST_PATCH && c->side && c->side <= MOST_SIDE && c->grid
        && c->grid <= MOST_GRID && c->grid == c->side / c->patch && c->join && c->join <= c->grid && c->grid % c->join == 0
        && c->most && c->most <= 64 && c->projected && c->projected <= 1 << 20 && c->hidden && c->hidden <= 1 << 20;
    for (int i = 0; i < COLOURS; i++) /* NaN fails, too */
        figures = figures && c->mean[i] > -1e6 && c->mean[i] < 1e6 && c->std[i] > 1e-6 && c->std[i] < 1e6;
    return figures;
}

const eyes_config *eyes_of(const edge_model *model)
{
    const eyes_config *c = (const eyes_config *)(const void *)model->sections[SECTION_EYES];
    const size_t head = sizeof *c + EYES_MATRICES * sizeof(stem_matrix);
    uint64_t size = model->sizes[SECTION_EYES];
    if (size < head || !is_possible(c))
        return NULL;
    const char *at = (const char *)c + head, *end = (const char *)c + size;
    for (int text = 0; text < EYES_TEXTS; text++) {
        const char *stop = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        if (!stop || stop - at > LONGEST_MARK / 4)
            return NULL;
        at = stop + 1;
    }
    return c;
}

const char *eyes_text(const eyes_config *c, enum eyes_text text)
{
    const char *at = (const char *)(c + 1) + EYES_MATRICES * sizeof(stem_matrix);
    for (int before = 0; before < (int)text; before++)
        at += strlen(at) + 1;
    return at;
}

/* Returns false if section STEM does not have the matrix. */
static bool find_matrix(const edge_model *file, const eyes_config *c, enum eyes_matrix which, uint32_t rows, uint32_t columns, matrix *m)
{
    const stem_matrix *found = (const stem_matrix *)(const void *)(c + 1) + which;
    const uint64_t size = file->sizes[SECTION_STEM], bytes = (uint64_t)rows * columns * (found->half ? 2 : 4);
    *m = (matrix){file->sections[SECTION_STEM] + found->at, rows, columns, found->half};
    return found->rows == rows && found->columns == columns && found->at % 64 == 0 && found->at <= size && bytes <= size - found->at;
}

/* ---- layout --------------------------------------------------------------------------------------------------------- */

/* Width and height with this longer side: the shorter one is cut to a whole number, and made even. */
static void within(uint32_t *width, uint32_t *height, uint32_t longest)
{
    const double ratio = (double)*width / *height;
    const bool wide = *width >= *height;
    uint32_t less = (uint32_t)(wide ? longest / ratio : longest * ratio);
    less += less % 2;
    less = less ? less : 1;
    *width = wide ? longest : less;
    *height = wide ? less : longest;
}

static uint32_t whole_sides(uint32_t length, uint32_t side)
{
    return (length + side - 1) / side * side;
}

static uint32_t at_least_one(double length)
{
    return length < 1 ? 1 : (uint32_t)length;
}

/* Both sides to whole tiles, at least one. */
static void stretch(uint32_t *width, uint32_t *height, uint32_t side)
{
    const double ratio = (double)*width / *height;
    if (*width >= *height) {
        *width = whole_sides(*width, side);
        *height = whole_sides(at_least_one(*width / ratio), side);
    } else {
        *height = whole_sides(*height, side);
        *width = whole_sides(at_least_one(*height * ratio), side);
    }
}

/* With `number` tiles on the longer side. */
static eyes_layout divided(const eyes_config *c, uint32_t width, uint32_t height, uint32_t number)
{
    within(&width, &height, number * c->side);
    stretch(&width, &height, c->side);
    eyes_layout found = {width, height, height / c->side, width / c->side, 1, 0};
    found.each = (c->grid / c->join) * (c->grid / c->join);
    if (found.down * found.across > 1)
        found.tiles += found.down * found.across;
    return found;
}

edge_status eyes_lay_out(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *layout, edge_error *error)
{
    if (!width || !height || (uint64_t)width * height > MOST_PIXELS)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture of %d x %d pixels: it must have some, and %d million at most",
                         (int64_t)width, (int64_t)height, (int64_t)(MOST_PIXELS / 1000000));
    if (width > (uint64_t)MOST_RATIO * height || height > (uint64_t)MOST_RATIO * width)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture of %d x %d pixels: one side is more than %d times the other",
                         (int64_t)width, (int64_t)height, (int64_t)MOST_RATIO);
    const uint32_t fewest = (c->grid / c->join) * (c->grid / c->join);
    if (most && most < fewest)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture has at least %d tokens, not %d: allow more", (int64_t)fewest, (int64_t)most);
    *layout = divided(c, width, height, 1);
    for (uint32_t number = 2; number <= c->most && number * c->side <= LONGEST; number++) {
        eyes_layout next = divided(c, width, height, number);
        uint32_t tokens = next.tiles * next.each;
        if ((!most || tokens <= most) && tokens > layout->tiles * layout->each)
            *layout = next;
    }
    return EDGE_OK;
}

static char *put(char *at, const char *text)
{
    size_t length = strlen(text);
    memcpy(at, text, length);
    return at + length;
}

static char *put_number(char *at, uint32_t number)
{
    if (number >= 10)
        at = put_number(at, number / 10);
    *at = (char)('0' + number % 10);
    return at + 1;
}

uint32_t eyes_mark(const eyes_config *c, const eyes_layout *layout, uint32_t number, char mark[LONGEST_MARK])
{
    char *at = mark;
    const uint32_t last = layout->tiles - 1;
    if (number > last) {
        at = put(at, eyes_text(c, EYES_TEXT_END));
    } else if (number == last) {
        at = put(at, last ? eyes_text(c, EYES_TEXT_WHOLE) : "");
        at = put(at, eyes_text(c, EYES_TEXT_START));
    } else {
        const uint32_t place[] = {number / layout->across + 1, number % layout->across + 1};
        if (number && place[1] == 1)
            at = put(at, eyes_text(c, EYES_TEXT_ROW));
        uint32_t numbers = 0;
        for (const char *text = eyes_text(c, EYES_TEXT_TILE); *text; text++)
            if (text[0] == '%' && text[1] == 'd' && numbers < 2)
                at = put_number(at, place[numbers++]), text++;
            else
                *at++ = *text;
    }
    return (uint32_t)(at - mark);
}

/* ---- encoding ------------------------------------------------------------------------------------------------------- */

typedef struct {
    encoder *encoder;
    const eyes_config *config;
    matrix patch, base, projector;
    float levels[COLOURS][256]; /* values of a colour's bytes */
    float *block;               /* [BLOCK][columns of the wider matrix] */
    uint64_t block_bytes;
} eye;

static void fill_levels(eye *e)
{
    for (int colour = 0; colour < COLOURS; colour++)
        for (int level = 0; level < 256; level++)
            e->levels[colour][level] = ((float)(level * (1.0 / 255)) - (float)e->config->mean[colour]) / (float)e->config->std[colour];
}

/* like: of model.edge, whose layout has the places of pixels and rows. */
static bool open_eye(eye *e, encoder *from, const eyes_config *like)
{
    const edge_model *file = encoder_model(from);
    const eyes_config *c = eyes_of(file);
    *e = (eye){.encoder = from, .config = c};
    if (!c || memcmp(c, like, sizeof *c) || c->hidden != file->config->hidden || file->config->capacity < c->grid * c->grid)
        return false;
    const uint32_t patches = c->grid * c->grid, joined = c->join * c->join * c->hidden;
    if (!find_matrix(file, c, EYES_MATRIX_PATCH, c->hidden, COLOURS * c->patch * c->patch, &e->patch)
        || !find_matrix(file, c, EYES_MATRIX_BASE, patches, c->hidden, &e->base)
        || !find_matrix(file, c, EYES_MATRIX_PROJECTOR, c->projected, joined, &e->projector))
        return false;
    fill_levels(e);
    uint32_t widest = e->patch.columns > joined ? e->patch.columns : joined;
    e->block_bytes = (uint64_t)BLOCK * widest * sizeof *e->block;
    e->block = map_memory(e->block_bytes);
    return true;
}

/* Writes the values of a patch: all of red, of green, of blue. */
static void read_patch(const eye *e, const pixels *from, uint32_t left, uint32_t top, float *out)
{
    const uint32_t patch = e->config->patch;
    for (int colour = 0; colour < COLOURS; colour++)
        for (uint32_t y = 0; y < patch; y++) {
            const uint8_t *in = from->data + COLOURS * ((size_t)(top + y) * from->width + left) + colour;
            for (uint32_t x = 0; x < patch; x++)
                *out++ = e->levels[colour][in[COLOURS * x]];
        }
}

/* Writes the rows of the patches of a tile. */
static void read_tile(const eye *e, const pixels *from, uint32_t left, uint32_t top, float *rows, uint32_t stride)
{
    const eyes_config *c = e->config;
    const uint32_t patches = c->grid * c->grid;
    for (uint32_t first = 0, count; first < patches; first += count) {
        count = smaller(BLOCK, patches - first);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t place = first + i;
            float *row = rows + (size_t)place * stride;
            memset(row, 0, c->hidden * sizeof *row);
            matrix_add_row(&e->base, place, row);
            read_patch(e, from, left + place % c->grid * c->patch, top + place / c->grid * c->patch,
                       e->block + (size_t)i * e->patch.columns);
        }
        matrix_add(&e->patch, e->block, count, rows + (size_t)first * stride, stride);
    }
}

/* Writes the rows for the text model of the states of a tile. */
static void project(const eye *e, const float *states, uint32_t stride, float *rows)
{
    const eyes_config *c = e->config;
    const uint32_t across = c->grid / c->join, each = across * across;
    memset(rows, 0, (size_t)each * c->projected * sizeof *rows);
    for (uint32_t first = 0, count; first < each; first += count) {
        count = smaller(BLOCK, each - first);
        float *out = e->block;
        for (uint32_t row = first; row < first + count; row++)
            for (uint32_t y = 0; y < c->join; y++)
                for (uint32_t x = 0; x < c->join; x++, out += c->hidden) {
                    uint32_t from = (row / across * c->join + y) * c->grid + row % across * c->join + x;
                    memcpy(out, states + (size_t)from * stride, c->hidden * sizeof *out);
                }
        matrix_add(&e->projector, e->block, count, rows + (size_t)first * c->projected, c->projected);
    }
}

/* The picture with whole tiles, and the whole picture as one tile. Returns false without memory. */
static bool resize(const eye *e, const edge_picture *picture, const eyes_layout *layout, pixels *tiled, pixels *whole)
{
    pixels given = {0}, near = {0};
    uint32_t width = picture->width, height = picture->height;
    within(&width, &height, layout->width > layout->height ? layout->width : layout->height);
    bool made = pixels_copy(&given, picture) && pixels_resize(&near, &given, width, height, FILTER_LANCZOS);
    pixels_free(&given);
    made = made && pixels_resize(tiled, &near, layout->width, layout->height, FILTER_LANCZOS);
    pixels_free(&near);
    return made && pixels_resize(whole, tiled, e->config->side, e->config->side, FILTER_LANCZOS);
}

static bool are_finite(const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return false;
    return true;
}

static edge_status encode(const eye *e, const pixels *tiled, const pixels *whole, const eyes_layout *layout,
                          const volatile int32_t *cancelled, float *rows, edge_error *error)
{
    const eyes_config *c = e->config;
    const uint32_t patches = c->grid * c->grid, together = encoder_model(e->encoder)->config->capacity / patches;
    const size_t part = (size_t)layout->each * c->projected;
    uint32_t ends[64], stride;
    for (uint32_t first = 0, count; first < layout->tiles; first += count) {
        count = smaller(smaller(together, 64), layout->tiles - first);
        float *inputs = encoder_inputs(e->encoder, &stride);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t tile = first + i;
            const bool all = tile == layout->tiles - 1;
            const uint32_t left = all ? 0 : tile % layout->across * c->side, top = all ? 0 : tile / layout->across * c->side;
            read_tile(e, all ? whole : tiled, left, top, inputs + (size_t)i * patches * stride, stride);
            ends[i] = (i + 1) * patches;
        }
        const float *states = encoder_run(e->encoder, ends, count * patches, &stride);
        if (!states)
            return edge_fail(error, EDGE_BAD_FILE, "eyes.edge was cut short while it was read, or a thread was lost: try again");
        for (uint32_t i = 0; i < count; i++)
            project(e, states + (size_t)i * patches * stride, stride, rows + (first + i) * part);
        if (__atomic_load_n(cancelled, __ATOMIC_RELAXED))
            return edge_fail(error, EDGE_BUSY, "edge_cancel has ended the picture: show it again");
    }
    if (!are_finite(rows, layout->tiles * part))
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
        unmap_memory(e.block, e.block_bytes);
    return status;
}
