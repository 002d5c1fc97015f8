/* A library with the functions of edge.h whose model answers with the question, a character a token. It holds its
 * caller to the rules of edge.h: a session used by two threads at once, or after its end, is counted as a fault, and
 * shows in every later error and usage. */
#define _POSIX_C_SOURCE 200809L
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "edge.h"

struct edge_model { atomic_int sessions; };
struct edge_session {
    edge_model *model;
    edge_options options;
    char stops[16][132], cache[64], npu[64];
    edge_readings readings;
    atomic_int inside, cancelled, ended;
    atomic_uint trims;
    char text[1 << 20];
    size_t length, at;
    uint32_t answering, tokens;
    uint64_t adapter; /* what was said of the last one */
};

static atomic_int faults;

static edge_status fail(edge_error *error, edge_status code, const char *message)
{
    error->code = code;
    strncpy(error->message, message, sizeof error->message - 1);
    return code;
}

static void enter(edge_session *session)
{
    if (atomic_load(&session->ended) || atomic_fetch_add(&session->inside, 1))
        atomic_fetch_add(&faults, 1);
}

static edge_status leave(edge_session *session, edge_status status)
{
    atomic_fetch_sub(&session->inside, 1);
    return status;
}

edge_status edge_open(const edge_source *source, edge_model **model, edge_error *error)
{
    if (source->path && strstr(source->path, "missing"))
        return fail(error, EDGE_BAD_FILE, "no file \xf0\x9f\x98\x80 there");
    if (!source->path && (source->fd != 7 || source->offset != 64 || source->length != 128))
        return fail(error, EDGE_BAD_ARGUMENT, "fd, offset and length did not arrive");
    *model = calloc(1, sizeof **model);
    return EDGE_OK;
}

edge_status edge_close(edge_model *model, edge_error *error)
{
    if (atomic_load(&model->sessions))
        return fail(error, EDGE_BUSY, "sessions are open");
    free(model);
    return EDGE_OK;
}

edge_status edge_info(const edge_model *model, edge_model_info *info, edge_error *error)
{
    (void)model, (void)error;
    *info = (edge_model_info){sizeof *info, EDGE_ABI, "echo \xf0\x9f\x98\x80", "MIT", "streaming", "int8", "avx2",
                              300, 2048, 256, 4, 1, 5000000000, 6, 7, 8, 3};
    return EDGE_OK;
}

edge_status edge_set(edge_session *session, const edge_options *options, edge_error *error)
{
    if (options->stop_count > 16)
        return fail(error, EDGE_BAD_ARGUMENT, "more than 16 stops");
    for (uint32_t i = 0; i < options->stop_count; i++) {
        if (strlen(options->stop[i]) > 128)
            return fail(error, EDGE_BAD_ARGUMENT, "a stop has more than 128 bytes");
        strcpy(session->stops[i], options->stop[i]);
    }
    strncpy(session->cache, options->cache ? options->cache : "", sizeof session->cache - 1);
    strncpy(session->npu, options->npu ? options->npu : "", sizeof session->npu - 1);
    session->options = *options;
    return EDGE_OK;
}

edge_status edge_begin(edge_model *model, const edge_options *options, edge_session **made, edge_error *error)
{
    edge_session *session = calloc(1, sizeof *session);
    edge_status status = edge_set(session, options, error);
    if (status < 0) {
        free(session);
        return status;
    }
    session->model = model;
    atomic_fetch_add(&model->sessions, 1);
    *made = session;
    return EDGE_OK;
}

void edge_end(edge_session *session)
{
    enter(session);
    atomic_store(&session->ended, 1); /* not freed, so that later use is seen */
    atomic_fetch_sub(&session->model->sessions, 1);
}

edge_status edge_read(edge_session *session, const edge_readings *readings, edge_error *error)
{
    (void)error;
    enter(session);
    session->readings = *readings;
    return leave(session, EDGE_OK);
}

edge_status edge_append(edge_session *session, edge_role role, const void *text, size_t count, edge_error *error)
{
    enter(session);
    if (role == EDGE_IDS)
        for (size_t i = 0; i < count; i++)
            session->text[i] = (char)((const int32_t *)text)[i];
    else if (count < sizeof session->text)
        memcpy(session->text, text, count);
    else
        return leave(session, fail(error, EDGE_FULL, "the text is too long"));
    if (role == EDGE_RAW && count == 5 && !memcmp(text, "names", 5))
        return leave(session, fail(error, EDGE_BAD_ARGUMENT, "call edge_next, append EDGE_USER, set edge_options.npu, not edge_other"));
    session->length = count;
    session->at = 0;
    session->answering = 1;
    atomic_store(&session->cancelled, 0);
    return leave(session, EDGE_OK);
}

