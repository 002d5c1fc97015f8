/* The driver of OpenCL. The device's driver compiles the sources; its binaries are kept in the app's cache folder. The
 * library is never unloaded, since drivers have threads. */
#include <string.h>

#include "gpu.h"
#include "opencl.h"
#include "system.h"

#ifndef GPU_BY_METAL

static const char OPTIONS[] = "-cl-std=CL1.2 -cl-mad-enable";
enum { MOST_PLATFORMS = 8, MOST_DEVICES = 8 };
static const uint64_t LARGEST_ALIGNMENT = 256; /* bytes: offsets of parts of buffers are multiples */

static bool failed(gpu *g, int32_t code)
{
    if (code != CL_SUCCESS)
        gpu_fail(g, code, NULL, 0);
    return g->failure != CL_SUCCESS;
}

/* ---- the library and its device ---------------------------------------------------------------------------------- */

static void *layout(arena *from, const gpu_config *config)
{
    opencl *cl = take(from, sizeof *cl);
    cl_handle *parts = take(from, config->parts * sizeof *parts);
    if (cl)
        cl->parts = parts;
    return cl;
}

static bool load(gpu *g)
{
    opencl *cl = g->own;
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    void *library = kernels->length[GPU_OPENCL] ? opencl_library() : NULL;
    if (!library)
        return false;
    bool whole = true;
#define LOAD(result, name, arguments) \
    *(void **)&cl->name = gpu_function(library, #name); \
    whole = whole && cl->name;
    OPENCL_FUNCTIONS(LOAD)
#undef LOAD
    return whole;
}

static uint64_t number_of(const gpu *g, cl_handle device, uint32_t which)
{
    opencl *cl = g->own;
    uint64_t value = 0; /* the device writes 4 or 8 bytes */
    return cl->clGetDeviceInfo(device, which, sizeof value, &value, NULL) == CL_SUCCESS ? value : 0;
}

/* Why a device cannot run the programs; NULL if it can. */
static const char *unfit(const gpu *g, cl_handle device)
{
    if (!number_of(g, device, CL_DEVICE_AVAILABLE) || !number_of(g, device, CL_DEVICE_COMPILER_AVAILABLE)
        || !number_of(g, device, CL_DEVICE_ENDIAN_LITTLE))
        return "it is not available, or has no compiler";
    if (number_of(g, device, CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8 > LARGEST_ALIGNMENT)
        return "parts of its buffers cannot begin where the programs need it";
    if (number_of(g, device, CL_DEVICE_MAX_MEM_ALLOC_SIZE) < largest_buffer(g))
        return "its buffers are too small";
    if (number_of(g, device, CL_DEVICE_MAX_WORK_GROUP_SIZE) < g->config->threads
        || number_of(g, device, CL_DEVICE_LOCAL_MEM_SIZE) < g->config->shared)
        return "its workgroups are too small";
    return NULL;
}

/* Finds the first GPU that can run the programs; if `software`, also another device, such as the CPU. */
static edge_status find_device(gpu *g, bool software, edge_error *error)
{
    opencl *cl = g->own;
    static const uint64_t kinds[] = {CL_DEVICE_TYPE_ALL_GPUS, (uint32_t)CL_DEVICE_TYPE_ANY};
    cl_handle platforms[MOST_PLATFORMS], devices[MOST_DEVICES];
    uint32_t count = 0, found;
    const char *why = NULL;
    if (cl->clGetPlatformIDs(MOST_PLATFORMS, platforms, &count) != CL_SUCCESS)
        count = 0;
    count = count < MOST_PLATFORMS ? count : MOST_PLATFORMS;
    for (size_t kind = 0; kind < (software ? 2 : 1); kind++)
        for (uint32_t each = 0; each < count; each++) {
            if (cl->clGetDeviceIDs(platforms[each], kinds[kind], MOST_DEVICES, devices, &found) != CL_SUCCESS)
                continue;
            for (uint32_t i = 0; i < found && i < MOST_DEVICES; i++) {
                const char *here = unfit(g, devices[i]);
                if (!here) {
                    cl->device = devices[i];
                    return EDGE_OK;
                }
                why = here;
            }
        }
    if (!why)
        return edge_fail(error, EDGE_UNSUPPORTED, "OpenCL has no %s here: set engine to cpu or auto",
                         software ? "device" : "GPU");
    return edge_fail(error, EDGE_UNSUPPORTED, "OpenCL's device cannot run the bundle (%s): set engine to cpu or auto", why);
}

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

/* Makes a program of the next binary of a file: uint64 size, then the bytes. */
static cl_handle from_binary(gpu *g, kept_file *kept)
{
    opencl *cl = g->own;
    uint64_t size;
    if (kept->size - kept->at < sizeof size || kept->at > kept->size)
        return NULL;
    memcpy(&size, kept->data + kept->at, sizeof size);
    kept->at += sizeof size;
    if (!size || size > kept->size - kept->at)
        return NULL;
    const uint8_t *data = kept->data + kept->at;
    size_t length = size;
    int32_t code, status;
    kept->at += size;
    cl_handle program = cl->clCreateProgramWithBinary(cl->context, 1, &cl->device, &length, &data, &status, &code);
    if (code != CL_SUCCESS || status != CL_SUCCESS
        || cl->clBuildProgram(program, 1, &cl->device, OPTIONS, NULL, NULL) != CL_SUCCESS) {
        if (code == CL_SUCCESS)
            cl->clReleaseProgram(program);
        return NULL;
    }
    return program;
}

static cl_handle from_source(gpu *g, const gpu_kernel *kernel)
{
    opencl *cl = g->own;
    const char *source = (const char *)g->section + kernel->source[GPU_OPENCL];
    size_t length = kernel->length[GPU_OPENCL];
    int32_t code;
    cl_handle program = cl->clCreateProgramWithSource(cl->context, 1, &source, &length, &code);
    if (failed(g, code))
        return NULL;
    if (!failed(g, cl->clBuildProgram(program, 1, &cl->device, OPTIONS, NULL, NULL)))
        return program;
    cl->clReleaseProgram(program);
    return NULL;
}

static void add_binary(gpu *g, cl_handle program, kept_file *made)
{
    opencl *cl = g->own;
    size_t size = 0;
    if (!made->data || cl->clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, NULL) != CL_SUCCESS
        || !size || size > made->size - made->at - sizeof(uint64_t) - 32) {
        unmap_memory(made->data, made->size);
        *made = (kept_file){0};
        return;
    }
    uint64_t length = size;
    memcpy(made->data + made->at, &length, sizeof length);
    uint8_t *to = made->data + made->at + sizeof length;
    if (cl->clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof to, &to, NULL) == CL_SUCCESS)
        made->at += sizeof length + size;
}

