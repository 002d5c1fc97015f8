/* The driver of WebGPU (webgpu.h) on Vulkan or Direct3D 12, by the app's library, wgpu-native or Dawn. The app links or
 * loads the library, or it is found by its file name. It is never unloaded, since drivers have threads.
 *
 * Errors arrive in callbacks. None may come after `close`, when the session's memory is freed. */
#include <string.h>

#include "gpu.h"
#include "system.h"
#include "webgpu_driver.h"

#ifndef GPU_BY_METAL

enum {
    ALIGNMENT = 256,      /* bytes of a dispatch's numbers */
    LEAST_MAPPED = 65536, /* bytes of the buffer for reading, at least */
    MOST_COPIED = 4 << 20
};
static const double PATIENCE_S = 300; /* for any request: drivers compile when a kernel first runs */
static const double PAUSE_S = 5e-5, LONG_PAUSE_S = 1e-3; /* between polls; they grow with the time waited */

/* ---- the library and its device ---------------------------------------------------------------------------------- */

static void *layout(arena *from, const gpu_config *config)
{
    webgpu_state *state = take(from, sizeof *state);
    WGPUBindGroupLayout *layouts = take(from, config->kernels * sizeof *layouts);
    WGPUBindGroup *groups = take(from, config->dispatches * sizeof *groups);
    if (state)
        state->layouts = layouts, state->groups = groups;
    return state;
}

