/* Reads LoRA adapters, which edge/apps/sections/adapter_file.py writes, into the session's memory. Compiled code uses
 * the offsets in its table unchecked, so that each is checked here against that memory. */
#include <string.h>

#include "bundle.h"
#include "hash.h"
#include "model.h"
#include "pass.h"
#include "rows.h"
#include "session.h"
#include "stream.h"

enum { PARTS = 3, TILE_SCALES = TILE * sizeof(float), PIECE = 4096 }; /* PARTS: A, its scales, B */

/* The accelerator that reads its own part of a file; NULL: none. A page's reads it beside the CPU, which may run any pass. */
static const accelerator_kind *reader(const edge_session *s)
{
    return s->accelerator ? s->accelerator->kind : EDGE_PAGE;
}

static uint64_t part_bytes(const adapted *matrix, int part, uint32_t rank)
{
    const uint32_t each[PARTS] = {matrix->a, matrix->a_scales, matrix->b};
    return (uint64_t)each[part] * rank + (part == PARTS - 1 ? matrix->b_scales : 0);
}

static bool are_within(const adapted *matrix, const int64_t places[PARTS], const adapter_header *header)
{
    for (int part = 0; part < PARTS; part++) {
        uint64_t at = (uint64_t)places[part], size = part_bytes(matrix, part, header->rank);
        if (!at || at % SECTION_ALIGNMENT || at > header->bytes || size > header->bytes - at)
            return false;
    }
    return true;
}

/* Multiplies B by `scale`. Returns false if a value overflows its type. */
static bool scale_matrix(const adapted *matrix, uint8_t *b, uint32_t rank, float scale)
{
    uint64_t size = part_bytes(matrix, PARTS - 1, rank), tile = (uint64_t)rank * TILE;
    bool finite = true;
    if (matrix->kind == LORA_I8) { /* each tile is its values, then the scales of its rows */
        for (; size >= tile + TILE_SCALES; size -= tile + TILE_SCALES, b += tile + TILE_SCALES)
            finite = rows_scale(b + tile, TILE_SCALES, true, scale) && finite;
        return finite;
    }
    return rows_scale(b, size, matrix->kind == LORA_F32, scale);
}

static edge_status check_header(const edge_session *s, const adapter_header *header, edge_error *error)
{
    const adapters_config *room = model_adapters(s->model);
    const file_header *model = (const file_header *)(const void *)s->model->file.data;
    if (memcmp(header->magic, ADAPTER_MAGIC, sizeof header->magic))
        return edge_fail(error, EDGE_BAD_FILE, "this is not an adapter: edge export-adapter makes one");
    if (header->version != ADAPTER_VERSION || memcmp(header->model, model->hash, sizeof header->model) ||
        memcmp(header->layout, room->layout, sizeof header->layout) || header->count != room->count)
        return edge_fail(error, EDGE_BAD_FILE, "the adapter belongs to another model or version: make it for this bundle "
                         "by edge export-adapter");
    if (header->rank > room->rank)
        return edge_fail(error, EDGE_UNSUPPORTED, "the adapter has rank %d, and the bundle room for %d: export it with a "
                         "larger --lora-rank", (int64_t)header->rank, (int64_t)room->rank);
    if (reader(s) && header->gpu_bytes != room->gpu)
        return edge_fail(error, EDGE_UNSUPPORTED, "the adapter is not for the GPU of this bundle: make it for the bundle by "
                         "edge export-adapter");
    if (!header->rank || header->rank % RANK_STEP || header->bytes > room->room)
        return edge_fail(error, EDGE_BAD_FILE, "the adapter is damaged: copy it again");
    return EDGE_OK;
}

/* Skips the part for the other engine, but hashes it. */
static bool skip(hashed_stream *from, uint64_t size)
{
    uint8_t piece[PIECE];
    bool whole = true;
    for (uint64_t at = 0; whole && at < size; at += PIECE)
        whole = stream_get(from, piece, (size_t)(size - at < PIECE ? size - at : PIECE));
    return whole;
}