/* Binaries are kept, and a failure to compile as well: as a file with only the first size. */
static edge_status make_kernels(gpu *g, const char *cache, edge_error *error)
{
    opencl *cl = g->own;
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    char path[LONGEST_PATH];
    kept_file kept = {0}, made = {0};
    bool keeps = cache && kept_kernels(g, GPU_OPENCL, cache, ".cl", path);
    if (keeps)
        kept_read(path, &kept);
    uint64_t mapped = kept.size + 32;
    if (kept.size == sizeof(uint64_t))
        failed(g, CL_BUILD_PROGRAM_FAILURE);
    for (uint32_t i = 0; i < g->config->kernels && !g->failure; i++) {
        cl_handle program = kept.size ? from_binary(g, &kept) : NULL;
        if (!program) {
            if (keeps && !i) /* pages become resident when they are written */
                made = (kept_file){map_memory(MOST_KEPT), MOST_KEPT, 0};
            kept.size = 0; /* the driver has changed: compile all others, too */
            program = from_source(g, kernels + i);
            if (program && made.data)
                add_binary(g, program, &made);
        }
        if (!program)
            break;
        int32_t code;
        g->kernels[i] = cl->clCreateKernel(program, kernels[i].name, &code);
        cl->clReleaseProgram(program);
        if (failed(g, code))
            g->kernels[i] = NULL;
    }
    if (kept.data)
        unmap_memory(kept.data, mapped);
    if (g->failure == CL_BUILD_PROGRAM_FAILURE)
        made.at = sizeof(uint64_t);
    if (made.data && (!g->failure || g->failure == CL_BUILD_PROGRAM_FAILURE))
        kept_write(path, &made);
    if (made.data)
        unmap_memory(made.data, made.size);
    if (!g->failure)
        return EDGE_OK;
    return edge_fail(error, EDGE_UNSUPPORTED, "the driver of %s cannot compile the bundle's kernels (OpenCL error %d): set "
                     "engine to cpu or auto", g->name, (int64_t)g->failure);
}

