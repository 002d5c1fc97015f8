/* The state of the WebGPU driver, which webgpu.c and webgpu_kernels.c share. */
#ifndef EDGE_WEBGPU_DRIVER_H
#define EDGE_WEBGPU_DRIVER_H

#include "gpu.h"
#include "webgpu_abi.h"

enum { MOST_PARTS = 16 }; /* buffers of a kernel */

typedef struct {
    webgpu api;                 /* functions of the library */
    WGPUInstance instance;
    WGPUAdapter adapter;
    WGPUDevice device;
    WGPUQueue queue;
    WGPUBuffer mapped, uniform; /* for reading buffers; numbers of dispatches */
    volatile bool answered;     /* the last request to the library */
    uint64_t copied;            /* bytes of writes that the library may still hold */
    WGPUBindGroupLayout *layouts; /* by the numbers of kernels */
    WGPUBindGroup *groups;        /* by the numbers of dispatches */
} webgpu_state;

/* webgpu_kernels.c */
edge_status webgpu_kernels(gpu *g, const char *cache, edge_error *error);
uint32_t webgpu_parts(const gpu *g); /* the most buffers of a kernel */

#endif
