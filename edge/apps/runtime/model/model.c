/* Maps model.edge, and checks once all that other files rely on: places and checksums of sections, the numbers of
 * CONFIG, and that they agree with the sizes of the other sections. */
#include <math.h>
#include <string.h>

#include "model.h"
#include "system.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers of the file are used unconverted");

enum { MOST_LAYERS = 1024, MOST_HEADS = 1024, MOST_HEAD = 1024, MOST_ROWS = 1 << 24, MOST_TOKENS = 1 << 14,
       MOST_THREADS = 256, MOST_VOCAB = 1 << 22, MOST_KINDS = 8, MOST_DESIGNS = 16, MOST_GEMM = 64,
       MOST_INPUTS = 1 << 16, MOST_WIDTH = 1 << 20 };
static const uint64_t MOST_SCRATCH = 1ull << 32; /* elements */
static const uint64_t MOST_BYTES = 1ull << 48;

static edge_status damaged(edge_error *error, const char *what)
{
    return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (%s): copy or export it again", what);
}

/* CRC-32 as zlib's, four bits at a time, since a table for eight would be longer than all this code. */
static uint32_t checksum(const uint8_t *data, uint64_t size)
{
    static const uint32_t nibbles[16] = {
        0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
        0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C,
    };
    uint32_t sum = ~0u;
    for (uint64_t i = 0; i < size; i++) {
        sum = sum >> 4 ^ nibbles[(sum ^ data[i]) & 15];
        sum = sum >> 4 ^ nibbles[(sum ^ (uint32_t)(data[i] >> 4)) & 15];
    }
    return ~sum;
}

static bool within(uint64_t value, uint64_t low, uint64_t high)
{
    return low <= value && value <= high;
}

static bool number_within(double value, double low, double high) /* false for NaN */
{
    return low <= value && value <= high;
}

static bool is_weights(uint32_t kind)
{
    return kind == SECTION_WEIGHTS || kind == SECTION_GPU_WEIGHTS || kind == SECTION_DRAFT;
}

static edge_status find_sections(edge_model *model, edge_error *error)
{
    const uint8_t *data = model->file.data;
    uint64_t size = model->file.size;
    const file_header *header = (const file_header *)data; /* may be unaligned: checked below */
    if (size < sizeof *header || memcmp(data, "EDGEMDL1", sizeof header->magic))
        return edge_fail(error, EDGE_BAD_FILE, "this is not a model.edge: edge export makes one");
    if ((uintptr_t)data % SECTION_ALIGNMENT)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge begins in the middle of a file, at no multiple of %d bytes: "
                         "give it a file of its own", (int64_t)SECTION_ALIGNMENT);
    if (header->version != MODEL_VERSION)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge has version %d, this library reads %d: export both together",
                         (int64_t)header->version, (int64_t)MODEL_VERSION);
    if (header->size != size)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge has %d bytes and should have %d: copy it again",
                         (int64_t)size, (int64_t)header->size);
    if (header->sections >= 2 * SECTIONS || header->resident > size
        || header->resident < sizeof *header + header->sections * sizeof(file_section))
        return damaged(error, "its table of sections");
    const file_section *found = (const file_section *)(header + 1);
    for (uint32_t i = 0; i < header->sections; i++) {
        uint32_t kind = found[i].kind;
        uint64_t at = found[i].offset, length = found[i].size, end = kind == SECTION_TABLE ? size : header->resident;
        if (!within(kind, 1, SECTIONS - 1) || model->sizes[kind] || !length || at > end || length > end - at
            || at % (is_weights(kind) ? WEIGHT_ALIGNMENT : SECTION_ALIGNMENT))
            return damaged(error, "its table of sections");
        model->sizes[kind] = length;
        if (kind == SECTION_TABLE) { /* not mapped */
            model->table = at;
            continue;
        }
        bool large = is_weights(kind) || kind == SECTION_TOKENIZER || kind == SECTION_STEM || kind == SECTION_ASSISTANT;
        if (!large && checksum(data + at, length) != found[i].crc)
            return damaged(error, "a checksum");
        model->sections[kind] = data + at;
    }
    return EDGE_OK;
}

