#define _GNU_SOURCE
#include "cores.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"

#define CPUS "/sys/devices/system/cpu"
static const char *const HYBRID[] = {"core", "atom", "lowpower"};
enum { HYBRIDS = sizeof HYBRID / sizeof *HYBRID };

/* Parses a list of CPUs such as 0-3,8. */
static cpu_set_t parse_list(const char *text)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    while (*text) {
        char *end;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (end == text)
            break;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < CPU_SETSIZE; cpu++)
            CPU_SET(cpu, &cpus);
        text = *end == ',' ? end + 1 : "";
    }
    return cpus;
}

static double known(double number)
{
    return number > 0 ? number : 0;
}

/* On x86, clocks differ between equal cores. */
static core_kind describe(int cpu, const cpu_set_t hybrids[HYBRIDS])
{
    core_kind kind = {.hybrid = ""};
    CPU_ZERO(&kind.cpus);
    for (int i = 0; i < HYBRIDS; i++)
        if (CPU_ISSET(cpu, &hybrids[i]))
            kind.hybrid = HYBRID[i];
#if defined(__aarch64__)
    kind.capacity = known(read_number(CPUS "/cpu%d/cpu_capacity", cpu));
    kind.kilohertz = known(read_number(CPUS "/cpu%d/cpufreq/cpuinfo_max_freq", cpu));
    read_text(kind.midr, sizeof kind.midr, CPUS "/cpu%d/regs/identification/midr_el1", cpu);
    for (char *at = kind.midr; *at; at++)
        if (!strchr("0123456789abcdefx", *at))
            *kind.midr = 0;
#endif
    return kind;
}

static int rank(const core_kind *kind)
{
    int i = 0;
    while (i < HYBRIDS && strcmp(kind->hybrid, HYBRID[i]))
        i++;
    return i;
}

/* Less than 0: `one` is faster than `other`; 0: equal. */
static int compare(const core_kind *one, const core_kind *other)
{
    if (one->capacity != other->capacity)
        return one->capacity > other->capacity ? -1 : 1;
    if (one->kilohertz != other->kilohertz)
        return one->kilohertz > other->kilohertz ? -1 : 1;
    return rank(one) != rank(other) ? rank(one) - rank(other) : strcmp(one->midr, other->midr);
}

/* The first CPU of a core, which identifies the core, as in fastest_cores of the runtime. */
static int core_of(int cpu)
{
    char text[256];
    return read_text(text, sizeof text, CPUS "/cpu%d/topology/thread_siblings_list", cpu) ? atoi(text) : cpu;
}

uint32_t find_kinds(core_kind kinds[MOST_KINDS])
{
    cpu_set_t allowed, seen, hybrids[HYBRIDS];
    uint32_t count = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        return 0;
    CPU_ZERO(&seen);
    for (int i = 0; i < HYBRIDS; i++) {
        char text[256];
        read_text(text, sizeof text, "/sys/devices/cpu_%s/cpus", HYBRID[i]);
        hybrids[i] = parse_list(text);
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed))
            continue;
        core_kind found = describe(cpu, hybrids);
        uint32_t at = 0;
        while (at < count && compare(&kinds[at], &found) < 0)
            at++;
        if (at == count || compare(&kinds[at], &found)) {
            if (count == MOST_KINDS)
                return 0;
            memmove(kinds + at + 1, kinds + at, (count++ - at) * sizeof *kinds);
            kinds[at] = found;
        }
        CPU_SET(cpu, &kinds[at].cpus);
        int core = core_of(cpu);
        kinds[at].cores += !CPU_ISSET(core, &seen);
        CPU_SET(core, &seen);
    }
    return count;
}
