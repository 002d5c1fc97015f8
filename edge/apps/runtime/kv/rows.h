/* KV rows in memory: how keys, values and scales of a row are encoded. */
#ifndef EDGE_ROWS_H
#define EDGE_ROWS_H

#include "base.h"
#include "model.h"

/* Rows in the memory of an accelerator. Its struct begins with a rows_device. Errors are kept: the next pass fails. */
typedef struct rows_device rows_device;
typedef struct {
    void (*move)(rows_device *device, uint32_t source, uint32_t target); /* may be deferred until `settle` */
    void (*settle)(rows_device *device);
    void (*save)(rows_device *device, uint32_t row, uint8_t *out);
    void (*restore)(rows_device *device, uint32_t row, const uint8_t *saved);
    void (*key)(rows_device *device, uint32_t row, uint32_t head, float *key);
    void (*set_key)(rows_device *device, uint32_t row, uint32_t head, float *key);
} rows_work;
struct rows_device { const rows_work *work; };

/* An arena of rows: keys, values and scales of the heads of some layers, laid out as in backends/tvm/kv/rows.py. A row is
 * that of one head. */
typedef struct {
    rows_device *device;               /* holds the rows; NULL: they are in `arrays` */
    row_shape shape;
    uint32_t dtype, count;             /* count: rows */
    uint32_t stride;                   /* values of a normal: of the largest key */
    uint8_t *arrays[4];                /* keys, values, key scales, value scales */
    uint32_t widths[4], item[4];       /* elements of a row, bytes of an element */
    const float *normals;              /* [layers * kv_heads][stride]; NULL: keys are not reflected */
    uint8_t *changed;                  /* for each tile: written since the page's GPU read it; NULL: none */
    float *work;                       /* [key] */
} kv_rows;
/* elsewhere: a device will hold the rows, so that the arrays take no memory. */
void rows_layout(arena *from, kv_rows *rows, const edge_model *model, row_shape shape, uint32_t count, bool elsewhere);
void rows_move(kv_rows *rows, uint32_t source, uint32_t target); /* each row at most once before rows_settle */
void rows_settle(kv_rows *rows);                                 /* completes the moves */
void rows_shift(kv_rows *rows, uint32_t source, uint32_t target, uint32_t count); /* moves neighbouring rows, whole tiles */
void rows_release(kv_rows *rows, uint32_t first, uint32_t count);            /* returns whole pages to the system */
void rows_key(const kv_rows *rows, uint32_t row, uint32_t head, float *key); /* decodes a key; head: of all layers' */
float rows_value_norm(const kv_rows *rows, uint32_t row, float *work);        /* work: [head] */
void rows_set_key(kv_rows *rows, uint32_t row, uint32_t head, float *key);   /* encodes a key; may change `key` */
void rows_written(kv_rows *rows, uint32_t first, uint32_t count);            /* notes rows that compiled code has written */
float rows_from_half(uint16_t half);
uint16_t rows_to_half(float x);
/* Multiplies `bytes` of float32 (exact) or float16 values. Returns false if one overflows. */
bool rows_scale(void *values, uint64_t bytes, bool exact, float scale);
size_t rows_bytes(const kv_rows *rows);                                      /* bytes of a row */
void rows_save(const kv_rows *rows, uint32_t row, uint8_t *out);             /* out: rows_bytes */
void rows_restore(kv_rows *rows, uint32_t row, const uint8_t *saved);

#endif
