/* The system: memory, files, clocks, threads, CPUs. Files that implement it:
 *
 *     platform.c             common to all systems: whole pages, parts of files
 *     posix.c                Linux, Android, macOS, iOS
 *     linux.c    apple.c     the rest of each
 *     windows.c              all of Windows
 *     cpu.c                  instruction sets
 *
 * In a web page, web/c/platform.c replaces all of them.
 */
#ifndef EDGE_SYSTEM_H
#define EDGE_SYSTEM_H

#include "base.h"

/* The runtime uses no malloc, stdio, errno or thread-local variables, whose ABIs differ between C libraries. */
void *map_memory(uint64_t size);                   /* zeros; a page becomes resident when it is written. NULL: no memory */
void unmap_memory(void *memory, uint64_t size);
void release_memory(void *memory, size_t size);   /* returns whole pages to the system; they become zeros */
void forget_memory(const void *memory, size_t size); /* drops whole pages of a mapped file until they are read again */
/* A mapped part of a file. fd: a duplicate, on Windows a handle; end: offset in the file of the end of `data`. */
typedef struct { const uint8_t *data; uint64_t size; void *base; size_t mapped; int32_t fd; uint64_t end; } mapping;
edge_status map_file(const edge_source *source, mapping *file, edge_error *error);
bool read_file(const mapping *file, uint64_t at, void *to, uint64_t size); /* without mapping; false: cut short */
void unmap_file(mapping *file);
int64_t read_fd(int32_t fd, void *to, uint64_t size);      /* returns bytes, fewer only at the end; -1: error */
int64_t write_fd(int32_t fd, const void *from, uint64_t size); /* returns `size`; -1: error */
enum { LONGEST_PATH = 1024 };
bool replace_file(const char *path, const void *data, uint64_t size); /* atomically; false: the file is unchanged */
double now_seconds(void);                         /* monotonic */
double cpu_seconds(void);                         /* CPU seconds of this process */
double thread_seconds(void);                      /* CPU seconds of the calling thread; where unknown, now_seconds */
void sleep_seconds(double seconds);
uint64_t random_seed(void);
int64_t process_id(void);
/* Anonymous bytes of the process in memory and in swap space; 0 where unknown. */
void private_bytes(uint64_t *anonymous, uint64_t *swapped);
typedef struct { uint64_t handle; void *(*work)(void *); void *argument; uint64_t cpu_mask; } worker; /* must not move */
bool start_worker(worker *thread, void *(*work)(void *), void *argument, uint64_t cpu_mask); /* mask 0: any CPU */
void join_worker(worker *thread);
/* Binds the calling thread to CPUs; false: the binding is unchanged. unbind_thread restores it. */
typedef struct { uint64_t bits[16]; } cpu_binding;
bool bind_thread(uint64_t cpu_mask, cpu_binding *before);
void unbind_thread(const cpu_binding *before);
/* Called by compiled passes: sleep while *word == value (may return early), and wake all threads that sleep there. The word
 * is the first of a line, which was zero and then prepared. */
int32_t edge_doze(int32_t *word, int32_t value);
int32_t edge_wake(int32_t *word);
#if defined(__APPLE__) || defined(EDGE_WAIT_ON_ADDRESS)
void prepare_line(int32_t line[LINE]);
#else
static inline void prepare_line(int32_t line[LINE]) { (void)line; }
#endif
/* The calling thread counts in this line. If the system ends the thread, which Linux alone does without ending the process,
 * those who wait for it go on within two seconds. line_owner: the thread's id; 0: not yet, and on other systems. */
#if defined(__linux__) && !defined(EDGE_WAIT_ON_ADDRESS)
void own_line(int32_t line[LINE]);
int32_t line_owner(const int32_t line[LINE]);
bool owner_ended(const int32_t line[LINE]);
#else
static inline void own_line(int32_t line[LINE]) { (void)line; }
static inline int32_t line_owner(const int32_t line[LINE]) { return (void)line, 0; }
static inline bool owner_ended(const int32_t line[LINE]) { return (void)line, false; }
#endif
int64_t edge_now(void); /* nanoseconds of now_seconds, for compiled passes: in pass.c, as the next */
int64_t edge_worked(void); /* nanoseconds of thread_seconds */

uint32_t fastest_cores(void); /* number of physical cores that are worth using, at least 1 */

/* ---- cpu.c ------------------------------------------------------------------------------------------------------- */

bool runs_isa(const char *name); /* whether this CPU runs avx512bf16, avx512vnni, avxvnni, avx2, i8mm, dotprod or neon */

/* ---- for platform.c, of each system ------------------------------------------------------------------------------ */

uint64_t system_page_size(void);
uint64_t system_mapping_step(void); /* offsets of mappings are multiples of it */
void system_clear(void *first, uint64_t size);  /* as release_memory, of whole pages */
void system_forget(void *first, uint64_t size); /* as forget_memory, of whole pages */
int32_t system_open(const char *path);        /* for reading; -1: error, as in the next two */
int32_t system_create(const char *path);      /* a new file, for writing */
int32_t system_duplicate(int32_t fd);
void system_close(int32_t fd);
bool system_move(const char *from, const char *to); /* replaces `to` */
void system_delete(const char *path);
int64_t system_size(int32_t fd);              /* keeps the position; -1: not a regular file, such as a pipe */
void *system_map(int32_t fd, uint64_t at, uint64_t size); /* for reading; NULL */
void system_unmap(void *base, uint64_t size);
int64_t system_read_at(int32_t fd, void *to, uint64_t size, uint64_t at); /* returns bytes, perhaps fewer; 0: end; -1: error */
int64_t system_read(int32_t fd, void *to, uint64_t size);            /* the same at the file's position */
#ifdef __wasm__
static inline bool file_is_whole(const mapping *file) { return (void)file, true; }
#else
static inline bool file_is_whole(const mapping *file) /* false: cut short; reading the lost part ends the process */
{
    uint8_t last;
    return !file->base || system_read_at(file->fd, &last, 1, file->end - 1) != 0;
}
#endif
int64_t system_write(int32_t fd, const void *from, uint64_t size);   /* returns bytes; -1: error */
bool system_random(uint64_t *value);

/* ---- for posix.c, of Linux and Apple's systems ------------------------------------------------------------------- */

void system_place_worker(uint64_t cpu_mask); /* called by each new thread */

#endif