/* Of layers that read another model's rows: those of an assistant. */
static bool is_beside(const edge_config *c)
{
    return !c->vocab && !c->encoder;
}

static bool rows_are_possible(const edge_config *c, const row_shape *shape)
{
    return within(shape->heads, 1, c->kv_heads)
        && within(shape->key, c->states ? 0 : 16, c->head) && shape->key % 16 == 0
        && shape->value <= c->head && shape->value % 16 == 0;
}

static bool shape_is_possible(const edge_config *c)
{
    return within(c->layers, 1, MOST_LAYERS)
        && within(c->kv_heads, 1, MOST_HEADS)
        && within(c->heads, c->kv_heads, MOST_HEADS)
        && within(c->hidden, 1, MOST_WIDTH)
        && within(c->head, 16, MOST_HEAD)
        && c->head % 16 == 0
        && c->vocab <= MOST_VOCAB
        && rows_are_possible(c, c->shapes)
        && rows_are_possible(c, c->shapes + 1)
        && c->layer_inputs <= MOST_INPUTS
        && c->encoder <= 1
        && (!c->encoder || (c->chunk == c->capacity && !c->drafts))
        && !c->table_type == !c->layer_inputs
        && c->padded_vocab == whole_tiles(c->vocab)
        && within(c->context, 1, 1 << 30);
}

static bool importance_is_possible(const edge_config *c)
{
    if (c->policy != POLICY_KVZAP)
        return !c->ranked;
    return c->kernel % 2 && c->kernel < MOST_ROWS && within(c->ranked, 1, c->shapes[0].key);
}

static bool plan_is_possible(const edge_config *c)
{
    return within(c->capacity, 1, MOST_ROWS)
        && within(c->chunk, 1, MOST_TOKENS)
        && c->chunk <= c->capacity
        && within(c->threads, 1, MOST_THREADS)
        && within(c->evict_step, 1, c->capacity)
        && c->pinned < c->capacity
        && c->sinks <= c->pinned
        && c->drafts <= MOST_DRAFTS
        && (!c->drafts || c->policy != POLICY_H2O)
        && c->policy <= POLICY_KVZAP
        && c->kv_dtype <= KV_INT4
        && importance_is_possible(c);
}

static bool rings_are_possible(const edge_config *c)
{
    const uint64_t cached = (uint64_t)c->layers * c->kv_heads * (c->capacity + 15 + TILE); /* rows of the cache */
    if (c->windowed > 1 || cached > INT32_MAX)
        return false;
    if (is_beside(c) ? c->whole > 1 || c->ringed : !within(c->whole, 1, c->layers) || c->ringed > c->layers - c->whole)
        return false;
    if (is_beside(c))
        return true;
    if (!c->ringed)
        return !c->ring_rows && !c->ring_window && !memcmp(c->shapes, c->shapes + 1, sizeof *c->shapes);
    return c->windowed
        && within(c->ring_rows, 1, c->capacity)
        && within(c->ring_window, 1, 1 << 30)
        && (c->ring_rows == c->capacity || c->ring_rows >= c->ring_window + c->chunk);
}

static bool angles_are_possible(const edge_config *c)
{
    return within(c->rope_kinds, 1, MOST_KINDS)
        && c->long_from <= 1 << 30
        && c->tempered <= 1
        && (!c->tempered || (c->temper_period && number_within(c->temper_slope, -1e6, 1e6)));
}

static bool sampling_is_possible(const edge_config *c)
{
    return number_within(c->temperature, 0, 100)
        && number_within(c->top_p, 0, 1)
        && number_within(c->min_p, 0, 1)
        && number_within(c->repeat_penalty, 0.01, 100)
        && number_within(c->recent, 0, 1)
        && number_within(c->aging, 0, 1)
        && number_within(c->floor, 0, 1);
}

static bool costs_are_possible(const edge_config *c)
{
    return number_within(c->core_watts, 0, 1e6)
        && number_within(c->idle_watts, 0, 1e6)
        && number_within(c->joules_per_byte, 0, 1)
        && c->chat <= 1
        && c->weight_bytes <= MOST_BYTES
        && c->states < MOST_SCRATCH / sizeof(float)
        && c->copied <= c->states
        && c->kv_bytes <= MOST_BYTES
        && c->scratch_bytes <= MOST_BYTES
        && c->peak <= MOST_BYTES;
}

