/* The part of webgpu.h that the pass needs: as wgpu-native 29 has it, which is that of Dawn since instances have required
 * features. The library is the app's; headers of it are not needed to build a bundle. Names, layouts and numbers are the
 * header's own, so that a test compiles webgpu.c with it instead. */
#ifndef EDGE_WEBGPU_ABI_H
#define EDGE_WEBGPU_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { WEBGPU_NATIVE = 29 }; /* the version of wgpu-native that has these structures */

#ifdef EDGE_WEBGPU_HEADER
#include EDGE_WEBGPU_HEADER
#else

typedef uint32_t WGPUBool;
typedef uint64_t WGPUFlags;
typedef WGPUFlags WGPUBufferUsage, WGPUMapMode, WGPUShaderStage;

#define WEBGPU_OBJECTS(X) \
    X(Instance) X(Adapter) X(Device) X(Queue) X(Buffer) X(ShaderModule) X(BindGroupLayout) X(PipelineLayout) \
    X(ComputePipeline) X(BindGroup) X(CommandEncoder) X(ComputePassEncoder) X(CommandBuffer) X(Sampler) X(TextureView) \
    X(Surface)
#define DECLARE(name) typedef struct WGPU##name##Impl *WGPU##name;
WEBGPU_OBJECTS(DECLARE)
#undef DECLARE

static const WGPUBufferUsage WGPUBufferUsage_MapRead = 1, WGPUBufferUsage_CopySrc = 4, WGPUBufferUsage_CopyDst = 8,
                             WGPUBufferUsage_Uniform = 0x40, WGPUBufferUsage_Storage = 0x80;
static const WGPUMapMode WGPUMapMode_Read = 1;
static const WGPUShaderStage WGPUShaderStage_Compute = 4;
typedef enum { WGPUStatus_Success = 1 } WGPUStatus;
typedef enum { WGPUSType_ShaderSourceWGSL = 2 } WGPUSType;
typedef enum { WGPUCallbackMode_AllowProcessEvents = 2 } WGPUCallbackMode;
typedef enum { WGPUFeatureLevel_Undefined } WGPUFeatureLevel;
typedef enum { WGPUPowerPreference_HighPerformance = 2 } WGPUPowerPreference;
typedef enum { WGPUBackendType_D3D12 = 4, WGPUBackendType_Metal, WGPUBackendType_Vulkan } WGPUBackendType;
typedef enum { WGPUAdapterType_CPU = 3 } WGPUAdapterType;
typedef enum { WGPURequestAdapterStatus_Success = 1 } WGPURequestAdapterStatus;
typedef enum { WGPURequestDeviceStatus_Success = 1 } WGPURequestDeviceStatus;
typedef enum { WGPUMapAsyncStatus_Success = 1 } WGPUMapAsyncStatus;
typedef enum { WGPUQueueWorkDoneStatus_Success = 1 } WGPUQueueWorkDoneStatus;
typedef enum { WGPUErrorType_Validation = 2, WGPUErrorType_OutOfMemory, WGPUErrorType_Internal } WGPUErrorType;
typedef enum { WGPUDeviceLostReason_Unknown = 1 } WGPUDeviceLostReason;
typedef enum {
    WGPUBufferBindingType_Uniform = 2, WGPUBufferBindingType_Storage, WGPUBufferBindingType_ReadOnlyStorage
} WGPUBufferBindingType;
typedef uint32_t WGPUFeatureName, WGPUInstanceFeatureName; /* and others of which only 0 is used */
typedef uint32_t WGPUSamplerBindingType, WGPUTextureSampleType, WGPUTextureViewDimension, WGPUStorageTextureAccess,
    WGPUTextureFormat;

typedef struct { uint64_t id; } WGPUFuture;
typedef struct { const char *data; size_t length; } WGPUStringView;
typedef struct WGPUChainedStruct { struct WGPUChainedStruct *next; WGPUSType sType; } WGPUChainedStruct;

