/* The functions of web.h: those of edge.h as numbers, for the one model and the one session of a module. */
#include "web.h"

#include <math.h>
#include <string.h>

#include "json.h"
#include "platform.h"
#include "session.h"

static edge_model *model;
static edge_session *session;
static edge_error failure = {sizeof failure, 0, ""};
static edge_piece piece = {sizeof piece, -1, 0, 0, ""};
static int32_t nothing_to_cancel;
static double chosen[WEB_OPTIONS] = {
    [WEB_TEMPERATURE] = -1, [WEB_TOP_P] = -1, [WEB_MIN_P] = -1, [WEB_REPEAT_PENALTY] = -1, [WEB_TOP_K] = -1,
};
static char text[4096]; /* JSON */

const char *web_message(void)
{
    return failure.message;
}

void *web_take(uint32_t bytes)
{
    return map_memory(bytes);
}

void web_give(void *memory, uint32_t bytes)
{
    unmap_memory(memory, bytes);
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

int32_t web_open(const void *file, uint32_t bytes)
{
    if (model)
        return edge_fail(&failure, EDGE_BUSY, "a model is open: call web_close first");
    edge_source source = {sizeof source, NULL, 0, (uintptr_t)file, bytes};
    return edge_open(&source, &model, &failure);
}

int32_t web_close(void)
{
    edge_status status = edge_close(model, &failure);
    if (!status) {
        model = NULL;
        dismiss_threads();
    }
    return status;
}

const char *web_info(void)
{
    edge_model_info info = {.size = sizeof info};
    if (edge_info(model, &info, &failure))
        return "{}";
    json out = json_begin(text, sizeof text);
    json_text(&out, "name", info.name);
    json_text(&out, "license", info.license);
    json_text(&out, "policy", info.policy);
    json_text(&out, "kv_dtype", info.kv_dtype);
    json_text(&out, "isa", info.isa);
    json_number(&out, "vocab", info.vocab);
    json_number(&out, "context", info.context);
    json_number(&out, "capacity", info.capacity);
    json_number(&out, "threads", info.threads);
    json_number(&out, "chat", info.chat);
    json_number(&out, "weights", (double)info.weights);
    json_number(&out, "kv", (double)info.kv);
    json_number(&out, "scratch", (double)info.scratch);
    return json_end(&out);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

enum { STACK = 1 << 16 }; /* bytes */

void *web_stack(uint32_t number)
{
    static uint8_t *stacks[WEB_MOST_THREADS];
    if (!number || number >= WEB_MOST_THREADS)
        return NULL;
    if (!stacks[number])
        stacks[number] = map_memory(STACK);
    return stacks[number] ? stacks[number] + STACK : NULL;
}

void web_thread(uint32_t number)
{
    sit_down(number);
}

uint32_t web_threads(void)
{
    return waiting_threads();
}

/* ---- the session ------------------------------------------------------------------------------------------------- */

double *web_options(void)
{
    return chosen;
}

/* What is no number of the type's, NaN too, becomes one that edge_begin refuses or takes for none. */
static uint32_t whole(double value)
{
    return value >= 0 && value <= UINT32_MAX ? (uint32_t)value : UINT32_MAX;
}

static edge_options options_of(const char *const *stops, uint32_t count)
{
    return (edge_options){
        .size = sizeof(edge_options),
        .threads = whole(chosen[WEB_THREADS]),
        .temperature = chosen[WEB_TEMPERATURE],
        .top_p = chosen[WEB_TOP_P],
        .min_p = chosen[WEB_MIN_P],
        .repeat_penalty = chosen[WEB_REPEAT_PENALTY],
        .top_k = chosen[WEB_TOP_K] < 0 ? -1 : (int32_t)fmin(chosen[WEB_TOP_K], INT32_MAX),
        .seeded = chosen[WEB_SEEDED] != 0,
        .seed = (uint64_t)whole(chosen[WEB_SEED_HIGH]) << 32 | whole(chosen[WEB_SEED_LOW]),
        .max_tokens = whole(chosen[WEB_MAX_TOKENS]),
        .ignore_eos = chosen[WEB_IGNORE_EOS] != 0,
        .stops = stops,
        .stop_count = count,
        .seconds = chosen[WEB_SECONDS],
        .joules = chosen[WEB_JOULES],
        .watts = chosen[WEB_WATTS],
    };
}

static const char *const *list_stops(const char *stops, uint32_t count)
{
    static const char *list[MOST_STOPS];
    for (uint32_t i = 0; i < count && i < MOST_STOPS; i++) {
        list[i] = stops;
        stops += strlen(stops) + 1;
    }
    return list;
}

int32_t web_begin(const char *stops, uint32_t stop_count)
{
    if (session)
        return edge_fail(&failure, EDGE_BUSY, "a session has begun: call web_end first");
    edge_options options = options_of(list_stops(stops, stop_count), stop_count);
    return edge_begin(model, &options, &session, &failure);
}

int32_t web_set(const char *stops, uint32_t stop_count)
{
    edge_options options = options_of(list_stops(stops, stop_count), stop_count);
    return edge_set(session, &options, &failure);
}

void web_end(void)
{
    edge_end(session);
    session = NULL;
}

int32_t web_append(int32_t role, const void *text_or_ids, uint32_t count)
{
    count_cpu(true);
    edge_status status = edge_append(session, role, text_or_ids, count, &failure);
    count_cpu(false);
    return status;
}

int32_t web_next(void)
{
    count_cpu(true);
    edge_status status = edge_next(session, &piece, &failure);
    count_cpu(false);
    return status ? status : piece.finish;
}

const char *web_piece(void)
{
    return piece.text;
}

uint32_t web_piece_length(void)
{
    return piece.length;
}

int32_t web_piece_token(void)
{
    return piece.token;
}

int32_t *web_cancelled(void)
{
    return session ? (int32_t *)&session->cancelled : &nothing_to_cancel;
}

int32_t web_rewind(uint32_t turns)
{
    return edge_rewind(session, turns, &failure);
}

enum { HOST = 0 }; /* what platform.c calls a file that the host writes or reads */

int64_t web_state(void)
{
    edge_stream stream = {sizeof stream, -1, NULL, 0, 0};
    edge_status status = edge_save(session, &stream, &failure);
    return status ? status : (int64_t)stream.length;
}

int32_t web_save(void)
{
    edge_stream stream = {sizeof stream, HOST, NULL, 0, 0};
    return edge_save(session, &stream, &failure);
}

int32_t web_load(void)
{
    edge_stream stream = {sizeof stream, HOST, NULL, 0, 0};
    return edge_load(session, &stream, &failure);
}

const char *web_use(void)
{
    edge_usage use = {.size = sizeof use};
    if (edge_use(session, &use, &failure))
        return "{}";
    json out = json_begin(text, sizeof text);
    json_number(&out, "rows", use.rows);
    json_number(&out, "capacity", use.capacity);
    json_number(&out, "threads", use.threads);
    json_number(&out, "weights", (double)use.weights);
    json_number(&out, "kv", (double)use.kv);
    json_number(&out, "scratch", (double)use.scratch);
    json_number(&out, "memory", (double)memory_bytes());
    json_number(&out, "tokens", (double)use.tokens);
    json_number(&out, "evicted", (double)use.evicted);
    json_number(&out, "joules", use.joules);
    json_number(&out, "seconds", use.seconds);
    json_number(&out, "measured", use.measured);
    return json_end(&out);
}

int32_t web_tokenize(const char *line, uint32_t bytes, uint32_t special, int32_t *ids, uint32_t room)
{
    return (int32_t)edge_tokenize(session, line, bytes, special, ids, room, &failure);
}