/* Cross attention, and what other passes give to this one or take from it. */
static bool others_are_possible(const edge_config *c)
{
    return c->crossings <= c->layers
        && c->cross_stride <= MOST_TOKENS
        && c->cross_stride % TILE == 0
        && !c->crossings == !c->cross_stride
        && (c->crossings || !c->cross_slot)
        && c->deepstack <= c->layers
        && c->components <= 3
        && c->beside <= MOST_BYTES
        && c->taps <= c->layers
        && c->features <= MOST_WIDTH
        && !c->features == !c->fuse_slot;
}

static bool config_is_possible(const edge_config *c)
{
    return shape_is_possible(c) && plan_is_possible(c) && rings_are_possible(c) && angles_are_possible(c)
        && sampling_is_possible(c) && costs_are_possible(c) && others_are_possible(c);
}

static bool layers_agree(const edge_model *model)
{
    const edge_config *c = model->config;
    if (model->sizes[SECTION_LAYERS] != c->layers * sizeof(layer_config))
        return false;
    uint32_t ringed = 0, rowless = 0;
    for (uint32_t i = 0; i < c->layers; i++) {
        const layer_config *layer = model->layers + i;
        if (layer->rope >= c->rope_kinds || layer->ringed > 1 || layer->rowless > 1 - layer->ringed
            || (layer->window && !c->windowed)
            || (layer->ringed && !within(layer->window, 1, c->ring_window)))
            return false;
        ringed += layer->ringed, rowless += layer->rowless;
    }
    return ringed == c->ringed && rowless == c->layers - c->whole - c->ringed;
}

static uint64_t angles_bytes(const edge_config *c)
{
    return sizeof(angles_config) + c->head / 2 * (sizeof(double) + 1);
}

static bool angles_agree(const edge_model *model)
{
    const edge_config *c = model->config;
    if (model->sizes[SECTION_ANGLES] != (c->long_from ? 2 : 1) * c->rope_kinds * angles_bytes(c))
        return false;
    for (uint32_t i = 0; i < (c->long_from ? 2 : 1) * c->rope_kinds; i++) {
        const angles_config *angles = (const angles_config *)(model->sections[SECTION_ANGLES] + i * angles_bytes(c));
        const double *radians = (const double *)(angles + 1);
        if (angles->first > c->head / 2 || angles->pairs > c->head / 2 - angles->first
            || !number_within(angles->magnitude, 1e-6, 1e6))
            return false;
        for (uint32_t pair = 0; pair < angles->pairs; pair++)
            if (!number_within(radians[pair], -1e6, 1e6)
                || find_components(c, angles)[pair] >= (c->components ? c->components : 1))
                return false;
    }
    return true;
}

/* Whether `count` values from `at` on are among the design's floats, at a multiple of `step`. */
static bool has_floats(const design_config *d, uint64_t at, uint64_t step, uint64_t count)
{
    return at % step == 0 && at <= d->floats && count <= d->floats - at;
}

static bool head_is_possible(const edge_config *c, const design_config *d)
{
    return d->tiles == c->padded_vocab / HEAD_TILE
        && has_floats(d, d->head_upper, 1, d->tiles)
        && has_floats(d, d->head_lower, 1, d->tiles)
        && d->head_tiles <= d->integers
        && d->tiles <= d->integers - d->head_tiles;
}