edge_status edge_next(edge_session *session, edge_piece *piece, edge_error *error)
{
    enter(session);
    if (!session->answering)
        return leave(session, fail(error, EDGE_BAD_ARGUMENT, "nothing was asked"));
    piece->token = -1;
    piece->finish = EDGE_GOING;
    piece->length = 0;
    piece->done = (uint32_t)session->length;
    piece->asked = piece->done + 1;
    if (strstr(session->text, "NaN"))
        return session->answering = 0, leave(session, fail(error, EDGE_FAILED, "the model computed no number"));
    if (strstr(session->text, "slow"))
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    if (atomic_load(&session->cancelled))
        piece->finish = EDGE_INTERRUPTED;
    else if (session->at == session->length)
        piece->finish = EDGE_EOS;
    else {
        piece->token = (uint8_t)session->text[session->at];
        do
            piece->text[piece->length++] = session->text[session->at++];
        while (((uint8_t)session->text[session->at] & 0xc0) == 0x80);
        session->tokens++;
    }
    session->answering = piece->finish == EDGE_GOING;
    return leave(session, EDGE_OK);
}

void edge_cancel(edge_session *session)
{
    if (atomic_load(&session->ended))
        atomic_fetch_add(&faults, 1);
    atomic_store(&session->cancelled, 1);
}

edge_status edge_bias(edge_session *session, const edge_logit_bias *biases, size_t count, edge_error *error)
{
    (void)session;
    return fail(error, EDGE_BAD_ARGUMENT, count == 2 && biases[1].token == 7 && biases[1].bias == -1.5f ? "biases" : "wrong");
}

edge_status edge_constrain(edge_session *session, edge_form form, const char *text, size_t length, edge_error *error)
{
    (void)session;
    return form == EDGE_REGEX && length == 2 && !memcmp(text, "\xC3\xA9", 2)
               ? EDGE_OK : fail(error, EDGE_UNSUPPORTED, form == EDGE_FREE && !length ? "free" : "not enforced");
}

edge_status edge_tools(edge_session *session, const char *tools, size_t length, edge_error *error)
{
    (void)session;
    return tools && (length != 4 || memcmp(tools, "[\xC3\xA9]", 4)) ? fail(error, EDGE_UNSUPPORTED, "not these tools") : EDGE_OK;
}

edge_status edge_choose(edge_session *session, const char *choice, uint32_t parallel, edge_error *error)
{
    (void)session;
    return !strcmp(choice, "auto") && !parallel ? EDGE_OK : fail(error, EDGE_BAD_ARGUMENT, choice);
}

int64_t edge_calls(edge_session *session, uint32_t index, edge_call *call, edge_error *error)
{
    (void)session;
    if (call && index > 1)
        return fail(error, EDGE_BAD_ARGUMENT, "no such call");
    if (call) {
        call->id = index ? "second" : "first";
        call->name = "f";
        call->arguments = "{\"\xC3\xA9\": 1}";
    }
    return 2;
}

edge_status edge_rewind(edge_session *session, uint32_t turns, edge_error *error)
{
    (void)session;
    return turns == UINT32_MAX ? EDGE_OK : fail(error, EDGE_UNSUPPORTED, "rows were evicted");
}

edge_status edge_save(edge_session *session, edge_stream *stream, edge_error *error)
{
    (void)error;
    stream->length = session->length;
    if (stream->buffer && stream->capacity >= session->length)
        memcpy(stream->buffer, session->text, session->length);
    return EDGE_OK;
}

edge_status edge_load(edge_session *session, const edge_stream *stream, edge_error *error)
{
    return edge_append(session, EDGE_RAW, stream->buffer, stream->length, error);
}

edge_status edge_set_adapter(edge_session *session, const edge_stream *adapter, double scale, edge_error *error)
{
    enter(session);
    if (scale > 1e6)
        return leave(session, fail(error, EDGE_BAD_ARGUMENT, "the scale is too large"));
    session->adapter = adapter ? 100 * (uint64_t)(scale * 100) + (uint64_t)adapter->fd + 1 : 0;
    if (adapter && adapter->buffer)
        session->adapter += 1000000 * ((const uint8_t *)adapter->buffer)[adapter->capacity - 1];
    return leave(session, EDGE_OK);
}

