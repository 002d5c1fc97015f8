/* Saved conversations: a header, pictures with the rows that may still run, the KV rows, their tokens (where rewinding
 * needs them), the tokens that wait, the system prompt, marks of turns, the pictures of KV rows, and the SHA-256 of all
 * of it. Only a session of the same bundle and adapter loads them. */
#include <string.h>

#include "bundle.h"
#include "context.h"
#include "given.h"
#include "hash.h"
#include "kv.h"
#include "pass.h"
#include "policy.h"
#include "session.h"
#include "stream.h"
#include "system.h"
#include "tools.h"

enum { STATE_VERSION = 9, MOST_TILES = 64 };

typedef struct {
    char magic[8]; /* "EDGESTA1" */
    uint32_t version, pinned;
    uint8_t model[32], bundle[32]; /* SHA-256 of the model's file, and of the trusted sections */
    uint64_t length, evicted;
    uint32_t turn, turns, waiting, system;
    adapter_name adapter;
    uint32_t pictures, shown, system_rows, rows;
} state_header;

/* A picture without its rows, which follow if `held` is not 0. */
typedef struct {
    uint8_t hash[32];
    int32_t first;
    uint32_t count, width, down, across, held, grid_down, grid_across, whole, each;
} saved_picture;

static uint32_t held_marks(const edge_session *s)
{
    return s->turns < MOST_MARKS ? s->turns : MOST_MARKS;
}

/* Number of row tokens that are saved; none after an eviction, when they are no longer known. */
static uint32_t held_tokens(const edge_session *s, uint64_t evicted)
{
    bool known = (s->model->config->states || s->model->config->ringed) && !evicted;
    return known ? kv_length(s->rows) : 0;
}

static uint32_t pictures_of(const edge_session *s)
{
    return s->given ? given_count(s->given) : 0;
}

static size_t row_bytes(const picture_rows *p)
{
    return p->rows ? (size_t)p->count * p->width * sizeof *p->rows : 0;
}

/* Bytes of pictures, and of the picture of each KV row. */
static uint64_t picture_bytes(const edge_session *s)
{
    const uint32_t count = pictures_of(s);
    uint64_t found = count ? kv_length(s->rows) * sizeof(uint16_t) : 0;
    for (uint32_t i = 0; i < count; i++)
        found += sizeof(saved_picture) + row_bytes(given_picture(s->given, i));
    return found;
}

static bool put_pictures(const edge_session *s, hashed_stream *to)
{
    for (uint32_t i = 0; i < pictures_of(s); i++) {
        const picture_rows *p = given_picture(s->given, i);
        saved_picture saved = {.first = p->first, .count = p->count, .width = p->width, .down = p->down,
                               .across = p->across, .held = p->rows != NULL, .grid_down = p->grid_down,
                               .grid_across = p->grid_across, .whole = p->whole, .each = p->each};
        memcpy(saved.hash, p->hash, sizeof saved.hash);
        if (!stream_put(to, &saved, sizeof saved) || (p->rows && !stream_put(to, p->rows, row_bytes(p))))
            return false;
    }
    return true;
}

static bool put_shown(const edge_session *s, hashed_stream *to)
{
    for (uint32_t row = 0; pictures_of(s) && row < kv_length(s->rows); row++) {
        const uint16_t picture = (uint16_t)policy_picture(s->policy, row);
        if (!stream_put(to, &picture, sizeof picture))
            return false;
    }
    return true;
}

static bool get_pictures(edge_session *s, hashed_stream *from, uint32_t count)
{
    const edge_config *c = s->model->config;
    if (count > (s->given ? MOST_PICTURES : 0))
        return false;
    for (uint32_t i = 0; i < count; i++) {
        saved_picture saved;
        if (!stream_get(from, &saved, sizeof saved)
            || !saved.count || saved.count > c->capacity
            || saved.width != c->hidden * (1 + c->deepstack)
            || saved.first < (int32_t)c->vocab || (uint32_t)saved.first > INT32_MAX - saved.count
            || !saved.down || !saved.across || saved.down > MOST_TILES || saved.across > MOST_TILES || saved.whole > 1
            || (uint64_t)saved.down * saved.across * (saved.down * saved.across > 1) * saved.each >= saved.count
            || (uint64_t)saved.grid_down * saved.grid_across != (c->components ? saved.count : 0))
            return false;
        picture_rows p = {.first = saved.first, .count = saved.count, .width = saved.width, .down = saved.down,
                          .across = saved.across, .grid_down = saved.grid_down, .grid_across = saved.grid_across,
                          .whole = saved.whole, .each = saved.each};
        memcpy(p.hash, saved.hash, sizeof p.hash);
        if (saved.held && !(p.rows = map_memory((uint64_t)p.count * p.width * sizeof *p.rows)))
            return false;
        given_put(s->given, p); /* which owns the rows */
        if (p.rows && !stream_get(from, p.rows, row_bytes(&p)))
            return false;
    }
    return true;
}

