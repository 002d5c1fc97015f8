/* Compiles kernels by WebGPU. Drivers cache compiled code themselves; a failure is kept in the app's cache folder. */
#include <string.h>

#include "gpu.h"
#include "webgpu_driver.h"

#ifndef GPU_BY_METAL

uint32_t webgpu_parts(const gpu *g)
{
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    uint32_t most = 0;
    for (uint32_t i = 0; i < g->config->kernels; i++)
        most = kernels[i].parts > most ? kernels[i].parts : most;
    return most;
}

static WGPUStringView view_of(const char *text, size_t length)
{
    return (WGPUStringView){text, length};
}

static void make_kernel(gpu *g, uint32_t number, const gpu_kernel *kernel)
{
    webgpu_state *state = g->own;
    WGPUBindGroupLayoutEntry entries[MOST_PARTS + 1] = {{0}};
    for (uint32_t i = 0; i <= kernel->parts; i++) {
        WGPUBufferBindingType type = i == kernel->parts ? WGPUBufferBindingType_Uniform :
                                     kernel->written >> i & 1 ? WGPUBufferBindingType_Storage :
                                     WGPUBufferBindingType_ReadOnlyStorage;
        entries[i] = (WGPUBindGroupLayoutEntry){
            .binding = i, .visibility = WGPUShaderStage_Compute, .buffer = {.type = type},
        };
    }
    WGPUShaderSourceWGSL source = {
        .chain = {.sType = WGPUSType_ShaderSourceWGSL},
        .code = view_of((const char *)g->section + kernel->source[GPU_WGSL], kernel->length[GPU_WGSL]),
    };
    WGPUShaderModuleDescriptor about = {.nextInChain = &source.chain};
    WGPUBindGroupLayoutDescriptor bound = {.entryCount = kernel->parts + 1, .entries = entries};
    WGPUBindGroupLayout layout = state->api.wgpuDeviceCreateBindGroupLayout(state->device, &bound);
    state->layouts[number] = layout;
    WGPUPipelineLayoutDescriptor groups = {.bindGroupLayoutCount = 1, .bindGroupLayouts = &layout};
    WGPUShaderModule module = state->api.wgpuDeviceCreateShaderModule(state->device, &about);
    WGPUPipelineLayout whole = state->api.wgpuDeviceCreatePipelineLayout(state->device, &groups);
    WGPUComputePipelineDescriptor wanted = {
        .layout = whole, .compute = {.module = module, .entryPoint = view_of(kernel->name, strlen(kernel->name))},
    };
    if (!g->failure)
        g->kernels[number] = state->api.wgpuDeviceCreateComputePipeline(state->device, &wanted);
    if (whole)
        state->api.wgpuPipelineLayoutRelease(whole);
    if (module)
        state->api.wgpuShaderModuleRelease(module);
}

edge_status webgpu_kernels(gpu *g, const char *cache, edge_error *error)
{
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    char path[LONGEST_PATH];
    bool keeps = cache && kept_kernels(g, GPU_WGSL, cache, ".wgsl", path);
    if (webgpu_parts(g) > MOST_PARTS)
        gpu_fail(g, REFUSED, "a kernel has too many buffers", 29);
    else if (keeps)
        fail_as_before(g, path);
    for (uint32_t i = 0; i < g->config->kernels && !g->failure; i++)
        make_kernel(g, i, kernels + i);
    if (!g->failure)
        return EDGE_OK;
    /* Keep only validation errors of libraries that state a version: others may be temporary, or another library's
     * tomorrow. */
    if (keeps && g->library > 1 && g->failure == (int32_t)WGPUErrorType_Validation)
        keep_failure(g, path);
    return edge_fail(error, EDGE_UNSUPPORTED, "%s cannot compile the bundle's kernels (%s): set engine to cpu or auto",
                     g->name, g->failed_by);
}

#endif
