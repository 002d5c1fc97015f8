/* Linux and Android: system calls, /proc, CPUs by number, futexes. See posix.c. */
#ifdef __linux__
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "system.h"

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
enum { SYSTEM_READ = 0, SYSTEM_WRITE = 1, SYSTEM_THREAD = 186, SYSTEM_FUTEX = 202, SYSTEM_SIGNAL = 234, SYSTEM_RANDOM = 318 };

/* Returns the kernel's result: -errno if it fails. */
static int64_t system_call(int64_t number, int64_t a, int64_t b, int64_t c, int64_t d)
{
    int64_t result;
    register int64_t fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
enum { SYSTEM_READ = 63, SYSTEM_WRITE = 64, SYSTEM_FUTEX = 98, SYSTEM_SIGNAL = 131, SYSTEM_THREAD = 178, SYSTEM_RANDOM = 278 };

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

enum { NO_SUCH_THREAD = -3, INTERRUPTED = -4 };

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

#ifndef ROOT /* tests have another */
#define ROOT ""
#endif

/* Reads the beginning of a file as a string, empty without a file. Returns its length. */
static size_t read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int64_t length = fd < 0 ? -1 : system_read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = 0;
    return length > 0 ? (size_t)length : 0;
}

void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    char text[4096];
    size_t size = read_text("/proc/self/status", text, sizeof text);
    *anonymous = kilobytes_behind("\nRssAnon:", text, size);
    *swapped = kilobytes_behind("\nVmSwap:", text, size);
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

enum { MOST_CPUS = 1024 };
typedef struct { uint64_t bits[MOST_CPUS / 64]; } cpu_bits;

/* Returns the number at *text, or `otherwise`. *text then points behind it and a blank. */
static uint32_t next_number(const char **text, uint32_t otherwise)
{
    const char *digit = *text;
    uint32_t number = 0;
    for (; *digit >= '0' && *digit <= '9' && number < 100000000; digit++)
        number = number * 10 + (uint32_t)(*digit - '0');
    otherwise = digit == *text ? otherwise : number;
    *text = digit + (*digit == ' ');
    return otherwise;
}

/* Returns the first number in a file, or `otherwise`. */
static uint32_t file_number(const char *path, uint32_t otherwise)
{
    char text[16];
    const char *at = text;
    read_text(path, text, sizeof text);
    return next_number(&at, otherwise);
}

/* Returns the first number in a file about a CPU, or `otherwise`. */
static uint32_t cpu_number(uint32_t cpu, const char *file, uint32_t otherwise)
{
    char path[256] = ROOT "/sys/devices/system/cpu/cpu";
    size_t at = strlen(path);
    for (uint32_t digit = cpu < 10 ? 1 : cpu < 100 ? 10 : cpu < 1000 ? 100 : 1000; digit; digit /= 10)
        path[at++] = (char)('0' + cpu / digit % 10);
    memcpy(path + at, file, strlen(file) + 1);
    return file_number(path, otherwise);
}

/* Returns the cores whose time a cgroup grants, rounded up, at most `most`. folder: a path of this length, with room behind
 * it. */
static uint32_t granted_by(char *folder, size_t length, uint32_t most)
{
    char text[32];
    const char *at = text;
    strcpy(folder + length, "/cpu.max"); /* of version 2 */
    uint32_t quota = 0, period = 0;
    if (read_text(folder, text, sizeof text)) {
        quota = next_number(&at, 0); /* none: "max" */
        period = next_number(&at, 0);
    } else {
        strcpy(folder + length, "/cpu.cfs_quota_us");
        quota = file_number(folder, 0); /* none: -1 */
        strcpy(folder + length, "/cpu.cfs_period_us");
        period = file_number(folder, 0);
    }
    uint32_t cores = quota && period ? (quota - 1) / period + 1 : most;
    return cores < most ? cores : most;
}

/* Returns the least cores that a cgroup of this process grants, at most `most`: `_granted_cores` of devices/host.py. */
static uint32_t granted_cores(uint32_t most)
{
    char text[4096], folder[4096 + 128];
    size_t left = read_text(ROOT "/proc/self/cgroup", text, sizeof text);
    for (char *line = text, *end; left && (end = strchr(line, '\n')); line = end + 1) { /* NUMBER:CONTROLLERS:PATH */
        *end = 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path || path[1] != '/')
            continue;
        *path++ = 0;
        bool second = !controllers[1], first = false;
        for (const char *name = controllers + 1; *name; name += strspn(name, ",")) {
            size_t length = strcspn(name, ",");
            first |= length == 3 && !memcmp(name, "cpu", 3);
            name += length;
        }
        if (!second && !first)
            continue;
        strcpy(folder, ROOT "/sys/fs/cgroup");
        size_t base = strlen(folder);
        if (first || !access(ROOT "/sys/fs/cgroup/unified", F_OK)) {
            strcpy(folder + base, first ? "/cpu" : "/unified");
            base = strlen(folder);
        }
        strcpy(folder + base, path);
        for (size_t at = strlen(folder); at >= base; at--) /* the group and those around it */
            if (at == base || folder[at] == '/' || !folder[at])
                most = granted_by(folder, at, most);
    }
    return most;
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
    return count ? granted_cores(worth_using(alike ? clocks : capacities, count)) : 1;
}

/* ---- sleeping and waking ----------------------------------------------------------------------------------------- */

#ifndef EDGE_WAIT_ON_ADDRESS /* tests run apple.c's code on Linux with it */

enum { FUTEX_WAIT_PRIVATE_ = 128, FUTEX_WAKE_PRIVATE_ = 129, FOREVER = 1 << 30 };
enum { OWNER = 2, ENDED = 3 }; /* words of a line */

void own_line(int32_t line[LINE])
{
    __atomic_store_n(&line[OWNER], (int32_t)system_call(SYSTEM_THREAD, 0, 0, 0, 0), __ATOMIC_RELAXED);
}

int32_t line_owner(const int32_t line[LINE])
{
    return __atomic_load_n(&line[OWNER], __ATOMIC_RELAXED);
}

bool owner_ended(const int32_t line[LINE])
{
    return __atomic_load_n(&line[ENDED], __ATOMIC_RELAXED);
}

int32_t edge_doze(int32_t *word, int32_t value)
{
    const struct timespec second = {1, 0};
    int32_t owner = __atomic_load_n(&word[OWNER], __ATOMIC_RELAXED); /* the thread may not have begun */
    system_call(SYSTEM_FUTEX, (int64_t)word, FUTEX_WAIT_PRIVATE_, value, (int64_t)(owner ? &second : NULL));
    if (owner && __atomic_load_n(word, __ATOMIC_SEQ_CST) == value
        && system_call(SYSTEM_SIGNAL, getpid(), owner, 0, 0) == NO_SUCH_THREAD
        && __atomic_compare_exchange_n(word, &value, value + FOREVER, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        __atomic_store_n(&word[ENDED], 1, __ATOMIC_RELAXED);
    return 0;
}

int32_t edge_wake(int32_t *word)
{
    return (int32_t)system_call(SYSTEM_FUTEX, (int64_t)word, FUTEX_WAKE_PRIVATE_, INT32_MAX, 0);
}

#endif
#endif