/* Checks the numbers by which the runtime indexes; only compiled code uses those of the table. */
static bool design_is_possible(const edge_config *c, const design_config *d, uint64_t section)
{
    const uint64_t ahead = d->tokens > ROPE_AHEAD ? d->tokens : ROPE_AHEAD, tokens = d->tokens;
    const uint64_t hidden = ((uint64_t)c->hidden + 31) / 32 * 32, heads = (uint64_t)c->layers * c->kv_heads;
    return memchr(d->isa, 0, sizeof d->isa)
        && d->isa[0]
        && within(d->gemm_tokens, 1, MOST_GEMM)
        && within(d->tokens, c->chunk, MOST_TOKENS + MOST_GEMM)
        && d->tokens % d->gemm_tokens == 0
        && d->rope_size == (ahead + d->gemm_tokens) * 2 * c->head
        && d->observed == (c->policy == POLICY_H2O ? whole_tiles(c->capacity) : 0)
        && d->floats <= MOST_SCRATCH
        && within(d->integers, 1, MOST_SCRATCH)
        && has_floats(d, d->x, 1, tokens * hidden)
        && has_floats(d, d->normals, 16, is_beside(c) ? 0 : heads * c->head)
        && has_floats(d, d->temperatures, 16, c->tempered ? tokens : 0)
        && has_floats(d, d->layer_inputs, 16, tokens * c->layers * whole_tiles(c->layer_inputs))
        && has_floats(d, d->given, 16, c->beside || c->features ? tokens * c->hidden : 0)
        && has_floats(d, d->features, 16, tokens * c->features)
        && has_floats(d, d->taps, 16, tokens * c->taps * hidden)
        && has_floats(d, d->deepstack, 1, tokens * c->deepstack * hidden)
        && (!d->tiles || head_is_possible(c, d))
        && d->table % 8 == 0
        && d->numbers > c->cross_slot
        && d->numbers > c->fuse_slot
        && d->table <= section
        && d->numbers <= (section - d->table) / 8;
}

static bool designs_agree(const edge_model *model)
{
    const uint8_t *section = model->sections[SECTION_DESIGNS];
    uint64_t size = model->sizes[SECTION_DESIGNS];
    uint32_t count = size < 8 ? 0 : *(const uint32_t *)section;
    if (!within(count, 1, MOST_DESIGNS) || size < 8 + count * sizeof(design_config))
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (!design_is_possible(model->config, (const design_config *)(section + 8) + i, size))
            return false;
    return true;
}

static bool find_strings(edge_model *model)
{
    const char **strings[] = {&model->name, &model->license, &model->policy, &model->kv_dtype};
    const char *at = (const char *)model->sections[SECTION_STRINGS], *end = at + model->sizes[SECTION_STRINGS];
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        const char *stop = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        if (!stop)
            return false;
        *strings[i] = at;
        at = stop + 1;
    }
    return true;
}

static bool adapters_agree(const edge_model *model)
{
    const adapters_config *room = model_adapters(model);
    uint64_t size = model->sizes[SECTION_ADAPTERS], fewest = UINT64_MAX;
    const design_config *designs;
    for (uint32_t count = model_designs(model, &designs); count; count--, designs++)
        fewest = designs->numbers < fewest ? designs->numbers : fewest;
    if (!room)
        return !size;
    if (room->rank % RANK_STEP || !within(room->rank, RANK_STEP, MOST_RANK) || room->lora_rank >= fewest
        || !within(room->room, 1, MOST_BYTES) || size != sizeof *room + (uint64_t)room->count * sizeof(adapted))
        return false;
    const adapted *each = (const adapted *)(room + 1);
    for (uint32_t i = 0; i < room->count; i++)
        if (each[i].kind > LORA_F32 || each[i].table + 3ull > fewest)
            return false;
    return true;
}

