#include "report.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "reasons.h"

static double peak(void) /* bytes that were resident at most */
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return 1024.0 * (double)used.ru_maxrss;
}

static double speed(const outcome *of) /* tokens a second; 0: not known */
{
    return of->generated > 1 && of->last > of->first ? (of->generated - 1) / (of->last - of->first) : 0;
}

/* ---- one line: edge/lab/report/run.py and edge/budget.py --------------------------------------------------------- */

static void print_thousands(double number)
{
    char digits[32];
    int length = snprintf(digits, sizeof digits, "%.0f", number);
    for (int i = 0; i < length; i++)
        fprintf(stderr, i && (length - i) % 3 == 0 ? ",%c" : "%c", digits[i]);
}

static void print_bytes(double count)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    int unit = 0;
    while (count >= 1024 && unit < 3)
        count /= 1024, unit++;
    fprintf(stderr, "%.*f %s", unit && count < 10 ? 1 : 0, count, units[unit]);
}

static void print_joules(double joules)
{
    if (joules < 0.9995)
        fprintf(stderr, "%.3g mJ", joules * 1e3);
    else
        fprintf(stderr, joules < 999.5 ? "%.3g J" : "%.0f J", joules);
}

void print_line(const outcome *of, const edge_usage *use, const edge_options *limits, double memory)
{
    double pace = speed(of);
    print_thousands(of->generated);
    fputs(of->generated == 1 ? " token" : " tokens", stderr);
    if (pace >= 1)
        fputs(" at ", stderr), print_thousands(pace), fputs(" tok/s", stderr);
    else if (pace > 0)
        fprintf(stderr, " at %.2g tok/s", pace);
    if (of->generated)
        fprintf(stderr, " · first after %.2f s", of->first - of->began);
    fputs(" · peak ", stderr);
    print_bytes(peak());
    if (memory > 0)
        fputs(" of ", stderr), print_bytes(memory);
    fputs(" · ", stderr);
    print_joules(use->joules);
    if (limits->energy > 0)
        fputs(" of ", stderr), print_joules(limits->energy);
    fprintf(stderr, " (%s) · stopped: %s\n", use->measured ? "measured" : "estimated", REASONS[of->finish]);
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void print_text(const char *text, size_t length)
{
    putchar('"');
    for (const char *end = text + length; text < end; text++)
        if ((unsigned char)*text < ' ' || *text == '"' || *text == '\\')
            printf("\\u%04x", (unsigned)*text);
        else
            putchar(*text);
    putchar('"');
}

static void print_known(const char *name, double value, const char *end) /* 0: not known */
{
    if (value > 0)
        printf("\"%s\": %.9g%s", name, value, end);
    else
        printf("\"%s\": null%s", name, end);
}

void print_json(const outcome *of, const edge_usage *use, const edge_options *limits, double memory, const char *sensor,
                const edge_model_info *info, const char *text, size_t length)
{
    printf("{\"text\": ");
    print_text(text, length);
    printf(", \"tokens\": {\"prompt\": %u, \"generated\": %u}, ", of->prompt, of->generated);
    printf("\"timings\": {\"load_s\": %.6f, ", of->load);
    print_known("ttft_s", of->generated ? of->first - of->began : 0, ", ");
    print_known("decode_tok_s", speed(of), ", ");
    printf("\"total_s\": %.6f, ", of->ended - of->began);
    print_known("budget_s", limits->time, "}, ");
    printf("\"stop_reason\": \"%s\", \"memory\": {\"peak_rss\": %.0f, ", REASONS[of->finish], peak());
    if (memory > 0)
        printf("\"budget\": %.0f, ", memory);
    else
        printf("\"budget\": null, ");
    printf("\"weights\": %llu, \"kv\": %llu, \"scratch\": %llu}, ", (unsigned long long)use->weights,
           (unsigned long long)use->kv, (unsigned long long)use->scratch);
    printf("\"kv\": {\"policy\": \"%s\", \"capacity\": %u, \"rows\": %u, ", info->policy, use->capacity, use->rows);
    printf("\"dtype\": \"%s\", \"evicted\": %llu}, ", info->kv_dtype, (unsigned long long)use->evicted);
    printf("\"energy\": {\"joules\": %.9g, ", use->joules);
    print_known("budget", limits->energy, ", ");
    if (!use->measured || !sensor)
        sensor = "profile";
    const char *kind = !strcmp(sensor, "RAPL") ? "counter" : "integrated";
    printf("\"kind\": \"%s\", \"source\": ", !strcmp(sensor, "profile") ? "estimate" : kind);
    print_text(sensor, strlen(sensor));
    puts("}}");
}
