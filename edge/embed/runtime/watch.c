/* Samples for the governor, its pauses, and the joules of an answer: a port of edge/run/meters.py. The sensors are the app's
 * (edge_read); joules that it does not read are estimated as in devices/power/estimate.py. */
#include <math.h>

#include "internal.h"

static const double THERMAL_S = 0.2, MEMORY_S = 0.5, SLICE_S = 0.02;
static const double LEAST_FREE = 6 << 20; /* bytes that the process should always be able to take */
static const double DEGREES = 30;         /* between Android's headroom of 0 and of 1 */

static double limit_of(double option)
{
    return option > 0 ? option : NAN;
}

void watch_start(watch *w, const edge_config *config, const edge_options *options, const edge_readings *readings)
{
    *w = (watch){.config = config, .readings = *readings};
    w->started = now_seconds();
    w->cpu_started = cpu_seconds();
    w->measured = readings->joules >= 0;
    w->first_joules = w->measured ? readings->joules : 0;
    w->celsius_at = -THERMAL_S;
    w->memory_at = -MEMORY_S;
    w->celsius_limit = limit_of(options->celsius);
    w->headroom_limit = limit_of(options->headroom);
    w->limits = (run_limits){
        .deadline = w->started + limit_of(options->seconds), .energy = limit_of(options->joules),
        .power = limit_of(options->watts), .celsius = w->celsius_limit,
    };
    if (!isnan(w->headroom_limit)) /* degrees beyond what is allowed */
        w->limits.celsius = 0;
    governor_init(&w->state, w->started);
}

void watch_read(watch *w, const edge_readings *readings)
{
    w->readings = *readings;
    w->joules_are_new = w->memory_is_new = true;
}

void watch_bytes(watch *w, double bytes)
{
    w->bytes += bytes;
}

double watch_joules(const watch *w)
{
    const edge_config *config = w->config;
    if (w->measured)
        return w->readings.joules >= w->first_joules ? w->readings.joules - w->first_joules : w->state.last.joules;
    return (cpu_seconds() - w->cpu_started) * config->core_watts + (now_seconds() - w->started) * config->idle_watts +
           w->bytes * config->joules_per_byte;
}

/* On the scale of limits.celsius. */
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
    if (!w->memory_is_new || w->readings.available < 0 || now - w->memory_at < MEMORY_S)
        return false;
    w->memory_at = now;
    w->memory_is_new = false;
    *memory = (memory_reading){
        .needed = needed, .spare = spare, .priv = NAN, .limit = NAN, .stalled = NAN,
        .available = needed + (double)w->readings.available - LEAST_FREE,
    };
    return true;
}

static sample take_sample(watch *w, double needed, double spare)
{
    double now = now_seconds();
    sample found = {.time = now, .joules = NAN, .peak = NAN, .celsius = read_heat(w, now)};
    if (!w->measured || w->joules_are_new)
        found.joules = watch_joules(w);
    w->joules_are_new = false;
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
    w->unread += tokens;
    for (bool worked = true;; worked = false) {
        sample now = take_sample(w, needed, spare);
        int64_t counted = !worked ? 0 : isnan(now.joules) ? tokens : w->unread;
        if (!isnan(now.joules))
            w->unread = 0;
        decision made = governor_decide(&w->limits, &w->state, &now, counted);
        *give += made.give;
        if (made.stop || made.pause <= 0 || __atomic_load_n(cancelled, __ATOMIC_RELAXED))
            return made.stop;
        wait_for(w, made.pause, cancelled);
    }
}

int64_t watch_affordable(const watch *w, int64_t tokens)
{
    return governor_affordable(&w->limits, &w->state, tokens, now_seconds(), watch_joules(w));
}
