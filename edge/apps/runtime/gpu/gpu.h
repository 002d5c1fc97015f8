/* A GPU as an accelerator, which runs the dispatches of section GPU:
 *
 *     gpu_pass.c    the pass: tokens in, logits out
 *     gpu_rows.c    KV rows in the GPU's memory
 *     gpu_adapter.c LoRA adapters
 *     gpu_device.c  the choice of a driver, and code that all drivers use
 *     metal.c       the driver of Apple's systems; others have the next two
 *     opencl.c      OpenCL
 *     webgpu.c      WebGPU, with webgpu_kernels.c
 *     gpu_cache.c   files in the app's cache folder
 *     gpu_system.c  libraries of drivers, and the system's version
 *     gpu_race.c    the faster of GPU and CPU
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

/* An arena of KV rows in buffers of the device, laid out as in backends/tvm/gpu/design.py: keys in tiles of 16 rows, by
 * units of 16 bytes; values row by row; for integers the scales of both. */
typedef struct {
    rows_device device; /* first, for rows.c */
    gpu *gpu;
    uint32_t number, count, row_bytes, coded; /* of the arena; rows; bytes of a key here, and in rows_save */
    uint32_t scale;                          /* bytes of a scale; 0: none */
    kv_rows converter;                       /* one tile in the process, to encode and decode keys */
    /* Rows to write or pairs of rows to move, which are deferred; never both. */
    uint32_t staged, moved;
    enum gpu_which { MOVED_KEYS = 1, MOVED_VALUES, MOVED_ROWS } which; /* parts of the staged rows to write */
    int32_t *pairs;                          /* [most_moved][2] */
    uint8_t *keys, *values;                  /* [staged] */
    float *scales;                           /* [staged][2] */
    /* The tile that was read last. */
    int64_t tile;                            /* -1: none */
    bool with_values;
    uint8_t *tile_keys, *tile_values, *row;  /* row: as rows_save writes it */
    float *tile_scales;
} gpu_arena;

/* A driver. Its state is a struct of its own, `g->own`. After a failure, which `g->failure` keeps, its functions do
 * nothing. */
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
enum { FAILED = 1, LOST = 1000, LATE, REFUSED }; /* codes of failures beside the drivers' own; REFUSED: permanent */
/* Keeps the first failure: its code, not 0, and the first meaningful line of `text`. text NULL: the code alone. */
void gpu_fail(gpu *g, int32_t code, const char *text, size_t length);
uint64_t largest_buffer(const gpu *g); /* bytes */
void load_weights(gpu *g, uint32_t number, const gpu_buffer *buffer); /* from the mapped file, whose pages are dropped */
void gpu_write(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait);
void gpu_read(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size);
bool gpu_dispatch(gpu *g, enum gpu_passes which, uint32_t tokens); /* false: *cancelled */
/* Opens the first driver with a device. A device that runs on the CPU will do only if the app has chosen engine GPU. */
edge_status gpu_open(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
void gpu_close(gpu *g);
void gpu_layout_drivers(arena *from, gpu *g);

/* gpu_rows.c */
void arena_layout(arena *from, gpu_arena *rows, const edge_model *model, uint32_t number);
void arena_flush(gpu_arena *rows);  /* submits deferred writes and moves */
void arena_forget(gpu_arena *rows); /* drops the tile that was read, after a pass has written rows */
void arena_normals(gpu_arena *rows); /* sends the normals of its heads' reflections, if any */

/* gpu_adapter.c */
void choose_dispatches(gpu *g);       /* sets `skipped` by `changed` */
bool read_gpu_adapter(accelerator *a, adapter_source in, void *from, float scale, bool *finite);

/* gpu_cache.c. kept_read allocates `data`; kept_write writes `at` bytes of it, and needs room for 32 more. */
enum { MOST_KEPT = 64 << 20 };
typedef struct { uint8_t *data; uint64_t size, at; } kept_file;
bool kept_path(const char *folder, const uint8_t digest[32], const char *suffix, char *path); /* [LONGEST_PATH] */
/* The path of the bundle's kernels in a language (GPU_OPENCL, …), as this driver compiles them. */
bool kept_kernels(const gpu *g, uint32_t language, const char *folder, const char *suffix, char *path);
void hash_driver(hasher *h, const gpu *g); /* adds device and driver */
void kept_read(const char *path, kept_file *kept); /* size 0: no file, or a damaged one */
void kept_write(const char *path, kept_file *made);
/* Keep the words of a driver that cannot compile the kernels, and fail with them, as REFUSED, if the file exists. */
void keep_failure(const gpu *g, const char *path);
void fail_as_before(gpu *g, const char *path);

/* webgpu.c */
#ifdef GPU_BY_METAL
static inline uint32_t webgpu_version(void) { return 0; }
#else
uint32_t webgpu_version(void); /* of the library that the app brings; 0: none, 1: unknown */
#endif

/* gpu_system.c */
void *metal_library(void);  /* NULL: not found */
void *opencl_library(void); /* NULL: not found */
bool webgpu_library(void **library); /* *library: NULL means the whole process; false: not found */
void *gpu_function(void *library, const char *name);
bool hash_system(hasher *h); /* adds the system's version; false: unknown */

/* Workgroups of a dispatch along the second axis, for this number of tokens. */
static inline uint32_t rows_of_groups(const gpu_dispatch_config *each, uint32_t tokens)
{
    return each->per ? (tokens + each->per - 1) / each->per : each->groups[1];
}

/* A table of section GPU, by its offset. */
static inline const void *gpu_table(const gpu *g, uint32_t at)
{
    return g->section + at;
}

#endif
