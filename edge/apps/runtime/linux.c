/* Linux and Android: system calls, /proc, CPUs by number, futexes. See posix.c. */
#ifdef __linux__
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "system.h"

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
enum { SYSTEM_READ = 0, SYSTEM_WRITE = 1, SYSTEM_FUTEX = 202, SYSTEM_RANDOM = 318 };

/* Returns what the kernel returns: -errno if it fails. */
static int64_t system_call(int64_t number, int64_t a, int64_t b, int64_t c, int64_t d)
{
    int64_t result;
    register int64_t fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
enum { SYSTEM_READ = 63, SYSTEM_WRITE = 64, SYSTEM_FUTEX = 98, SYSTEM_RANDOM = 278 };

static int64_t system_call(int64_t number, int64_t a, int64_t b, int64_t c, int64_t d)
{
    register int64_t which __asm__("x8") = number;
    register int64_t first __asm__("x0") = a;
    register int64_t second __asm__("x1") = b;
    register int64_t third __asm__("x2") = c;
    register int64_t fourth __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(first) : "r"(which), "r"(second), "r"(third), "r"(fourth) : "memory");
    return first;
}
#else
#error "edge runs on x86-64 and ARM64"
#endif

enum { INTERRUPTED = -4 };

int64_t system_read(int32_t fd, void *to, uint64_t size)
{
    int64_t count;
    do
        count = system_call(SYSTEM_READ, fd, (int64_t)to, (int64_t)size, 0);
    while (count == INTERRUPTED);
    return count;
}

int64_t system_write(int32_t fd, const void *from, uint64_t size)
{
    int64_t count;
    do
        count = system_call(SYSTEM_WRITE, fd, (int64_t)from, (int64_t)size, 0);
    while (count == INTERRUPTED);
    return count;
}

bool system_random(uint64_t *value)
{
    return system_call(SYSTEM_RANDOM, (int64_t)value, sizeof *value, 0, 0) == sizeof *value;
}

uint64_t system_page_size(void)
{
    uint64_t size = getauxval(AT_PAGESZ);
    return size ? size : 4096;
}

void system_clear(void *first, uint64_t size)
{
    madvise(first, size, MADV_DONTNEED);
}

/* Returns the kB of a line of /proc, in bytes; 0: there is no such line. */
static uint64_t kilobytes_behind(const char *name, const char *text, size_t size)
{
    size_t length = strlen(name);
    uint64_t number = 0;
    for (size_t at = 0; at + length < size; at++)
        if (!memcmp(text + at, name, length)) {
            for (at += length; at < size && (text[at] == ' ' || text[at] == '\t'); at++)
                ;
            for (; at < size && text[at] >= '0' && text[at] <= '9'; at++)
                number = 10 * number + (uint64_t)(text[at] - '0');
            return number << 10;
        }
    return 0;
}

void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    char text[4096];
    int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    int64_t size = fd < 0 ? -1 : system_read(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    *anonymous = kilobytes_behind("\nRssAnon:", text, size > 0 ? (size_t)size : 0);
    *swapped = kilobytes_behind("\nVmSwap:", text, size > 0 ? (size_t)size : 0);
}

/* ---- CPUs -------------------------------------------------------------------------------------------------------- */

void system_place_worker(uint64_t cpu_mask)
{
    if (cpu_mask) /* the system ignores absent CPUs, and the call fails if none is left */
        sched_setaffinity(0, sizeof cpu_mask, (const cpu_set_t *)&cpu_mask);
}

bool bind_thread(uint64_t cpu_mask, cpu_binding *before)
{
    return cpu_mask && sched_getaffinity(0, sizeof *before, (cpu_set_t *)before) >= 0
        && !sched_setaffinity(0, sizeof cpu_mask, (const cpu_set_t *)&cpu_mask);
}

void unbind_thread(const cpu_binding *before)
{
    sched_setaffinity(0, sizeof *before, (const cpu_set_t *)before);
}

#ifndef CPUS /* tests set another folder */
#define CPUS "/sys/devices/system/cpu/cpu"
#endif
enum { MOST_CPUS = 1024 };
typedef struct { uint64_t bits[MOST_CPUS / 64]; } cpu_bits;

