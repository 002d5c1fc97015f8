/* Measures the model of a kit on this machine: progress goes to standard error, one JSON document to standard output.
 *
 *     edge-profile [MODEL] > result.json
 *
 * MODEL is model.edge beside the program, unless it is named. kit.h, which edge writes, says how much is measured, and
 * has the description of the kit, which the result repeats: edge profile --read result.json needs nothing else.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ceilings.h"
#include "constants.h"
#include "edge.h"
#include "energy.h"
#include "kit.h"
#include "machine.h"
#include "output.h"

enum { WARM_UP = 32, WARM_UP_ANSWER = 4, LEAST_TOKENS = 4, LEAST_WINDOWS = 5, THREADS_PROMPT = 128, TRIMS = 5 };
static const double MARGIN = 1.3; /* longer contexts are slower than measured ones */
static const double READING_SHARE = 0.005; /* of time, for reading joules, as in edge itself */
static const double WINDOW_S = 60, THREADS_S = 2, TRIM_S = CURVE_S / 2, LOAD_S = 1;

double paused_seconds(const edge_session *session); /* defined in the runtime */

static edge_model *model;
static edge_session *session;
static edge_model_info info = {.size = sizeof info};
static edge_error error = {.size = sizeof error};
static edge_finish finish; /* of the last answer */
static int32_t tokens[KIT_ROWS];
static double *seconds; /* of each token */
static uint32_t timed, room;
static double prompt_s; /* seconds per token of a prompt */
static double paused;      /* seconds of pauses that held WATTS */
static bool held;          /* whether WATTS is held: only in the long run */
static energy_reading held_since, reading; /* when the run began; the last one passed to the governor */
static double read_at;

