/* The budgets of an answer: time, energy, power, temperature, memory. A port of edge/run/budgets: `governor` decides from
 * readings alone, `watch` takes the readings and waits. NAN stands for Python's None. */
#ifndef EDGE_BUDGETS_H
#define EDGE_BUDGETS_H

#include "base.h"

/* ---- the governor: decide and affordable of edge/run/budgets/governor.py ------------------------------------------ */

typedef struct { double deadline, energy, power, max_temp; } run_limits; /* seconds, joules, watts, degrees Celsius */
typedef struct { double needed, spare, priv, limit, available, stalled; } memory_reading; /* bytes; stalled: a share of time */
typedef struct { double time, joules, celsius; bool has_memory; memory_reading memory; } sample;
typedef struct {
    sample last;
    double token, each, pace, debt, idle, duty, rest, error, corrected_at, paused, coolest, cooled_at, gave_at;
    int64_t ran;
    int32_t shorts;
} governor_state;
enum cause { CAUSE_NONE, CAUSE_LIMIT, CAUSE_FREE, CAUSE_PRESSURE };
/* stop: the spent budget, or EDGE_GOING; pause: seconds; give: bytes to return to the system, because of `cause`. */
typedef struct { edge_finish stop; double pause, give; enum cause cause; } decision;
void governor_init(governor_state *state, double time);
decision governor_decide(const run_limits *limits, governor_state *state, const sample *now, int64_t tokens);
/* Of `tokens`, the number that time and energy allow. spent: joules. */
int64_t governor_affordable(const run_limits *limits, const governor_state *state, int64_t tokens, double now,
                            double spent);

/* ---- the watch: Watch of edge/run/budgets/meters.py ---------------------------------------------------------------- */

typedef struct {
    run_limits limits;
    governor_state state;
    edge_readings readings;   /* the newest, by the app */
    double read_at;           /* when they were taken */
    double first_joules;      /* the app's reading at the beginning of the answer */
    double joules, estimated; /* at the newest reading: joules of the answer, and the estimate */
    double celsius_limit, headroom_limit, started, paused;
    double bytes;             /* read from memory, for the estimate */
    double on_gpu;            /* core seconds of GPU work, for the estimate */
    double celsius_at, memory_at; /* when temperature and memory were last used */
    const edge_config *config;
    bool measured;            /* the app has read joules */
    bool memory_is_new;
} watch;
void watch_start(watch *w, const edge_config *config, const edge_options *options, const edge_readings *readings);
void watch_read(watch *w, const edge_readings *readings, bool answering);
void watch_bytes(watch *w, double bytes); /* adds bytes read from memory to the energy estimate */
/* Adds GPU work to the energy estimate, since no clock of the process shows it. core_seconds: its seconds times the plan's
 * cores; cpu: the part of them that the process's CPU clock shows. */
void watch_gpu(watch *w, double core_seconds, double cpu);
double watch_joules(const watch *w); /* of the answer so far */
edge_finish watch_spent(const watch *w); /* the spent budget, or EDGE_GOING; never waits */
/* Returns the spent budget, or EDGE_GOING. Waits as long as limits demand, unless *cancelled. tokens: run since the last
 * call; needed, spare: the process's planned peak and what it could return, in bytes; *give grows by the bytes to
 * return. */
edge_finish watch_look(watch *w, int64_t tokens, const volatile int32_t *cancelled, double needed, double spare,
                       double *give);
/* Ends an answer: waits until the last tokens are within the power limit, too. */
void watch_pay(watch *w, const volatile int32_t *cancelled, double needed, double spare, double *give);
int64_t watch_affordable(const watch *w, int64_t tokens); /* as governor_affordable, now */

#endif
