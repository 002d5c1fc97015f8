/* Windows 8 and later. A file descriptor is a handle, whose lower 32 bits are significant; paths are UTF-8. */
#ifdef _WIN32
#define _WIN32_WINNT 0x0602
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <ntsecapi.h>
#include <psapi.h>
#include <string.h>

#include "system.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static SYSTEM_INFO about_system(void)
{
    SYSTEM_INFO about;
    GetSystemInfo(&about);
    return about;
}

uint64_t system_page_size(void)
{
    return about_system().dwPageSize;
}

void *map_memory(uint64_t size)
{
    return VirtualAlloc(NULL, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void unmap_memory(void *memory, uint64_t size)
{
    (void)size;
    if (memory)
        VirtualFree(memory, 0, MEM_RELEASE);
}

void system_clear(void *first, uint64_t size)
{
    if (VirtualFree(first, size, MEM_DECOMMIT))
        while (!VirtualAlloc(first, size, MEM_COMMIT, PAGE_READWRITE)) /* another process has just taken the last memory */
            Sleep(1);
}

void system_forget(void *first, uint64_t size)
{
    VirtualUnlock(first, size); /* removes pages that are not locked from the working set */
}

void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    PROCESS_MEMORY_COUNTERS counters;
    bool told = GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters);
    *anonymous = told ? counters.PagefileUsage : 0; /* commit charge, resident or not */
    *swapped = 0;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static HANDLE handle_of(int32_t fd)
{
    return (HANDLE)(intptr_t)fd;
}

static int32_t fd_of(HANDLE handle) /* INVALID_HANDLE_VALUE is -1 */
{
    return (int32_t)(intptr_t)handle;
}

typedef struct { wchar_t text[LONGEST_PATH + 33]; } wide_path;

/* Returns false if the path is too long or not UTF-8. */
static bool widen(const char *path, wide_path *wide)
{
    return MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide->text,
                               sizeof wide->text / sizeof wide->text[0]) > 0;
}

int32_t system_open(const char *path)
{
    wide_path wide;
    if (!widen(path, &wide))
        return -1;
    DWORD shared = FILE_SHARE_READ | FILE_SHARE_DELETE;
    return fd_of(CreateFileW(wide.text, GENERIC_READ, shared, NULL, OPEN_EXISTING, 0, NULL));
}

int32_t system_create(const char *path)
{
    wide_path wide;
    return widen(path, &wide) ? fd_of(CreateFileW(wide.text, GENERIC_WRITE, 0, NULL, CREATE_NEW, 0, NULL)) : -1;
}

int32_t system_duplicate(int32_t fd)
{
    HANDLE own, process = GetCurrentProcess();
    return DuplicateHandle(process, handle_of(fd), process, &own, 0, FALSE, DUPLICATE_SAME_ACCESS) ? fd_of(own) : -1;
}

void system_close(int32_t fd)
{
    CloseHandle(handle_of(fd));
}

bool system_move(const char *from, const char *to)
{
    wide_path source, target;
    return widen(from, &source) && widen(to, &target)
        && MoveFileExW(source.text, target.text, MOVEFILE_REPLACE_EXISTING);
}

void system_delete(const char *path)
{
    wide_path wide;
    if (widen(path, &wide))
        DeleteFileW(wide.text);
}

int64_t system_size(int32_t fd)
{
    LARGE_INTEGER size;
    bool told = GetFileType(handle_of(fd)) == FILE_TYPE_DISK && GetFileSizeEx(handle_of(fd), &size);
    return told ? size.QuadPart : -1;
}

uint64_t system_mapping_step(void)
{
    return about_system().dwAllocationGranularity;
}