static void check(edge_status status)
{
    if (status < 0)
        fail(error.message);
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

static void keep(double took)
{
    if (timed == room) {
        room = room ? 2 * room : 4096;
        if (!(seconds = realloc(seconds, room * sizeof *seconds)))
            fail("out of memory");
    }
    seconds[timed++] = took;
}

static edge_options options_of(uint32_t threads)
{
    edge_options options = EDGE_OPTIONS;
    options.threads = threads;
    options.temperature = 0;
    options.ignore_eos = 1;
    options.speculate = 1; /* off: passes over several tokens would hide the cost of one */
    return options;
}

static void begin(uint32_t threads)
{
    edge_options options = options_of(threads);
    check(edge_begin(model, &options, &session, &error));
}

static edge_usage usage(void)
{
    edge_usage use = {.size = sizeof use};
    check(edge_use(session, &use, &error));
    return use;
}

/* Holds the session to WATTS from its next answer on, by the sensor or else by the runtime's estimate. */
static void hold_power(uint32_t threads)
{
    edge_options options = options_of(threads);
    options.power = WATTS;
    check(edge_set(session, &options, &error));
    held_since = energy_read(now());
    held = true;
}

/* Passes joules to the governor, unless the sensor missed some. Readings take at most READING_SHARE of the time. */
static void tell_joules(void)
{
    static double next;
    if (!held || now() < next)
        return;
    read_at = now();
    reading = energy_read(read_at);
    edge_readings readings = EDGE_READINGS;
    readings.joules = energy_between(&held_since, &reading);
    check(edge_read(session, &readings, &error));
    next = now() + (now() - read_at) / READING_SHARE;
}

static void step(edge_piece *piece)
{
    tell_joules();
    check(edge_next(session, piece, &error));
    finish = piece->finish;
}

/* Runs a prompt, and draws the first token of its answer. Returns the seconds of both. */
static double run_prompt(const int32_t *ids, uint32_t count)
{
    edge_piece piece = {.size = sizeof piece};
    double started = now();
    tell_joules();
    check(edge_append(session, EDGE_IDS, ids, count, &error));
    do
        step(&piece);
    while (!piece.finish && piece.token < 0);
    sampled_rows(usage().rows);
    return now() - started;
}

/* Keeps the seconds of each further token, without pauses, of `most` at most, and of fewer once `limit` seconds are over.
 * Returns their number. */
static uint32_t run_answer(uint32_t most, double limit)
{
    edge_piece piece = {.size = sizeof piece};
    uint32_t count = 0;
    double total = 0;
    while (count < most && !(count >= LEAST_TOKENS && total > limit)) {
        double before = paused_seconds(session), started = now();
        step(&piece);
        double took = now() - started, pause = paused_seconds(session) - before;
        paused += pause;
        took -= pause;
        if (pause > HOPELESS_S) { /* the governor judges it by its estimate, since pauses have no readings */
            energy_reading here = energy_read(now());
            if (energy_between(&reading, &here) >= WATTS * (now() - read_at))
                finish = EDGE_POWER;
        }
        if (piece.token >= 0) {
            keep(took);
            total += took;
            count++;
        }
        if (finish)
            break;
    }
    sampled_rows(usage().rows);
    return count;
}

static void forget(void)
{
    check(edge_rewind(session, UINT32_MAX, &error));
}

/* ---- measurements ------------------------------------------------------------------------------------------------ */

static void measure_load(const char *path)
{
    begin_stage(LOAD_S);
    say("loading", 0);
    edge_source source = {.size = sizeof source, .path = path, .fd = -1};
    for (int again = 0; again < 2; again++) {
        double started = now();
        check(edge_open(&source, &model, &error));
        begin(0);
        double took = now() - started;
        printf("\"%s\": %.9g,\n", again ? "load_s" : "first_load_s", took);
        if (!again) {
            edge_end(session);
            check(edge_close(model, &error));
        }
    }
    check(edge_info(model, &info, &error));
    for (uint32_t i = 0; i < KIT_ROWS; i++) {
        static uint64_t state = 1;
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = (int32_t)((state >> 33) % info.vocab);
    }
    printf("\"isa\": \"%s\", \"threads\": %u, \"capacity\": %u,\n", info.isa, usage().threads, info.capacity);
}

/* Less than 0: some joules were not measured. */
static double add_joules(double sum, double more)
{
    return sum < 0 || more < 0 ? -1 : sum + more;
}

static void print_joules(const char *name, double joules)
{
    printf(joules < 0 ? "\"%s\": null, " : "\"%s\": %.9g, ", name, joules);
}

static void measure_speeds(void)
{
    static double first[REPETITIONS];
    double spent[2] = {0, 0}, worked[2] = {0, 0}, answering = 0, begun = now();
    uint32_t count = 0;
    others_since before = others_begin();
    begin_stage(SPEED_S);
    say("warm-up", 0);
    run_prompt(tokens, PROMPT < WARM_UP ? PROMPT : WARM_UP);
    run_answer(WARM_UP_ANSWER, 1e9);
    timed = 0;
    for (; count < REPETITIONS; count++) {
        double passed = now() - begun;
        if (count && passed * (1 + 1.0 / count) > SPEED_S)
            break;
        char what[64];
        snprintf(what, sizeof what, "prompt and answer %u of %u", count + 1, REPETITIONS);
        say(what, (double)count / REPETITIONS);
        forget();
        mark("prompt");
        energy_reading start = energy_read(now());
        double cpu = cpu_now();
        first[count] = run_prompt(tokens, PROMPT);
        double cpu_between = cpu_now(), started = now();
        energy_reading between = energy_read(started);
        mark("answer");
        run_answer(ANSWER, SPEED_S);
        answering += now() - started;
        energy_reading end = energy_read(now());
        spent[0] = add_joules(spent[0], energy_between(&start, &between));
        spent[1] = add_joules(spent[1], energy_between(&between, &end));
        worked[0] += cpu_between - cpu;
        worked[1] += cpu_now() - cpu_between;
    }
    printf("\"prompts\": %u, \"tokens\": %u, \"answering_s\": %.9g, \"others\": %.4f,\n", count, timed, answering,
           others_share(&before));
    print_joules("prompt_joules", spent[0]);
    print_joules("answer_joules", spent[1]);
    printf("\"prompt_cpu_s\": %.9g, \"answer_cpu_s\": %.9g,\n", worked[0], worked[1]);
    print_spread("ttft", first, count);
    prompt_s = first[count / 2] / PROMPT; /* print_spread has sorted them */
    printf(",\n");
    print_spread("token", seconds, timed);
    printf(",\n");
}

static void measure_curve(void)
{
    static const uint32_t contexts[] = {CONTEXTS};
    uint32_t count = sizeof contexts / sizeof *contexts;
    double started = now(), per_token = 0;
    const char *comma = "";
    begin_stage(CURVE_S);
    forget();
    printf("\"curve\": [");
    for (uint32_t i = 0; i < count && contexts[i]; i++) {
        uint32_t missing = contexts[i] - (i ? usage().rows : 0);
        if (now() - started + per_token * missing * MARGIN > CURVE_S) {
            printf("], \"curve_end\": \"context %u would have taken longer than %g s\",\n", contexts[i], CURVE_S);
            return;
        }
        char what[64];
        snprintf(what, sizeof what, "context %u", contexts[i]);
        say(what, (double)i / count);
        mark(what);
        double took = run_prompt(tokens + contexts[i] - missing, missing);
        per_token = took / missing;
        timed = 0;
        uint32_t most = ANSWER;
        if (i + 1 < count && contexts[i + 1] && contexts[i + 1] - contexts[i] <= most)
            most = contexts[i + 1] - contexts[i] - 1; /* the next context follows this answer */
        run_answer(most > 1 ? most : 1, CURVE_S / count / 2);
        printf("%s\n  {\"context\": %u, \"prefill\": %.9g, ", comma, contexts[i], per_token);
        print_spread("decode", seconds, timed);
        printf("}");
        comma = ",";
    }
    printf("], \"curve_end\": null,\n");
}

/* Fewer threads than the plan has: 1, 2, 4, … */
static void measure_threads(uint32_t most)
{
    uint32_t prompt = PROMPT < THREADS_PROMPT ? PROMPT : THREADS_PROMPT;
    const char *comma = "";
    begin_stage(THREADS_S);
    mark("threads");
    printf("\"by_threads\": [");
    for (uint32_t threads = 1; threads < most; threads *= 2) {
        say("fewer threads", (double)threads / most);
        edge_end(session);
        begin(threads);
        run_prompt(tokens, prompt < WARM_UP ? prompt : WARM_UP);
        forget();
        double took = run_prompt(tokens, prompt);
        timed = 0;
        run_answer(ANSWER, THREADS_S);
        printf("%s\n  {\"threads\": %u, \"prefill\": %.9g, ", comma, threads, took / prompt);
        print_spread("decode", seconds, timed);
        printf("}");
        comma = ",";
    }
    printf("],\n");
    edge_end(session);
    begin(most);
}

static void measure_sustained(uint32_t threads)
{
    double length = SUSTAINED_S / LEAST_WINDOWS < WINDOW_S ? SUSTAINED_S / LEAST_WINDOWS : WINDOW_S;
    const char *comma = "";
    begin_stage(SUSTAINED_S);
    if (!(SUSTAINED_S > 0)) {
        printf("\"sustained\": null,\n");
        return;
    }
    mark("sustained");
    forget();
    if (WATTS > 0)
        hold_power(threads);
    run_prompt(tokens, PROMPT);
    uint32_t left = info.capacity - PROMPT;
    double began = now(), start;
    printf("\"sustained\": {\"length\": %g, \"windows\": [", length);
    while (finish != EDGE_POWER && ((start = now() - began) < SUSTAINED_S - length / 2 || !*comma)) {
        energy_reading from = energy_read(now());
        double joules = 0, cpu = cpu_now(), away = 0, told = -1e9;
        others_since before = others_begin();
        climate_begin();
        timed = 0, paused = 0;
        while (finish != EDGE_POWER && (!timed || now() - began < start + length)) {
            if (now() - told > 1) { /* also detects a lost connection */
                char what[64];
                snprintf(what, sizeof what, "sustained, %.0f of %g s", now() - began, SUSTAINED_S);
                say(what, (now() - began) / SUSTAINED_S);
                told = now();
            }
            if (left < 2) { /* begin another answer; its prompt is not counted */
                energy_reading pause = energy_read(now());
                double stopped = now(), worked = cpu_now();
                joules = add_joules(joules, energy_between(&from, &pause));
                forget();
                run_prompt(tokens, PROMPT);
                if (finish == EDGE_POWER)
                    break;
                left = info.capacity - PROMPT;
                away += now() - stopped;
                from = energy_read(now());
                cpu += cpu_now() - worked;
            }
            uint32_t ran = run_answer(left < 8 ? left : 8, 1e9);
            left = ran ? left - ran : 0;
        }
        if (!timed)
            break;
        energy_reading to = energy_read(now());
        double worked = cpu_now() - cpu, lasted = now() - began - start - away;
        double celsius = climate_celsius(), hertz = climate_hertz();
        printf("%s\n  {\"start\": %.4f, \"seconds\": %.6f, ", comma, start, lasted);
        print_joules("joules", add_joules(joules, energy_between(&from, &to)));
        printf("\"paused\": %.6f, \"cpu_s\": %.9g, ", paused, worked);
        printf("\"others\": %.4f, \"celsius\": ", others_share(&before));
        printf(celsius > -100 ? "%.1f" : "null", celsius);
        printf(", \"hertz\": ");
        printf(hertz > 0 ? "%.0f" : "null", hertz);
        printf(", ");
        print_spread("per_token", seconds, timed);
        printf("}");
        comma = ",";
    }
    printf("], \"hopeless\": %s},\n", finish == EDGE_POWER ? "true" : "false");
}

/* Times edge_trim, for which apps wait in onTrimMemory: new sessions fill their cache and return it. */
static void measure_trim(uint32_t threads)
{
    static double soft[TRIMS], all[TRIMS];
    double started = now(), freed = 0, fits = TRIM_S / prompt_s;
    uint32_t rows = fits < KIT_ROWS ? (uint32_t)fits + 1 : KIT_ROWS, count = 0;
    begin_stage(TRIM_S);
    mark("trim");
    for (; count < TRIMS && (!count || now() - started < TRIM_S); count++) {
        say("giving memory back", (double)count / TRIMS);
        edge_end(session);
        begin(threads);
        run_prompt(tokens, rows);
        double full = (double)usage().anonymous, start = now();
        check(edge_trim(session, EDGE_TRIM_SOFT, &error));
        double between = now();
        check(edge_trim(session, EDGE_TRIM_ALL, &error));
        all[count] = now() - between;
        soft[count] = between - start;
        freed = full - (double)usage().anonymous;
    }
    printf("\"trim\": {\"rows\": %u, \"freed\": %.0f, ", rows, freed > 0 ? freed : 0);
    print_spread("soft", soft, count);
    printf(", ");
    print_spread("all", all, count);
    printf("},\n");
}

static const char *beside(const char *name) /* the program's path, or that of a file beside it */
{
    static char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 64);
    char *end = length > 0 ? (path[length] = 0, strrchr(path, '/')) : NULL;
    strcpy(end ? end + 1 : path, name);
    return path;
}

