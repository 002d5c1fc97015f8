/* A GPU through webgpu.h: Vulkan or Direct3D 12, by the library that the app brings, wgpu-native or Dawn. It is
 * linked or loaded by the app, or found by the names of its file, and never unloaded: drivers have threads.
 *
 * Errors arrive in callbacks, of which none may come after `close`, since the memory of the session then goes. */
#include <string.h>

#include "gpu.h"
#include "system.h"

#ifndef GPU_BY_METAL

enum {
    ALIGNMENT = 256,      /* bytes, of a dispatch's numbers */
    LEAST_MAPPED = 65536, /* bytes of the buffer that the process reads */
    MOST_COPIED = 4 << 20
};
static const double PATIENCE_S = 300; /* that anything may take: drivers compile when a kernel runs first */
static const double PAUSE_S = 5e-5, LONG_PAUSE_S = 1e-3; /* between two questions; longer ones as time goes by */

/* ---- the library and its device ---------------------------------------------------------------------------------- */

static bool load(gpu *g)
{
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    void *library;
    if (!kernels->length[GPU_WGSL] || !webgpu_library(&library))
        return false;
    g->wg = (webgpu){0};
#define LOAD(result, name, arguments) *(void **)&g->wg.name = gpu_function(library, #name);
    WEBGPU_FUNCTIONS(LOAD)
    LOAD(, wgpuDevicePoll, )
    LOAD(, wgpuGetVersion, )
    g->wg.wgpuGetInstanceFeatures = gpu_function(library, "wgpuGetInstanceFeatures");
#undef LOAD
    return true;
}

uint32_t webgpu_version(void)
{
    void *library;
    uint32_t (*version)(void);
    if (!webgpu_library(&library))
        return 0;
    *(void **)&version = gpu_function(library, "wgpuGetVersion");
    return version ? version() : 1;
}

/* Whether the structures of the library are those that we know. Of wgpu-native its version says it, of others a function
 * that came with them. */
static edge_status check_version(const gpu *g, edge_error *error)
{
    bool whole = g->wg.wgpuGetInstanceFeatures;
#define CHECK(result, name, arguments) whole = whole && g->wg.name;
    WEBGPU_FUNCTIONS(CHECK)
#undef CHECK
    uint32_t version = g->wg.wgpuGetVersion ? g->wg.wgpuGetVersion() >> 24 : WEBGPU_NATIVE;
    if (whole && version == WEBGPU_NATIVE)
        return EDGE_OK;
    if (version == WEBGPU_NATIVE)
        return edge_fail(error, EDGE_UNSUPPORTED, "the app's library of webgpu.h lacks functions: bring wgpu-native %d, or "
                         "set engine to cpu or auto", (int64_t)WEBGPU_NATIVE);
    return edge_fail(error, EDGE_UNSUPPORTED, "the app's wgpu-native is version %d: bring version %d, or set engine to cpu "
                     "or auto", (int64_t)version, (int64_t)WEBGPU_NATIVE);
}

/* Lets the library call back until the request is answered, which after a failure may be later, when `g` is closed. It is
 * never told to wait itself: it would wait for a device that hangs. */
static void await(gpu *g)
{
    double began = now_seconds();
    while (!g->answered && !g->failure) {
        if (g->wg_device && g->wg.wgpuDevicePoll)
            g->wg.wgpuDevicePoll(g->wg_device, false, NULL);
        g->wg.wgpuInstanceProcessEvents(g->instance);
        if (g->answered || g->failure)
            break;
        double waited = now_seconds() - began;
        if (waited > PATIENCE_S)
            gpu_fail(g, LATE, "the GPU does not answer", 23);
        double pause = waited / 16;
        sleep_seconds(pause < PAUSE_S ? PAUSE_S : pause < LONG_PAUSE_S ? pause : LONG_PAUSE_S);
    }
}

static void on_adapter(WGPURequestAdapterStatus status, WGPUAdapter adapter, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    (void)said, (void)unused;
    g->adapter = status == WGPURequestAdapterStatus_Success ? adapter : NULL;
    g->answered = true;
}

