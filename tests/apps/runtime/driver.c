/* Stands between opencl.c and the system's OpenCL, for tests of what no driver here does: with -Ddlsym=driver_function. */
#define _GNU_SOURCE
#include <string.h>

#include "opencl.h"

#undef dlsym
void *dlsym(void *library, const char *name);

uint32_t driver_is_gpu;         /* 1: devices of all kinds are GPUs; 0: none is */
int64_t driver_runs;            /* kernels so far */
int64_t driver_fails_at = -1;   /* the number of the kernel from which on the device is lost */
int64_t driver_cancels_at = -1; /* the number of the kernel at which … */
edge_session *driver_session;   /* … this one's answer is cancelled */
int64_t driver_read;            /* bytes so far */
uint32_t driver_compiles;       /* sources so far */
uint32_t driver_refuses;        /* 1: to compile them; 2: to load its binaries */

int64_t driver_shared;          /* bytes of buffers in memory of the process so far */
uint32_t driver_copies;         /* 1: it takes none of those */

static opencl real;

static cl_handle make_buffer(cl_handle context, uint64_t flags, size_t size, void *memory, int32_t *code)
{
    bool shares = flags & CL_MEM_USE_HOST_PTR;
    if (shares && driver_copies)
        return *code = -37, NULL; /* CL_INVALID_HOST_PTR */
    driver_shared += shares ? (int64_t)size : 0;
    return real.clCreateBuffer(context, flags, size, memory, code);
}

static int32_t device_ids(cl_handle platform, uint64_t kind, uint32_t most, cl_handle *devices, uint32_t *count)
{
    bool gpus = kind == CL_DEVICE_TYPE_ALL_GPUS;
    if (gpus && !driver_is_gpu)
        return -1; /* CL_DEVICE_NOT_FOUND */
    return real.clGetDeviceIDs(platform, (uint32_t)CL_DEVICE_TYPE_ANY, most, devices, count);
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

static int32_t read_buffer(cl_handle queue, cl_handle buffer, uint32_t wait, size_t offset, size_t size, void *data,
                           uint32_t count, const cl_handle *events, cl_handle *event)
{
    driver_read += (int64_t)size;
    return real.clEnqueueReadBuffer(queue, buffer, wait, offset, size, data, count, events, event);
}

static cl_handle with_source(cl_handle context, uint32_t count, const char **sources, const size_t *lengths, int32_t *code)
{
    driver_compiles++;
    return real.clCreateProgramWithSource(context, count, sources, lengths, code);
}

static cl_handle with_binary(cl_handle context, uint32_t count, const cl_handle *devices, const size_t *lengths,
                             const uint8_t **binaries, int32_t *status, int32_t *code)
{
    if (driver_refuses == 2)
        return *code = -42, NULL; /* CL_INVALID_BINARY */
    return real.clCreateProgramWithBinary(context, count, devices, lengths, binaries, status, code);
}

static int32_t build(cl_handle program, uint32_t count, const cl_handle *devices, const char *options, void *tell, void *data)
{
    return driver_refuses == 1 ? -11 /* CL_BUILD_PROGRAM_FAILURE */ :
           real.clBuildProgram(program, count, devices, options, tell, data);
}

void *driver_function(void *library, const char *name);
void *driver_function(void *library, const char *name)
{
    void *found = dlsym(library, name), *ours = NULL;
#define REPLACE(function, replacement) \
    if (!strcmp(name, #function)) \
        *(void **)&real.function = found, *(__typeof__(&replacement) *)&ours = replacement;
    REPLACE(clGetDeviceIDs, device_ids)
    REPLACE(clCreateBuffer, make_buffer)
    REPLACE(clCreateProgramWithSource, with_source)
    REPLACE(clCreateProgramWithBinary, with_binary)
    REPLACE(clBuildProgram, build)
    REPLACE(clEnqueueNDRangeKernel, run_kernel)
    REPLACE(clEnqueueReadBuffer, read_buffer)
    return found && ours ? ours : found;
}
