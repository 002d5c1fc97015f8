#define _GNU_SOURCE
#include "machine.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "energy.h"
#include "files.h"
#include "thermal.h"

enum { MOST_SAMPLES = 600, MOST_MARKS = 64, TEXT = 16384 };
#define CPUS "/sys/devices/system/cpu"

typedef struct { double at, rss, anonymous, file, swap, rows; } memory_sample;
typedef struct { double at, celsius, hertz, allowed, watts; } climate_sample;

uint32_t fastest_cores(void); /* defined in the runtime */

static struct { double at; char what[64]; } marks[MOST_MARKS];
static memory_sample memory[MOST_SAMPLES + 1];
static climate_sample climate[MOST_SAMPLES + 1];
static uint32_t marked, memories, climates, highest_rows;
static double began, peak, peak_anonymous, peak_swap;
static double window_celsius, window_hertz;
static uint32_t window_clocks;
static thermometer zone;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t sampler;
static bool ended;
static void (*each_second)(void);

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double cpu_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- text ----------------------------------------------------------------------------------------------------------- */

/* Returns the number behind a word at the beginning of a line; 0: there is none. */
static double number_behind(const char *text, const char *word)
{
    size_t length = strlen(word);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, word, length))
            return strtod(line + length + strspn(line + length, " \t:"), NULL);
    return 0;
}

static void print_text(const char *name, const char *text)
{
    printf("\"%s\": \"", name);
    for (const unsigned char *at = (const unsigned char *)text; *at; at++)
        if (*at == '"' || *at == '\\')
            printf("\\%c", *at);
        else if (*at < 32 || *at > 126)
            printf("\\u%04x", *at);
        else
            putchar(*at);
    printf("\",\n");
}

/* ---- the machine ------------------------------------------------------------------------------------------------- */

uint64_t memory_bytes(void)
{
    char text[TEXT];
    read_text(text, sizeof text, "/proc/meminfo");
    return (uint64_t)number_behind(text, "MemTotal") * 1024;
}

static void print_caches(void)
{
    const char *comma = "";
    printf("\"caches\": {");
    for (int i = 0; i < 8; i++) {
        char level[8], type[32], size[32], *end;
        read_text(level, sizeof level, CPUS "/cpu0/cache/index%d/level", i);
        read_text(type, sizeof type, CPUS "/cpu0/cache/index%d/type", i);
        read_text(size, sizeof size, CPUS "/cpu0/cache/index%d/size", i);
        double kib = strtod(size, &end);
        if (strlen(level) != 1 || *end != 'K')
            continue;
        const char *suffix = *level != '1' ? "" : *type == 'I' ? "i" : "d";
        printf("%s\"L%s%s\": %.0f", comma, level, suffix, kib * 1024);
        comma = ", ";
    }
    printf("},\n");
}

/* Reads a property of Android by getprop; empty on other systems. */
static void read_property(char *text, size_t size, const char *name)
{
    char command[128];
    snprintf(command, sizeof command, "getprop %s 2>/dev/null", name);
    FILE *pipe = popen(command, "r");
    text[0] = 0;
    if (pipe && !fgets(text, (int)size, pipe))
        text[0] = 0;
    if (pipe)
        pclose(pipe);
    text[strcspn(text, "\n")] = 0;
}

void describe_machine(void)
{
    static char text[TEXT];
    char release[64], maker[64], product[64];
    struct utsname names;
    cpu_set_t allowed;
    uname(&names);
    read_property(release, sizeof release, "ro.build.version.release");
    read_property(maker, sizeof maker, "ro.product.manufacturer");
    read_property(product, sizeof product, "ro.product.model");
    snprintf(text, sizeof text, "%s%s%s%s %s", *release ? "Android " : "", release, *release ? ", " : "", names.sysname,
             names.release);
    print_text("system", text);
    print_text("machine", names.machine);
    if (*product)
        snprintf(text, sizeof text, "%s %s", maker, product);
    else
        read_text(text, sizeof text, "/proc/device-tree/model");
    print_text("board", text);
    read_text(text, sizeof text, "/proc/cpuinfo");
    print_text("cpuinfo", text);
    print_caches();
    int cores = sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : CPU_COUNT(&allowed);
    printf("\"memory\": %llu, \"fastest_cores\": %u, \"cores\": %d,\n", (unsigned long long)memory_bytes(),
           fastest_cores(), cores);
}