static bool load(gpu *g)
{
    webgpu_state *state = g->own;
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    void *library;
    if (!kernels->length[GPU_WGSL] || !webgpu_library(&library))
        return false;
    state->api = (webgpu){0};
#define LOAD(result, name, arguments) *(void **)&state->api.name = gpu_function(library, #name);
    WEBGPU_FUNCTIONS(LOAD)
    LOAD(, wgpuDevicePoll, )
    LOAD(, wgpuGetVersion, )
    state->api.wgpuGetInstanceFeatures = gpu_function(library, "wgpuGetInstanceFeatures");
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

/* Checks that the library has the structures of webgpu_abi.h: wgpu-native by its version, others by a function that was
 * added with them. */
static edge_status check_version(const gpu *g, edge_error *error)
{
    webgpu_state *state = g->own;
    bool whole = state->api.wgpuGetInstanceFeatures;
#define CHECK(result, name, arguments) whole = whole && state->api.name;
    WEBGPU_FUNCTIONS(CHECK)
#undef CHECK
    uint32_t version = state->api.wgpuGetVersion ? state->api.wgpuGetVersion() >> 24 : WEBGPU_NATIVE;
    if (whole && version == WEBGPU_NATIVE)
        return EDGE_OK;
    if (version == WEBGPU_NATIVE)
        return edge_fail(error, EDGE_UNSUPPORTED, "the app's library of webgpu.h lacks functions: bring wgpu-native %d, or "
                         "set engine to cpu or auto", (int64_t)WEBGPU_NATIVE);
    return edge_fail(error, EDGE_UNSUPPORTED, "the app's wgpu-native is version %d: bring version %d, or set engine to cpu "
                     "or auto", (int64_t)version, (int64_t)WEBGPU_NATIVE);
}

/* Processes events until the request is answered or has failed; the answer may then still come while the device is closed.
 * The library itself never waits, since it would wait forever for a device that hangs. */
static void await(gpu *g)
{
    webgpu_state *state = g->own;
    double began = now_seconds();
    while (!state->answered && !g->failure) {
        if (state->device && state->api.wgpuDevicePoll)
            state->api.wgpuDevicePoll(state->device, false, NULL);
        state->api.wgpuInstanceProcessEvents(state->instance);
        if (state->answered || g->failure)
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
    webgpu_state *state = g->own;
    (void)said, (void)unused;
    state->adapter = status == WGPURequestAdapterStatus_Success ? adapter : NULL;
    state->answered = true;
}

static void on_device(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    webgpu_state *state = g->own;
    (void)unused;
    if (status == WGPURequestDeviceStatus_Success)
        state->device = device;
    else
        gpu_fail(g, REFUSED, said.data, said.length);
    state->answered = true;
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

/* Copies the beginning of a text; ends with \0. */
static void copy_text(char *to, size_t room, WGPUStringView from)
{
    size_t length = from.data ? from.length : 0;
    length = length < room ? length : room - 1;
    memset(to, 0, room);
    if (length)
        memcpy(to, from.data, length);
}

/* Whether the adapter runs on the CPU. Sets name and version. */
static bool is_software(gpu *g)
{
    webgpu_state *state = g->own;
    WGPUAdapterInfo info = {0};
    if (state->api.wgpuAdapterGetInfo(state->adapter, &info) != WGPUStatus_Success)
        return false;
    copy_text(g->name, sizeof g->name, info.device);
    copy_text(g->version, sizeof g->version, info.description);
    bool software = info.adapterType == WGPUAdapterType_CPU;
    state->api.wgpuAdapterInfoFreeMembers(info);
    return software;
}

/* Finds the fastest adapter of the first system that has a fitting one. OpenGL, the slowest, is left out. */
static edge_status find_adapter(gpu *g, bool software, WGPULimits *limits, edge_error *error)
{
    webgpu_state *state = g->own;
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
        state->answered = false;
        state->api.wgpuInstanceRequestAdapter(state->instance, &wanted, back);
        await(g);
        if (g->failure)
            break; /* the answer may still come */
        if (!state->adapter)
            continue;
        *limits = (WGPULimits){0};
        bool on_cpu = is_software(g);
        const char *here = on_cpu && !software ? "it is software" :
                           state->api.wgpuAdapterGetLimits(state->adapter, limits) != WGPUStatus_Success ? "it has no limits" :
                           unfit(g, limits);
        if (!here)
            return EDGE_OK;
        why = here;
        state->api.wgpuAdapterRelease(state->adapter);
        state->adapter = NULL;
        g->name[0] = 0;
    }
    if (!why)
        return edge_fail(error, EDGE_UNSUPPORTED, "WebGPU has no %s here: set engine to cpu or auto",
                         software ? "adapter" : "GPU");
    return edge_fail(error, EDGE_UNSUPPORTED, "WebGPU's adapter cannot run the bundle (%s): set engine to cpu or auto", why);
}

static void make_device(gpu *g, const WGPULimits *limits)
{
    webgpu_state *state = g->own;
    WGPUDeviceDescriptor wanted = {
        .requiredLimits = limits,
        .deviceLostCallbackInfo = {.mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_loss, .userdata1 = g},
        .uncapturedErrorCallbackInfo = {.callback = on_error, .userdata1 = g},
    };
    WGPURequestDeviceCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_device, .userdata1 = g,
    };
    state->answered = false;
    state->api.wgpuAdapterRequestDevice(state->adapter, &wanted, back);
    await(g);
    if (state->device)
        state->queue = state->api.wgpuDeviceGetQueue(state->device);
}

/* ---- buffers ------------------------------------------------------------------------------------------------------- */

/* Makes a buffer of zeros; NULL: see g->failure. */
static WGPUBuffer make_buffer(gpu *g, uint64_t size, WGPUBufferUsage usage)
{
    webgpu_state *state = g->own;
    WGPUBufferDescriptor wanted = {.usage = usage, .size = size};
    WGPUBuffer made = g->failure ? NULL : state->api.wgpuDeviceCreateBuffer(state->device, &wanted);
    g->bytes += made ? size : 0;
    return made;
}

static void wait_for_all(gpu *g);

/* The library keeps copies of written data until the device has them. */
static void write_to(gpu *g, WGPUBuffer buffer, uint64_t offset, const void *data, uint64_t size)
{
    webgpu_state *state = g->own;
    state->api.wgpuQueueWriteBuffer(state->queue, buffer, offset, data, size);
    if ((state->copied += size) < MOST_COPIED || g->failure)
        return;
    state->api.wgpuQueueSubmit(state->queue, 0, NULL);
    wait_for_all(g);
}

static void write_buffer(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait)
{
    (void)wait; /* the data has been copied */
    write_to(g, g->buffers[buffer], offset, data, size);
}

/* Binds buffers and numbers of a dispatch, which never change. */
static void bind_dispatch(gpu *g, uint32_t number, const gpu_dispatch_config *each)
{
    webgpu_state *state = g->own;
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
        .binding = each->parts, .buffer = state->uniform, .offset = (uint64_t)number * ALIGNMENT, .size = ALIGNMENT,
    };
    memcpy(values, numbers + each->parts, each->scalars * sizeof *values);
    values[each->scalars] = each->groups[0] - 1;
    write_to(g, state->uniform, (uint64_t)number * ALIGNMENT, values, sizeof values);
    WGPUBindGroupDescriptor wanted = {
        .layout = state->layouts[each->kernel], .entryCount = each->parts + 1, .entries = entries,
    };
    if (!g->failure)
        state->groups[number] = state->api.wgpuDeviceCreateBindGroup(state->device, &wanted);
}

