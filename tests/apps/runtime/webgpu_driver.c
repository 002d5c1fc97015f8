/* Stands between the GPU pass and the system, for tests of webgpu.c: hides OpenCL, finds wgpu-native at WGPU_LIBRARY, and
 * does what no adapter here does: with -Ddlopen=driver_open -Ddlsym=driver_function -Dclock_gettime=driver_clock
 * -Dnanosleep=driver_sleep. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "base.h"
#include "webgpu_abi.h"

#undef dlopen
#undef dlsym
#undef clock_gettime
#undef nanosleep
void *dlopen(const char *name, int mode);
void *dlsym(void *library, const char *name);
int clock_gettime(clockid_t clock, struct timespec *time);
int nanosleep(const struct timespec *asked, struct timespec *rest);

enum { NO_LIMIT = 1, NO_DEVICE, NO_ADAPTER, NO_KERNEL, OTHER_VERSION, NO_FUNCTION };
uint32_t driver_is_gpu;         /* 1: the adapter says that it is one */
uint32_t driver_refuses;        /* one of the above */
int64_t driver_runs;            /* submits of dispatches so far */
int64_t driver_fails_at = -1;   /* the number of the one before which the device is lost */
int64_t driver_cancels_at = -1; /* the number of the one at which … */
edge_session *driver_session;   /* … this one's answer is cancelled */
uint32_t driver_compiles;       /* pipelines so far */
uint32_t driver_hangs;          /* 1: the device does not answer, while time goes by; 2: and it was waited for */
double driver_ahead;            /* seconds by which our clock is fast; pauses of 2 ms or more advance it instead of time */

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
    driver_compiles++;
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

static WGPUBool poll(WGPUDevice from, WGPUBool wait, const uint64_t *submission)
{
    if (!driver_hangs)
        return real.wgpuDevicePoll(from, wait, submission);
    driver_hangs = wait ? 2 : driver_hangs;
    driver_ahead += 100;
    return false;
}

static void process_events(WGPUInstance instance)
{
    if (!driver_hangs)
        real.wgpuInstanceProcessEvents(instance);
}

int driver_clock(clockid_t clock, struct timespec *time);
int driver_clock(clockid_t clock, struct timespec *time)
{
    int code = clock_gettime(clock, time);
    if (clock == CLOCK_MONOTONIC) {
        int64_t all = time->tv_nsec + (int64_t)(1e9 * driver_ahead);
        time->tv_sec += all / 1000000000, time->tv_nsec = all % 1000000000;
    }
    return code;
}

int driver_sleep(const struct timespec *asked, struct timespec *rest);
int driver_sleep(const struct timespec *asked, struct timespec *rest)
{
    double seconds = (double)asked->tv_sec + 1e-9 * (double)asked->tv_nsec;
    if (seconds < 2e-3)
        return nanosleep(asked, rest);
    driver_ahead += seconds;
    return 0;
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
    REPLACE(wgpuDevicePoll, poll)
    REPLACE(wgpuInstanceProcessEvents, process_events)
    return found && ours ? ours : found;
}
