/* The budgets of an answer. The governor makes one decision for each pass, from readings alone: continue, pause, return
 * memory, or stop because a budget is spent. It is a port of edge/run/budgets/governor.py, which explains the rules, with
 * the same order of operations, so that decisions are equal. The watch takes readings and pauses, as
 * edge/run/budgets/meters.py.
 *
 * The sensors are the app's (edge_read), which cannot read them while a prompt runs: joules since its last reading are
 * estimated, as in devices/power/estimate.py. NAN is None. */
#include <math.h>

#include "budgets.h"
#include "system.h"

static const double SLICE_S = 0.02;
static const double FRESH_S = 1;          /* age up to which a reading counts when an answer begins */
static const double DEGREES = 30;         /* from Android's headroom 0 to 1 */

/* ---- the governor -------------------------------------------------------------------------------------------------- */

void governor_init(governor_state *state, double time)
{
    *state = (governor_state){
        .last = {.time = time, .joules = 0, .celsius = NAN},
        .duty = 1, .error = NAN, .coolest = INFINITY, .gave_at = -SETTLE_S,
    };
}

static double larger(double one, double other) { return other > one ? other : one; }
static double lesser(double one, double other) { return other < one ? other : one; }
static double newest(double before, double now) { return isnan(now) ? before : now; }

/* Corrects `duty`, the share of time that may be spent working, by the distance to the temperature limit. */
static void correct_duty(const run_limits *limits, governor_state *state, const sample *now)
{
    if (isnan(limits->max_temp) || isnan(now->celsius) || now->time - state->corrected_at < THERMAL_S)
        return;
    double error = limits->max_temp - CELSIUS_MARGIN - now->celsius, change;
    if (isnan(state->error)) /* the device may be too hot from the start */
        change = GAIN * lesser(0, error);
    else
        change = GAIN * (error - state->error) + INTEGRAL * error * (now->time - state->corrected_at);
    state->duty = lesser(1, larger(LEAST_DUTY, state->duty + change));
    state->error = error;
    state->corrected_at = now->time;
}

/* Notes the lowest temperature at the smallest duty, and its time. */
static void note_coolest(governor_state *state, const sample *now)
{
    if (state->duty > LEAST_DUTY) {
        state->coolest = INFINITY;
        state->cooled_at = now->time;
    } else if (!isnan(now->celsius) && now->celsius < state->coolest) {
        state->coolest = now->celsius;
        state->cooled_at = now->time;
    }
}

/* Counts consecutive readings of too little memory. */
static void count_shorts(governor_state *state, const sample *now)
{
    const memory_reading *memory = &now->memory;
    if (now->has_memory)
        state->shorts = memory->needed > memory->available ? state->shorts + 1 : 0; /* false for NAN */
}

/* Returns the bytes to return to the system, and the cause. */
static double give_back(const governor_state *state, const sample *now, enum cause *cause)
{
    const memory_reading *memory = &now->memory;
    *cause = CAUSE_NONE;
    if (!now->has_memory || !(memory->spare > 0))
        return 0;
    double lacking = isnan(memory->limit) ? 0 : memory->needed - memory->limit;
    if (lacking > 0) {
        *cause = CAUSE_LIMIT;
        return lesser(memory->spare, lacking + MEMORY_SLACK);
    }
    if (state->shorts >= SHORT_READINGS && !isnan(memory->available)) {
        *cause = CAUSE_FREE;
        return lesser(memory->spare, memory->needed - memory->available + MEMORY_SLACK);
    }
    if (memory->stalled >= STALLED && now->time - state->gave_at >= SETTLE_S) { /* false for NAN */
        *cause = CAUSE_PRESSURE;
        return floor((memory->spare + 1) / 2);
    }
    return 0;
}

static double pause_for_power(const run_limits *limits, const governor_state *state)
{
    if (isnan(limits->power) || state->debt <= 0)
        return 0;
    return state->debt / larger(limits->power - state->idle, 0.1 * limits->power);
}

/* Whether nothing is left to return, and private memory is at its limit. */
static bool is_about_to_be_killed(const memory_reading *memory, int32_t shorts)
{
    if (memory->spare > 0 || isnan(memory->priv))
        return false;
    double available = shorts >= SHORT_READINGS ? memory->available : NAN;
    return memory->priv + MEMORY_SLACK > memory->limit || memory->priv + MEMORY_SLACK > available; /* false for NAN */
}