static uint64_t mapped_bytes(const gpu *g)
{
    uint64_t logits = (uint64_t)g->config->vocab * sizeof(float);
    return logits > LEAST_MAPPED ? logits : LEAST_MAPPED;
}

static edge_status make_buffers(gpu *g, edge_error *error)
{
    webgpu_state *state = g->own;
    const gpu_config *c = g->config;
    const gpu_buffer *buffers = gpu_table(g, c->buffers_at);
    const gpu_dispatch_config *dispatches = gpu_table(g, c->dispatches_at);
    for (uint32_t i = 0; i < c->buffers && !g->failure; i++) {
        g->buffers[i] = make_buffer(g, buffers[i].size,
                                    WGPUBufferUsage_Storage | WGPUBufferUsage_CopySrc | WGPUBufferUsage_CopyDst);
        if (buffers[i].loaded)
            load_weights(g, i, buffers + i);
    }
    state->mapped = make_buffer(g, mapped_bytes(g), WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
    state->uniform = make_buffer(g, (uint64_t)c->dispatches * ALIGNMENT, WGPUBufferUsage_Uniform | WGPUBufferUsage_CopyDst);
    for (uint32_t i = 0; i < c->dispatches && !g->failure; i++)
        bind_dispatch(g, i, dispatches + i);
    if (!g->failure)
        return EDGE_OK;
    return edge_fail(error, g->failure == (int32_t)WGPUErrorType_OutOfMemory ? EDGE_NO_MEMORY : EDGE_UNSUPPORTED,
                     "%s cannot hold the model (%s): set engine to cpu or auto", g->name, g->failed_by);
}

static edge_status open_device(gpu *g, const char *cache, bool software, edge_error *error)
{
    webgpu_state *state = g->own;
    WGPUInstanceDescriptor plain = {0};
    WGPULimits limits;
    edge_status status = check_version(g, error);
    if (status)
        return status;
    if (!(state->instance = state->api.wgpuCreateInstance(&plain)))
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
        state->api.function(handle)

static void release_buffer(const webgpu_state *state, WGPUBuffer buffer)
{
    if (!buffer)
        return;
    state->api.wgpuBufferDestroy(buffer);
    state->api.wgpuBufferRelease(buffer);
}

static void release_device(const gpu *g, webgpu_state *state)
{
    for (uint32_t i = 0; i < g->config->dispatches; i++)
        RELEASE(wgpuBindGroupRelease, state->groups[i]);
    for (uint32_t i = 0; i < g->config->kernels; i++) {
        RELEASE(wgpuComputePipelineRelease, g->kernels[i]);
        RELEASE(wgpuBindGroupLayoutRelease, state->layouts[i]);
    }
    for (uint32_t i = 0; i < g->config->buffers; i++)
        release_buffer(state, g->buffers[i]);
    release_buffer(state, state->mapped);
    release_buffer(state, state->uniform);
    RELEASE(wgpuDeviceDestroy, state->device);
    if (state->instance)
        state->api.wgpuInstanceProcessEvents(state->instance); /* the last callbacks */
    RELEASE(wgpuQueueRelease, state->queue);
    RELEASE(wgpuDeviceRelease, state->device);
    RELEASE(wgpuAdapterRelease, state->adapter);
    RELEASE(wgpuInstanceRelease, state->instance);
}

/* The handles of a device that hangs are kept, since to release them would wait for the device. Nothing processes its
 * library's events any more, so that no callback comes. */
static void close_device(gpu *g)
{
    webgpu_state *state = g->own;
    if (g->failure != LATE)
        release_device(g, state);
    state->instance = NULL, state->adapter = NULL, state->device = NULL, state->queue = NULL;
    state->mapped = state->uniform = NULL;
    state->copied = 0;
    memset(state->layouts, 0, g->config->kernels * sizeof *state->layouts);
    memset(state->groups, 0, g->config->dispatches * sizeof *state->groups);
}

/* ---- work ---------------------------------------------------------------------------------------------------------- */

static void on_mapped(WGPUMapAsyncStatus status, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    webgpu_state *state = g->own;
    (void)unused;
    if (status != WGPUMapAsyncStatus_Success)
        gpu_fail(g, REFUSED, said.data, said.length);
    state->answered = true;
}

static void on_done(WGPUQueueWorkDoneStatus status, WGPUStringView said, void *data, void *unused)
{
    gpu *g = data;
    webgpu_state *state = g->own;
    (void)unused;
    if (status != WGPUQueueWorkDoneStatus_Success)
        gpu_fail(g, REFUSED, said.data, said.length);
    state->answered = true;
}

static void wait_for_all(gpu *g)
{
    webgpu_state *state = g->own;
    WGPUQueueWorkDoneCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_done, .userdata1 = g,
    };
    if (g->failure)
        return;
    state->answered = false;
    state->api.wgpuQueueOnSubmittedWorkDone(state->queue, back);
    await(g);
    state->copied = 0;
}

static void submit(gpu *g, WGPUCommandEncoder encoder)
{
    webgpu_state *state = g->own;
    WGPUCommandBuffer commands = state->api.wgpuCommandEncoderFinish(encoder, NULL);
    state->api.wgpuCommandEncoderRelease(encoder);
    if (!commands)
        return;
    if (!g->failure)
        state->api.wgpuQueueSubmit(state->queue, 1, &commands);
    state->api.wgpuCommandBufferRelease(commands);
}

/* Reads a part that fits into `mapped`. */
static void read_part(gpu *g, WGPUBuffer buffer, uint64_t offset, void *data, uint64_t size)
{
    webgpu_state *state = g->own;
    WGPUBufferMapCallbackInfo back = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_mapped, .userdata1 = g,
    };
    WGPUCommandEncoder encoder = state->api.wgpuDeviceCreateCommandEncoder(state->device, NULL);
    state->api.wgpuCommandEncoderCopyBufferToBuffer(encoder, buffer, offset, state->mapped, 0, size);
    submit(g, encoder);
    if (g->failure)
        return;
    state->answered = false;
    state->api.wgpuBufferMapAsync(state->mapped, WGPUMapMode_Read, 0, size, back);
    await(g);
    const void *found = g->failure ? NULL : state->api.wgpuBufferGetConstMappedRange(state->mapped, 0, size);
    if (!found) {
        gpu_fail(g, REFUSED, "a buffer cannot be read", 23);
        return;
    }
    memcpy(data, found, size);
    state->api.wgpuBufferUnmap(state->mapped);
    state->copied = 0;
}

