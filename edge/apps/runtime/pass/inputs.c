/* Inputs of compiled code for a pass's tokens: ids or rows in their place, positions and their angles, factors of queries. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "pass_parts.h"
#include "places.h"

bool has_learned_positions(const edge_model *model)
{
    for (uint32_t kind = 0; kind < model->config->rope_kinds; kind++)
        if (find_angles(model, kind, false)->pairs)
            return false;
    return true;
}

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
void place_texts(pass *p, uint32_t count, const text_places *texts)
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

void place_tokens(pass *p, const int32_t *tokens, uint32_t count, uint32_t rows, const text_places *texts)
{
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
    const bool others = texts && texts->cells && !p->learned; /* place_texts has angles for every token */
    p->job->angle = p->placed ? place_angles(p, count) : others ? 0 : angle_row(p, rows);
}

float *pass_inputs(pass *p, uint32_t *stride)
{
    *stride = (p->model->config->hidden + 31) / 32 * 32;
    return p->floats + p->design->x;
}

float *pass_given(pass *p, bool features)
{
    const uint32_t slot = p->model->config->fuse_slot;
    if (slot)
        p->adapter.table[slot] = features;
    return p->floats + (features ? p->design->features : p->design->given);
}

const float *pass_taps(const pass *p, uint32_t *stride)
{
    *stride = (p->model->config->hidden + 31) / 32 * 32;
    return p->floats + p->design->taps;
}

/* Writes tokens where compiled code reads them: -1 for given rows, which it finds in place of embeddings. NULL: all are
 * given, and there. */
void write_tokens(pass *p, const int32_t *tokens, uint32_t count)
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
