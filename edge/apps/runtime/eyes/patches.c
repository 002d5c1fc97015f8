/* Rows of patches: a matrix of their values, and their positions. */
#include <string.h>

#include "eye.h"
#include "matrix.h"

uint32_t order_patches(const eyes_config *c, uint32_t down, uint32_t across, cell *cells, uint32_t first, uint32_t **windows)
{
    const uint32_t join = c->join, rows = down / join, columns = across / join, side = c->window ? c->window : UINT16_MAX;
    uint32_t count = 0;
    for (uint32_t top = 0; top < rows; top += side)
        for (uint32_t left = 0; left < columns; left += side) {
            for (uint32_t row = top; row < smaller(rows, top + side); row++)
                for (uint32_t column = left; column < smaller(columns, left + side); column++)
                    for (uint32_t y = 0; y < join; y++)
                        for (uint32_t x = 0; x < join; x++)
                            cells[count++] = (cell){row * join + y, column * join + x};
            *(*windows)++ = first + count;
        }
    return count;
}

/* ---- positions ---------------------------------------------------------------------------------------------------------- */

/* Writes the share that each row of the table has in position `at` of `count`; they are 1 together. */
static void find_shares(const eyes_config *c, uint32_t at, uint32_t count, float *shares)
{
    const uint32_t size = c->table;
    if (c->positions == POSITIONS_STRETCHED) {
        const float place = (float)at * (float)(size - 1) / (float)(count > 1 ? count - 1 : 1);
        const uint32_t first = smaller((uint32_t)place, size - 1), next = smaller(first + 1, size - 1);
        memset(shares, 0, size * sizeof *shares);
        shares[next] = place - (float)first;
        shares[first] += 1 - shares[next];
        return;
    }
    const float scale = (float)size / (float)count, center = ((float)at + 0.5f) * scale - 0.5f, wide = scale > 1 ? scale : 1;
    float sum = 0;
    for (uint32_t i = 0; i < size; i++) {
        const float off = (float)i - center, far = (off < 0 ? -off : off) / wide;
        sum += shares[i] = far < 1 ? 1 - far : 0;
    }
    for (uint32_t i = 0; i < size; i++)
        shares[i] /= sum;
}

static void add_scaled(float *to, const float *from, float by, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] += by * from[i];
}

/* Writes the table at a height of the tile, [table][hidden]. shares, own: room for a row of the table, and of a matrix. */
static void make_line(const eye *e, uint32_t row, uint32_t down, float *line, float *shares, float *own)
{
    const uint32_t table = e->config->table, hidden = e->config->hidden;
    find_shares(e->config, row, down, shares);
    memset(line, 0, (size_t)table * hidden * sizeof *line);
    for (uint32_t from = 0; from < table; from++)
        for (uint32_t column = 0; shares[from] != 0 && column < table; column++) {
            memset(own, 0, hidden * sizeof *own);
            matrix_add_row(&e->base, from * table + column, own);
            add_scaled(line + (size_t)column * hidden, own, shares[from], hidden);
        }
}

/* Adds positions of a table that is resized to the tile's patches, of which `join` rows are near each other. */
static void add_resized(const eye *e, uint32_t down, uint32_t across, const cell *cells, uint32_t count, float *rows, uint32_t stride)
{
    const eyes_config *c = e->config;
    const size_t size = (size_t)c->table * c->hidden;
    float *shares = e->lines + c->join * size, *own = shares + c->table;
    uint32_t held = UINT32_MAX; /* lines are those of this row of cells */
    for (uint32_t i = 0; i < count; i++) {
        if (cells[i].row / c->join != held) {
            held = cells[i].row / c->join;
            for (uint32_t line = 0; line < c->join; line++)
                make_line(e, held * c->join + line, down, e->lines + line * size, shares, own);
        }
        find_shares(c, cells[i].column, across, shares);
        for (uint32_t column = 0; column < c->table; column++)
            if (shares[column] != 0)
                add_scaled(rows + (size_t)i * stride, e->lines + cells[i].row % c->join * size + (size_t)column * c->hidden,
                           shares[column], c->hidden);
    }
}

static void add_positions(const eye *e, uint32_t down, uint32_t across, const cell *cells, uint32_t count, float *rows, uint32_t stride)
{
    const eyes_config *c = e->config;
    if (c->positions == POSITIONS_RESIZED || c->positions == POSITIONS_STRETCHED) {
        add_resized(e, down, across, cells, count, rows, stride);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        float *row = rows + (size_t)i * stride;
        if (c->positions == POSITIONS_OF_A_GRID)
            matrix_add_row(&e->base, cells[i].row * c->grid + cells[i].column, row);
        if (c->positions == POSITIONS_CROSSED) {
            matrix_add_row(&e->base, cells[i].column, row);
            matrix_add_row(&e->base, c->table + cells[i].row, row);
        }
    }
}

/* ---- patches -------------------------------------------------------------------------------------------------------------- */

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

void patch_rows(const eye *e, const pixels *from, uint32_t left, uint32_t top, uint32_t down, uint32_t across, const cell *cells,
               float *rows, uint32_t stride)
{
    const eyes_config *c = e->config;
    const uint32_t patches = down * across;
    for (uint32_t i = 0; i < patches; i++)
        memset(rows + (size_t)i * stride, 0, c->hidden * sizeof *rows);
    add_positions(e, down, across, cells, patches, rows, stride);
    for (uint32_t first = 0, count; first < patches; first += count) {
        count = smaller(BLOCK, patches - first);
        for (uint32_t i = 0; i < count; i++)
            read_patch(e, from, left + cells[first + i].column * c->patch, top + cells[first + i].row * c->patch,
                       e->block + (size_t)i * e->patch.columns);
        matrix_add(&e->patch, e->block, count, rows + (size_t)first * stride, stride);
    }
}
