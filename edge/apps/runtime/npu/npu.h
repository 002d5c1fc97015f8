/* What the files of the NPU's pass know of each other:
 *
 *     ort.c         ONNX Runtime: its library, the provider, sessions on the graphs, and their inputs and outputs
 *     npu_pass.c    tokens in, logits out; KV rows, which the graphs read
 */
#ifndef EDGE_NPU_H
#define EDGE_NPU_H

#include "base.h"
#include "accelerator.h"
#include "model.h"
#include "ort.h"
#include "rows.h"

enum npu_size { NPU_CHUNK, NPU_STEP, NPU_SIZES }; /* of a graph: as the last number in its file's name */

/* Keys and values [rows][head] of all layers, as a graph has them: the two that RoPE pairs are half a head apart. */
typedef struct {
    rows_device device; /* the first member, by which rows.c knows it */
    uint8_t *keys, *values;
    uint32_t head, rotated, item; /* values; of them, those that RoPE pairs; bytes of one */
} npu_rows;

typedef struct { /* an input or output that graphs may have, by its name in backends/onnx/graph/static.py */
    char name[24];
    ort_handle values[NPU_SIZES];
    bool output, written[NPU_SIZES]; /* by a graph */
} npu_tensor;

typedef struct { /* a graph, and its inputs and outputs behind each other */
    ort_handle session;
    size_t inputs, outputs;
    const char **names;
    ort_handle *values;
} npu_graph;

typedef struct { /* of a size of graphs, with the tokens at the end */
    uint32_t tokens;
    int64_t *ids, *positions;
    float *x, *temperatures;
    float **tables;      /* [kinds][2]: cosines and sines, [tokens][head / 2] */
    float **masks;       /* of each window: [tokens][rows + tokens] */
    uint8_t *rows;       /* new ones: [layers][keys, values][KV heads][tokens][head] */
    npu_graph *graphs;   /* that of embeddings, then those of shards */
} npu_arrays;

typedef struct {
    accelerator base;
    const edge_model *model;
    const npu_config *config;
    npu_rows rows;
    npu_arrays sizes[NPU_SIZES];
    npu_tensor *tensors;
    uint32_t tensor_count, windows;
    uint32_t *window_layers; /* [windows]: the first layer of each */
    uint64_t *starts;        /* [layers]: of their rows */
    float *logits;
    uint64_t bytes;
    const volatile int32_t *cancelled;
    int32_t failure;         /* the first OrtErrorCode; 0 */
    char failed_by[160];     /* its message, in one line */
    char name[96];
    ort_api ort;
    ort_handle env, memory, allocator, embedding; /* embedding: the session */
} npu;

/* Rows of each head of a layer, in whole tiles. */
static inline uint32_t npu_layer_rows(const npu *n, uint32_t layer)
{
    const edge_config *c = n->model->config;
    uint32_t rows = n->model->layers[layer].ringed ? c->ring_rows : c->capacity;
    return (rows + TILE - 1) / TILE * TILE;
}

/* ort.c */
edge_status npu_open(accelerator *a, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
void npu_close(accelerator *a);
bool npu_run(npu *n, const npu_graph *graph); /* false: `failure` is set */

#endif