edge_status edge_trim(edge_session *session, edge_trim_level level, edge_error *error)
{
    (void)error;
    if (atomic_load(&session->ended)) /* it may come at any other time */
        atomic_fetch_add(&faults, 1);
    atomic_fetch_add(&session->trims, 1000 * (1 + (uint32_t)level));
    return EDGE_OK;
}

/* Shows what arrived: options in the order of their fields, and the readings. */
edge_status edge_use(const edge_session *session, edge_usage *usage, edge_error *error)
{
    const edge_options *o = &session->options;
    (void)error;
    *usage = (edge_usage){
        sizeof *usage, o->threads, (uint32_t)o->top_k, o->max_tokens, o->cpu_mask, o->seed,
        (uint64_t)((o->temperature * 1000 + o->top_p * 100 + o->min_p * 10 + o->repeat_penalty) * 1000 + 0.5),
        session->adapter, o->stop_count ? strlen(session->stops[o->stop_count - 1]) : 0,
        (uint64_t)5 << 32, 7, session->tokens + atomic_load(&session->trims), (uint64_t)atomic_load(&faults), o->speculate, 0,
        session->readings.joules + session->readings.celsius * 1000 + session->readings.headroom * 1e6,
        o->time + o->energy * 10 + o->power * 100 + o->max_temp * 1000 + o->headroom * 1e4,
        session->readings.available == 1 << 30, o->engine, "timed 😀", session->cache,
        strlen(session->cache) + 100 * strlen(session->npu), 1.25, 31, 32, 3.5, 4.5};
    return EDGE_OK;
}

/* As many as the option says, from 100 on. */
int64_t edge_thread_ids(const edge_session *session, int32_t *ids, size_t capacity, edge_error *error)
{
    (void)error;
    for (size_t i = 0; i < session->options.threads && i < capacity; i++)
        ids[i] = 100 + (int32_t)i;
    return session->options.threads;
}

int64_t edge_tokenize(edge_session *session, const char *text, size_t length, uint32_t special, int32_t *ids,
                      size_t capacity, edge_error *error)
{
    (void)session, (void)error;
    for (size_t i = 0; i < length && i < capacity; i++)
        ids[i] = (uint8_t)text[i] + (special ? 1000 : 0);
    return (int64_t)length;
}

uint32_t edge_dimensions(const edge_model *model)
{
    (void)model;
    return 3;
}

/* Vectors of a text's length, its last byte, and what else was said. */
edge_status edge_embed(edge_session *session, const char *const *texts, const size_t *lengths, size_t count,
                       const edge_embedding *options, float *vectors, size_t capacity, edge_error *error)
{
    const size_t size = options->dimensions ? options->dimensions : 3;
    if (capacity != count * size)
        return fail(error, EDGE_BAD_ARGUMENT, "there is no room for the vectors");
    enter(session);
    for (size_t i = 0; i < count; i++, vectors += size) {
        vectors[0] = (float)lengths[i];
        vectors[1] = lengths[i] ? (float)(uint8_t)texts[i][lengths[i] - 1] : -1;
        if (size > 2)
            vectors[2] = (float)(options->unscaled + 2 * options->truncate) + (options->prompt ? (float)strlen(options->prompt) / 16 : 0);
    }
    return leave(session, EDGE_OK);
}

/* Echoes no sounds. */
edge_status edge_listen(edge_session *session, const edge_source *ears, const edge_hearing *options, edge_error *error)
{
    (void)session, (void)ears, (void)options;
    return fail(error, EDGE_UNSUPPORTED, "the echo hears nothing");
}

int64_t edge_hear(edge_session *session, const float *samples, size_t count, edge_segment *segment, edge_error *error)
{
    (void)session, (void)samples, (void)count, (void)segment;
    return fail(error, EDGE_UNSUPPORTED, "the echo hears nothing");
}

int64_t edge_image_tokens(const edge_model *model, uint32_t width, uint32_t height, uint32_t most, edge_error *error)
{
    (void)model, (void)width, (void)height, (void)most;
    return fail(error, EDGE_UNSUPPORTED, "the echo sees nothing");
}

edge_status edge_image(edge_session *session, const edge_source *eyes, const edge_picture *picture, edge_error *error)
{
    (void)session, (void)eyes, (void)picture;
    return fail(error, EDGE_UNSUPPORTED, "the echo sees nothing");
}
