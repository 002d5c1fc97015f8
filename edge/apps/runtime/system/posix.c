/* Memory, files, clocks and threads of Linux, Android, macOS and iOS.
 *
 * A library for Android may be built against the headers of another C library. So this file and linux.c use only
 * functions and constants that all C libraries take unchanged from the kernel. errno is not among them: linux.c makes the
 * system calls that need it itself. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base.h"
#include "system.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

void *map_memory(uint64_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void unmap_memory(void *memory, uint64_t size)
{
#ifdef __SANITIZE_ADDRESS__ /* the gaps of `take` */
    __asan_unpoison_memory_region(memory, size);
#endif
    if (memory)
        munmap(memory, size);
}

void system_forget(void *first, uint64_t size)
{
    madvise(first, size, MADV_DONTNEED);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

uint64_t system_mapping_step(void)
{
    return system_page_size();
}

int32_t system_open(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* does not wait for the writer of a pipe */
}

int32_t system_create(const char *path)
{
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

int32_t system_duplicate(int32_t fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

void system_close(int32_t fd)
{
    close(fd);
}

bool system_move(const char *from, const char *to)
{
    return !rename(from, to);
}

void system_delete(const char *path)
{
    unlink(path);
}

int64_t system_size(int32_t fd)
{
    int64_t at = lseek(fd, 0, SEEK_CUR);
    if (at < 0)
        return -1;
    int64_t size = lseek(fd, 0, SEEK_END);
    lseek(fd, at, SEEK_SET);
    return size;
}

void *system_map(int32_t fd, uint64_t at, uint64_t size)
{
    void *base = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, (off_t)at);
    return base == MAP_FAILED ? NULL : base;
}

void system_unmap(void *base, uint64_t size)
{
    munmap(base, size);
}

int64_t system_read_at(int32_t fd, void *to, uint64_t size, uint64_t at)
{
    return pread(fd, to, size, (off_t)at);
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

double thread_seconds(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

void sleep_seconds(double seconds)
{
    if (!(seconds > 0)) /* or NaN */
        return;
    double most = 1e9, whole = seconds < most ? seconds : most;
    struct timespec rest = {(time_t)whole, 0};
    rest.tv_nsec = (long)((whole - (double)rest.tv_sec) * 1e9);
    while (nanosleep(&rest, &rest)) /* interrupted by a signal */
        ;
}

/* ---- processes and threads --------------------------------------------------------------------------------------- */

int64_t process_id(void)
{
    return getpid();
}

_Static_assert(sizeof(pthread_t) <= sizeof(uint64_t), "worker.handle holds it");

static void *begin_worker(void *argument)
{
    worker *thread = argument;
    system_place_worker(thread->cpu_mask);
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

#endif
