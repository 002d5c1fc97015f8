/* Stands between opencl.c and the system's OpenCL, for tests of what no driver here does: with -Ddlsym=driver_function. */
#define _GNU_SOURCE
#include <string.h>

#include "opencl.h"

#undef dlsym
void *dlsym(void *library, const char *name);

uint32_t driver_is_gpu;         /* 1: devices of all kinds are GPUs */
int64_t driver_runs;            /* kernels so far */
int64_t driver_fails_at = -1;   /* the number of the kernel from which on the device is lost */
int64_t driver_cancels_at = -1; /* the number of the kernel at which … */
edge_session *driver_session;   /* … this one's answer is cancelled */

static opencl real;

static int32_t device_ids(cl_handle platform, uint64_t kind, uint32_t most, cl_handle *devices, uint32_t *count)
{
    bool gpus = kind == CL_DEVICE_TYPE_ALL_GPUS;
    return real.clGetDeviceIDs(platform, gpus && driver_is_gpu ? (uint32_t)CL_DEVICE_TYPE_ANY : kind, most, devices, count);
}

static int32_t run_kernel(cl_handle queue, cl_handle kernel, uint32_t dimensions, const size_t *first, const size_t *total,
                          const size_t *group, uint32_t count, const cl_handle *events, cl_handle *event)
{
    if (driver_fails_at >= 0 && driver_runs >= driver_fails_at)
        return -36; /* CL_INVALID_COMMAND_QUEUE */
    if (driver_runs++ == driver_cancels_at)
        edge_cancel(driver_session);
    return real.clEnqueueNDRangeKernel(queue, kernel, dimensions, first, total, group, count, events, event);
}

void *driver_function(void *library, const char *name);
void *driver_function(void *library, const char *name)
{
    void *found = dlsym(library, name), *ours = NULL;
    if (!strcmp(name, "clGetDeviceIDs"))
        *(void **)&real.clGetDeviceIDs = found, *(__typeof__(&device_ids) *)&ours = device_ids;
    if (!strcmp(name, "clEnqueueNDRangeKernel"))
        *(void **)&real.clEnqueueNDRangeKernel = found, *(__typeof__(&run_kernel) *)&ours = run_kernel;
    return found && ours ? ours : found;
}