static bool read_matrices(edge_session *s, hashed_stream *from, const adapter_header *header)
{
    const adapters_config *room = model_adapters(s->model);
    const adapted *matrices = (const adapted *)(room + 1);
    adapter_room to = pass_adapter(s->pass);
    bool whole = true;
    for (uint32_t i = 0; whole && i < room->count; i++) {
        static const int64_t none[PARTS];
        int64_t *places = to.table + matrices[i].table;
        whole = stream_get(from, places, sizeof none) &&
                (!memcmp(places, none, sizeof none) || are_within(matrices + i, places, header));
    }
    return whole && stream_get(from, to.memory, (size_t)header->bytes);
}

static bool scale_matrices(edge_session *s, const adapter_header *header, float scale)
{
    const adapters_config *room = model_adapters(s->model);
    const adapted *matrices = (const adapted *)(room + 1);
    adapter_room to = pass_adapter(s->pass);
    bool finite = true;
    for (uint32_t i = 0; scale != 1 && i < room->count; i++) {
        const int64_t *places = to.table + matrices[i].table;
        if (places[PARTS - 1])
            finite = scale_matrix(matrices + i, to.memory + places[PARTS - 1], header->rank, scale) && finite;
    }
    return finite;
}

/* After a failure, the table has no adapter, and the memory's content is undefined. */
static edge_status read_all(edge_session *s, const edge_stream *stream, float scale, edge_error *error)
{
    const adapters_config *room = model_adapters(s->model);
    hashed_stream from = {.stream = stream};
    adapter_header header = {.rank = 0};
    hash_start(&from.sum);
    bool whole = stream_get(&from, &header, sizeof header);
    edge_status status = check_header(s, &header, error);
    if (status)
        return status;
    uint8_t stored[DIGEST];
    bool finite = true;
    if (s->accelerator)
        whole = whole && skip(&from, (uint64_t)room->count * PARTS * sizeof(int64_t)) && skip(&from, header.bytes);
    else
        whole = whole && read_matrices(s, &from, &header);
    whole = whole && (reader(s) ? reader(s)->adapt(s->accelerator, stream_get, &from, scale, &finite)
                                : skip(&from, header.gpu_bytes));
    hash_end(&from.sum, s->adapter.hash);
    if (!whole || !stream_get(&from, stored, sizeof stored) || memcmp(stored, s->adapter.hash, sizeof stored))
        return edge_fail(error, EDGE_BAD_FILE, "the adapter is damaged or cut short: copy it again");
    if (!s->accelerator)
        finite = scale_matrices(s, &header, scale) && finite;
    if (finite && !s->accelerator)
        pass_adapter(s->pass).table[room->lora_rank] = header.rank;
    if (!finite)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the adapter's values are too large with this scale: lower it");
    s->adapter.scale = scale;
    return s->accelerator ? check_accelerator(s, error) : EDGE_OK;
}

static void remove_adapter(edge_session *s)
{
    const adapters_config *room = model_adapters(s->model);
    const adapted *matrices = (const adapted *)(room + 1);
    int64_t *table = pass_adapter(s->pass).table;
    bool finite;
    for (uint32_t i = 0; table && i < room->count; i++)
        memset(table + matrices[i].table, 0, PARTS * sizeof *table);
    if (table)
        table[room->lora_rank] = 0;
    if (reader(s))
        reader(s)->adapt(s->accelerator, NULL, NULL, 1, &finite);
    memset(&s->adapter, 0, sizeof s->adapter);
}

edge_status read_adapter(edge_session *s, const edge_stream *stream, double scale, edge_error *error)
{
    remove_adapter(s);
    edge_status status = stream ? read_all(s, stream, (float)scale, error) : EDGE_OK;
    if (status)
        remove_adapter(s);
    return status;
}
