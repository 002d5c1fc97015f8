/* What the files of the GPU pass know of each other:
 *
 *     gpu_device.c  the device: which driver has it, and what they share
 *     metal.c       by Metal, on Apple's systems, with metal.h; others have the next three
 *     opencl.c      by OpenCL: its library, kernels, buffers; runs the dispatches of section GPU
 *     webgpu.c      the same by webgpu.h, but for kernels
 *     webgpu_kernels.c  those
 *     gpu_rows.c    KV rows in its memory
 *     gpu_pass.c    tokens in, logits out
 *     gpu_adapter.c LoRA adapters
 *     gpu_race.c    whether the GPU or the CPU answers sooner
 *     gpu_cache.c   files in the app's cache folder
 *     gpu_system.c  the driver's library, and the system's version
 */
#ifndef EDGE_GPU_H
#define EDGE_GPU_H

#include "base.h"
#include "accelerator.h"
#include "hash.h"
#include "model.h"
#include "rows.h"

#if defined(__APPLE__) || defined(EDGE_METAL) /* tests define it on Linux */
#define GPU_BY_METAL
#endif

typedef struct gpu gpu;

/* Rows of an arena in buffers of the device, in the layout of backends/tvm/gpu/design.py: keys in tiles of 16 rows, by units
 * of 16 bytes, values row by row, and for integers the scales of both. */
typedef struct {
    rows_device device; /* the first member, by which rows.c knows it */
    gpu *gpu;
    uint32_t number, count, row_bytes, coded; /* of the arenas; rows; bytes of a key, here and as rows_save has it */
    uint32_t scale;                          /* bytes of a scale; 0: there is none */
    kv_rows converter;                       /* one tile in the process, for keys in float32 */
    /* Rows that wait to be written, and pairs of rows that wait to be moved: never both. */
    uint32_t staged, moved;
    enum gpu_which { MOVED_KEYS = 1, MOVED_VALUES, MOVED_ROWS } which; /* of what is staged */
    int32_t *pairs;                          /* [most_moved][2] */
    uint8_t *keys, *values;                  /* [staged] */
    float *scales;                           /* [staged][2] */
    /* The tile that was read last, from the device. */
    int64_t tile;                            /* -1: none */
    bool with_values;
    uint8_t *tile_keys, *tile_values, *row;  /* row: as rows_save has it */
    float *tile_scales;
} gpu_arena;

/* A driver. Its state is a struct of its own, `g->own`. After a failure, which `g->failure` keeps, its functions do nothing. */
typedef struct {
    const char *name; /* of its interface */
    void *(*layout)(arena *from, const gpu_config *config); /* its state */
    bool (*load)(gpu *g); /* loads its library; false: there is none */
    /* Finds a device, sets its name, and makes kernels and buffers. cache: folder for compiled kernels; NULL: none.
     * software: a device that runs on the CPU will do. */
    edge_status (*open)(gpu *g, const char *cache, bool software, edge_error *error);
    void (*close)(gpu *g); /* also after `open` has failed; resets its state */
    void (*write)(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait);
    void (*read)(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size); /* waits for all work before */
    void (*run)(gpu *g, uint32_t first, uint32_t count, uint32_t tokens); /* submits dispatches, by their numbers */
    void (*wait)(gpu *g);                                                 /* for all that was submitted */
} gpu_driver;
extern const gpu_driver METAL, OPENCL, WEBGPU;
enum { MOST_DRIVERS = 2 }; /* of a system */

struct gpu {
    accelerator base;
    const edge_model *model;
    const gpu_config *config;
    const uint8_t *section;
    const gpu_driver *driver;             /* NULL: none is open */
    void *own;                            /* its state */
    void *states[MOST_DRIVERS];           /* of all drivers */
    void **kernels, **buffers;            /* handles of the driver, by their numbers */
    int32_t failure;                      /* code of the driver's first error; 0: none */
    char failed_by[96];                   /* the same in words */
    uint64_t bytes;                       /* of all buffers */
    const volatile int32_t *cancelled;
    uint32_t sent;                        /* dispatches of a chunk that are submitted together */
    char name[64], version[256];          /* of the device, and of its driver */
    uint32_t library;                     /* version of WebGPU's library; 0: another interface */
    gpu_arena arenas[2];
    uint32_t *tables;                     /* the device's, up to its angles */
    float *angles, *temperatures, *inputs;
    int32_t *positions;                   /* as the device has them */
    int64_t first_angle;                  /* RoPE position of the first row of the device's angles */
    uint32_t known_angles;                /* rows of them */
    bool lengthened;                      /* they have LongRoPE's long factors */
    uint8_t *changed;                     /* [adapted]: 1: the adapter changes this matrix */
    bool *skipped;                        /* [dispatches]: drivers leave them out */
};