int main(int count, char **words)
{
    if (count > 2 || (count > 1 && words[1][0] == '-')) {
        fprintf(stderr, "edge-profile takes no options: ./edge-profile [MODEL] > result.json\n");
        return 2;
    }
    double began = now();
    expect_all(LOAD_S + SPEED_S + CURVE_S + THREADS_S + SUSTAINED_S + TRIM_S + CEILINGS_S);
    setvbuf(stderr, NULL, _IOLBF, 0);
    printf("{\"kind\": \"edge kit result\", \"schema\": 1, \"kit\": %s,\n", KIT_JSON);
    printf("\"time\": %lld,\n", (long long)time(NULL));
    describe_machine();
    start_sampling(say_again);
    mark("load");
    measure_load(count > 1 ? words[1] : beside("model.edge"));
    uint32_t threads = usage().threads;
    measure_speeds();
    measure_curve();
    measure_threads(threads);
    measure_sustained(threads);
    held = false;
    measure_trim(threads);
    edge_end(session);
    check(edge_close(model, &error));
    print_samples();
    begin_stage(CEILINGS_S);
    print_ceilings(threads, CEILINGS_S / 4, say);
    printf("\"seconds\": %.3f}\n", now() - began);
    if (fflush(stdout) || ferror(stdout))
        fail("the result cannot be written: is the disk full?");
    say("done", 1);
    return 0;
}