/* ---- heat and clock ---------------------------------------------------------------------------------------------- */

static double hertz_now(void) /* the highest clock of online CPUs; some machines lack the numbers of others */
{
    double most = 0;
    DIR *folder = open_folder(CPUS);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        int number, end = 0;
        if (sscanf(entry->d_name, "cpu%d%n", &number, &end) != 1 || entry->d_name[end])
            continue;
        double kilo = read_number(CPUS "/%s/cpufreq/scaling_cur_freq", entry->d_name);
        most = kilo * 1e3 > most ? kilo * 1e3 : most;
    }
    if (folder)
        closedir(folder);
    if (most <= 0) {
        char text[4096];
        read_text(text, sizeof text, "/proc/cpuinfo");
        most = number_behind(text, "cpu MHz") * 1e6;
    }
    return most;
}

/* ---- other programs ---------------------------------------------------------------------------------------------- */

others_since others_begin(void)
{
    char text[1024];
    double fields[8] = {0};
    read_text(text, sizeof text, "/proc/stat");
    sscanf(text, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", fields, fields + 1, fields + 2, fields + 3, fields + 4,
           fields + 5, fields + 6, fields + 7);
    double busy = fields[0] + fields[1] + fields[2] + fields[5] + fields[6] + fields[7]; /* all but idle and iowait */
    return (others_since){busy / (double)sysconf(_SC_CLK_TCK), cpu_now(), now()};
}

double others_share(const others_since *before)
{
    others_since after = others_begin();
    double whole = (after.at - before->at) * (double)sysconf(_SC_NPROCESSORS_ONLN);
    double share = (after.busy - before->busy - (after.own - before->own)) / (whole > 0 ? whole : 1);
    return share > 0 ? share < 1 ? share : 1 : 0;
}

/* ---- samples ----------------------------------------------------------------------------------------------------- */

static void sample_memory(void)
{
    char text[4096];
    read_text(text, sizeof text, "/proc/self/status");
    memory_sample each = {now() - began, number_behind(text, "VmRSS") * 1024, number_behind(text, "RssAnon") * 1024,
                          number_behind(text, "RssFile") * 1024, number_behind(text, "VmSwap") * 1024, highest_rows};
    double most = number_behind(text, "VmHWM") * 1024;
    pthread_mutex_lock(&lock);
    if (memories > MOST_SAMPLES)
        for (memories = 0; 2 * memories <= MOST_SAMPLES; memories++)
            memory[memories] = memory[2 * memories];
    memory[memories++] = each;
    most = most > each.rss ? most : each.rss;
    peak = most > peak ? most : peak;
    peak_anonymous = each.anonymous > peak_anonymous ? each.anonymous : peak_anonymous;
    peak_swap = each.swap > peak_swap ? each.swap : peak_swap;
    pthread_mutex_unlock(&lock);
}

static void sample_climate(void)
{
    double most = read_number(CPUS "/cpu0/cpufreq/cpuinfo_max_freq");
    double allowed = read_number(CPUS "/cpu0/cpufreq/scaling_max_freq");
    energy_read(now());
    double celsius = thermal_read(&zone);
    climate_sample each = {now() - began, celsius == UNREADABLE ? -1000 : celsius, hertz_now(),
                           most > 0 && allowed > 0 ? allowed / most : -1, energy_battery_watts()};
    pthread_mutex_lock(&lock);
    if (climates > MOST_SAMPLES)
        for (climates = 0; 2 * climates <= MOST_SAMPLES; climates++)
            climate[climates] = climate[2 * climates];
    climate[climates++] = each;
    window_celsius = each.celsius > window_celsius ? each.celsius : window_celsius;
    window_hertz += each.hertz;
    window_clocks += each.hertz > 0;
    pthread_mutex_unlock(&lock);
}