static void on_device(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    (void)unused;
    if (status == WGPURequestDeviceStatus_Success)
        g->wg_device = device;
    else
        gpu_fail(g, REFUSED, said.data, said.length);
    g->answered = true;
}

static void on_error(const WGPUDevice *device, WGPUErrorType type, WGPUStringView said, void *data, void *unused)
{
    (void)device, (void)unused;
    gpu_fail(data, (int32_t)type, said.data, said.length);
}

static void on_loss(const WGPUDevice *device, WGPUDeviceLostReason reason, WGPUStringView said, void *data, void *unused)
{
    (void)device, (void)reason, (void)said, (void)unused;
    gpu_fail(data, LOST, "the device is lost", 18);
}

static uint64_t largest_part(const gpu *g)
{
    const gpu_part *parts = gpu_table(g, g->config->parts_at);
    uint64_t largest = 0;
    for (uint32_t i = 0; i < g->config->parts; i++)
        largest = parts[i].size > largest ? parts[i].size : largest;
    return largest;
}

/* Why an adapter cannot run the programs; NULL if it can. */
static const char *unfit(const gpu *g, const WGPULimits *limits)
{
    if (limits->maxStorageBufferBindingSize < largest_part(g) || limits->maxBufferSize < largest_buffer(g))
        return "its buffers are too small";
    if (limits->maxStorageBuffersPerShaderStage < webgpu_parts(g))
        return "its kernels have too few buffers";
    if (limits->minStorageBufferOffsetAlignment > ALIGNMENT || limits->minUniformBufferOffsetAlignment > ALIGNMENT)
        return "parts of its buffers cannot begin where the programs need it";
    if (limits->maxComputeInvocationsPerWorkgroup < g->config->threads || limits->maxComputeWorkgroupSizeX < g->config->threads
        || limits->maxComputeWorkgroupStorageSize < g->config->shared)
        return "its workgroups are too small";
    return NULL;
}

/* The beginning of a text, in `room` bytes. */
static void copy_text(char *to, size_t room, WGPUStringView from)
{
    size_t length = from.data ? from.length : 0;
    length = length < room ? length : room - 1;
    memset(to, 0, room);
    if (length)
        memcpy(to, from.data, length);
}

/* Whether it runs on the CPU. Keeps its name, and the driver's version. */
static bool is_software(gpu *g)
{
    WGPUAdapterInfo info = {0};
    if (g->wg.wgpuAdapterGetInfo(g->adapter, &info) != WGPUStatus_Success)
        return false;
    copy_text(g->name, sizeof g->name, info.device);
    copy_text(g->version, sizeof g->version, info.description);
    bool software = info.adapterType == WGPUAdapterType_CPU;
    g->wg.wgpuAdapterInfoFreeMembers(info);
    return software;
}

/* The fastest adapter of the first system that has one which fits. OpenGL's are left out: the slowest way. */
static edge_status find_adapter(gpu *g, bool software, WGPULimits *limits, edge_error *error)
{
    static const WGPUBackendType systems[] = {WGPUBackendType_Vulkan, WGPUBackendType_D3D12};
    const char *why = NULL;
    for (size_t i = 0; i < sizeof systems / sizeof *systems; i++) {
        WGPURequestAdapterOptions wanted = {
            .powerPreference = WGPUPowerPreference_HighPerformance, .forceFallbackAdapter = software,
            .backendType = systems[i],
        };
        WGPURequestAdapterCallbackInfo back = {
            .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_adapter, .userdata1 = g,
        };
        g->answered = false;
        g->wg.wgpuInstanceRequestAdapter(g->instance, &wanted, back);
        await(g);
        if (g->failure)
            break; /* the answer may still come */
        if (!g->adapter)
            continue;
        *limits = (WGPULimits){0};
        bool on_cpu = is_software(g);
        const char *here = on_cpu && !software ? "it is software" :
                           g->wg.wgpuAdapterGetLimits(g->adapter, limits) != WGPUStatus_Success ? "it has no limits" :
                           unfit(g, limits);
        if (!here)
            return EDGE_OK;
        why = here;
        g->wg.wgpuAdapterRelease(g->adapter);
        g->adapter = NULL;
        g->name[0] = 0;
    }
    if (!why)
        return edge_fail(error, EDGE_UNSUPPORTED, "WebGPU has no %s here: set engine to cpu or auto",
                         software ? "adapter" : "GPU");
    return edge_fail(error, EDGE_UNSUPPORTED, "WebGPU's adapter cannot run the bundle (%s): set engine to cpu or auto", why);
}

