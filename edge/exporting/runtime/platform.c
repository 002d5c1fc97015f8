/* Memory, files, clocks and threads of Linux, Android, macOS and iOS.
 *
 * A library for Android is built against the headers of another C library, so this file keeps to functions and
 * constants that come from the kernel and agree everywhere. What returns its error in errno, which does not, is called
 * directly.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <dlfcn.h>
#include <errno.h>
#include <pthread/qos.h>
#include <stdlib.h>
#else
#include <sys/auxv.h>
#endif

#include "internal.h"

/* ---- the system ------------------------------------------------------------------------------------------------- */

#ifdef __linux__

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

static int64_t system_read(int32_t fd, void *to, uint64_t size)
{
    return system_call(SYSTEM_READ, fd, (int64_t)to, (int64_t)size, 0);
}

static int64_t system_write(int32_t fd, const void *from, uint64_t size)
{
    return system_call(SYSTEM_WRITE, fd, (int64_t)from, (int64_t)size, 0);
}

static bool system_random(uint64_t *value)
{
    return system_call(SYSTEM_RANDOM, (int64_t)value, sizeof *value, 0, 0) == sizeof *value;
}

static uint64_t page_size(void)
{
    uint64_t size = getauxval(AT_PAGESZ);
    return size ? size : 4096;
}

#elif defined(__APPLE__)

enum { INTERRUPTED = -EINTR };

static int64_t system_read(int32_t fd, void *to, uint64_t size)
{
    int64_t count = read(fd, to, size);
    return count < 0 ? -errno : count;
}

static int64_t system_write(int32_t fd, const void *from, uint64_t size)
{
    int64_t count = write(fd, from, size);
    return count < 0 ? -errno : count;
}

static bool system_random(uint64_t *value)
{
    arc4random_buf(value, sizeof *value);
    return true;
}

static uint64_t page_size(void)
{
    return (uint64_t)getpagesize();
}