static bool get_shown(edge_session *s, hashed_stream *from)
{
    for (uint32_t row = 0; pictures_of(s) && row < kv_length(s->rows); row++) {
        uint16_t picture;
        if (!stream_get(from, &picture, sizeof picture) || picture > pictures_of(s))
            return false;
        policy_show(s->policy, row, picture);
    }
    return true;
}

static state_header header_of(const edge_session *s)
{
    state_header header = {
        .magic = {'E', 'D', 'G', 'E', 'S', 'T', 'A', '1'},
        .version = STATE_VERSION,
        .pinned = policy_pinned(s->policy),
        .length = sizeof header + (s->waiting + (uint64_t)s->system_count) * sizeof(int32_t) +
                  held_marks(s) * sizeof(turn_mark) + kv_saved_bytes(s->rows) +
                  held_tokens(s, s->evicted) * sizeof *s->run_ids + picture_bytes(s) + DIGEST,
        .evicted = s->evicted,
        .turn = s->turn,
        .turns = s->turns,
        .waiting = s->waiting,
        .system = s->system_count,
        .adapter = s->adapter,
        .pictures = pictures_of(s),
        .shown = s->shown,
        .system_rows = s->system_rows,
        .rows = kv_length(s->rows),
    };
    memcpy(header.model, ((const file_header *)(const void *)s->model->file.data)->hash, sizeof header.model);
    memcpy(header.bundle, EDGE_TRUSTED, sizeof header.bundle);
    return header;
}

static edge_status check_stream(const edge_session *s, const edge_stream *stream, edge_error *error)
{
    if (answers(s))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "an answer is being generated: let it end, or cancel it, first");
    if (!stream || stream->size < sizeof *stream)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "an edge_stream is needed whose size is set");
    return EDGE_OK;
}

static edge_status check_source(const edge_session *s, const edge_stream *stream, edge_error *error)
{
    edge_status status = check_stream(s, stream, error);
    if (!status && stream->fd < 0 && !stream->buffer)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "an edge_stream is needed with a file or a buffer");
    return status;
}

/* Forgets the whole conversation with the system prompt. */
static void forget(edge_session *s)
{
    begin_anew(s);
    if (s->tools) {
        tools_start(s->tools, false);
        s->tools->alone = false;
    }
}

edge_status edge_save(edge_session *s, edge_stream *stream, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if ((status = check_stream(s, stream, error)))
        return leave(s, status);
    if (s->tools && s->tools->given) /* which their answer is written differently for */
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT,
                                  "the results wait for their answer: call edge_next, then save"));
    state_header header = header_of(s);
    stream->length = header.length;
    if (stream->fd < 0 && !stream->buffer) /* the call only asks for the length */
        return leave(s, EDGE_OK);
    if (stream->fd < 0 && stream->capacity < header.length)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "the state has %d bytes, and the buffer fewer: see length",
                                  (int64_t)header.length));
    hashed_stream to = {.stream = stream};
    uint8_t digest[DIGEST];
    hash_start(&to.sum);
    bool written = pass_catch_up(s->pass) && stream_put(&to, &header, sizeof header) && put_pictures(s, &to) &&
                   kv_save(s->rows, stream_put, &to) &&
                   stream_put(&to, s->run_ids, held_tokens(s, s->evicted) * sizeof *s->run_ids) &&
                   stream_put(&to, s->ids + s->first, s->waiting * sizeof *s->ids) &&
                   stream_put(&to, s->system, s->system_count * sizeof *s->system) &&
                   stream_put(&to, s->marks, held_marks(s) * sizeof *s->marks) && put_shown(s, &to);
    hash_end(&to.sum, digest);
    written = written && stream_put(&to, digest, sizeof digest) && to.at == header.length;
    if ((status = check_accelerator(s, error)))
        return leave(s, status);
    return leave(s, written ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "the state could not be written"));
}

static bool is_picture(const edge_session *s, int32_t id)
{
    return s->given && given_find(s->given, id) < given_count(s->given);
}

static bool are_ids(const edge_session *s, const int32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || ((uint32_t)ids[i] >= s->model->config->vocab && !is_picture(s, ids[i])))
            return false;
    return true;
}

static edge_status damaged(edge_error *error)
{
    return edge_fail(error, EDGE_BAD_FILE, "the saved state is damaged");
}