static void make_device(gpu *g, const WGPULimits *limits)
{
    WGPUDeviceDescriptor wanted = {
        .requiredLimits = limits,
        .deviceLostCallbackInfo = {.mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_loss, .userdata1 = g},
        .uncapturedErrorCallbackInfo = {.callback = on_error, .userdata1 = g},
    };
    WGPURequestDeviceCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_device, .userdata1 = g,
    };
    g->answered = false;
    g->wg.wgpuAdapterRequestDevice(g->adapter, &wanted, back);
    await(g);
    if (g->wg_device)
        g->wg_queue = g->wg.wgpuDeviceGetQueue(g->wg_device);
}

/* ---- buffers ------------------------------------------------------------------------------------------------------- */

/* Zeros. NULL: g->failure. */
static WGPUBuffer make_buffer(gpu *g, uint64_t size, WGPUBufferUsage usage)
{
    WGPUBufferDescriptor wanted = {.usage = usage, .size = size};
    WGPUBuffer made = g->failure ? NULL : g->wg.wgpuDeviceCreateBuffer(g->wg_device, &wanted);
    g->bytes += made ? size : 0;
    return made;
}

static void wait_for_all(gpu *g);

/* The library keeps copies of what is written until the device has it. */
static void write_to(gpu *g, WGPUBuffer buffer, uint64_t offset, const void *data, uint64_t size)
{
    g->wg.wgpuQueueWriteBuffer(g->wg_queue, buffer, offset, data, size);
    if ((g->copied += size) < MOST_COPIED || g->failure)
        return;
    g->wg.wgpuQueueSubmit(g->wg_queue, 0, NULL);
    wait_for_all(g);
}

static void write_buffer(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait)
{
    (void)wait; /* the data has been copied */
    write_to(g, g->buffers[buffer], offset, data, size);
}

/* What stays the same from run to run: buffers of each dispatch, and its numbers. */
static void bind_dispatch(gpu *g, uint32_t number, const gpu_dispatch_config *each)
{
    const uint32_t *numbers = (const uint32_t *)gpu_table(g, g->config->numbers_at) + each->numbers;
    const gpu_part *parts = gpu_table(g, g->config->parts_at);
    uint32_t values[ALIGNMENT / sizeof(uint32_t)] = {0};
    WGPUBindGroupEntry entries[MOST_PARTS + 1] = {{0}};
    for (uint32_t i = 0; i < each->parts; i++) {
        const gpu_part *part = parts + numbers[i];
        entries[i] = (WGPUBindGroupEntry){
            .binding = i, .buffer = g->buffers[part->buffer], .offset = part->offset, .size = part->size,
        };
    }
    entries[each->parts] = (WGPUBindGroupEntry){
        .binding = each->parts, .buffer = g->uniform, .offset = (uint64_t)number * ALIGNMENT, .size = ALIGNMENT,
    };
    memcpy(values, numbers + each->parts, each->scalars * sizeof *values);
    values[each->scalars] = each->groups[0] - 1;
    write_to(g, g->uniform, (uint64_t)number * ALIGNMENT, values, sizeof values);
    WGPUBindGroupDescriptor wanted = {
        .layout = g->layouts[each->kernel], .entryCount = each->parts + 1, .entries = entries,
    };
    if (!g->failure)
        g->groups[number] = g->wg.wgpuDeviceCreateBindGroup(g->wg_device, &wanted);
}

static uint64_t mapped_bytes(const gpu *g)
{
    uint64_t logits = (uint64_t)g->config->vocab * sizeof(float);
    return logits > LEAST_MAPPED ? logits : LEAST_MAPPED;
}

