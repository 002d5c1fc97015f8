/* One decision per step, from readings alone: continue, pause, return memory, or stop because a budget is spent. A port of
 * edge/run/budgets/governor.py, which explains the rules; the order of operations is the same, so decisions are.
 * NAN is None. */
#include <math.h>

#include "internal.h"

void governor_init(governor_state *state, double time)
{
    *state = (governor_state){
        .last = {.time = time, .joules = 0, .celsius = NAN},
        .duty = 1, .error = NAN, .coolest = INFINITY, .gave_at = -SETTLE_S,
    };
}

static double larger(double one, double other) { return other > one ? other : one; }
static double smaller(double one, double other) { return other < one ? other : one; }
static double newest(double before, double now) { return isnan(now) ? before : now; }

/* The share of time, the distance to the limit (degrees), and when they were corrected. */
static void correct_duty(const run_limits *limits, governor_state *state, const sample *now)
{
    if (isnan(limits->max_temp) || isnan(now->celsius) || now->time - state->corrected_at < THERMAL_S)
        return;
    double error = limits->max_temp - CELSIUS_MARGIN - now->celsius, change;
    if (isnan(state->error)) /* a device that is too hot from the start */
        change = GAIN * smaller(0, error);
    else
        change = GAIN * (error - state->error) + INTEGRAL * error * (now->time - state->corrected_at);
    state->duty = smaller(1, larger(LEAST_DUTY, state->duty + change));
    state->error = error;
    state->corrected_at = now->time;
}

/* The lowest temperature at the smallest share of work, and when it was first read. */
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

static void count_shorts(governor_state *state, const sample *now)
{
    const memory_reading *memory = &now->memory;
    if (now->has_memory)
        state->shorts = memory->needed > memory->available ? state->shorts + 1 : 0; /* not if it is NAN */
}

/* Bytes to return, and why. */
static double give_back(const governor_state *state, const sample *now, enum cause *cause)
{
    const memory_reading *memory = &now->memory;
    *cause = CAUSE_NONE;
    if (!now->has_memory || !(memory->spare > 0))
        return 0;
    double lacking = isnan(memory->limit) ? 0 : memory->needed - memory->limit;
    if (lacking > 0) {
        *cause = CAUSE_LIMIT;
        return smaller(memory->spare, lacking + MEMORY_SLACK);
    }
    if (state->shorts >= SHORT_READINGS && !isnan(memory->available)) {
        *cause = CAUSE_FREE;
        return smaller(memory->spare, memory->needed - memory->available + MEMORY_SLACK);
    }
    if (memory->stalled >= STALLED && now->time - state->gave_at >= SETTLE_S) { /* not if it is NAN */
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

/* Whether nothing is left to return, and the private memory reaches the limit. */
static bool is_about_to_be_killed(const memory_reading *memory, int32_t shorts)
{
    if (memory->spare > 0 || isnan(memory->priv))
        return false;
    double available = shorts >= SHORT_READINGS ? memory->available : NAN;
    return memory->priv + MEMORY_SLACK > memory->limit || memory->priv + MEMORY_SLACK > available; /* neither if it is NAN */
}

static edge_finish find_stop(const run_limits *limits, const governor_state *state, const sample *now, double pause)
{
    if (now->time + pause >= limits->deadline) /* comparisons with NAN, which stands for no limit, are false */
        return EDGE_TIME;
    if (now->has_memory && is_about_to_be_killed(&now->memory, state->shorts))
        return EDGE_MEMORY;
    if (state->last.joules + state->token > limits->energy) /* the next token would exceed it */
        return EDGE_ENERGY;
    if (state->paused > HOPELESS_S && state->idle >= limits->power) /* the device draws more even in pauses */
        return EDGE_POWER;
    if (state->last.celsius > limits->max_temp + 2 && now->time - state->cooled_at > NO_COOLER_S)
        return EDGE_THERMAL; /* pauses do not cool it */
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
    made.pause = pause <= SHORTEST_PAUSE_S ? 0 : smaller(pause, LONGEST_PAUSE_S);
    made.give = give;
    return made;
}

/* Whole units of `each` in `amount`. */
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
            most = whole(limits->deadline - now, state->pace);
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