typedef void (*WGPURequestAdapterCallback)(WGPURequestAdapterStatus, WGPUAdapter, WGPUStringView, void *, void *);
typedef void (*WGPURequestDeviceCallback)(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void *, void *);
typedef void (*WGPUBufferMapCallback)(WGPUMapAsyncStatus, WGPUStringView, void *, void *);
typedef void (*WGPUQueueWorkDoneCallback)(WGPUQueueWorkDoneStatus, WGPUStringView, void *, void *);
typedef void (*WGPUDeviceLostCallback)(const WGPUDevice *, WGPUDeviceLostReason, WGPUStringView, void *, void *);
typedef void (*WGPUUncapturedErrorCallback)(const WGPUDevice *, WGPUErrorType, WGPUStringView, void *, void *);
#define CALLBACK_INFO(name) \
    typedef struct { \
        WGPUChainedStruct *nextInChain; \
        WGPUCallbackMode mode; \
        WGPU##name##Callback callback; \
        void *userdata1, *userdata2; \
    } WGPU##name##CallbackInfo;
CALLBACK_INFO(RequestAdapter)
CALLBACK_INFO(RequestDevice)
CALLBACK_INFO(BufferMap)
CALLBACK_INFO(QueueWorkDone)
CALLBACK_INFO(DeviceLost)
#undef CALLBACK_INFO
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUUncapturedErrorCallback callback;
    void *userdata1, *userdata2;
} WGPUUncapturedErrorCallbackInfo;

typedef struct {
    WGPUChainedStruct *nextInChain;
    size_t requiredFeatureCount;
    const WGPUInstanceFeatureName *requiredFeatures;
    const void *requiredLimits;
} WGPUInstanceDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUFeatureLevel featureLevel;
    WGPUPowerPreference powerPreference;
    WGPUBool forceFallbackAdapter;
    WGPUBackendType backendType;
    WGPUSurface compatibleSurface;
} WGPURequestAdapterOptions;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView vendor, architecture, device, description;
    WGPUBackendType backendType;
    WGPUAdapterType adapterType;
    uint32_t vendorID, deviceID, subgroupMinSize, subgroupMaxSize;
} WGPUAdapterInfo;
typedef struct {
    WGPUChainedStruct *nextInChain;
    uint32_t maxTextureDimension1D, maxTextureDimension2D, maxTextureDimension3D, maxTextureArrayLayers, maxBindGroups,
        maxBindGroupsPlusVertexBuffers, maxBindingsPerBindGroup, maxDynamicUniformBuffersPerPipelineLayout,
        maxDynamicStorageBuffersPerPipelineLayout, maxSampledTexturesPerShaderStage, maxSamplersPerShaderStage,
        maxStorageBuffersPerShaderStage, maxStorageTexturesPerShaderStage, maxUniformBuffersPerShaderStage;
    uint64_t maxUniformBufferBindingSize, maxStorageBufferBindingSize;
    uint32_t minUniformBufferOffsetAlignment, minStorageBufferOffsetAlignment, maxVertexBuffers;
    uint64_t maxBufferSize;
    uint32_t maxVertexAttributes, maxVertexBufferArrayStride, maxInterStageShaderVariables, maxColorAttachments,
        maxColorAttachmentBytesPerSample, maxComputeWorkgroupStorageSize, maxComputeInvocationsPerWorkgroup,
        maxComputeWorkgroupSizeX, maxComputeWorkgroupSizeY, maxComputeWorkgroupSizeZ, maxComputeWorkgroupsPerDimension,
        maxImmediateSize;
} WGPULimits;
typedef struct { WGPUChainedStruct *nextInChain; WGPUStringView label; } WGPUQueueDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    size_t requiredFeatureCount;
    const WGPUFeatureName *requiredFeatures;
    const WGPULimits *requiredLimits;
    WGPUQueueDescriptor defaultQueue;
    WGPUDeviceLostCallbackInfo deviceLostCallbackInfo;
    WGPUUncapturedErrorCallbackInfo uncapturedErrorCallbackInfo;
} WGPUDeviceDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    WGPUBufferUsage usage;
    uint64_t size;
    WGPUBool mappedAtCreation;
} WGPUBufferDescriptor;
typedef struct { WGPUChainedStruct chain; WGPUStringView code; } WGPUShaderSourceWGSL;
typedef struct { WGPUChainedStruct *nextInChain; WGPUStringView label; } WGPUShaderModuleDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUBufferBindingType type;
    WGPUBool hasDynamicOffset;
    uint64_t minBindingSize;
} WGPUBufferBindingLayout;
typedef struct { WGPUChainedStruct *nextInChain; WGPUSamplerBindingType type; } WGPUSamplerBindingLayout;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUTextureSampleType sampleType;
    WGPUTextureViewDimension viewDimension;
    WGPUBool multisampled;
} WGPUTextureBindingLayout;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStorageTextureAccess access;
    WGPUTextureFormat format;
    WGPUTextureViewDimension viewDimension;
} WGPUStorageTextureBindingLayout;
typedef struct {
    WGPUChainedStruct *nextInChain;
    uint32_t binding;
    WGPUShaderStage visibility;
    uint32_t bindingArraySize;
    WGPUBufferBindingLayout buffer;
    WGPUSamplerBindingLayout sampler;
    WGPUTextureBindingLayout texture;
    WGPUStorageTextureBindingLayout storageTexture;
} WGPUBindGroupLayoutEntry;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    size_t entryCount;
    const WGPUBindGroupLayoutEntry *entries;
} WGPUBindGroupLayoutDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    size_t bindGroupLayoutCount;
    const WGPUBindGroupLayout *bindGroupLayouts;
    uint32_t immediateSize;
} WGPUPipelineLayoutDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUShaderModule module;
    WGPUStringView entryPoint;
    size_t constantCount;
    const void *constants;
} WGPUComputeState;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    WGPUPipelineLayout layout;
    WGPUComputeState compute;
} WGPUComputePipelineDescriptor;
typedef struct {
    WGPUChainedStruct *nextInChain;
    uint32_t binding;
    WGPUBuffer buffer;
    uint64_t offset, size;
    WGPUSampler sampler;
    WGPUTextureView textureView;
} WGPUBindGroupEntry;
typedef struct {
    WGPUChainedStruct *nextInChain;
    WGPUStringView label;
    WGPUBindGroupLayout layout;
    size_t entryCount;
    const WGPUBindGroupEntry *entries;
} WGPUBindGroupDescriptor;
typedef struct WGPUCommandEncoderDescriptor WGPUCommandEncoderDescriptor; /* of which there is none here: NULL */
typedef struct WGPUComputePassDescriptor WGPUComputePassDescriptor;
typedef struct WGPUCommandBufferDescriptor WGPUCommandBufferDescriptor;
#endif