static edge_status get_header(const edge_session *s, hashed_stream *from, state_header *header, edge_error *error)
{
    const state_header ours = header_of(s);
    hash_start(&from->sum);
    if (!stream_get(from, header, sizeof *header) || memcmp(header->magic, ours.magic, sizeof ours.magic))
        return edge_fail(error, EDGE_BAD_FILE, "this is not a saved state");
    if (header->version != ours.version || memcmp(header->model, ours.model, sizeof ours.model) ||
        memcmp(header->bundle, ours.bundle, sizeof ours.bundle))
        return edge_fail(error, EDGE_BAD_FILE, "the state was saved with another bundle or version of it");
    if (memcmp(&header->adapter, &ours.adapter, sizeof ours.adapter))
        return edge_fail(error, EDGE_BAD_FILE, "the state was saved with another adapter: set that one first");
    if (header->rows > kv_most(s->rows))
        return edge_fail(error, EDGE_FULL, "the saved state has %d KV rows, and this session room for %d",
                         (int64_t)header->rows, (int64_t)kv_most(s->rows));
    const uint32_t prefix = kv_prefix(s->rows); /* rows that no conversation lacks */
    const bool right = header->waiting <= s->room
        && header->system <= s->model->config->capacity
        && header->rows >= prefix
        && (!header->system_rows || header->system_rows >= prefix)
        && header->system_rows <= header->system + prefix
        && header->turn <= TURN_ANSWERED
        && header->turn != TURN_ANSWERING
        && header->shown <= header->pictures;
    return right ? EDGE_OK : damaged(error);
}

edge_status state_check(const edge_session *s, const edge_stream *stream, edge_error *error)
{
    hashed_stream from = {.stream = stream};
    uint8_t some[1024], digest[DIGEST], stored[DIGEST];
    state_header header;
    edge_status status = get_header(s, &from, &header, error);
    bool right = !status && header.length >= sizeof header + DIGEST;
    while (right && from.at < header.length - DIGEST) {
        const uint64_t left = header.length - DIGEST - from.at;
        right = stream_get(&from, some, left < sizeof some ? (size_t)left : sizeof some);
    }
    hash_end(&from.sum, digest);
    if (!status && !(right && stream_get(&from, stored, sizeof stored) && !memcmp(stored, digest, sizeof stored)))
        return damaged(error);
    return status;
}

/* Reads a state behind its header. After a failure, the caller must forget the conversation. */
static edge_status load(edge_session *s, hashed_stream *from, const state_header *header, edge_error *error)
{
    uint8_t digest[DIGEST], stored[DIGEST];
    bool right = get_pictures(s, from, header->pictures);
    edge_status status = right ? kv_load(s->rows, stream_get, from, error) : EDGE_OK;
    if (status)
        return status;
    if (right) {
        s->turns = header->turns;
        uint32_t held = held_tokens(s, header->evicted);
        right = stream_get(from, s->run_ids, held * sizeof *s->run_ids) && are_ids(s, s->run_ids, held) &&
                stream_get(from, s->ids, header->waiting * sizeof *s->ids) && are_ids(s, s->ids, header->waiting) &&
                stream_get(from, s->system, header->system * sizeof *s->system) && are_ids(s, s->system, header->system) &&
                stream_get(from, s->marks, held_marks(s) * sizeof *s->marks) && get_shown(s, from);
    }
    for (uint32_t i = 0; right && i < held_marks(s); i++)
        right = s->marks[i].count <= MOST_LEFT && s->marks[i].asked <= 1
            && are_ids(s, s->marks[i].left, s->marks[i].count);
    hash_end(&from->sum, digest);
    if (!right || !stream_get(from, stored, sizeof stored) || memcmp(stored, digest, sizeof digest) ||
        from->at != header->length || kv_length(s->rows) != header->rows)
        return damaged(error);
    policy_pin(s->policy, header->pinned, kv_capacity(s->rows));
    s->waiting = header->waiting;
    s->system_count = header->system;
    s->system_rows = header->system_rows;
    s->evicted = header->evicted;
    s->shown = header->shown;
    s->turn = (enum turn)header->turn;
    return EDGE_OK;
}

edge_status edge_load(edge_session *s, const edge_stream *stream, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if ((status = check_source(s, stream, error)))
        return leave(s, status);
    hashed_stream from = {.stream = stream};
    state_header header;
    if ((stream->fd < 0 && (status = state_check(s, stream, error))) || (status = get_header(s, &from, &header, error)))
        return leave(s, status);
    forget(s);
    if ((status = load(s, &from, &header, error)))
        forget(s);
    context_settle(s); /* a cancellation was of this call */
    return leave(s, status);
}

edge_status edge_set_adapter(edge_session *s, const edge_stream *adapter, double scale, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if (answers(s) || adapter)
        status = check_source(s, adapter, error);
    if (!status && adapter && !EDGE_ADAPTERS)
        status = edge_fail(error, EDGE_UNSUPPORTED, "the bundle has no room for adapters: export it with --lora-rank");
    if (!status && adapter && !(scale >= -MOST_SCALE && scale <= MOST_SCALE)) /* NaN fails, too */
        status = edge_fail(error, EDGE_BAD_ARGUMENT, "an adapter's scale must be from -%d to %d", (int64_t)MOST_SCALE,
                           (int64_t)MOST_SCALE);
    if (status)
        return leave(s, status);
    forget(s);
    return leave(s, EDGE_ADAPTERS ? EDGE_ADAPTERS(s, adapter, scale, error) : EDGE_OK);
}
