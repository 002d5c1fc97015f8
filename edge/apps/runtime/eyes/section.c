/* Section EYES, of which nothing is trusted, and the matrices of STEM. */
#include <string.h>

#include "eye.h"
#include "eyes.h"

enum { MOST_SIDE = 1 << 14, MOST_PATCH = 256, MOST_GRID = 1 << 10, MOST_TABLE = 1 << 14, MOST_PARTS = 16, MOST_TILE_TOKENS = 1 << 16, MOST_CELL = 1 << 12 };

static bool is_between(uint64_t value, uint64_t low, uint64_t high)
{
    return low <= value && value <= high;
}

static bool stages_are_possible(const eyes_config *c)
{
    if (!is_between(c->stages, 1, sizeof c->stops / sizeof *c->stops))
        return false;
    uint32_t parts = 0;
    for (uint32_t stage = 0; stage < c->stages; stage++) {
        if (c->stops[stage] <= (stage ? c->stops[stage - 1] : 0))
            return false;
        parts += c->kept >> stage & 1;
    }
    return parts == c->parts && c->kept >> (c->stages - 1) & 1;
}

static bool is_possible(const eyes_config *c)
{
    const bool tiled = c->family <= EYES_LFM2, table = c->positions >= POSITIONS_RESIZED;
    bool figures = c->family <= EYES_SOUND && is_between(c->patch, 1, MOST_PATCH) && is_between(c->join, 1, MOST_GRID)
        && is_between(c->most, 1, 64) && is_between(c->projected, 1, MOST_EYE_VALUES) && is_between(c->hidden, 1, MOST_EYE_VALUES)
        && is_between(c->tokens, 1, MOST_TILE_TOKENS) && is_between(c->least, 1, c->tokens) && is_between(c->parts, 1, MOST_PARTS)
        && c->filter < FILTERS && c->positions <= POSITIONS_CROSSED && c->norm <= NORM_LAYER && stages_are_possible(c)
        && c->least_pixels <= 1u << 30 && is_between((uint64_t)c->join * c->patch, 1, MOST_CELL)
        && (c->positions != POSITIONS_CROSSED || (uint64_t)c->join * c->tokens <= c->table)
        && (uint64_t)c->join * c->join * c->hidden <= MOST_EYE_VALUES;
    figures = figures && (!tiled || (is_between(c->side, 1, MOST_SIDE) && is_between(c->grid, 1, MOST_GRID)
                                     && c->grid == c->side / c->patch && c->grid % c->join == 0));
    figures = figures && (table ? is_between(c->table, 1, c->positions == POSITIONS_CROSSED ? MOST_TABLE : MOST_GRID)
                                : c->positions != POSITIONS_OF_A_GRID || c->family <= EYES_SQUARE);
    for (int i = 0; i < COLOURS; i++) /* NaN fails, too */
        figures = figures && c->mean[i] > -1e6 && c->mean[i] < 1e6 && c->std[i] > 1e-6 && c->std[i] < 1e6;
    return figures && c->eps >= 0 && c->eps < 1 && c->factor >= 0 && c->factor < 1e6;
}

static uint32_t matrices_of(const eyes_config *c)
{
    return EYES_MATRICES + c->parts * EYES_PART_MATRICES;
}

static const char *texts_of(const eyes_config *c)
{
    return (const char *)(c + 1) + matrices_of(c) * sizeof(stem_matrix);
}

const eyes_config *eyes_of(const edge_model *model)
{
    const eyes_config *c = (const eyes_config *)(const void *)model->sections[SECTION_EYES];
    const uint64_t size = model->sizes[SECTION_EYES];
    if (size < sizeof *c || !is_possible(c) || size < sizeof *c + matrices_of(c) * sizeof(stem_matrix)
        || (c->family == EYES_SOUND) != (model->sizes[SECTION_SOUNDS] > 0))
        return NULL;
    const char *at = texts_of(c), *end = (const char *)c + size;
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
    const char *at = texts_of(c);
    for (int before = 0; before < (int)text; before++)
        at += strlen(at) + 1;
    return at;
}

bool eyes_matrix_of(const edge_model *file, const eyes_config *c, uint32_t number, uint32_t rows, uint32_t columns, matrix *m)
{
    const stem_matrix *found = (const stem_matrix *)(const void *)(c + 1) + number;
    const uint64_t size = file->sizes[SECTION_STEM], bytes = (uint64_t)rows * columns * (found->half ? 2 : 4);
    *m = (matrix){found->rows ? file->sections[SECTION_STEM] + found->at : NULL, rows, columns, found->half};
    return !found->rows || (found->rows == rows && found->columns == columns && found->at % 64 == 0 && found->at <= size
                            && bytes <= size - found->at);
}