static edge_finish find_stop(const run_limits *limits, const governor_state *state, const sample *now, double pause)
{
    if (now->time + pause >= limits->deadline) /* NAN is no limit: comparisons with it are false */
        return EDGE_TIME;
    if (now->has_memory && is_about_to_be_killed(&now->memory, state->shorts))
        return EDGE_MEMORY;
    if (state->last.joules + state->token > limits->energy) /* the next token would exceed the limit */
        return EDGE_ENERGY;
    if (state->paused > HOPELESS_S && state->idle >= limits->power) /* the device draws more than the limit even in pauses */
        return EDGE_POWER;
    if (state->last.celsius > limits->max_temp + 2 && now->time - state->cooled_at > NO_COOLER_S)
        return EDGE_THERMAL; /* pauses do not cool the device */
    return EDGE_GOING;
}

decision governor_decide(const run_limits *limits, governor_state *state, const sample *now, int64_t tokens)
{
    const sample last = state->last;
    double elapsed = now->time - last.time, spent = 0;
    bool known = !isnan(now->joules);
    if (known && !isnan(last.joules))
        spent = larger(0, now->joules - last.joules);
    correct_duty(limits, state, now);
    if (isnan(limits->max_temp))
        state->rest = 0;
    else
        state->rest = larger(0, tokens ? state->rest + elapsed * (1 / state->duty - 1) : state->rest - elapsed);
    state->debt = isnan(limits->power)
        ? 0 : larger(-limits->power * CREDIT_S, state->debt + spent - limits->power * elapsed);
    note_coolest(state, now);
    count_shorts(state, now);
    decision made = {EDGE_GOING, 0, 0, CAUSE_NONE};
    double give = give_back(state, now, &made.cause);
    state->last = (sample){
        .time = now->time, .joules = newest(last.joules, now->joules),
        .celsius = newest(last.celsius, now->celsius),
    };
    if (tokens && known) {
        double each = spent / (double)tokens;
        state->token = larger(each, state->token * FORGET);
        state->ran = tokens;
        state->each = each;
    }
    if (tokens)
        state->pace = elapsed / (double)tokens;
    else if (elapsed > 0 && known)
        state->idle = spent / elapsed;
    state->paused = tokens ? 0 : state->paused + elapsed;
    if (made.cause == CAUSE_PRESSURE)
        state->gave_at = now->time;
    double pause = larger(pause_for_power(limits, state), state->rest);
    made.stop = find_stop(limits, state, now, pause);
    if (made.stop) {
        made.cause = CAUSE_NONE;
        return made;
    }
    made.pause = pause <= SHORTEST_PAUSE_S ? 0 : lesser(pause, LONGEST_PAUSE_S);
    made.give = give;
    return made;
}

/* amount / each, truncated, within ±1e15. */
static int64_t whole(double amount, double each)
{
    double count = amount / each;
    return count > 1e15 ? (int64_t)1e15 : count < -1e15 ? (int64_t)-1e15 : (int64_t)count;
}

int64_t governor_affordable(const run_limits *limits, const governor_state *state, int64_t tokens, double now,
                            double spent)
{
    if (!isnan(limits->deadline)) {
        int64_t most = FIRST_TIMED;
        if (state->pace != 0)
            most = whole((limits->deadline - now) / 2, state->pace);
        most = most < 1 ? 1 : most;
        tokens = tokens < most ? tokens : most;
    }
    if (isnan(limits->energy))
        return tokens;
    if (state->token == 0)
        return tokens < FIRST_PAID ? tokens : FIRST_PAID;
    double left = limits->energy - spent;
    int64_t half = state->each != 0 ? whole(left / 2, state->each) : tokens;
    if (half < state->ran)
        half = whole(left / 2, state->token);
    int64_t one = left >= state->token;
    half = half > one ? half : one;
    return tokens < half ? tokens : half;
}

/* ---- the watch ------------------------------------------------------------------------------------------------------ */

static double limit_of(double option)
{
    return option > 0 ? option : NAN;
}

/* Estimated joules since a fixed moment. */
static double estimate(const watch *w)
{
    return (cpu_seconds() + w->on_gpu) * w->config->core_watts + now_seconds() * w->config->idle_watts +
           w->bytes * w->config->joules_per_byte;
}

/* Takes the app's joules. The first reading is the zero point if it comes during an answer; so is a reading below the last
 * one, since the meter has restarted. */
static void take_joules(watch *w, double joules)
{
    if (!w->measured || joules - w->first_joules < w->joules)
        w->first_joules = joules - watch_joules(w);
    w->measured = true;
    w->joules = joules - w->first_joules;
    w->estimated = estimate(w);
    double excess = w->state.last.joules - w->joules; /* the estimate since the last reading was too high */
    if (excess > 0) {
        w->state.last.joules = w->joules;
        w->state.debt -= excess;
    }
}