#else
#error "edge runs on Linux, Android, macOS and iOS"
#endif

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void *map_memory(uint64_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void unmap_memory(void *memory, uint64_t size)
{
#ifdef __SANITIZE_ADDRESS__ /* what `take` left between two parts */
    __asan_unpoison_memory_region(memory, size);
#endif
    if (memory)
        munmap(memory, size);
}

void release_memory(void *memory, size_t size)
{
    uint64_t page = page_size(), first = ((uint64_t)memory + page - 1) / page * page;
    uint64_t end = ((uint64_t)memory + size) / page * page;
    if (end <= first)
        return;
#ifdef __APPLE__ /* whose MADV_FREE may keep what was there */
    mmap((void *)first, end - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#else
    madvise((void *)first, end - first, MADV_DONTNEED);
#endif
}

void forget_memory(const void *memory, size_t size)
{
    uint64_t page = page_size(), first = ((uint64_t)memory + page - 1) / page * page;
    uint64_t end = ((uint64_t)memory + size) / page * page;
    if (first < end)
        madvise((void *)first, end - first, MADV_DONTNEED);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* Bytes of an open file, whose position stays; -1 for what has none, such as a pipe. */
static int64_t file_size(int fd)
{
    int64_t at = lseek(fd, 0, SEEK_CUR);
    if (at < 0)
        return -1;
    int64_t size = lseek(fd, 0, SEEK_END);
    lseek(fd, at, SEEK_SET);
    return size;
}

static edge_status cannot_map(edge_error *error)
{
    return edge_fail(error, EDGE_BAD_FILE, "model.edge cannot be mapped: it must be a file on a disk, open for "
                     "reading");
}

static edge_status map_open_file(int fd, const edge_source *source, mapping *file, edge_error *error)
{
    int64_t found = file_size(fd);
    if (found < 0)
        return cannot_map(error);
    uint64_t size = (uint64_t)found, offset = source->offset;
    if (offset > size || source->length > size - offset)
        return edge_fail(error, EDGE_BAD_FILE, "offset and length of model.edge reach beyond its file, which has %d "
                         "bytes", found);
    uint64_t length = source->length ? source->length : size - offset, before = offset % page_size();
    if (!length)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is empty: copy it again");
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return edge_fail(error, EDGE_NO_MEMORY, "the process may open no more files: close others");
    uint8_t *base = mmap(NULL, length + before, PROT_READ, MAP_PRIVATE, own, (off_t)(offset - before));
    if (base == MAP_FAILED) {
        close(own);
        return cannot_map(error);
    }
    *file = (mapping){base + before, length, base, length + before, own, offset + length};
    return EDGE_OK;
}

edge_status map_file(const edge_source *source, mapping *file, edge_error *error)
{
    memset(file, 0, sizeof *file);
    if (!source->path)
        return map_open_file(source->fd, source, file, error);
    int fd = open(source->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* which does not wait for a pipe's writer */
    if (fd < 0)
        return edge_fail(error, EDGE_BAD_FILE, "cannot open %s: check that it is there and may be read", source->path);
    edge_status status = map_open_file(fd, source, file, error);
    close(fd);
    return status;
}

bool file_is_whole(const mapping *file)
{
    uint8_t last;
    return !file->base || pread(file->fd, &last, 1, (off_t)(file->end - 1)) != 0;
}

bool read_file(const mapping *file, uint64_t at, void *to, uint64_t size)
{
    uint64_t start = file->end - file->size + at, done = 0;
    while (done < size) {
        int64_t count = pread(file->fd, (uint8_t *)to + done, size - done, (off_t)(start + done));
        if (count <= 0)
            return false;
        done += (uint64_t)count;
    }
    return true;
}

void unmap_file(mapping *file)
{
    if (file->base) {
        munmap(file->base, file->mapped);
        close(file->fd);
    }
    memset(file, 0, sizeof *file);
}

enum { MOST_AT_ONCE = 1 << 30 }; /* bytes; Linux and macOS move at most 2 GiB */

int64_t read_fd(int32_t fd, void *to, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        uint64_t rest = size - done;
        int64_t count = system_read(fd, (uint8_t *)to + done, rest < MOST_AT_ONCE ? rest : MOST_AT_ONCE);
        if (count == 0)
            break;
        if (count < 0 && count != INTERRUPTED)
            return -1;
        done += count > 0 ? (uint64_t)count : 0;
    }
    return (int64_t)done;
}

int64_t write_fd(int32_t fd, const void *from, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        uint64_t rest = size - done;
        int64_t count = system_write(fd, (const uint8_t *)from + done, rest < MOST_AT_ONCE ? rest : MOST_AT_ONCE);
        if (count == 0 || (count < 0 && count != INTERRUPTED))
            return -1;
        done += count > 0 ? (uint64_t)count : 0;
    }
    return (int64_t)done;
}

bool replace_file(const char *path, const void *data, uint64_t size)
{
    char temporary[LONGEST_PATH + 32];
    size_t length = strlen(path);
    if (length > LONGEST_PATH)
        return false;
    memcpy(temporary, path, length);
    temporary[length++] = '.';
    for (uint64_t number = random_seed(); number; number /= 10)
        temporary[length++] = (char)('0' + number % 10);
    temporary[length] = 0;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    bool written = write_fd(fd, data, size) >= 0;
    close(fd);
    if (written && !rename(temporary, path))
        return true;
    unlink(temporary);
    return false;
}

/* ---- clocks ------------------------------------------------------------------------------------------------------ */

static double read_clock(clockid_t clock)
{
    struct timespec time = {0, 0};
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double now_seconds(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

double cpu_seconds(void)
{
    return read_clock(CLOCK_PROCESS_CPUTIME_ID);
}

void sleep_seconds(double seconds)
{
    if (!(seconds > 0)) /* nor NaN */
        return;
    double most = 1e9, whole = seconds < most ? seconds : most;
    struct timespec rest = {(time_t)whole, 0};
    rest.tv_nsec = (long)((whole - (double)rest.tv_sec) * 1e9);
    while (nanosleep(&rest, &rest)) /* a signal came */
        ;
}

uint64_t random_seed(void)
{
    uint64_t value = 0;
    if (!system_random(&value)) {
        double times[2] = {now_seconds(), cpu_seconds()};
        uint64_t bits[2];
        memcpy(bits, times, sizeof bits);
        value = (bits[0] ^ (uint64_t)&value) * 0x9E3779B97F4A7C15u + bits[1];
    }
    return value;
}

/* ---- processes and threads --------------------------------------------------------------------------------------- */

int64_t process_id(void)
{
    return getpid();
}

_Static_assert(sizeof(pthread_t) <= sizeof(uint64_t), "a worker has room for it");

#ifdef __linux__
/* The number of a line of /proc, in bytes; 0 if there is no such line. */
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
    int64_t size = fd < 0 ? -1 : read_fd(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    *anonymous = kilobytes_behind("\nRssAnon:", text, size > 0 ? (size_t)size : 0);
    *swapped = kilobytes_behind("\nVmSwap:", text, size > 0 ? (size_t)size : 0);
}
#else
void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    *anonymous = *swapped = 0;
}
#endif

static void *begin_worker(void *argument)
{
    worker *thread = argument;
#ifdef __APPLE__ /* has no masks; threads of unknown importance run on slow cores */
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#else
    if (thread->cpu_mask) /* of which the system takes what there is; none: it stays where it is */
        sched_setaffinity(0, sizeof thread->cpu_mask, (const cpu_set_t *)&thread->cpu_mask);
#endif
    return thread->work(thread->argument);
}

bool start_worker(worker *thread, void *(*work)(void *), void *argument, uint64_t cpu_mask)
{
    pthread_t made;
    *thread = (worker){0, work, argument, cpu_mask};
    if (pthread_create(&made, NULL, begin_worker, thread))
        return false;
    memcpy(&thread->handle, &made, sizeof made);
    return true;
}

void join_worker(worker *thread)
{
    pthread_t made;
    memcpy(&made, &thread->handle, sizeof made);
    pthread_join(made, NULL);
}

bool bind_thread(uint64_t cpu_mask, cpu_binding *before)
{
#ifdef __APPLE__
    (void)cpu_mask, (void)before;
    return false;
#else
    return cpu_mask && sched_getaffinity(0, sizeof *before, (cpu_set_t *)before) >= 0
        && !sched_setaffinity(0, sizeof cpu_mask, (const cpu_set_t *)&cpu_mask);
#endif
}

void unbind_thread(const cpu_binding *before)
{
#ifdef __APPLE__
    (void)before;
#else
    sched_setaffinity(0, sizeof *before, (const cpu_set_t *)before);
#endif
}

/* ---- sleeping and waking ----------------------------------------------------------------------------------------- */

#if defined(__linux__) && !defined(EDGE_WAIT_ON_ADDRESS) /* with it, what Apple's systems do is tested on Linux */

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

#else

#include <dlfcn.h>

/* os_sync_wait_on_address and its counterpart, which iOS 17.4 and macOS 14.4 have; before, a condition variable. They
 * lie behind the pass's two words in its line, so that nothing is global. */
typedef int wait_on_address(void *address, uint64_t value, size_t size, uint32_t flags);
typedef int wake_by_address(void *address, size_t size, uint32_t flags);
typedef struct {
    int32_t words[2];
    wait_on_address *wait;
    union {
        wake_by_address *wake;
        struct { pthread_mutex_t mutex; pthread_cond_t changed; } lock;
    } by;
} waiting_line;
_Static_assert(sizeof(waiting_line) <= LINE * sizeof(int32_t), "it fits behind the words");

void prepare_line(int32_t line[LINE])
{
    waiting_line *own = (waiting_line *)line;
    void *wait = dlsym(RTLD_DEFAULT, "os_sync_wait_on_address");
    void *wake = dlsym(RTLD_DEFAULT, "os_sync_wake_by_address_all");
    if (wait && wake) {
        memcpy(&own->wait, &wait, sizeof wait); /* ISO C converts no object's pointer to a function's */
        memcpy(&own->by.wake, &wake, sizeof wake);
    } else {
        own->wait = NULL;
        pthread_mutex_init(&own->by.lock.mutex, NULL);
        pthread_cond_init(&own->by.lock.changed, NULL);
    }
}

int32_t edge_doze(int32_t *word, int32_t value)
{
    waiting_line *own = (waiting_line *)word;
    if (own->wait)
        return own->wait(word, (uint32_t)value, sizeof *word, 0);
    pthread_mutex_lock(&own->by.lock.mutex);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value)
        pthread_cond_wait(&own->by.lock.changed, &own->by.lock.mutex);
    pthread_mutex_unlock(&own->by.lock.mutex);
    return 0;
}

int32_t edge_wake(int32_t *word)
{
    waiting_line *own = (waiting_line *)word;
    if (own->wait)
        return own->by.wake(word, sizeof *word, 0);
    pthread_mutex_lock(&own->by.lock.mutex); /* a thread that has looked at the word is asleep by now */
    pthread_cond_broadcast(&own->by.lock.changed);
    pthread_mutex_unlock(&own->by.lock.mutex);
    return 0;
}

#endif
