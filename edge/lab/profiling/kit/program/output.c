/* Output of the kit: progress to standard error, figures to standard output. */
#include "output.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "machine.h"

static const double HEARTBEAT_S = 2;
static double whole = 1, stage_start, stage_share; /* seconds of all stages; share done before this stage; share of this stage */

void fail(const char *what)
{
    fprintf(stderr, "edge-profile: %s\n", what);
    exit(1);
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */

void expect_all(double length)
{
    whole = length;
}

void begin_stage(double length)
{
    stage_start += stage_share;
    stage_share = length / whole;
}

static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;
static char said[96];
static double told_at;

/* If the reader is gone, as after a lost connection, SIGPIPE ends the program. */
static void tell(void)
{
    if (fputs(said, stderr) < 0)
        exit(1); /* SIGPIPE is ignored */
    told_at = now();
}

void say(const char *what, double done)
{
    pthread_mutex_lock(&telling);
    snprintf(said, sizeof said, "%5.1f%% %s\n", 100 * (stage_start + stage_share * (done < 1 ? done : 1)), what);
    tell();
    pthread_mutex_unlock(&telling);
}

/* Repeats the last line while one step takes long, such as a prompt on a slow machine. */
void say_again(void)
{
    pthread_mutex_lock(&telling);
    if (*said && now() - told_at >= HEARTBEAT_S)
        tell();
    pthread_mutex_unlock(&telling);
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double quantile(double *sorted, uint32_t count, double share)
{
    double at = share * (count - 1);
    uint32_t low = (uint32_t)at, high = low + 1 < count ? low + 1 : low;
    return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
}

void print_spread(const char *name, double *values, uint32_t count)
{
    if (!count)
        fail("nothing was measured: the model ended its answer at once");
    qsort(values, count, sizeof *values, by_size);
    printf("\"%s\": {\"p10\": %.9g, \"p50\": %.9g, \"p90\": %.9g, \"count\": %u}", name,
           quantile(values, count, 0.1), quantile(values, count, 0.5), quantile(values, count, 0.9), count);
}