static edge_status make_buffers(gpu *g, edge_error *error)
{
    const gpu_config *c = g->config;
    const gpu_buffer *buffers = gpu_table(g, c->buffers_at);
    const gpu_dispatch_config *dispatches = gpu_table(g, c->dispatches_at);
    for (uint32_t i = 0; i < c->buffers && !g->failure; i++) {
        g->buffers[i] = make_buffer(g, buffers[i].size,
                                    WGPUBufferUsage_Storage | WGPUBufferUsage_CopySrc | WGPUBufferUsage_CopyDst);
        if (buffers[i].loaded)
            load_weights(g, i, buffers + i);
    }
    g->mapped = make_buffer(g, mapped_bytes(g), WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
    g->uniform = make_buffer(g, (uint64_t)c->dispatches * ALIGNMENT, WGPUBufferUsage_Uniform | WGPUBufferUsage_CopyDst);
    for (uint32_t i = 0; i < c->dispatches && !g->failure; i++)
        bind_dispatch(g, i, dispatches + i);
    if (!g->failure)
        return EDGE_OK;
    return edge_fail(error, g->failure == (int32_t)WGPUErrorType_OutOfMemory ? EDGE_NO_MEMORY : EDGE_UNSUPPORTED,
                     "%s cannot hold the model (%s): set engine to cpu or auto", g->name, g->failed_by);
}

static edge_status open_device(gpu *g, const char *cache, bool software, edge_error *error)
{
    WGPUInstanceDescriptor plain = {0};
    WGPULimits limits;
    edge_status status = check_version(g, error);
    if (status)
        return status;
    if (!(g->instance = g->wg.wgpuCreateInstance(&plain)))
        return edge_fail(error, EDGE_UNSUPPORTED, "WebGPU cannot be opened here: set engine to cpu or auto");
    if ((status = find_adapter(g, software, &limits, error)))
        return status;
    make_device(g, &limits);
    if (g->failure)
        return edge_fail(error, EDGE_UNSUPPORTED, "%s cannot be opened (%s): set engine to cpu or auto", g->name, g->failed_by);
    g->library = webgpu_version();
    status = webgpu_kernels(g, cache, error);
    return status ? status : make_buffers(g, error);
}

#define RELEASE(function, handle) \
    if (handle) \
        g->wg.function(handle)

static void release_buffer(gpu *g, WGPUBuffer buffer)
{
    if (!buffer)
        return;
    g->wg.wgpuBufferDestroy(buffer);
    g->wg.wgpuBufferRelease(buffer);
}

static void release_device(gpu *g)
{
    for (uint32_t i = 0; i < g->config->dispatches; i++)
        RELEASE(wgpuBindGroupRelease, g->groups[i]);
    for (uint32_t i = 0; i < g->config->kernels; i++) {
        RELEASE(wgpuComputePipelineRelease, g->kernels[i]);
        RELEASE(wgpuBindGroupLayoutRelease, g->layouts[i]);
    }
    for (uint32_t i = 0; i < g->config->buffers; i++)
        release_buffer(g, g->buffers[i]);
    release_buffer(g, g->mapped);
    release_buffer(g, g->uniform);
    RELEASE(wgpuDeviceDestroy, g->wg_device);
    if (g->instance)
        g->wg.wgpuInstanceProcessEvents(g->instance); /* the last callbacks */
    RELEASE(wgpuQueueRelease, g->wg_queue);
    RELEASE(wgpuDeviceRelease, g->wg_device);
    RELEASE(wgpuAdapterRelease, g->adapter);
    RELEASE(wgpuInstanceRelease, g->instance);
}

/* What belongs to a device that hangs stays: to release it would wait for the device. Nothing asks its library again, so
 * that it calls nothing back. */
static void close_device(gpu *g)
{
    if (g->failure != LATE)
        release_device(g);
    g->instance = NULL, g->adapter = NULL, g->wg_device = NULL, g->wg_queue = NULL;
    g->mapped = g->uniform = NULL;
    g->copied = 0;
}

/* ---- work ---------------------------------------------------------------------------------------------------------- */

static void on_mapped(WGPUMapAsyncStatus status, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    (void)unused;
    if (status != WGPUMapAsyncStatus_Success)
        gpu_fail(g, REFUSED, said.data, said.length);
    g->answered = true;
}

static void on_done(WGPUQueueWorkDoneStatus status, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    (void)unused;
    if (status != WGPUQueueWorkDoneStatus_Success)
        gpu_fail(g, REFUSED, said.data, said.length);
    g->answered = true;
}

static void wait_for_all(gpu *g)
{
    WGPUQueueWorkDoneCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_done, .userdata1 = g,
    };
    if (g->failure)
        return;
    g->answered = false;
    g->wg.wgpuQueueOnSubmittedWorkDone(g->wg_queue, back);
    await(g);
    g->copied = 0;
}

