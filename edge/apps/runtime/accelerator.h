/* Devices beside the CPU that run passes. */
#ifndef EDGE_ACCELERATOR_H
#define EDGE_ACCELERATOR_H

#include "base.h"
#include "model.h"
#include "rows.h"

/* Tokens that a device chooses itself: each the likeliest after the one before, the lowest of equals, and none of `banned`.
 * Or none: then the `enough` largest logits are wanted, up to MOST_TOP, and all others may be -INFINITY. */
typedef struct {
    uint32_t most;               /* to choose; 0: none */
    uint32_t enough;
    int32_t banned[MOST_BANS];
    uint32_t banned_count;
    int32_t *chosen;             /* [most] */
    uint32_t count;              /* it has chosen; 0: it chose none, and the logits tell */
} picking;
/* Rows for which a pass over `count` tokens is prepared. */
static inline uint32_t most_rows(uint32_t count, const picking *pick)
{
    return pick && pick->most ? pick->most : count;
}

typedef struct gpu gpu; /* a device with the programs, weights and rows of a session; first its gpu_host; each host has its own */
typedef struct {
    const int32_t *tokens;
    uint32_t count;
    int64_t position, rope_position;
    bool lengthened;
    const int32_t *starts, *lengths, *positions; /* of kv_pointers */
    const float *inputs;                         /* as a table_reader writes them; NULL: the model has no table */
    picking *pick;                               /* NULL: all logits are wanted */
} gpu_input;
typedef bool (*adapter_source)(void *from, void *bytes, size_t size); /* the next bytes of an adapter; false: there are fewer */
typedef struct {
    edge_engine engine;
    const char *called;                                       /* in messages */
    bool picks;                                               /* it can choose tokens */
    gpu *(*layout)(arena *from, const edge_model *model);
    rows_device *(*rows)(gpu *g, bool rings, uint32_t count); /* an arena of so many rows */
    edge_status (*open)(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
    void (*close)(gpu *g);                                    /* also after `open` has failed */
    bool (*run)(gpu *g, const gpu_input *input, float *logits); /* false: the device has failed, or *cancelled */
    const char *(*failure)(const gpu *g);                     /* the driver's first one, in words; NULL: none */
    uint64_t (*bytes)(const gpu *g);                          /* of the device */
    const char *(*name)(const gpu *g);
    uint64_t (*adapter_bytes)(const gpu *g);                  /* of the part of an adapter's file that is for this host */
    /* Reads it, and multiplies B. in NULL: no adapter any more; nor if it returns false: a part is missing. *finite: no
     * value became too large. */
    bool (*adapt)(gpu *g, adapter_source in, void *from, float scale, bool *finite);
} gpu_host;
static inline const gpu_host *host_of(const gpu *g)
{
    return *(const gpu_host *const *)g;
}

/* A pass for a device beside the processor. It reads rows of arenas that are `changed`, and writes those that it appends
 * to the arenas, too: so rows are saved, moved and rotated here, and the processor can go on at any time. */
typedef struct {
    const int32_t *tokens;
    uint32_t count;
    int32_t position;                  /* of the first token */
    const float *angles;               /* of the first token, as `fill_angles` writes them; those of each kind … */
    uint32_t angles_stride;            /* … are so many values apart */
    const float *temperatures;         /* [count], NULL: none */
    const int32_t *starts, *lengths;   /* [layers * kv_heads] */
    const int32_t *positions;          /* of the rows of the arena that has windows */
    float *logits;
    picking *pick;                     /* NULL: all logits are wanted */
    const float *normals;              /* section NORMALS; NULL: keys are not reflected */
    const kv_rows *arenas;             /* [2]: see kv_arenas */
} device_job;
typedef enum { DEVICE_LEFT = -1, DEVICE_WAITS, DEVICE_RAN } device_answer; /* it will run no pass; not this one; it ran */
typedef device_answer device_run(const device_job *job); /* unless it ran, nothing has changed but `changed` */

#endif
