/* `gpu_answers model.edge ENGINE FOLDER COUNT`: a conversation of three turns on the GPU or the NPU, and the same on
 * the CPU, where the third follows a saved state that the other engine goes on with. Fails if their greedy tokens
 * differ. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session.h"

enum { MOST_TOKENS_HERE = 1 << 12, PROMPT = 70 };
static edge_error error = {.size = sizeof error};

static void must(edge_status status)
{
    if (status < 0) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
}

static edge_session *begin(edge_model *model, edge_engine engine, const char *folder)
{
    edge_options options = EDGE_OPTIONS;
    options.engine = (uint32_t)engine;
    options.cache = options.npu = folder;
    options.temperature = 0;
    options.ignore_eos = 1;
    edge_session *session;
    must(edge_begin(model, &options, &session, &error));
    return session;
}

static uint32_t answer(edge_session *session, uint32_t seed, uint32_t count, int32_t *tokens)
{
    int32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)((i * 7 + seed * 31) % 250 + 1);
    must(edge_append(session, EDGE_IDS, prompt, PROMPT, &error));
    uint32_t found = 0;
    for (edge_piece piece = {.size = sizeof piece}; found < count && !piece.finish;) {
        must(edge_next(session, &piece, &error));
        if (piece.token >= 0)
            tokens[found++] = piece.token;
    }
    must(edge_rewind(session, 0, &error)); /* ends the answer */
    return found;
}

static edge_stream saved(edge_session *session)
{
    edge_stream stream = {.size = sizeof stream, .fd = -1};
    must(edge_save(session, &stream, &error));
    stream.buffer = malloc(stream.length);
    stream.capacity = stream.length;
    must(edge_save(session, &stream, &error));
    return stream;
}

int main(int arguments, char **values)
{
    if (arguments != 5)
        return 2;
    edge_source source = {.size = sizeof source, .path = values[1], .fd = -1};
    uint32_t engine = (uint32_t)atoi(values[2]), count = (uint32_t)atoi(values[4]);
    edge_model *model;
    static int32_t tokens[2][3][MOST_TOKENS_HERE];
    must(edge_open(&source, &model, &error));
    edge_session *sessions[] = {begin(model, (edge_engine)engine, values[3]), begin(model, EDGE_ENGINE_CPU, NULL)};
    for (uint32_t turn = 0; turn < 2; turn++)
        for (int each = 0; each < 2; each++)
            if (answer(sessions[each], turn, count, tokens[each][turn]) != count)
                return 3;
    edge_stream streams[] = {saved(sessions[0]), saved(sessions[1])};
    must(edge_load(sessions[0], &streams[1], &error));
    must(edge_load(sessions[1], &streams[0], &error));
    for (int each = 0; each < 2; each++)
        if (answer(sessions[each], 2, count, tokens[each][2]) != count)
            return 3;
    edge_usage usage = {.size = sizeof usage};
    must(edge_use(sessions[0], &usage, &error));
    if (usage.engine != engine || !usage.gpu[0] || !usage.gpu_bytes)
        return 4;
    printf("%u %u %llu\n", (unsigned)usage.rows, (unsigned)usage.evicted, (unsigned long long)usage.gpu_bytes);
    for (int each = 0; each < 2; each++) {
        edge_end(sessions[each]);
        free(streams[each].buffer);
    }
    must(edge_close(model, &error));
    return memcmp(tokens[0], tokens[1], sizeof tokens[0]) ? 5 : 0;
}
