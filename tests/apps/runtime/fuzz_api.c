/* Calls the functions of edge.h in any order, with right and wrong arguments, from two threads: `fuzz_api model.edge SEED
 * STEPS`. Whatever comes, calls return, say why, and keep their promises; sanitizers watch. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "model.h"
#include "session.h"
#include "system.h"

enum { MOST_TEXT = 1 << 15, MOST_STATE = 1 << 22 };

typedef struct { uint64_t state; } chance;
static uint64_t draw(chance *c) /* SplitMix64 */
{
    uint64_t z = c->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static uint32_t below(chance *c, uint32_t count) { return (uint32_t)(draw(c) % count); }
static bool rarely(chance *c) { return below(c, 8) == 0; }

typedef struct {
    chance luck;
    edge_model *model;
    edge_model_info info;
    edge_session *session;
    bool ended; /* the answer, or none was begun */
    uint64_t calls, failed, pieces;
} run;

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* A status that a function may return, with a message that ends. */
static int64_t hold(run *r, int64_t status, const edge_error *error)
{
    r->calls++;
    if (status < EDGE_FAILED)
        fail("no such status");
    if (status < 0) {
        r->failed++;
        if (error->code != status || !memchr(error->message, 0, sizeof error->message) || !error->message[0])
            fail("a failure without a message");
    }
    return status;
}

static bool is_utf8(const uint8_t *text, size_t length)
{
    for (size_t i = 0; i < length;) {
        uint32_t more = text[i] < 0x80 ? 0 : text[i] >> 5 == 6 ? 1 : text[i] >> 4 == 14 ? 2 : text[i] >> 3 == 30 ? 3 : 9;
        if (more > length - i - 1)
            return false;
        for (uint32_t k = 1; k <= more; k++)
            if ((text[i + k] & 0xC0) != 0x80)
                return false;
        i += more + 1;
    }
    return true;
}

static size_t write_text(chance *c, char *text)
{
    static const char *const parts[] = {
        "the ", "sky", " is", " blue", "\n", "  ", "1234", "<|im_end|>", "<|im_start|>", "<eos>", "é", "日本", "🙂", "\xff",
        "\xe2\x82", "\xf0\x9f", "", "don't", "\t", "!?",
    };
    size_t length = 0, wanted = below(c, 64);
    if (rarely(c))
        wanted = below(c, rarely(c) ? MOST_TEXT - 16 : MOST_TEXT / 16);
    bool one = below(c, 16) == 0; /* a run of one word */
    uint32_t word = below(c, sizeof parts / sizeof *parts);
    while (length < wanted) {
        if (!one)
            word = below(c, sizeof parts / sizeof *parts);
        size_t size = strlen(parts[word]);
        memcpy(text + length, parts[word], size);
        length += size ? size : 1;
        if (!size)
            text[length - 1] = 0;
    }
    return length;
}

static double some_number(chance *c, double usual)
{
    const double numbers[] = {usual, -1, 0, 1e-9, 1e9, NAN, INFINITY, -INFINITY};
    return numbers[rarely(c) ? below(c, 8) : 0];
}

static void call_set(run *r)
{
    chance *c = &r->luck;
    edge_options options = EDGE_OPTIONS;
    edge_error error = {.size = sizeof error};
    char copies[MOST_STOPS + 1][200];
    const char *texts[MOST_STOPS + 1];
    options.threads = rarely(c) ? below(c, 100) : below(c, 3);
    options.cpu_mask = rarely(c) ? draw(c) : 0;
    options.temperature = some_number(c, (double)below(c, 3));
    options.top_p = some_number(c, 0.9);
    options.min_p = some_number(c, 0.05);
    options.repeat_penalty = some_number(c, 1.1);
    options.top_k = (int32_t)below(c, 50) - 1;
    options.seeded = below(c, 2);
    options.seed = draw(c);
    options.max_tokens = 1 + below(c, 12);
    options.speculate = below(c, rarely(c) ? 4 : 2);
    options.ignore_eos = below(c, 2);
    options.stop_count = rarely(c) ? below(c, MOST_STOPS + 2) : 0;
    for (uint32_t i = 0; i < options.stop_count; i++) {
        size_t length = below(c, rarely(c) ? 199 : 5);
        memset(copies[i], 'a' + (int)below(c, 20), length);
        copies[i][length] = 0;
        texts[i] = copies[i];
    }
    options.stop = options.stop_count && rarely(c) ? NULL : texts;
    options.time = rarely(c) ? some_number(c, 0.01) : 0;
    options.energy = rarely(c) ? some_number(c, 0.001) : 0;
    options.power = rarely(c) ? some_number(c, 50) : 0;
    options.max_temp = rarely(c) ? some_number(c, 90) : 0;
    options.headroom = rarely(c) ? some_number(c, 0.9) : 0;
    options.size = rarely(c) ? below(c, 300) : options.size;
    if (options.power != 0 || options.max_temp != 0 || options.headroom != 0)
        options.time = 0.05; /* or there are pauses of seconds */
    if (r->session) {
        hold(r, edge_set(r->session, rarely(c) ? NULL : &options, &error), &error);
    } else if (!hold(r, edge_begin(r->model, &options, &r->session, &error), &error)) {
        r->ended = true;
    }
}

static void call_append(run *r)
{
    static char text[MOST_TEXT];
    int32_t ids[64];
    chance *c = &r->luck;
    edge_error error = {.size = sizeof error};
    edge_role role = rarely(c) ? (edge_role)below(c, 12) - 3 : (edge_role)below(c, 5);
    int64_t status;
    if (role == EDGE_IDS) {
        uint32_t count = below(c, 64);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = below(c, 100) ? (int32_t)below(c, r->info.vocab) : (int32_t)draw(c);
        status = hold(r, edge_append(r->session, role, ids, count, &error), &error);
    } else {
        size_t length = write_text(c, text);
        status = hold(r, edge_append(r->session, role, rarely(c) ? NULL : text, length, &error), &error);
    }
    if (!status && role != EDGE_SYSTEM)
        r->ended = role == EDGE_ASSISTANT;
}

static void call_next(run *r)
{
    edge_error error = {.size = sizeof error};
    edge_piece piece = {.size = rarely(&r->luck) && rarely(&r->luck) ? 3 : sizeof piece};
    for (uint32_t count = below(&r->luck, 20); count; count--) {
        int64_t status = hold(r, edge_next(r->session, &piece, &error), &error);
        if (status == EDGE_FAILED)
            fail(error.message);
        if (!status) {
            r->pieces++;
            if (r->ended)
                fail("an answer goes on after its end");
            if (piece.length > sizeof piece.text || !is_utf8((uint8_t *)piece.text, piece.length))
                fail("a piece of no text");
            if (piece.finish < EDGE_GOING || piece.finish > EDGE_TOOL_CALLS || piece.token >= (int64_t)r->info.vocab)
                fail("a piece of no kind");
            r->ended = piece.finish != EDGE_GOING && piece.finish != EDGE_INTERRUPTED; /* an earlier question may wait again */
        }
    }
}

static void call_state(run *r)
{
    static uint8_t *state, *bytes;
    static uint64_t length;
    chance *c = &r->luck;
    edge_error error = {.size = sizeof error};
    edge_stream stream = {.size = rarely(c) ? below(c, 64) : sizeof stream, .fd = -1};
    state = state ? state : calloc(MOST_STATE, 2);
    bytes = state + MOST_STATE;
    if (below(c, 2) || !length) {
        stream.buffer = rarely(c) ? NULL : state;
        stream.capacity = rarely(c) ? below(c, 4096) : MOST_STATE;
        if (!hold(r, edge_save(r->session, &stream, &error), &error) && stream.buffer)
            length = stream.length;
        return;
    }
    memcpy(bytes, state, length);
    stream.buffer = bytes;
    stream.capacity = rarely(c) ? below(c, (uint32_t)length) : length;
    uint32_t changes = below(c, 2) * below(c, 5);
    for (uint32_t i = 0; i < changes; i++)
        bytes[below(c, 2) ? below(c, (uint32_t)length) : below(c, 256)] = (uint8_t)draw(c);
    if (below(c, 2)) { /* with the checksum of what is there now */
        hasher sum;
        hash_start(&sum);
        hash_add(&sum, bytes, length - 32);
        hash_end(&sum, bytes + length - 32);
    }
    int64_t status = hold(r, edge_load(r->session, &stream, &error), &error);
    if (!status && !changes && stream.capacity < length)
        fail("half a state was loaded");
    if (status != EDGE_BAD_ARGUMENT)
        r->ended = !status; /* a stream of another kind leaves the conversation, a damaged one ends it */
    if (!status && changes) /* whose turn it is may have changed, too */
        hold(r, edge_rewind(r->session, UINT32_MAX, &error), &error);
    if (!status && !changes) {
        edge_piece piece = {.size = sizeof piece};
        r->ended = edge_next(r->session, &piece, &error) != EDGE_OK || piece.finish;
    }
}

static void call_other(run *r)
{
    chance *c = &r->luck;
    edge_error error = {.size = sizeof error};
    edge_readings readings = EDGE_READINGS;
    edge_usage usage = {.size = sizeof usage};
    static char text[MOST_TEXT];
    int32_t ids[128];
    int64_t count;
    uint32_t turns, room = below(c, 128);
    switch (below(c, 6)) {
    case 0:
        readings.joules = some_number(c, below(c, 100));
        readings.celsius = some_number(c, 40);
        readings.headroom = some_number(c, 0.5);
        readings.available = rarely(c) ? (int64_t)draw(c) : -1;
        hold(r, edge_read(r->session, rarely(c) ? NULL : &readings, &error), &error);
        break;
    case 1:
        turns = rarely(c) ? UINT32_MAX : below(c, 4);
        if (!hold(r, edge_rewind(r->session, turns, &error), &error) && turns)
            r->ended = turns == UINT32_MAX; /* an earlier question may wait again */
        else if (!turns)
            r->ended = true, hold(r, edge_rewind(r->session, UINT32_MAX, &error), &error);
        break;
    case 2:
        if (rarely(c))
            hold(r, edge_trim(r->session, (edge_trim_level)below(c, 5) - 1, &error), &error);
        break;
    case 3:
        if (!hold(r, edge_use(r->session, &usage, &error), &error) &&
            (usage.rows > usage.capacity || usage.capacity > r->info.capacity || usage.joules != usage.joules))
            fail("more rows than there are");
        break;
    case 4:
        count = hold(r, edge_tokenize(r->session, text, write_text(c, text), below(c, 2), ids, room, &error),
                     &error);
        for (int64_t i = 0; i < count && i < room; i++)
            if (ids[i] < 0 || ids[i] >= (int64_t)r->info.vocab)
                fail("no token");
        break;
    default:
        edge_cancel(r->session);
    }
}

static void call_tools(run *r)
{
    static const char *const lists[] = {
        "[{\"type\": \"function\", \"function\": {\"name\": \"sky\", \"parameters\": {\"type\": \"object\", \"properties\": {\"at\": "
        "{\"type\": \"string\"}}}}}]",
        "[{\"name\": \"a\", \"strict\": true}, {\"name\": \"b\", \"parameters\": {\"properties\": {\"n\": {\"enum\": [1, null]}}}}]",
        "[{\"name\": \"a\"}, {\"name\": \"a\"}]", "[{\"name\": 5}]", "[", "{}",
    };
    static const char *const choices[] = {"auto", "none", "required", "sky", "b", "no such tool"};
    chance *c = &r->luck;
    edge_error error = {.size = sizeof error};
    edge_call call = {.size = rarely(c) ? 3 : sizeof call};
    switch (below(c, 4)) {
    case 0: {
        const char *text = lists[below(c, 6)];
        if (below(c, 2)) /* since tools are stated before a conversation */
            hold(r, edge_rewind(r->session, UINT32_MAX, &error), &error);
        hold(r, edge_tools(r->session, rarely(c) ? NULL : text, rarely(c) ? below(c, (uint32_t)strlen(text) + 1) : strlen(text), &error), &error);
        break;
    }
    case 1:
        hold(r, edge_choose(r->session, rarely(c) ? NULL : choices[below(c, 6)], below(c, 2), &error), &error);
        break;
    case 2: {
        const int64_t found = hold(r, edge_calls(r->session, 0, NULL, &error), &error);
        for (uint32_t i = 0; found > 0 && i < found; i++)
            if (!hold(r, edge_calls(r->session, i, &call, &error), &error) && !(call.name && call.arguments && call.id))
                fail("a call without its texts");
        break;
    }
    default:
        r->ended &= hold(r, edge_append(r->session, EDGE_RESULT, "blue", 4, &error), &error) != 0;
    }
}

/* The other thread: may cancel, and is told to wait. */
typedef struct { edge_session *session; uint64_t seed; volatile int32_t over; uint64_t busy; } disturber;

static void *disturb(void *argument)
{
    disturber *own = argument;
    run r = {.luck = {own->seed}};
    while (!__atomic_load_n(&own->over, __ATOMIC_ACQUIRE)) {
        edge_error error = {.size = sizeof error};
        edge_usage usage = {.size = sizeof usage};
        uint32_t what = below(&r.luck, 4);
        if (what == 0)
            edge_cancel(own->session);
        int64_t status = what == 1 ? edge_use(own->session, &usage, &error)
                       : what == 2 ? edge_trim(own->session, EDGE_TRIM_SOFT, &error) : 0;
        own->busy += hold(&r, status, &error) == EDGE_BUSY;
        sleep_seconds(1e-4 * below(&r.luck, 20));
    }
    return NULL;
}

static void talk(run *r)
{
    pthread_t thread;
    disturber other = {r->session, draw(&r->luck), 0, 0};
    edge_error error = {.size = sizeof error};
    edge_options options = EDGE_OPTIONS;
    options.max_tokens = 40;
    options.ignore_eos = 1;
    if (edge_set(r->session, &options, &error) || edge_rewind(r->session, UINT32_MAX, &error)
        || edge_tools(r->session, NULL, 0, &error))
        fail(error.message);
    if (pthread_create(&thread, NULL, disturb, &other))
        fail("no thread");
    for (int turn = 0; turn < 6; turn++) {
        edge_piece piece = {.size = sizeof piece};
        edge_status status;
        while ((status = edge_append(r->session, EDGE_RAW, "the sky is blue", 15, &error)) == EDGE_BUSY)
            ;
        if (status == EDGE_FULL)
            break;
        if (status)
            fail(error.message);
        while (!piece.finish)
            if ((status = edge_next(r->session, &piece, &error)) && status != EDGE_BUSY)
                fail(error.message);
    }
    __atomic_store_n(&other.over, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    r->ended = true;
}

int main(int count, char **arguments)
{
    if (count != 4)
        fail("fuzz_api model.edge SEED STEPS");
    edge_source source = {.size = sizeof source, .path = arguments[1], .fd = -1};
    edge_error error = {.size = sizeof error};
    run r = {.luck = {strtoull(arguments[2], NULL, 10)}, .info = {.size = sizeof r.info}};
    if (edge_open(&source, &r.model, &error) || edge_info(r.model, &r.info, &error))
        fail(error.message);
    for (uint64_t steps = strtoull(arguments[3], NULL, 10); steps; steps--) {
        uint32_t what = below(&r.luck, 100);
        if (!r.session || what < 4)
            call_set(&r);
        else if (what < 6)
            edge_end(r.session), r.session = NULL;
        else if (what < 35)
            call_append(&r);
        else if (what < 70)
            call_next(&r);
        else if (what < 78)
            call_state(&r);
        else if (what < 93)
            call_other(&r);
        else if (what < 98)
            call_tools(&r);
        else
            talk(&r);
        if (what < 2 && edge_close(r.model, &error) != (r.session ? EDGE_BUSY : EDGE_OK))
            fail("closed under a session");
        else if (what < 2 && !r.session && edge_open(&source, &r.model, &error))
            fail(error.message);
    }
    edge_end(r.session);
    if (edge_close(r.model, &error))
        fail(error.message);
    printf("%llu calls, of which %llu failed, %llu pieces\n", (unsigned long long)r.calls, (unsigned long long)r.failed,
           (unsigned long long)r.pieces);
    return 0;
}