void watch_start(watch *w, const edge_config *config, const edge_options *options, const edge_readings *readings)
{
    *w = (watch){.config = config, .readings = *readings, .read_at = w->read_at};
    w->started = now_seconds();
    w->estimated = estimate(w);
    if (readings->joules >= 0 && w->started - w->read_at <= FRESH_S)
        take_joules(w, readings->joules);
    w->celsius_at = -THERMAL_S;
    w->memory_at = -PRESSURE_S;
    w->celsius_limit = limit_of(options->max_temp);
    w->headroom_limit = limit_of(options->headroom);
    w->limits = (run_limits){
        .deadline = w->started + limit_of(options->time), .energy = limit_of(options->energy),
        .power = limit_of(options->power), .max_temp = w->celsius_limit,
    };
    if (!isnan(w->headroom_limit)) /* read_heat returns degrees above the headroom limit */
        w->limits.max_temp = 0;
    governor_init(&w->state, w->started);
}

void watch_read(watch *w, const edge_readings *readings, bool answering)
{
    w->readings = *readings;
    w->read_at = now_seconds();
    w->memory_is_new = true;
    if (answering && readings->joules >= 0)
        take_joules(w, readings->joules);
}

void watch_bytes(watch *w, double bytes)
{
    w->bytes += bytes;
}

void watch_gpu(watch *w, double core_seconds, double cpu)
{
    w->on_gpu += core_seconds > cpu ? core_seconds - cpu : 0;
}

double watch_joules(const watch *w)
{
    return w->joules + estimate(w) - w->estimated;
}

/* Temperature on the scale of limits.max_temp; NAN: not read. */
static double read_heat(watch *w, double now)
{
    if (now - w->celsius_at < THERMAL_S)
        return NAN;
    w->celsius_at = now;
    double celsius = w->readings.celsius >= 0 ? w->readings.celsius : NAN;
    if (isnan(w->headroom_limit))
        return celsius;
    double headroom = w->readings.headroom >= 0 ? DEGREES * (w->readings.headroom - w->headroom_limit) : NAN;
    celsius -= w->celsius_limit;
    return isnan(headroom) || celsius > headroom ? celsius : headroom;
}

static bool read_memory(watch *w, double now, double needed, double spare, memory_reading *memory)
{
    if (!w->memory_is_new || w->readings.available <= 0 || now - w->memory_at < PRESSURE_S)
        return false; /* iOS reports 0 for no limit */
    w->memory_at = now;
    w->memory_is_new = false;
    *memory = (memory_reading){
        .needed = needed, .spare = spare, .priv = needed - MEMORY_SLACK, .limit = NAN, .stalled = NAN,
        .available = needed + (double)w->readings.available - MEMORY_SLACK,
    };
    return true;
}

static sample take_sample(watch *w, double needed, double spare)
{
    double now = now_seconds();
    bool counts = !isnan(w->limits.energy) || !isnan(w->limits.power);
    sample found = {.time = now, .joules = counts ? watch_joules(w) : NAN, .celsius = read_heat(w, now)};
    found.has_memory = read_memory(w, now, needed, spare, &found.memory);
    return found;
}

static void wait_for(watch *w, double seconds, const volatile int32_t *cancelled)
{
    double until = now_seconds() + seconds;
    for (double left = seconds; left > 0 && !__atomic_load_n(cancelled, __ATOMIC_RELAXED); left = until - now_seconds())
        sleep_seconds(left < SLICE_S ? left : SLICE_S);
    w->paused += seconds;
}

edge_finish watch_look(watch *w, int64_t tokens, const volatile int32_t *cancelled, double needed, double spare,
                       double *give)
{
    for (bool worked = true;; worked = false) {
        sample now = take_sample(w, needed, spare);
        decision made = governor_decide(&w->limits, &w->state, &now, worked ? tokens : 0);
        *give += made.give;
        if (made.stop || made.pause <= 0 || __atomic_load_n(cancelled, __ATOMIC_RELAXED))
            return made.stop;
        wait_for(w, made.pause, cancelled);
    }
}

void watch_pay(watch *w, const volatile int32_t *cancelled, double needed, double spare, double *give)
{
    if (!isnan(w->limits.power))
        watch_look(w, 1, cancelled, needed, spare, give);
}

edge_finish watch_spent(const watch *w)
{
    if (now_seconds() >= w->limits.deadline)
        return EDGE_TIME;
    return watch_joules(w) > w->limits.energy ? EDGE_ENERGY : EDGE_GOING;
}

int64_t watch_affordable(const watch *w, int64_t tokens)
{
    return governor_affordable(&w->limits, &w->state, tokens, now_seconds(), watch_joules(w));
}