static void *sample(void *nothing)
{
    double looked = now() - 1;
    while (!__atomic_load_n(&ended, __ATOMIC_RELAXED)) {
        struct timespec pause = {0, 50000000};
        sample_memory();
        if (now() - looked >= 1) {
            sample_climate();
            looked = now();
            each_second();
        }
        nanosleep(&pause, NULL);
    }
    return nothing;
}

void start_sampling(void (*heartbeat)(void))
{
    began = now();
    each_second = heartbeat;
    energy_begin(began);
    thermal_find(&zone);
    sample_memory();
    if (pthread_create(&sampler, NULL, sample, NULL))
        abort();
}

void mark(const char *what)
{
    if (marked < MOST_MARKS && !(marked && !strcmp(marks[marked - 1].what, what))) {
        marks[marked].at = now() - began;
        snprintf(marks[marked++].what, sizeof marks->what, "%s", what);
    }
    sample_memory();
}

void sampled_rows(uint32_t rows)
{
    pthread_mutex_lock(&lock);
    highest_rows = rows > highest_rows ? rows : highest_rows;
    pthread_mutex_unlock(&lock);
}

void climate_begin(void)
{
    pthread_mutex_lock(&lock);
    window_celsius = -1000;
    window_hertz = window_clocks = 0;
    pthread_mutex_unlock(&lock);
}

double climate_celsius(void)
{
    pthread_mutex_lock(&lock);
    double celsius = window_celsius;
    pthread_mutex_unlock(&lock);
    return celsius;
}

double climate_hertz(void)
{
    pthread_mutex_lock(&lock);
    double hertz = window_clocks ? window_hertz / window_clocks : 0;
    pthread_mutex_unlock(&lock);
    return hertz;
}

static void print_known(const char *name, double value, bool known)
{
    if (known)
        printf("\"%s\": %.9g", name, value);
    else
        printf("\"%s\": null", name);
}

void print_samples(void)
{
    __atomic_store_n(&ended, true, __ATOMIC_RELAXED);
    pthread_join(sampler, NULL);
    sample_memory();
    if (energy_source())
        print_text("energy", energy_source());
    else
        printf("\"energy\": null,\n");
    printf("\"peak\": %.0f, \"peak_anonymous\": %.0f, \"peak_swap\": %.0f,\n", peak, peak_anonymous, peak_swap);
    print_text("sensor", zone.name);
    print_known("trip", zone.trip, zone.trip > 0);
    printf(",\n\"samples\": [");
    for (uint32_t i = 0; i < memories; i++) {
        printf("%s\n  {\"seconds\": %.4f, \"rss\": %.0f, \"anonymous\": %.0f, ", i ? "," : "", memory[i].at,
               memory[i].rss, memory[i].anonymous);
        printf("\"file\": %.0f, \"swap\": %.0f, \"rows\": %.0f}", memory[i].file, memory[i].swap, memory[i].rows);
    }
    printf("],\n\"marks\": [");
    for (uint32_t i = 0; i < marked; i++)
        printf("%s{\"seconds\": %.4f, \"what\": \"%s\"}", i ? ", " : "", marks[i].at, marks[i].what);
    printf("],\n\"climate\": [");
    for (uint32_t i = 0; i < climates; i++) {
        printf("%s\n  {\"seconds\": %.4f, ", i ? "," : "", climate[i].at);
        print_known("celsius", climate[i].celsius, climate[i].celsius > -100);
        printf(", ");
        print_known("hertz", climate[i].hertz, climate[i].hertz > 0);
        printf(", ");
        print_known("allowed", climate[i].allowed, climate[i].allowed > 0);
        printf(", ");
        print_known("battery_watts", climate[i].watts, climate[i].watts > 0);
        printf("}");
    }
    printf("],\n");
}