static void read_buffer(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size)
{
    uint64_t most = mapped_bytes(g);
    for (uint64_t at = 0; at < size && !g->failure; at += most)
        read_part(g, g->buffers[buffer], offset + at, (uint8_t *)data + at, size - at < most ? size - at : most);
}

static void run(gpu *g, uint32_t first, uint32_t count, uint32_t tokens)
{
    webgpu_state *state = g->own;
    const gpu_dispatch_config *dispatches = gpu_table(g, g->config->dispatches_at);
    WGPUCommandEncoder encoder = state->api.wgpuDeviceCreateCommandEncoder(state->device, NULL);
    WGPUComputePassEncoder encoded = state->api.wgpuCommandEncoderBeginComputePass(encoder, NULL);
    for (uint32_t i = first; i < first + count; i++) {
        const gpu_dispatch_config *each = dispatches + i;
        if (g->skipped[i])
            continue;
        uint32_t rows = rows_of_groups(each, tokens);
        state->api.wgpuComputePassEncoderSetPipeline(encoded, g->kernels[each->kernel]);
        state->api.wgpuComputePassEncoderSetBindGroup(encoded, 0, state->groups[i], 0, NULL);
        state->api.wgpuComputePassEncoderDispatchWorkgroups(encoded, each->groups[0], rows, 1);
    }
    state->api.wgpuComputePassEncoderEnd(encoded);
    state->api.wgpuComputePassEncoderRelease(encoded);
    submit(g, encoder);
}

const gpu_driver WEBGPU = {"WebGPU", layout, load, open_device, close_device, write_buffer, read_buffer, run, wait_for_all};

#endif
