/* Accelerators: devices beside the CPU that run passes. `accelerator_kind` is their interface, a struct of functions. Each
 * kind has a struct of its own for its state, whose first member is an `accelerator`:
 *
 *     gpu/gpu_pass.c   a GPU by Metal, OpenCL or WebGPU   holds weights and rows, and runs all passes of a session
 *     npu/npu_pass.c   an NPU by ONNX Runtime             the same
 *     web/c/gpu.c      the GPU of a web page              copies rows from the arenas and writes new ones back, so that the
 *                                                         CPU can run any pass instead
 */
#ifndef EDGE_ACCELERATOR_H
#define EDGE_ACCELERATOR_H

#include "base.h"
#include "model.h"
#include "rows.h"

typedef struct accelerator_kind accelerator_kind;
typedef struct { const accelerator_kind *kind; } accelerator;

/* A choice of tokens by the accelerator: each is the likeliest after the one before, the lowest id among equals, and none
 * of `banned`. With most 0 it chooses none, but only the `enough` largest logits are wanted: all others may be
 * -INFINITY. */
typedef struct {
    uint32_t most;               /* tokens to choose; 0: none */
    uint32_t enough;             /* at most MOST_TOP */
    int32_t banned[MOST_BANS];
    uint32_t banned_count;
    int32_t *chosen;             /* [most] */
    uint32_t count;              /* result: tokens chosen; 0: none, and there are logits */
} picking;
/* Rows that a pass over `count` tokens may append. */
static inline uint32_t most_rows(uint32_t count, const picking *pick)
{
    return pick && pick->most ? pick->most : count;
}

/* The fixed states of all layers. A page's GPU has them, too, and may be ahead for some steps. */
enum { MOST_BEHIND = 16 };
typedef struct {
    float *values;
    uint8_t changed; /* 1: the GPU has to take `values` */
    uint32_t behind; /* newest rows whose tokens are in the GPU's states only; at most MOST_BEHIND */
} fixed_states;

typedef struct {
    const int32_t *tokens;             /* [count] */
    uint32_t count;
    int64_t position, rope_position;   /* of the first token */
    bool lengthened;                   /* LongRoPE's long factors are in use */
    const int32_t *starts, *lengths;   /* [layers * kv_heads]: first row and number of rows, as in kv_pointers */
    const int32_t *positions;          /* of the rows of the arena that has windows */
    const float *inputs;               /* as a table_reader writes them; NULL: the model has no table */
    picking *pick;                     /* NULL: all logits are wanted */
    /* Only where rows stay in the arenas: */
    const float *angles;               /* of the first token: cosines and sines, as pass.c lays them out */
    uint32_t angles_stride;            /* values from the angles of one kind of layers to those of the next */
    const float *temperatures;         /* [count]; NULL: none */
    const float *normals;              /* section NORMALS; NULL: keys are not reflected */
    const kv_rows *arenas;             /* [2], as kv_arenas; `changed` marks tiles that the accelerator has to read */
    fixed_states *states;              /* as kv_states */
    bool settles;                      /* values become those behind the pass, and `behind` 0; otherwise both stay */
} pass_input;

typedef enum {
    OUT_OF_SERVICE = -1, /* it has run nothing, and will run no more passes */
    DECLINED,            /* it has run nothing: it failed, was cancelled, or leaves this pass to the CPU */
    COMPLETED            /* logits, or the picked tokens, and new rows are there */
} accelerator_answer;

typedef bool (*adapter_source)(void *from, void *bytes, size_t size); /* reads an adapter; false at its end */

struct accelerator_kind {
    edge_engine engine;
    const char *called;                     /* in messages */
    bool picks;                             /* can choose tokens */
    accelerator *(*layout)(arena *from, const edge_model *model);
    accelerator_answer (*run)(accelerator *a, const pass_input *input, float *logits);
    /* NULL where rows stay in the arenas, up to `adapt`: */
    rows_device *(*rows)(accelerator *a, bool rings, uint32_t count); /* an arena of `count` rows */
    /* Copy the fixed states of all layers, as kv_states has them. NULL if it runs no models that have some. */
    void (*read_states)(accelerator *a, float *states);
    void (*write_states)(accelerator *a, const float *states);
    /* *cancelled: a later pass may end early. */
    edge_status (*open)(accelerator *a, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
    void (*close)(accelerator *a);          /* also after `open` has failed */
    const char *(*failure)(const accelerator *a); /* the first error of the driver, in words; NULL: none */
    uint64_t (*bytes)(const accelerator *a); /* of the device's memory */
    const char *(*name)(const accelerator *a); /* of the device */
    /* Reads its part of an adapter's file, of adapters_config.gpu bytes, and multiplies B by `scale`; in NULL removes the
     * adapter. Returns false, and sets no adapter, if bytes are missing. *finite: no value overflowed. NULL if it runs no
     * adapters. */
    bool (*adapt)(accelerator *a, adapter_source in, void *from, float scale, bool *finite);
};

#endif