static void submit(gpu *g, WGPUCommandEncoder encoder)
{
    WGPUCommandBuffer commands = g->wg.wgpuCommandEncoderFinish(encoder, NULL);
    g->wg.wgpuCommandEncoderRelease(encoder);
    if (!commands)
        return;
    if (!g->failure)
        g->wg.wgpuQueueSubmit(g->wg_queue, 1, &commands);
    g->wg.wgpuCommandBufferRelease(commands);
}

/* A part that fits into `mapped`. */
static void read_part(gpu *g, WGPUBuffer buffer, uint64_t offset, void *data, uint64_t size)
{
    WGPUBufferMapCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_mapped, .userdata1 = g,
    };
    WGPUCommandEncoder encoder = g->wg.wgpuDeviceCreateCommandEncoder(g->wg_device, NULL);
    g->wg.wgpuCommandEncoderCopyBufferToBuffer(encoder, buffer, offset, g->mapped, 0, size);
    submit(g, encoder);
    if (g->failure)
        return;
    g->answered = false;
    g->wg.wgpuBufferMapAsync(g->mapped, WGPUMapMode_Read, 0, size, back);
    await(g);
    const void *found = g->failure ? NULL : g->wg.wgpuBufferGetConstMappedRange(g->mapped, 0, size);
    if (!found) {
        gpu_fail(g, REFUSED, "a buffer cannot be read", 23);
        return;
    }
    memcpy(data, found, size);
    g->wg.wgpuBufferUnmap(g->mapped);
    g->copied = 0;
}

static void read_buffer(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size)
{
    uint64_t most = mapped_bytes(g);
    for (uint64_t at = 0; at < size && !g->failure; at += most)
        read_part(g, g->buffers[buffer], offset + at, (uint8_t *)data + at, size - at < most ? size - at : most);
}

static void run(gpu *g, uint32_t first, uint32_t count, uint32_t tokens)
{
    const gpu_dispatch_config *dispatches = gpu_table(g, g->config->dispatches_at);
    WGPUCommandEncoder encoder = g->wg.wgpuDeviceCreateCommandEncoder(g->wg_device, NULL);
    WGPUComputePassEncoder encoded = g->wg.wgpuCommandEncoderBeginComputePass(encoder, NULL);
    for (uint32_t i = first; i < first + count; i++) {
        const gpu_dispatch_config *each = dispatches + i;
        if (g->skipped[i])
            continue;
        uint32_t rows = rows_of_groups(each, tokens);
        g->wg.wgpuComputePassEncoderSetPipeline(encoded, g->kernels[each->kernel]);
        g->wg.wgpuComputePassEncoderSetBindGroup(encoded, 0, g->groups[i], 0, NULL);
        g->wg.wgpuComputePassEncoderDispatchWorkgroups(encoded, each->groups[0], rows, 1);
    }
    g->wg.wgpuComputePassEncoderEnd(encoded);
    g->wg.wgpuComputePassEncoderRelease(encoded);
    submit(g, encoder);
}

const gpu_driver WEBGPU = {"WebGPU", load, open_device, close_device, write_buffer, read_buffer, run, wait_for_all};

#endif
