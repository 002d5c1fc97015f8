/* Samples for the governor, its pauses, and the joules of an answer: a port of edge/run/budgets/meters.py. The
 * sensors are the app's (edge_read). Since it cannot read them while a prompt runs, joules since its last reading are
 * estimated, as those of devices/power/estimate.py. */
#include <math.h>

#include "internal.h"

static const double SLICE_S = 0.02;
static const double FRESH_S = 1;          /* readings are, that were taken so long before an answer */
static const double DEGREES = 30;         /* between Android's headroom of 0 and of 1 */

static double limit_of(double option)
{
    return option > 0 ? option : NAN;
}

/* Joules since a moment of the system's. */
static double estimate(const watch *w)
{
    return (cpu_seconds() + w->on_gpu) * w->config->core_watts + now_seconds() * w->config->idle_watts +
           w->bytes * w->config->joules_per_byte;
}

/* Joules by the app. The first reading counts from here on if it comes while the answer is under way, as does that of a
 * meter that began anew: it shows less than before. */
static void take_joules(watch *w, double joules)
{
    if (!w->measured || joules - w->first_joules < w->joules)
        w->first_joules = joules - watch_joules(w);
    w->measured = true;
    w->joules = joules - w->first_joules;
    w->estimated = estimate(w);
    double excess = w->state.last.joules - w->joules; /* estimated since the reading before, and not spent */
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
    if (!isnan(w->headroom_limit)) /* degrees beyond what is allowed */
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

/* On the scale of limits.max_temp. */
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
        return false; /* iOS says 0 where there is no limit */
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