static edge_status check_sections(edge_model *model, edge_error *error)
{
    static const enum section_kind needed[] = {
        SECTION_CONFIG, SECTION_LAYERS, SECTION_DESIGNS, SECTION_ANGLES, SECTION_STRINGS, SECTION_WEIGHTS,
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!model->sizes[needed[i]])
            return damaged(error, "a section is missing");
    if (model->sizes[SECTION_CONFIG] != sizeof(edge_config))
        return damaged(error, "its settings");
    memcpy(&model->settings, model->sections[SECTION_CONFIG], sizeof model->settings);
    const edge_config *c = model->config = &model->settings;
    model->layers = (const layer_config *)model->sections[SECTION_LAYERS];
    if (!config_is_possible(c))
        return damaged(error, "its settings");
    if (!layers_agree(model))
        return damaged(error, "its layers");
    if (!angles_agree(model))
        return damaged(error, "its angles");
    if (!designs_agree(model))
        return damaged(error, "its designs");
    if (!adapters_agree(model))
        return damaged(error, "its room for adapters");
    const uint64_t heads = (uint64_t)c->layers * c->kv_heads, ranking = (uint64_t)c->whole * c->shapes[0].heads;
    const uint64_t normals = c->kv_dtype == KV_INT4 && !is_beside(c) ? heads * c->head : 0;
    const uint64_t importance = c->ranked ? ranking * (c->ranked + IMPORTANCE_EXTRA) : 0;
    const uint64_t table = model->sizes[SECTION_TABLE];
    /* read unchecked */
    if (model->sizes[SECTION_WEIGHTS] != c->weights || model->sizes[SECTION_GPU_WEIGHTS] != c->gpu_weights)
        return damaged(error, "its weights");
    if (!model->sizes[SECTION_GPU] != !model->sizes[SECTION_GPU_WEIGHTS])
        return damaged(error, "its programs of a GPU");
    if (model->sizes[SECTION_NORMALS] != normals * sizeof(float))
        return damaged(error, "its normals");
    if (model->sizes[SECTION_IMPORTANCE] != importance * sizeof(float))
        return damaged(error, "its weights of rows");
    if (!table != !c->layer_inputs || (c->layer_inputs && table % (c->vocab ? c->vocab : UINT64_MAX)))
        return damaged(error, "its table of embeddings");
    if (!find_strings(model))
        return damaged(error, "its strings");
    return EDGE_OK;
}

edge_status model_map(const edge_source *source, edge_model *model, edge_error *error)
{
    memset(model, 0, sizeof *model);
    edge_status status = map_file(source, &model->file, error);
    if (status)
        return status;
    status = find_sections(model, error);
    if (!status)
        status = check_sections(model, error);
    if (!status && (is_beside(model->config) || model->config->beside || model->config->features))
        status = damaged(error, "its settings");
    if (status)
        unmap_file(&model->file);
    return status;
}

edge_status model_inside(const edge_model *outer, enum section_kind kind, edge_model *model, edge_error *error)
{
    memset(model, 0, sizeof *model);
    model->file = outer->file;
    model->file.data = outer->sections[kind];
    model->file.size = outer->sizes[kind];
    edge_status status = find_sections(model, error);
    if (!status)
        status = check_sections(model, error);
    if (status)
        return status;
    const uint64_t beside = (uint64_t)(model->sections[SECTION_WEIGHTS] - outer->sections[SECTION_WEIGHTS]);
    const edge_config *c = model->config;
    const bool right = !c->beside || (beside == c->beside && !is_beside(c)); /* what drafts checks the rest */
    return right ? EDGE_OK : damaged(error, "its settings");
}

const embed_config *model_embed(const edge_model *model)
{
    const embed_config *found = (const embed_config *)model->sections[SECTION_EMBED];
    bool whole = model->sizes[SECTION_EMBED] >= sizeof *found;
    return whole && within(found->widest, model->config->hidden, MOST_WIDTH)
        && within(found->dimensions, 1, found->widest)
        ? found : NULL;
}

uint32_t model_designs(const edge_model *model, const design_config **designs)
{
    *designs = (const design_config *)(model->sections[SECTION_DESIGNS] + 8);
    return *(const uint32_t *)model->sections[SECTION_DESIGNS];
}

edge_status find_design(const edge_model *model, const char *isa, const design_config **design, edge_error *error)
{
    const design_config *designs;
    uint32_t count = model_designs(model, &designs);
    for (uint32_t i = 0; i < count; i++)
        if (!strcmp(designs[i].isa, isa)) {
            *design = designs + i;
            return EDGE_OK;
        }
    return edge_fail(error, EDGE_UNSUPPORTED, "model.edge has no tables for %s: export it together with the library",
                     isa);
}

const angles_config *find_angles(const edge_model *model, uint32_t kind, bool lengthened)
{
    const edge_config *c = model->config;
    uint64_t index = kind + (lengthened && c->long_from ? c->rope_kinds : 0);
    return (const angles_config *)(model->sections[SECTION_ANGLES] + index * angles_bytes(c));
}

float temperature_at(const edge_config *config, int64_t position)
{
    return (float)(1 + config->temper_slope * log1p((double)(position / config->temper_period)));
}
