/* web.h: the functions of edge.h with numbers as arguments, for one model and one session. */
#include "web.h"

#include <string.h>

#include "platform.h"
#include "session.h"
#include "system.h"

static edge_model *model;
static edge_session *session;
static edge_error failure = {sizeof failure, 0, ""};
static edge_piece piece = {.size = sizeof piece, .token = -1};
static int32_t nothing_to_cancel;
static edge_options options = EDGE_OPTIONS;

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

const edge_model_info *web_info(void)
{
    static edge_model_info info = {.size = sizeof info};
    return edge_info(model, &info, &failure) ? NULL : &info;
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

edge_options *web_options(void)
{
    return &options;
}

static void list_stops(const char *stops, uint32_t count)
{
    static const char *list[MOST_STOPS];
    for (uint32_t i = 0; i < count && i < MOST_STOPS; i++) {
        list[i] = stops;
        stops += strlen(stops) + 1;
    }
    options.stop = list;
    options.stop_count = count;
}

int32_t web_begin(const char *stops, uint32_t stop_count)
{
    if (session)
        return edge_fail(&failure, EDGE_BUSY, "a session has begun: call web_end first");
    list_stops(stops, stop_count);
    return edge_begin(model, &options, &session, &failure);
}

int32_t web_set(const char *stops, uint32_t stop_count)
{
    list_stops(stops, stop_count);
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

uint32_t web_piece_done(void)
{
    return piece.done;
}

uint32_t web_piece_asked(void)
{
    return piece.asked;
}

int32_t *web_cancelled(void)
{
    return session ? (int32_t *)&session->cancelled : &nothing_to_cancel;
}

int32_t web_rewind(uint32_t turns)
{
    return edge_rewind(session, turns, &failure);
}

enum { HOST = 0 }; /* any file descriptor stands for the host's stream */

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

int32_t web_check(void)
{
    edge_stream stream = {sizeof stream, HOST, NULL, 0, 0};
    return session ? state_check(session, &stream, &failure)
                   : edge_fail(&failure, EDGE_BAD_ARGUMENT, "no session has begun: call web_begin first");
}

int32_t web_load(void)
{
    edge_stream stream = {sizeof stream, HOST, NULL, 0, 0};
    return edge_load(session, &stream, &failure);
}

int32_t web_set_adapter(uint32_t given, double scale)
{
    edge_stream stream = {sizeof stream, HOST, NULL, 0, 0};
    return edge_set_adapter(session, given ? &stream : NULL, scale, &failure);
}

/* Here, since an export in gpu.c would keep that file, and its imports, in modules of sites without WebGPU. */
int32_t web_scale(void *values, uint32_t bytes, double scale)
{
    return rows_scale(values, bytes, model->config->kv_dtype == KV_F32, (float)scale);
}

const edge_usage *web_use(void)
{
    static edge_usage use = {.size = sizeof use};
    return edge_use(session, &use, &failure) ? NULL : &use;
}

int32_t web_constrain(int32_t form, const char *grammar, uint32_t bytes)
{
    return edge_constrain(session, form, grammar, bytes, &failure);
}

int32_t web_bias(const void *biases, uint32_t count)
{
    return edge_bias(session, biases, count, &failure);
}

int32_t web_tools(const char *tools, uint32_t bytes)
{
    return edge_tools(session, bytes ? tools : NULL, bytes, &failure);
}

int32_t web_choose(const char *choice, uint32_t parallel)
{
    return edge_choose(session, choice, parallel, &failure);
}

int32_t web_calls(void)
{
    return (int32_t)edge_calls(session, 0, NULL, &failure);
}

const char *web_call(uint32_t index, uint32_t field)
{
    edge_call call = {.size = sizeof call};
    if (edge_calls(session, index, &call, &failure) < 0)
        return NULL;
    return field == 0 ? call.id : field == 1 ? call.name : call.arguments;
}

int32_t web_embed(const char *const *texts, const size_t *lengths, uint32_t count, const char *prompt, uint32_t dimensions,
                  uint32_t unscaled, uint32_t truncate, float *vectors, uint32_t room)
{
    edge_embedding how = {sizeof how, prompt, dimensions, 0, unscaled, truncate};
    return edge_embed(session, texts, lengths, count, &how, vectors, room, &failure);
}

static edge_hearing hearing = EDGE_HEARING;
static edge_segment segment = {.size = sizeof segment};

edge_hearing *web_hearing(void)
{
    return &hearing;
}

int32_t web_listen(const void *ears, uint32_t bytes, const char *language, const char *prompt)
{
    edge_source source = {sizeof source, NULL, 0, (uintptr_t)ears, bytes};
    hearing.language = language;
    hearing.prompt = prompt;
    return edge_listen(session, &source, &hearing, &failure);
}

int32_t web_hear(const float *samples, uint32_t count)
{
    count_cpu(true);
    int64_t taken = edge_hear(session, samples, count, &segment, &failure);
    count_cpu(false);
    return (int32_t)taken;
}

const edge_segment *web_segment(void)
{
    return &segment;
}

int32_t web_image(const void *file, uint32_t bytes, const void *data, uint32_t width, uint32_t height, uint32_t tokens)
{
    edge_source eyes = {sizeof eyes, NULL, 0, (uintptr_t)file, bytes};
    edge_picture picture = {sizeof picture, data, width, height, 4 * width, 4, tokens};
    count_cpu(true);
    edge_status status = edge_image(session, &eyes, &picture, &failure);
    count_cpu(false);
    return status;
}

int32_t web_image_tokens(uint32_t width, uint32_t height, uint32_t tokens)
{
    return (int32_t)edge_image_tokens(model, width, height, tokens, &failure);
}

int32_t web_sound(const void *file, uint32_t bytes, const float *samples, uint32_t count, uint32_t rate)
{
    edge_source sounds = {sizeof sounds, NULL, 0, (uintptr_t)file, bytes};
    count_cpu(true);
    edge_status status = edge_sound(session, &sounds, samples, count, rate, &failure);
    count_cpu(false);
    return status;
}

int32_t web_sound_tokens(uint32_t count, uint32_t rate)
{
    return (int32_t)edge_sound_tokens(model, count, rate, &failure);
}

int32_t web_tokenize(const char *line, uint32_t bytes, uint32_t special, int32_t *ids, uint32_t room)
{
    return (int32_t)edge_tokenize(session, line, bytes, special, ids, room, &failure);
}
