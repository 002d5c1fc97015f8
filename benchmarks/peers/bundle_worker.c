/* A bundle for `bundle.py`, as an app in C uses it: linked with libedge.a, without Python.
 *
 *     bundle_worker MODEL THREADS start TEXT           seconds from edge_open to the first token of its
 *                                                      answer, and to the end of edge_begin
 *     bundle_worker MODEL THREADS memory PROMPT COUNT  runs PROMPT ids and generates COUNT more; bytes
 *     bundle_worker MODEL THREADS decode COUNT         for every line on stdin: seconds that COUNT tokens take, those of
 *                                                      them that the compiled pass takes, CPU seconds, and the tokens
 *
 * A line of output is a JSON object. Link it with -Wl,-z,norelro: `decode` writes into the library's table of passes, in
 * order to time them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bundle.h" /* compiled_run: all other names are those of edge.h */

static edge_error error = {.size = sizeof error};
static const char *path;
static edge_model *model;
static edge_session *session;
static compiled_run *compiled;
static double in_passes;

static double read_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double seconds(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

static void check(edge_status status)
{
    if (status < 0) {
        fprintf(stderr, "bundle_worker: %s\n", error.message);
        exit(1);
    }
}

/* In the place of the compiled pass. Other threads come back from it when the session ends. */
static void timed(int64_t *job, int32_t *lines, const uint8_t *weights, const int64_t *table, float *floats,
                  int32_t *integers, void *keys, void *values, void *key_scales, void *value_scales,
                  const int32_t *lengths, const int32_t *positions, const int32_t *tokens, float *logits,
                  const float *rope, float *attention, const int32_t *starts, int64_t thread)
{
    double began = seconds();
    compiled(job, lines, weights, table, floats, integers, keys, values, key_scales, value_scales, lengths, positions,
             tokens, logits, rope, attention, starts, thread);
    if (!thread)
        in_passes += seconds() - began;
}

static void time_passes(void)
{
    edge_model_info info = {.size = sizeof info};
    check(edge_info(model, &info, &error));
    for (compiled_pass *each = (compiled_pass *)EDGE_PASSES; each->isa; each++)
        if (!strcmp(each->isa, info.isa)) {
            compiled = each->run;
            each->run = timed;
        }
}

static edge_piece next(void)
{
    edge_piece piece = {.size = sizeof piece};
    check(edge_next(session, &piece, &error));
    return piece;
}

static void open_model(void)
{
    edge_source source = {.size = sizeof source, .path = path, .fd = -1};
    check(edge_open(&source, &model, &error));
}

static void begin(uint32_t threads, uint32_t count)
{
    edge_options options = EDGE_OPTIONS;
    options.threads = threads;
    options.temperature = 0;
    options.ignore_eos = 1;
    options.max_tokens = count;
    check(edge_begin(model, &options, &session, &error));
}

static void start(uint32_t threads, const char *text)
{
    double began = seconds();
    open_model();
    begin(threads, 0);
    double opened = seconds() - began;
    check(edge_append(session, EDGE_RAW, text, strlen(text), &error));
    while (next().token < 0)
        continue;
    printf("{\"seconds\": %.6f, \"opened\": %.6f}\n", seconds() - began, opened);
}

/* A field of /proc/self/status, in bytes. */
static long long status_of(const char *name)
{
    char line[256];
    long long found = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)) && sscanf(line + strlen(name), ": %lld", &found) == 1)
            break;
    if (file)
        fclose(file);
    return found * 1024;
}

static void memory(uint32_t threads, uint32_t prompt, uint32_t count)
{
    edge_model_info info = {.size = sizeof info};
    edge_usage use = {.size = sizeof use};
    open_model();
    begin(threads, count);
    check(edge_info(model, &info, &error));
    for (uint32_t i = 0; i < prompt; i++) { /* of no text: all but the first hundred, which are special */
        int32_t id = (int32_t)(100 + i * 7919ull % (info.vocab - 100));
        check(edge_append(session, EDGE_IDS, &id, 1, &error));
    }
    while (!next().finish)
        continue;
    check(edge_use(session, &use, &error));
    printf("{\"peak\": %lld, \"weights\": %llu, \"kv\": %llu, \"scratch\": %llu, \"tokens\": %llu, \"evicted\": %llu}\n",
           status_of("VmHWM"), (unsigned long long)use.weights, (unsigned long long)use.kv,
           (unsigned long long)use.scratch, (unsigned long long)use.tokens, (unsigned long long)use.evicted);
}

static void decode(uint32_t threads, uint32_t count)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    open_model();
    time_passes();
    begin(threads, 0);
    while ((length = getline(&line, &room, stdin)) > 1) {
        check(edge_rewind(session, UINT32_MAX, &error));
        check(edge_append(session, EDGE_RAW, line, (size_t)length - 1, &error));
        int32_t *tokens = malloc((count + 1) * sizeof *tokens);
        do
            tokens[0] = next().token; /* the prompt */
        while (tokens[0] < 0);
        double before = in_passes, busy = read_clock(CLOCK_PROCESS_CPUTIME_ID), began = seconds();
        for (uint32_t i = 1; i <= count;) {
            edge_piece piece = next();
            if (piece.token >= 0)
                tokens[i++] = piece.token;
        }
        double ended = seconds();
        printf("{\"seconds\": %.6f, \"passes\": %.6f, \"cpu\": %.6f, \"tokens\": [", ended - began, in_passes - before,
               read_clock(CLOCK_PROCESS_CPUTIME_ID) - busy);
        for (uint32_t i = 0; i <= count; i++)
            printf(i ? ", %d" : "%d", tokens[i]);
        puts("]}");
        fflush(stdout);
        free(tokens);
    }
    free(line);
}

int main(int words, char **word)
{
    uint32_t threads = words > 3 ? (uint32_t)strtoul(word[2], NULL, 10) : 0;
    uint32_t first = words > 4 ? (uint32_t)strtoul(word[4], NULL, 10) : 0;
    path = word[1];
    if (words == 5 && !strcmp(word[3], "start"))
        start(threads, word[4]);
    else if (words == 5 && !strcmp(word[3], "decode"))
        decode(threads, first);
    else if (words == 6 && !strcmp(word[3], "memory"))
        memory(threads, first, (uint32_t)strtoul(word[5], NULL, 10));
    else
        return 2;
    edge_end(session);
    check(edge_close(model, &error));
    return 0;
}
