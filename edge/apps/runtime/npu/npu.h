/* An NPU as an accelerator, which runs graphs of fixed sizes by ONNX Runtime:
 *
 *     npu_pass.c    the pass: tokens in, logits out; KV rows, which the graphs read
 *     ort.c         ONNX Runtime: library, provider, sessions on the graphs, their inputs and outputs
 */
#ifndef EDGE_NPU_H
#define EDGE_NPU_H

#include "base.h"
#include "accelerator.h"
#include "model.h"
#include "ort.h"
#include "rows.h"

enum npu_size { NPU_CHUNK, NPU_STEP, NPU_SIZES }; /* the last number in a graph's file name */

/* Keys and values [rows][head] of all layers, as in the graphs: the values of a RoPE pair are half a head apart. */
typedef struct {
    rows_device device; /* first, for rows.c */
    uint8_t *keys, *values;
    uint32_t head, rotated, item; /* values of a head; rotated values; bytes of a value */
} npu_rows;

typedef struct { /* an input or output of graphs, by its name in backends/onnx/graph/static.py */
    char name[24];
    ort_handle values[NPU_SIZES];
    bool output, written[NPU_SIZES]; /* by a graph of this size */
} npu_tensor;

typedef struct { /* a graph; its inputs, then its outputs */
    ort_handle session;
    size_t inputs, outputs;
    const char **names;
    ort_handle *values;
} npu_graph;

typedef struct { /* arrays of graphs of one size. Tokens are at the end of each array, behind padding */
    uint32_t tokens;
    int64_t *ids, *positions;
    float *x, *temperatures;
    float **tables;      /* [kinds][2]: cosines and sines, [tokens][head / 2] */
    float **masks;       /* [windows]: each [tokens][rows + tokens] */
    uint8_t *rows;       /* new rows: [layers][keys, values][KV heads][tokens][head] */
    npu_graph *graphs;   /* [1 + shards]: of embeddings, then of the shards */
} npu_arrays;

typedef struct {
    accelerator base;
    const edge_model *model;
    const npu_config *config;
    npu_rows rows;
    npu_arrays sizes[NPU_SIZES];
    npu_tensor *tensors;
    uint32_t tensor_count, windows;
    uint32_t *window_layers; /* [windows]: first layer with this window */
    uint64_t *starts;        /* [layers]: first row */
    float *logits;
    uint64_t bytes;
    const volatile int32_t *cancelled;
    int32_t failure;         /* first OrtErrorCode; 0: none */
    char failed_by[160];     /* its message, one line */
    char name[96];
    ort_api ort;
    ort_handle env, memory, allocator, embedding; /* embedding: the session */
} npu;

/* Rows of each head of a layer, in whole tiles. */
static inline uint32_t npu_layer_rows(const npu *n, uint32_t layer)
{
    const edge_config *c = n->model->config;
    uint32_t rows = n->model->layers[layer].ringed ? c->ring_rows : c->capacity;
    return whole_tiles(rows);
}

/* ort.c */
edge_status npu_open(accelerator *a, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
void npu_close(accelerator *a);
bool npu_run(npu *n, const npu_graph *graph); /* false: see `failure` */

#endif
