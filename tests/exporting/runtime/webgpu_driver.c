/* Stands between the GPU pass and the system, for tests of webgpu.c: hides OpenCL, finds wgpu-native at WGPU_LIBRARY, and
 * does what no adapter here does: with -Ddlopen=driver_open -Ddlsym=driver_function. */
#define _GNU_SOURCE
#include <string.h>

#include "internal.h"
#include "webgpu_abi.h"

#undef dlopen
#undef dlsym
void *dlopen(const char *name, int mode);
void *dlsym(void *library, const char *name);

enum { NO_LIMIT = 1, NO_DEVICE, NO_ADAPTER, NO_KERNEL, OTHER_VERSION, NO_FUNCTION };
uint32_t driver_is_gpu;         /* 1: the adapter says that it is one */
uint32_t driver_refuses;        /* one of the above */
int64_t driver_runs;            /* submits of dispatches so far */
int64_t driver_fails_at = -1;   /* the number of the one before which the device is lost */
int64_t driver_cancels_at = -1; /* the number of the one at which … */
edge_session *driver_session;   /* … this one's answer is cancelled */

static webgpu real;
static WGPUDevice device;

static WGPUFuture request_adapter(WGPUInstance instance, const WGPURequestAdapterOptions *options,
                                  WGPURequestAdapterCallbackInfo back)
{
    WGPURequestAdapterOptions other = *options;
    if (driver_refuses == NO_ADAPTER)
        other.backendType = WGPUBackendType_Metal;
    if (driver_is_gpu)
        other.forceFallbackAdapter = false;
    return real.wgpuInstanceRequestAdapter(instance, &other, back);
}

static WGPUFuture request_device(WGPUAdapter adapter, const WGPUDeviceDescriptor *wanted, WGPURequestDeviceCallbackInfo back)
{
    WGPULimits limits = *wanted->requiredLimits;
    WGPUDeviceDescriptor other = *wanted;
    other.requiredLimits = &limits;
    if (driver_refuses == NO_DEVICE)
        limits.maxBindGroups = 1 << 20;
    return real.wgpuAdapterRequestDevice(adapter, &other, back);
}

static WGPUStatus adapter_limits(WGPUAdapter adapter, WGPULimits *limits)
{
    WGPUStatus status = real.wgpuAdapterGetLimits(adapter, limits);
    if (driver_refuses == NO_LIMIT)
        limits->maxStorageBufferBindingSize = 1024;
    return status;
}

static WGPUStatus adapter_info(WGPUAdapter adapter, WGPUAdapterInfo *info)
{
    WGPUStatus status = real.wgpuAdapterGetInfo(adapter, info);
    if (driver_is_gpu)
        info->adapterType = 1; /* discrete */
    return status;
}

static WGPUQueue device_queue(WGPUDevice from)
{
    device = from;
    return real.wgpuDeviceGetQueue(from);
}

static WGPUComputePipeline make_pipeline(WGPUDevice from, const WGPUComputePipelineDescriptor *wanted)
{
    WGPUComputePipelineDescriptor other = *wanted;
    if (driver_refuses == NO_KERNEL)
        other.compute.entryPoint = (WGPUStringView){"nowhere", 7};
    return real.wgpuDeviceCreateComputePipeline(from, &other);
}

static WGPUComputePassEncoder begin_pass(WGPUCommandEncoder encoder, const WGPUComputePassDescriptor *wanted)
{
    if (driver_fails_at >= 0 && driver_runs >= driver_fails_at)
        real.wgpuDeviceDestroy(device);
    if (driver_runs++ == driver_cancels_at)
        edge_cancel(driver_session);
    return real.wgpuCommandEncoderBeginComputePass(encoder, wanted);
}

static uint32_t other_version(void)
{
    return 22 << 24;
}

void *driver_open(const char *name, int mode);
void *driver_open(const char *name, int mode)
{
    return strcmp(name, "libwgpu_native.so") ? NULL : dlopen(WGPU_LIBRARY, mode);
}

void *driver_function(void *library, const char *name);
void *driver_function(void *library, const char *name)
{
    void *found = dlsym(library, name), *ours = NULL;
    if (driver_refuses == OTHER_VERSION && !strcmp(name, "wgpuGetVersion"))
        *(uint32_t (**)(void)) & ours = other_version;
    if (driver_refuses == NO_FUNCTION && !strcmp(name, "wgpuGetInstanceFeatures"))
        return NULL;
#define REPLACE(function, replacement) \
    if (!strcmp(name, #function)) \
        *(void **)&real.function = found, *(__typeof__(&replacement) *)&ours = replacement;
#define KEEP(function) \
    if (library) \
        *(void **)&real.function = dlsym(library, #function);
    KEEP(wgpuDeviceDestroy)
    REPLACE(wgpuInstanceRequestAdapter, request_adapter)
    REPLACE(wgpuAdapterRequestDevice, request_device)
    REPLACE(wgpuAdapterGetLimits, adapter_limits)
    REPLACE(wgpuAdapterGetInfo, adapter_info)
    REPLACE(wgpuDeviceGetQueue, device_queue)
    REPLACE(wgpuDeviceCreateComputePipeline, make_pipeline)
    REPLACE(wgpuCommandEncoderBeginComputePass, begin_pass)
    return found && ours ? ours : found;
}