/* gpu_device.c */
enum { FAILED = 1, LOST = 1000, LATE, REFUSED }; /* codes of failures beside the drivers' own; REFUSED: it stays so */
/* Keeps the first failure, by its code, not 0, and the first line of text that says something; NULL: the code says it. */
void gpu_fail(gpu *g, int32_t code, const char *text, size_t length);
uint64_t largest_buffer(const gpu *g); /* bytes */
void load_weights(gpu *g, uint32_t number, const gpu_buffer *buffer); /* from the mapped file, of whose pages none stays */
void gpu_write(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait);
void gpu_read(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size);
bool gpu_dispatch(gpu *g, enum gpu_passes which, uint32_t tokens); /* false: *cancelled */
/* Another device than a GPU only if the app has asked for the engine. */
edge_status gpu_open(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
void gpu_close(gpu *g);
void gpu_layout_drivers(arena *from, gpu *g);

/* gpu_rows.c */
void arena_layout(arena *from, gpu_arena *rows, const edge_model *model, uint32_t number);
void arena_flush(gpu_arena *rows);  /* what waits is on its way */
void arena_forget(gpu_arena *rows); /* the tile that was read: a pass has written rows */
void arena_normals(gpu_arena *rows); /* sends those of the reflections of its heads' keys, if there are any */

/* gpu_adapter.c */
uint64_t adapter_bytes(const accelerator *a); /* size of the part of a file that is for GPUs */
void choose_dispatches(gpu *g);       /* sets `skipped` by `changed` */
bool read_gpu_adapter(accelerator *a, adapter_source in, void *from, float scale, bool *finite);

/* gpu_cache.c. A file is read into mapped memory; it is written up to `at`, from memory with 32 bytes more. */
enum { MOST_KEPT = 64 << 20 };
typedef struct { uint8_t *data; uint64_t size, at; } kept_file;
bool kept_path(const char *folder, const uint8_t digest[32], const char *suffix, char *path); /* [LONGEST_PATH] */
/* The same for what the device's driver makes of the bundle's kernels in a language, of enum gpu_languages. */
bool kept_kernels(const gpu *g, uint32_t language, const char *folder, const char *suffix, char *path);
void hash_driver(hasher *h, const gpu *g); /* adds the device, and what compiles for it */
void kept_read(const char *path, kept_file *kept); /* size 0: there is none, or it is damaged */
void kept_write(const char *path, kept_file *made);
/* Of a driver that cannot compile the kernels: the failure in its words, and with a file of these REFUSED. */
void keep_failure(const gpu *g, const char *path);
void fail_as_before(gpu *g, const char *path);

/* webgpu.c */
#ifdef GPU_BY_METAL
static inline uint32_t webgpu_version(void) { return 0; }
#else
uint32_t webgpu_version(void); /* of the library that the app brings; 0: none, 1: unknown */
#endif

/* gpu_system.c */
void *metal_library(void);  /* NULL: there is none */
void *opencl_library(void); /* likewise */
bool webgpu_library(void **library); /* the app's, which may be NULL, for the whole process; false: there is none */
void *gpu_function(void *library, const char *name);
bool hash_system(hasher *h); /* adds its version; false: it does not tell */

/* Of a dispatch over so many tokens, the workgroups of the second axis. */
static inline uint32_t rows_of_groups(const gpu_dispatch_config *each, uint32_t tokens)
{
    return each->per ? (tokens + each->per - 1) / each->per : each->groups[1];
}

/* gpu_pass.c */
static inline const void *gpu_table(const gpu *g, uint32_t at)
{
    return g->section + at;
}

#endif