/* X(result, name, arguments) */
#define WEBGPU_FUNCTIONS(X) \
    X(WGPUInstance, wgpuCreateInstance, (const WGPUInstanceDescriptor *)) \
    X(WGPUFuture, wgpuInstanceRequestAdapter, \
      (WGPUInstance, const WGPURequestAdapterOptions *, WGPURequestAdapterCallbackInfo)) \
    X(void, wgpuInstanceProcessEvents, (WGPUInstance)) \
    X(WGPUFuture, wgpuAdapterRequestDevice, (WGPUAdapter, const WGPUDeviceDescriptor *, WGPURequestDeviceCallbackInfo)) \
    X(WGPUStatus, wgpuAdapterGetLimits, (WGPUAdapter, WGPULimits *)) \
    X(WGPUStatus, wgpuAdapterGetInfo, (WGPUAdapter, WGPUAdapterInfo *)) \
    X(void, wgpuAdapterInfoFreeMembers, (WGPUAdapterInfo)) \
    X(WGPUQueue, wgpuDeviceGetQueue, (WGPUDevice)) \
    X(WGPUBuffer, wgpuDeviceCreateBuffer, (WGPUDevice, const WGPUBufferDescriptor *)) \
    X(WGPUShaderModule, wgpuDeviceCreateShaderModule, (WGPUDevice, const WGPUShaderModuleDescriptor *)) \
    X(WGPUBindGroupLayout, wgpuDeviceCreateBindGroupLayout, (WGPUDevice, const WGPUBindGroupLayoutDescriptor *)) \
    X(WGPUPipelineLayout, wgpuDeviceCreatePipelineLayout, (WGPUDevice, const WGPUPipelineLayoutDescriptor *)) \
    X(WGPUComputePipeline, wgpuDeviceCreateComputePipeline, (WGPUDevice, const WGPUComputePipelineDescriptor *)) \
    X(WGPUBindGroup, wgpuDeviceCreateBindGroup, (WGPUDevice, const WGPUBindGroupDescriptor *)) \
    X(WGPUCommandEncoder, wgpuDeviceCreateCommandEncoder, (WGPUDevice, const WGPUCommandEncoderDescriptor *)) \
    X(WGPUComputePassEncoder, wgpuCommandEncoderBeginComputePass, (WGPUCommandEncoder, const WGPUComputePassDescriptor *)) \
    X(void, wgpuCommandEncoderCopyBufferToBuffer, \
      (WGPUCommandEncoder, WGPUBuffer, uint64_t, WGPUBuffer, uint64_t, uint64_t)) \
    X(WGPUCommandBuffer, wgpuCommandEncoderFinish, (WGPUCommandEncoder, const WGPUCommandBufferDescriptor *)) \
    X(void, wgpuComputePassEncoderSetPipeline, (WGPUComputePassEncoder, WGPUComputePipeline)) \
    X(void, wgpuComputePassEncoderSetBindGroup, (WGPUComputePassEncoder, uint32_t, WGPUBindGroup, size_t, const uint32_t *)) \
    X(void, wgpuComputePassEncoderDispatchWorkgroups, (WGPUComputePassEncoder, uint32_t, uint32_t, uint32_t)) \
    X(void, wgpuComputePassEncoderEnd, (WGPUComputePassEncoder)) \
    X(void, wgpuQueueWriteBuffer, (WGPUQueue, WGPUBuffer, uint64_t, const void *, size_t)) \
    X(void, wgpuQueueSubmit, (WGPUQueue, size_t, const WGPUCommandBuffer *)) \
    X(WGPUFuture, wgpuQueueOnSubmittedWorkDone, (WGPUQueue, WGPUQueueWorkDoneCallbackInfo)) \
    X(WGPUFuture, wgpuBufferMapAsync, (WGPUBuffer, WGPUMapMode, size_t, size_t, WGPUBufferMapCallbackInfo)) \
    X(const void *, wgpuBufferGetConstMappedRange, (WGPUBuffer, size_t, size_t)) \
    X(void, wgpuBufferUnmap, (WGPUBuffer)) \
    X(void, wgpuBufferDestroy, (WGPUBuffer)) \
    X(void, wgpuDeviceDestroy, (WGPUDevice)) \
    X(void, wgpuInstanceRelease, (WGPUInstance)) \
    X(void, wgpuAdapterRelease, (WGPUAdapter)) \
    X(void, wgpuDeviceRelease, (WGPUDevice)) \
    X(void, wgpuQueueRelease, (WGPUQueue)) \
    X(void, wgpuBufferRelease, (WGPUBuffer)) \
    X(void, wgpuShaderModuleRelease, (WGPUShaderModule)) \
    X(void, wgpuBindGroupLayoutRelease, (WGPUBindGroupLayout)) \
    X(void, wgpuPipelineLayoutRelease, (WGPUPipelineLayout)) \
    X(void, wgpuComputePipelineRelease, (WGPUComputePipeline)) \
    X(void, wgpuBindGroupRelease, (WGPUBindGroup)) \
    X(void, wgpuCommandEncoderRelease, (WGPUCommandEncoder)) \
    X(void, wgpuComputePassEncoderRelease, (WGPUComputePassEncoder)) \
    X(void, wgpuCommandBufferRelease, (WGPUCommandBuffer))

typedef struct {
#define MEMBER(result, name, arguments) result(*name) arguments;
    WEBGPU_FUNCTIONS(MEMBER)
#undef MEMBER
    /* Of wgpu-native only, or NULL. The last argument of `wgpuDevicePoll` is a submission's number; NULL: all. */
    WGPUBool (*wgpuDevicePoll)(WGPUDevice, WGPUBool, const uint64_t *);
    uint32_t (*wgpuGetVersion)(void);
    void *wgpuGetInstanceFeatures; /* a function that is not called: older headers lack it */
} webgpu;

#endif
