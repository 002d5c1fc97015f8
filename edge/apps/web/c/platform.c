/* runtime/system/system.h for a WebAssembly module.
 *
 * Memory only grows, up to the host's limit, so that freed blocks are kept for reuse. Threads are workers of the host,
 * which wait in web_thread until start_worker gives them work. map_file finds model.edge in memory; every file descriptor
 * stands for the state or adapter that the host reads or writes. */
#include <string.h>

#include "bundle.h"
#include "platform.h"
#include "system.h"

__attribute__((import_module("env"), import_name("now"))) double host_now(void);
__attribute__((import_module("env"), import_name("random"))) int32_t host_random(void);
__attribute__((import_module("env"), import_name("write"))) int32_t host_write(const void *from, uint32_t size);
__attribute__((import_module("env"), import_name("row"))) int32_t host_row(double at, void *to, uint32_t size);
__attribute__((import_module("env"), import_name("read"))) int32_t host_read(void *to, uint32_t size);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { ALIGNMENT = 64, PAGE = 65536 };
typedef struct block { struct block *next; size_t size; } block;
static block *unused;          /* free blocks, by address; adjacent ones are joined */
static uintptr_t end, written; /* end of allocated memory; high-water mark of dirty memory */
extern uint8_t __heap_base;    /* set by the linker: end of the module's own data */

static uint64_t memory_bytes(void)
{
    return (uint64_t)__builtin_wasm_memory_size(0) * PAGE;
}

/* Grows the memory to `limit` bytes. */
static bool reach(uint64_t limit)
{
    uint64_t have = memory_bytes();
    return limit <= have || __builtin_wasm_memory_grow(0, (size_t)((limit - have + PAGE - 1) / PAGE)) != SIZE_MAX;
}