/* Returns the first number in a file about a CPU, or `otherwise`. */
static uint32_t cpu_number(uint32_t cpu, const char *file, uint32_t otherwise)
{
    char path[256] = CPUS, text[16] = "";
    size_t at = strlen(path);
    for (uint32_t digit = cpu < 10 ? 1 : cpu < 100 ? 10 : cpu < 1000 ? 100 : 1000; digit; digit /= 10)
        path[at++] = (char)('0' + cpu / digit % 10);
    memcpy(path + at, file, strlen(file) + 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return otherwise;
    int64_t length = system_read(fd, text, sizeof text - 1);
    close(fd);
    if (length < 1 || text[0] < '0' || text[0] > '9')
        return otherwise;
    uint32_t number = 0;
    for (const char *digit = text; *digit >= '0' && *digit <= '9' && number < 100000000; digit++)
        number = number * 10 + (uint32_t)(*digit - '0');
    return number;
}

/* Number of the fastest cores that finish equal shares of work first: devices/cores.py explains the rule. Speed 0:
 * unknown. */
static uint32_t worth_using(uint64_t *speeds, uint32_t count)
{
    uint64_t most = 0;
    uint32_t found = 0;
    for (uint32_t i = 1; i < count; i++) /* the fastest first */
        for (uint32_t j = i; j && speeds[j - 1] < speeds[j]; j--) {
            uint64_t slower = speeds[j - 1];
            speeds[j - 1] = speeds[j];
            speeds[j] = slower;
        }
    for (uint32_t i = 0; i < count; i++)
        if ((i + 1) * speeds[i] >= most) {
            most = (i + 1) * speeds[i];
            found = i + 1;
        }
    return found;
}

/* On x86 all physical cores that the process may use are worth using: clocks differ there between equal cores. */
uint32_t fastest_cores(void)
{
#if defined(__aarch64__)
    const char *clock = "/cpufreq/cpuinfo_max_freq", *size = "/cpu_capacity";
#else
    const char *clock = "/none", *size = "/none";
#endif
    cpu_bits allowed = {{0}}, cores = {{0}};
    uint64_t clocks[MOST_CPUS], capacities[MOST_CPUS];
    sched_getaffinity(0, sizeof allowed, (cpu_set_t *)&allowed);
    uint32_t count = 0;
    bool alike = true;
    for (uint32_t cpu = 0; cpu < MOST_CPUS; cpu++) {
        if (!(allowed.bits[cpu / 64] >> cpu % 64 & 1))
            continue;
        uint32_t core = cpu_number(cpu, "/topology/thread_siblings_list", cpu);
        if (core >= MOST_CPUS || cores.bits[core / 64] >> core % 64 & 1)
            continue;
        cores.bits[core / 64] |= 1ull << core % 64;
        uint64_t mhz = cpu_number(cpu, clock, 0) / 1000;
        clocks[count] = mhz * mhz * mhz;
        capacities[count] = cpu_number(cpu, size, 0);
        alike &= capacities[count] == capacities[0];
        count++;
    }
    return count ? worth_using(alike ? clocks : capacities, count) : 1;
}

/* ---- sleeping and waking ----------------------------------------------------------------------------------------- */

#ifndef EDGE_WAIT_ON_ADDRESS /* tests run apple.c's code on Linux with it */

enum { FUTEX_WAIT_PRIVATE_ = 128, FUTEX_WAKE_PRIVATE_ = 129 };

void prepare_line(int32_t line[LINE])
{
    (void)line;
}

int32_t edge_doze(int32_t *word, int32_t value)
{
    return (int32_t)system_call(SYSTEM_FUTEX, (int64_t)word, FUTEX_WAIT_PRIVATE_, value, 0);
}

int32_t edge_wake(int32_t *word)
{
    return (int32_t)system_call(SYSTEM_FUTEX, (int64_t)word, FUTEX_WAKE_PRIVATE_, INT32_MAX, 0);
}

#endif
#endif
