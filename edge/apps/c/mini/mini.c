/* edge-mini: answers on a board, without Python. See edge-mini --help; options.h says where its options come from. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "edge.h"
#include "energy.h"
#include "files.h"
#include "options.h"
#include "reasons.h"
#include "report.h"
#include "thermal.h"

extern const double planned_peak; /* bytes that a process with one session may hold at most, by the bundle's plan */

static const double READING_SHARE = 0.005, OTHERS_S = 0.25; /* of time, for joules; between readings of others */

static request asked;
static edge_model *model;
static edge_model_info info = {.size = sizeof info};
static edge_session *session;
static edge_error error = {.size = sizeof error};
static edge_role role = EDGE_USER;
static double load;
static thermometer heat;
static volatile sig_atomic_t signalled; /* the signal that ends an answer; 0: none */
static volatile sig_atomic_t waiting;   /* for a turn */
static struct { char *bytes; size_t length, room; } kept; /* the answer, for JSON; the prompt from stdin */

static void check(edge_status status)
{
    if (status < 0)
        fail(WRONG, "%s", error.message);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void on_signal(int number)
{
    if (signalled || waiting)
        _exit(128 + number); /* between two turns, or the second one, while a long step runs */
    signalled = number;
    edge_cancel(session); /* does nothing between answers */
}

static void keep(const char *bytes, size_t length)
{
    if (kept.length + length > kept.room) {
        kept.room = 2 * (kept.length + length);
        if (!(kept.bytes = realloc(kept.bytes, kept.room)))
            fail(WRONG, "out of memory");
    }
    memcpy(kept.bytes + kept.length, bytes, length);
    kept.length += length;
}

/* ---- readings ---------------------------------------------------------------------------------------------------- */

/* Bytes that the system can still give; -1: it does not say. */
static double free_memory(void)
{
    char text[4096];
    read_text(text, sizeof text, "/proc/meminfo");
    const char *found = strstr(text, "MemAvailable:");
    return found ? 1024 * strtod(found + strlen("MemAvailable:"), NULL) : -1;
}

/* Passes joules, unless the sensor missed some, free memory and heat to the session. first: before a prompt. */
static void tell(bool first)
{
    static energy_reading since;
    static double next_joules, next_others, celsius = -1; /* edge_read forgets what it is not told again */
    edge_readings readings = EDGE_READINGS;
    double began = now();
    if (first)
        since = energy_read(began), readings.joules = 0;
    else if (began >= next_joules) {
        energy_reading reading = energy_read(began);
        readings.joules = energy_between(&since, &reading);
    }
    if (readings.joules >= 0)
        next_joules = now() + (now() - began) / READING_SHARE;
    if (!energy_source())
        readings.joules = -1;
    bool others = first || began >= next_others;
    if (others) {
        readings.available = (int64_t)free_memory();
        if (asked.options.max_temp > 0)
            celsius = thermal_read(&heat);
        next_others = began + OTHERS_S;
    }
    readings.celsius = celsius;
    if (others || readings.joules >= 0)
        check(edge_read(session, &readings, &error));
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

#define LEFT_NONE "stopped before the first token of the answer: %s: state more"
static const char *const SPENT[] = {"--time is over", "--energy is spent", "--power cannot be held", "--max-temp cannot be held"};

static bool left_none(const outcome *of) /* whether a budget ended the answer before its first token */
{
    return !of->generated && of->finish >= EDGE_TIME && of->finish <= EDGE_THERMAL;
}

static outcome answer(const char *text, size_t length)
{
    outcome of = {.began = now(), .load = load};
    edge_piece piece = {.size = sizeof piece};
    edge_usage use = {.size = sizeof use};
    kept.length = 0;
    tell(true);
    check(edge_append(session, role, text, length, &error));
    while (!piece.finish) {
        tell(false);
        if (signalled)
            edge_cancel(session); /* it may have come before the answer began */
        check(edge_next(session, &piece, &error));
        if (piece.token >= 0) {
            of.last = now();
            of.first = of.generated++ ? of.first : of.last;
        }
        of.prompt = piece.asked;
        if (asked.json)
            keep(piece.text, piece.length);
        else if (piece.length) {
            fwrite(piece.text, 1, piece.length, stdout);
            fflush(stdout);
        }
    }
    of.ended = now();
    of.finish = piece.finish;
    bool shown = !asked.json && !left_none(&of); /* else `run` and `chat` say what is wrong */
    check(edge_use(session, &use, &error));
    if (asked.json)
        print_json(&of, &use, &asked.options, asked.memory, energy_source(), &info, kept.bytes, kept.length);
    else if (shown)
        putchar('\n');
    if (fflush(stdout) || ferror(stdout))
        fail(NO_OUTPUT, "stdout cannot be written: %s", strerror(errno));
    if (shown && !asked.quiet) {
        fputs("\n", stderr);
        print_line(&of, &use, &asked.options, asked.memory);
    }
    return of;
}

static char *read_prompt(size_t *length) /* from stdin, before the prompt that was given */
{
    char block[4096];
    for (size_t count; (count = fread(block, 1, sizeof block, stdin));)
        keep(block, count);
    if (ferror(stdin))
        fail(WRONG, "stdin cannot be read: %s", strerror(errno));
    if (asked.prompt && kept.length) { /* an empty line lies between */
        bool one = kept.bytes[kept.length - 1] == '\n';
        bool two = one && kept.length > 1 && kept.bytes[kept.length - 2] == '\n';
        keep("\n\n", (size_t)(2 - one - two));
    }
    if (asked.prompt)
        keep(asked.prompt, strlen(asked.prompt));
    if (!kept.length)
        fail(WRONG, "stdin is empty: give a prompt after MODEL, with -p, or on stdin");
    *length = kept.length;
    char *text = kept.bytes;
    kept.bytes = NULL, kept.room = kept.length = 0;
    return text;
}

static int run(const char *text, size_t length)
{
    outcome of = answer(text, length);
    if (of.finish == EDGE_INTERRUPTED)
        return 128 + (signalled ? signalled : SIGINT);
    if (left_none(&of))
        fail(NO_BUDGET, LEFT_NONE, SPENT[of.finish - EDGE_TIME]);
    return of.finish == EDGE_MEMORY ? SHORT_OF_MEMORY : 0;
}

static int chat(void)
{
    char *line = NULL;
    size_t room = 0;
    bool terminal = isatty(0);
    for (ssize_t length;;) {
        if (terminal)
            fputs("> ", stderr);
        waiting = 1;
        length = getline(&line, &room, stdin);
        waiting = 0;
        if (length < 0)
            break;
        length -= length && line[length - 1] == '\n';
        if (!length)
            continue;
        outcome of = answer(line, (size_t)length);
        if (left_none(&of))
            fprintf(stderr, "edge-mini: " LEFT_NONE "\n", SPENT[of.finish - EDGE_TIME]);
        if (signalled == SIGTERM)
            break;
        signalled = 0; /* Ctrl-C ended the answer, not the conversation */
    }
    free(line);
    if (terminal)
        fputs("\n", stderr);
    return signalled ? 128 + signalled : 0;
}

int main(int count, char **words)
{
    asked = read_command(count, words);
    double began = now();
    size_t length = asked.prompt ? strlen(asked.prompt) : 0;
    const char *text = asked.prompt;
    asked.options.stop = asked.stops;
    if (!asked.chat && !asked.prompt && !asked.from_stdin && isatty(0))
        fail(WRONG, "no prompt: give one after MODEL, or on stdin; edge-mini chat holds a conversation");
    edge_source source = {.size = sizeof source, .path = asked.model, .fd = -1};
    check(edge_open(&source, &model, &error));
    check(edge_info(model, &info, &error));
    if (asked.memory > 0 && asked.memory < planned_peak)
        fail(NO_BUDGET, "%s needs %.0f MiB, the memory budget is %.4g MiB: export it with that --memory", info.name,
             planned_peak / (1 << 20) + 0.5, asked.memory / (1 << 20));
    if (asked.options.max_temp > 0 && !thermal_find(&heat))
        fail(WRONG, "--max-temp cannot be kept: this device shows no temperature in /sys/class/thermal");
    if (!asked.chat && (!asked.prompt || asked.from_stdin))
        text = read_prompt(&length);
    if (asked.raw || !info.chat)
        role = EDGE_RAW;
    if (!asked.raw && !info.chat && !asked.quiet)
        fprintf(stderr, "%s has no chat template: it continues texts, and answers no questions (--raw: no note)\n",
                info.name);
    check(edge_begin(model, &asked.options, &session, &error));
    if (asked.system)
        check(edge_append(session, EDGE_SYSTEM, asked.system, strlen(asked.system), &error));
    load = now() - began;
    energy_begin(now());
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    int code = asked.chat ? chat() : run(text, length);
    edge_end(session);
    check(edge_close(model, &error));
    return code;
}