static size_t whole_blocks(uint64_t size)
{
    return (size_t)((size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static void *take_unused(size_t size)
{
    for (block **link = &unused; *link; link = &(*link)->next) {
        block *found = *link;
        if (found->size < size)
            continue;
        if (found->size == size) {
            *link = found->next;
        } else {
            block *rest = (block *)((uintptr_t)found + size);
            *rest = (block){found->next, found->size - size};
            *link = rest;
        }
        return memset(found, 0, size);
    }
    return NULL;
}

void *map_memory(uint64_t wanted)
{
    if (!wanted || wanted > SIZE_MAX - ALIGNMENT)
        return NULL;
    size_t size = whole_blocks(wanted);
    void *found = take_unused(size);
    if (found)
        return found;
    if (!end)
        end = written = ((uintptr_t)&__heap_base + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    uint64_t limit = (uint64_t)end + size;
    if (!reach(limit) || limit > SIZE_MAX)
        return NULL;
    found = (void *)end;
    if (end < written)
        memset(found, 0, size < written - end ? size : written - end);
    end = (uintptr_t)limit;
    written = written > end ? written : end;
    return found;
}

void unmap_memory(void *memory, uint64_t used)
{
    if (!memory || !used)
        return;
    size_t size = whole_blocks(used);
    block *freed = memory, **link = &unused, *before = NULL;
    while (*link && *link < freed) {
        before = *link;
        link = &before->next;
    }
    *freed = (block){*link, size};
    *link = freed;
    if (freed->next && (uintptr_t)freed + size == (uintptr_t)freed->next)
        *freed = (block){freed->next->next, size + freed->next->size};
    if (before && (uintptr_t)before + before->size == (uintptr_t)freed) {
        *before = (block){freed->next, before->size + freed->size};
        freed = before;
    }
    if ((uintptr_t)freed + freed->size != end)
        return;
    end = (uintptr_t)freed; /* the last block becomes unallocated memory */
    for (link = &unused; *link != freed; link = &(*link)->next)
        ;
    *link = NULL;
}

void release_memory(void *memory, size_t size)
{
    memset(memory, 0, size);
}

void forget_memory(const void *memory, size_t size)
{
    (void)memory, (void)size;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* source->offset: an address. */
edge_status map_file(const edge_source *source, mapping *file, edge_error *error)
{
    memset(file, 0, sizeof *file);
    if (source->path || !source->length || source->offset > memory_bytes()
        || source->length > memory_bytes() - source->offset)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is not in the module's memory");
    const file_header *header = (const file_header *)(uintptr_t)source->offset;
    bool resident = source->length >= sizeof *header && header->resident == source->length; /* all but a table of embeddings */
    *file = (mapping){.data = (const uint8_t *)header, .size = resident ? header->size : source->length};
    return EDGE_OK;
}

bool read_file(const mapping *file, uint64_t at, void *to, uint64_t size)
{
    (void)file;
    return host_row((double)at, to, (uint32_t)size) == (int32_t)size;
}

void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    *anonymous = *swapped = 0; /* a page has no process of its own */
}

int64_t process_id(void)
{
    return 1;
}

void unmap_file(mapping *file)
{
    memset(file, 0, sizeof *file);
}

int64_t read_fd(int32_t fd, void *to, uint64_t size)
{
    (void)fd;
    return host_read(to, (uint32_t)size);
}

int64_t write_fd(int32_t fd, const void *from, uint64_t size)
{
    (void)fd;
    return host_write(from, (uint32_t)size) < 0 ? -1 : (int64_t)size;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

/* Waits until `*word` differs from `value`, a wake, or the timeout; a negative timeout is none. Never inline: V8's baseline
 * compiler (11.3, in Node 20) loses local variables at this instruction. */
__attribute__((noinline)) static int32_t wait_on(int32_t *word, int32_t value, int64_t nanoseconds)
{
    return __builtin_wasm_memory_atomic_wait32(word, value, nanoseconds);
}

int32_t edge_doze(int32_t *word, int32_t value)
{
    return wait_on(word, value, -1);
}

int32_t edge_wake(int32_t *word)
{
    return (int32_t)__builtin_wasm_memory_atomic_notify(word, UINT32_MAX);
}

/* ---- clocks ------------------------------------------------------------------------------------------------------ */

static double spent, since; /* CPU seconds of all threads; beginning of the present call */
static bool running;

double now_seconds(void)
{
    return host_now();
}

/* All threads work or spin while the first thread works. */
static double spent_since(void)
{
    return running ? (host_now() - since) * (1 + working_threads()) : 0;
}

double cpu_seconds(void)
{
    return spent + spent_since();
}

double thread_seconds(void)
{
    return host_now(); /* unknown to pages */
}

void count_cpu(bool begins)
{
    spent += spent_since();
    running = begins;
    since = host_now();
}

void sleep_seconds(double seconds)
{
    if (!(seconds > 0)) /* or NaN */
        return;
    double most = 1e9;
    int32_t never = 0;
    bool was_running = running;
    count_cpu(false);
    wait_on(&never, 0, (int64_t)((seconds < most ? seconds : most) * 1e9));
    count_cpu(was_running);
}

uint64_t random_seed(void)
{
    uint64_t high = (uint32_t)host_random();
    return high << 32 | (uint32_t)host_random();
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

enum { ABSENT, WAITING, WORKING, LEAVING };
typedef struct { int32_t state; void *(*work)(void *); void *argument; } seat;
static seat seats[WEB_MOST_THREADS]; /* by thread, from 1 on */

static uint32_t count_seats(int32_t state)
{
    uint32_t count = 0;
    for (uint32_t i = 1; i < WEB_MOST_THREADS; i++)
        count += __atomic_load_n(&seats[i].state, __ATOMIC_ACQUIRE) == state;
    return count;
}

uint32_t waiting_threads(void)
{
    return count_seats(WAITING);
}

uint32_t working_threads(void)
{
    return count_seats(WORKING);
}

static void set_state(seat *own, int32_t state)
{
    __atomic_store_n(&own->state, state, __ATOMIC_SEQ_CST);
    edge_wake(&own->state);
}

void sit_down(uint32_t number)
{
    if (!number || number >= WEB_MOST_THREADS)
        return;
    seat *own = seats + number;
    for (set_state(own, WAITING);;) {
        int32_t state = __atomic_load_n(&own->state, __ATOMIC_SEQ_CST);
        if (state == LEAVING)
            break;
        if (state == WORKING) {
            own->work(own->argument);
            set_state(own, WAITING);
        } else {
            edge_doze(&own->state, WAITING);
        }
    }
    set_state(own, ABSENT);
}

void dismiss_threads(void)
{
    for (uint32_t i = 1; i < WEB_MOST_THREADS; i++)
        if (__atomic_load_n(&seats[i].state, __ATOMIC_ACQUIRE) == WAITING)
            set_state(seats + i, LEAVING);
}

/* Returns false if no thread waits for work, so that no call blocks for a missing thread. */
bool start_worker(worker *thread, void *(*work)(void *), void *argument, uint64_t cpu_mask)
{
    for (uint32_t i = 1; i < WEB_MOST_THREADS; i++) {
        if (__atomic_load_n(&seats[i].state, __ATOMIC_ACQUIRE) != WAITING)
            continue;
        *thread = (worker){i, work, argument, cpu_mask};
        seats[i].work = work;
        seats[i].argument = argument;
        set_state(seats + i, WORKING);
        return true;
    }
    return false;
}

void join_worker(worker *thread)
{
    seat *other = seats + thread->handle;
    while (__atomic_load_n(&other->state, __ATOMIC_SEQ_CST) == WORKING)
        edge_doze(&other->state, WORKING);
}

bool bind_thread(uint64_t cpu_mask, cpu_binding *before)
{
    (void)cpu_mask, (void)before;
    return false;
}

void unbind_thread(const cpu_binding *before)
{
    (void)before;
}

/* ---- the CPU ----------------------------------------------------------------------------------------------------- */

/* Threads of the host for this model. */
uint32_t fastest_cores(void)
{
    return 1 + waiting_threads() + working_threads();
}

/* A module has one instruction set, and the host has loaded it. */
bool runs_isa(const char *name)
{
    return !strcmp(name, EDGE_PASSES[0].isa);
}