/* ---- buffers ------------------------------------------------------------------------------------------------------- */

/* If the device shares the process's memory, weights stay in the mapped file, whose pages the system can drop, unless the
 * driver copies them. Returns false if the driver refuses. */
static bool share_weights(gpu *g, const gpu_buffer *buffer, void **made)
{
    opencl *cl = g->own;
    const uint8_t *data = g->model->sections[SECTION_GPU_WEIGHTS] + buffer->weights;
    if (!buffer->loaded || !number_of(g, cl->device, CL_DEVICE_HOST_UNIFIED_MEMORY))
        return false;
    uint64_t alignment = number_of(g, cl->device, CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8;
    if (!alignment || (uintptr_t)data % alignment)
        return false;
    int32_t code;
    uint32_t first;
    cl_handle found = cl->clCreateBuffer(cl->context, CL_MEM_READ_ONLY | CL_MEM_USE_HOST_PTR, buffer->size,
                                           (void *)(uintptr_t)data, &code);
    if (code != CL_SUCCESS)
        return false;
    /* drivers allocate and copy at the first use of a buffer */
    code = cl->clEnqueueReadBuffer(cl->queue, found, 1, 0, sizeof first, &first, 0, NULL, NULL);
    if (code != CL_SUCCESS) {
        cl->clReleaseMemObject(found);
        return false;
    }
    forget_memory(data, buffer->size); /* in case it was copied */
    *made = found;
    g->bytes += buffer->size;
    return true;
}

static void make_buffer(gpu *g, const gpu_buffer *buffer, void **made)
{
    opencl *cl = g->own;
    static const uint32_t zero = 0;
    int32_t code;
    cl_handle found = cl->clCreateBuffer(cl->context, CL_MEM_READ_WRITE, buffer->size, NULL, &code);
    if (failed(g, code))
        return;
    *made = found;
    g->bytes += buffer->size;
    /* drivers allocate at the first use of a buffer */
    if (!failed(g, cl->clEnqueueFillBuffer(cl->queue, found, &zero, sizeof zero, 0, buffer->size, 0, NULL, NULL)))
        failed(g, cl->clFinish(cl->queue));
}

static void make_part(gpu *g, uint32_t number, const gpu_part *part)
{
    opencl *cl = g->own;
    const gpu_buffer *buffers = gpu_table(g, g->config->buffers_at);
    if (part->size == buffers[part->buffer].size)
        return; /* the part is the whole buffer */
    cl_region region = {part->offset, part->size};
    int32_t code;
    cl_handle made = cl->clCreateSubBuffer(g->buffers[part->buffer], 0, CL_BUFFER_CREATE_TYPE_REGION, &region, &code);
    if (!failed(g, code))
        cl->parts[number] = made;
}

static edge_status make_buffers(gpu *g, edge_error *error)
{
    const gpu_buffer *buffers = gpu_table(g, g->config->buffers_at);
    const gpu_part *parts = gpu_table(g, g->config->parts_at);
    for (uint32_t i = 0; i < g->config->buffers && !g->failure; i++) {
        if (share_weights(g, buffers + i, g->buffers + i))
            continue;
        make_buffer(g, buffers + i, g->buffers + i);
        if (buffers[i].loaded)
            load_weights(g, i, buffers + i);
    }
    for (uint32_t i = 0; i < g->config->parts && !g->failure; i++)
        make_part(g, i, parts + i);
    if (!g->failure)
        return EDGE_OK;
    bool memory = g->failure >= CL_OUT_OF_MEMORY_FIRST && g->failure <= CL_OUT_OF_MEMORY_LAST;
    return edge_fail(error, memory ? EDGE_NO_MEMORY : EDGE_UNSUPPORTED, "%s cannot hold the model (OpenCL error %d): set "
                     "engine to cpu or auto", g->name, (int64_t)g->failure);
}

static edge_status open_device(gpu *g, const char *cache, bool software, edge_error *error)
{
    opencl *cl = g->own;
    int32_t code;
    edge_status status = find_device(g, software, error);
    if (status)
        return status;
    cl->clGetDeviceInfo(cl->device, CL_DEVICE_NAME, sizeof g->name - 1, g->name, NULL);
    cl->clGetDeviceInfo(cl->device, CL_DRIVER_VERSION, sizeof g->version - 1, g->version, NULL);
    cl_handle made = cl->clCreateContext(NULL, 1, &cl->device, NULL, NULL, &code);
    if (!failed(g, code)) {
        cl->context = made;
        made = cl->clCreateCommandQueue(cl->context, cl->device, 0, &code);
        cl->queue = failed(g, code) ? NULL : made;
    }
    if (g->failure)
        return edge_fail(error, EDGE_UNSUPPORTED, "%s cannot be opened (OpenCL error %d): set engine to cpu or auto",
                         g->name, (int64_t)g->failure);
    status = make_kernels(g, cache, error);
    return status ? status : make_buffers(g, error);
}

static void close_device(gpu *g)
{
    opencl *cl = g->own;
    if (cl->queue)
        cl->clFinish(cl->queue);
    for (uint32_t i = 0; i < g->config->parts; i++)
        if (cl->parts[i]) {
            cl->clReleaseMemObject(cl->parts[i]);
            cl->parts[i] = NULL;
        }
    for (uint32_t i = 0; i < g->config->buffers; i++)
        if (g->buffers[i])
            cl->clReleaseMemObject(g->buffers[i]);
    for (uint32_t i = 0; i < g->config->kernels; i++)
        if (g->kernels[i])
            cl->clReleaseKernel(g->kernels[i]);
    if (cl->queue)
        cl->clReleaseCommandQueue(cl->queue);
    if (cl->context)
        cl->clReleaseContext(cl->context);
    cl->queue = cl->context = NULL;
}

/* ---- work ---------------------------------------------------------------------------------------------------------- */

static void write_buffer(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait)
{
    opencl *cl = g->own;
    failed(g, cl->clEnqueueWriteBuffer(cl->queue, g->buffers[buffer], wait, offset, size, data, 0, NULL, NULL));
}

static void read_buffer(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size)
{
    opencl *cl = g->own;
    failed(g, cl->clEnqueueReadBuffer(cl->queue, g->buffers[buffer], true, offset, size, data, 0, NULL, NULL));
}

static void run_one(gpu *g, const gpu_dispatch_config *each, uint32_t tokens)
{
    opencl *cl = g->own;
    const gpu_kernel *kernel = (const gpu_kernel *)gpu_table(g, g->config->kernels_at) + each->kernel;
    const uint32_t *numbers = (const uint32_t *)gpu_table(g, g->config->numbers_at) + each->numbers;
    const gpu_part *parts = gpu_table(g, g->config->parts_at);
    cl_handle run = g->kernels[each->kernel];
    for (uint32_t i = 0; i < each->parts; i++) {
        cl_handle part = cl->parts[numbers[i]];
        if (!part)
            part = g->buffers[parts[numbers[i]].buffer];
        failed(g, cl->clSetKernelArg(run, i, sizeof part, &part));
    }
    for (uint32_t i = each->parts; i < each->parts + each->scalars; i++)
        failed(g, cl->clSetKernelArg(run, i, sizeof numbers[i], numbers + i));
    uint32_t rows = rows_of_groups(each, tokens);
    size_t group[2] = {kernel->threads[0], kernel->threads[1]};
    size_t total[2] = {(size_t)each->groups[0] * group[0], (size_t)rows * group[1]};
    if (!g->failure)
        failed(g, cl->clEnqueueNDRangeKernel(cl->queue, run, 2, NULL, total, group, 0, NULL, NULL));
}

static void run(gpu *g, uint32_t first, uint32_t count, uint32_t tokens)
{
    opencl *cl = g->own;
    const gpu_dispatch_config *dispatches = gpu_table(g, g->config->dispatches_at);
    for (uint32_t i = first; i < first + count && !g->failure; i++)
        if (!g->skipped[i])
            run_one(g, dispatches + i, tokens);
    if (!g->failure)
        failed(g, cl->clFlush(cl->queue));
}

static void wait_for_all(gpu *g)
{
    opencl *cl = g->own;
    failed(g, cl->clFinish(cl->queue));
}

const gpu_driver OPENCL = {"OpenCL", layout, load, open_device, close_device, write_buffer, read_buffer, run, wait_for_all};

#endif