void *system_map(int32_t fd, uint64_t at, uint64_t size)
{
    HANDLE section = CreateFileMappingW(handle_of(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    if (!section)
        return NULL;
    void *base = MapViewOfFile(section, FILE_MAP_READ, (DWORD)(at >> 32), (DWORD)at, size);
    CloseHandle(section); /* the view keeps the section */
    return base;
}

void system_unmap(void *base, uint64_t size)
{
    (void)size;
    UnmapViewOfFile(base);
}

static int64_t read_from(int32_t fd, void *to, uint64_t size, OVERLAPPED *place)
{
    DWORD count = 0, wanted = size < UINT32_MAX ? (DWORD)size : UINT32_MAX;
    if (ReadFile(handle_of(fd), to, wanted, &count, place))
        return count;
    DWORD problem = GetLastError();
    return problem == ERROR_HANDLE_EOF || problem == ERROR_BROKEN_PIPE ? 0 : -1;
}

int64_t system_read_at(int32_t fd, void *to, uint64_t size, uint64_t at)
{
    OVERLAPPED place = {.Offset = (DWORD)at, .OffsetHigh = (DWORD)(at >> 32)};
    return read_from(fd, to, size, &place);
}

int64_t system_read(int32_t fd, void *to, uint64_t size)
{
    return read_from(fd, to, size, NULL);
}

int64_t system_write(int32_t fd, const void *from, uint64_t size)
{
    DWORD count = 0, wanted = size < UINT32_MAX ? (DWORD)size : UINT32_MAX;
    return WriteFile(handle_of(fd), from, wanted, &count, NULL) ? (int64_t)count : -1;
}

/* ---- clocks and seeds -------------------------------------------------------------------------------------------- */

double now_seconds(void)
{
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    return (double)count.QuadPart / (double)rate.QuadPart;
}

static double seconds_of(FILETIME time)
{
    return 1e-7 * (double)((uint64_t)time.dwHighDateTime << 32 | time.dwLowDateTime);
}

double cpu_seconds(void)
{
    FILETIME began, ended, system, own;
    if (!GetProcessTimes(GetCurrentProcess(), &began, &ended, &system, &own))
        return 0;
    return seconds_of(system) + seconds_of(own);
}

double thread_seconds(void)
{
    return now_seconds(); /* GetThreadTimes has steps of 15 ms */
}

void sleep_seconds(double seconds)
{
    if (!(seconds > 0)) /* or NaN */
        return;
    double end = now_seconds() + (seconds < 1e9 ? seconds : 1e9), rest = seconds;
    for (; rest > 0; rest = end - now_seconds())
        Sleep(rest < 1000 ? (DWORD)(rest * 1000) + 1 : 1000000);
}

bool system_random(uint64_t *value)
{
    return RtlGenRandom(value, sizeof *value);
}

/* ---- processes and threads --------------------------------------------------------------------------------------- */

int64_t process_id(void)
{
    return GetCurrentProcessId();
}

/* Binds the calling thread to the CPUs of the mask that exist. Returns its previous CPUs; 0: the binding is unchanged. */
static DWORD_PTR bind_to(uint64_t cpu_mask)
{
    DWORD_PTR own, all;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all) || !(own & cpu_mask))
        return 0;
    return SetThreadAffinityMask(GetCurrentThread(), own & cpu_mask);
}

/* Runs the calling thread at full speed also where the app is in the background (EcoQoS; ThreadPowerThrottling, which older
 * headers and versions of Windows lack). */
static void run_at_full_speed(void)
{
    struct { ULONG version, controlled, on; } execution_speed = {1, 1, 0};
    SetThreadInformation(GetCurrentThread(), (THREAD_INFORMATION_CLASS)3, &execution_speed, sizeof execution_speed);
}

static DWORD WINAPI begin_worker(void *argument)
{
    worker *thread = argument;
    bind_to(thread->cpu_mask);
    run_at_full_speed();
    thread->work(thread->argument);
    return 0;
}

bool start_worker(worker *thread, void *(*work)(void *), void *argument, uint64_t cpu_mask)
{
    *thread = (worker){0, work, argument, cpu_mask};
    thread->handle = (uint64_t)(uintptr_t)CreateThread(NULL, 0, begin_worker, thread, 0, NULL);
    return thread->handle != 0;
}

void join_worker(worker *thread)
{
    HANDLE handle = (HANDLE)(uintptr_t)thread->handle;
    WaitForSingleObject(handle, INFINITE);
    CloseHandle(handle);
}

bool bind_thread(uint64_t cpu_mask, cpu_binding *before)
{
    before->bits[0] = bind_to(cpu_mask);
    return before->bits[0] != 0;
}

void unbind_thread(const cpu_binding *before)
{
    SetThreadAffinityMask(GetCurrentThread(), before->bits[0]);
}

uint32_t fastest_cores(void)
{
    static const size_t HEAD = offsetof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX, Processor);
    uint64_t memory[4096]; /* each core needs a few words */
    DWORD size = sizeof memory, at = 0;
    DWORD_PTR own, all;
    uint32_t count = 0;
    BYTE best = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all)
        || !GetLogicalProcessorInformationEx(RelationProcessorCore, (void *)memory, &size))
        return 1;
    while (at + HEAD + sizeof(PROCESSOR_RELATIONSHIP) <= size) {
        const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *core = (const void *)((const char *)memory + at);
        const GROUP_AFFINITY *cpus = core->Processor.GroupMask;
        BYTE speed = (&core->Processor.Flags)[1]; /* EfficiencyClass, which MinGW's older headers lack */
        at += core->Size;
        if (cpus->Group || !(cpus->Mask & own) || speed < best)
            continue;
        count = speed > best ? 1 : count + 1;
        best = speed;
    }
    return count ? count : 1;
}

/* ---- sleeping and waking ----------------------------------------------------------------------------------------- */

int32_t edge_doze(int32_t *word, int32_t value)
{
    return WaitOnAddress(word, &value, sizeof value, INFINITE);
}

int32_t edge_wake(int32_t *word)
{
    WakeByAddressAll(word);
    return 0;
}

#endif
