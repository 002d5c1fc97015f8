/* What the runtime takes from the system, and how the system's files divide it:
 *
 *     platform.c             what systems share: parts of files, whole pages
 *     posix.c                Linux, Android, macOS, iOS
 *     linux.c    apple.c     the rest of each
 *     windows.c              all of Windows
 *     cpu.c                  instruction sets
 *
 * A page's module has its own (web/c/platform.c).
 */
#ifndef EDGE_SYSTEM_H
#define EDGE_SYSTEM_H

#include "base.h"

/* Without malloc, stdio, errno and thread-local variables, whose ABIs differ between C libraries. */
void *map_memory(uint64_t size);                   /* zeros, whose pages become resident when they are written; NULL */
void unmap_memory(void *memory, uint64_t size);
void release_memory(void *memory, size_t size);   /* whole pages become zeros and are given back */
void forget_memory(const void *memory, size_t size); /* whole pages of a mapped file are given back until next read */
/* fd: of the file, its own, on Windows a handle; end: where `data` ends in it. */
typedef struct { const uint8_t *data; uint64_t size; void *base; size_t mapped; int32_t fd; uint64_t end; } mapping;
edge_status map_file(const edge_source *source, mapping *file, edge_error *error);
bool file_is_whole(const mapping *file);          /* false: it was cut short; reading what is gone ends the process */
bool read_file(const mapping *file, uint64_t at, void *to, uint64_t size); /* without mapping; false: it was cut short */
void unmap_file(mapping *file);
int64_t read_fd(int32_t fd, void *to, uint64_t size);      /* bytes, less than `size` at the end of a file; -1 */
int64_t write_fd(int32_t fd, const void *from, uint64_t size);
enum { LONGEST_PATH = 1024 };
bool replace_file(const char *path, const void *data, uint64_t size); /* whole, or not at all; false: not */
double now_seconds(void);                         /* monotonic */
double cpu_seconds(void);                         /* of this process */
double thread_seconds(void);                      /* of the calling thread, or the clock's where systems do not tell */
void sleep_seconds(double seconds);
uint64_t random_seed(void);
int64_t process_id(void);
/* Bytes of the process that no file backs: in memory, and in swap space. 0 where the system does not tell. */
void private_bytes(uint64_t *anonymous, uint64_t *swapped);
typedef struct { uint64_t handle; void *(*work)(void *); void *argument; uint64_t cpu_mask; } worker; /* stays put */
bool start_worker(worker *thread, void *(*work)(void *), void *argument, uint64_t cpu_mask); /* mask 0: any CPU */
void join_worker(worker *thread);
/* Binds the calling thread to CPUs; false: it is where it was. Otherwise `unbind_thread` takes it back there. */
typedef struct { uint64_t bits[16]; } cpu_binding;
bool bind_thread(uint64_t cpu_mask, cpu_binding *before);
void unbind_thread(const cpu_binding *before);
/* Called by compiled passes: sleep while *word == value (may return early), and wake all who sleep there. The word is the
 * first of a line that was zero and prepared. */
void prepare_line(int32_t line[LINE]);
int32_t edge_doze(int32_t *word, int32_t value);
int32_t edge_wake(int32_t *word);
int64_t edge_now(void); /* pass.c has both, for them, too */
int64_t edge_worked(void);

uint32_t fastest_cores(void); /* physical ones that are worth using, at least 1 */

/* ---- cpu.c ------------------------------------------------------------------------------------------------------- */

bool runs_isa(const char *name); /* avx512vnni, avxvnni, avx2, i8mm, dotprod, neon */

/* ---- for platform.c, of each system ------------------------------------------------------------------------------ */

uint64_t system_page_size(void);
uint64_t system_mapping_step(void); /* a part of a file is mapped from a multiple of it on */
void system_clear(void *first, uint64_t size);
void system_forget(void *first, uint64_t size);
int32_t system_open(const char *path);        /* for reading; -1 */
int32_t system_create(const char *path);      /* that is not there, for writing; -1 */
int32_t system_duplicate(int32_t fd);         /* -1 */
void system_close(int32_t fd);
bool system_move(const char *from, const char *to); /* in the place of another one */
void system_delete(const char *path);
int64_t system_size(int32_t fd);              /* whose position stays; -1 for what has none, such as a pipe */
void *system_map(int32_t fd, uint64_t at, uint64_t size); /* for reading; NULL */
void system_unmap(void *base, uint64_t size);
int64_t system_read_at(int32_t fd, void *to, uint64_t size, uint64_t at); /* bytes, perhaps fewer; 0 at the end; -1 */
int64_t system_read(int32_t fd, void *to, uint64_t size);            /* the same from its position on */
int64_t system_write(int32_t fd, const void *from, uint64_t size);   /* -1 */
bool system_random(uint64_t *value);

/* ---- for posix.c, of Linux and Apple's systems ------------------------------------------------------------------- */

void system_place_worker(uint64_t cpu_mask); /* the calling thread, which has just begun */

#endif
