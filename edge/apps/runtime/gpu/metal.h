/* The part of Metal that the driver uses, called from C through the Objective-C runtime, without headers of the SDK or a
 * compiler of Objective-C. Names, signatures and numbers are from developer.apple.com/documentation/metal, and agree with
 * Apple's metal-cpp, which calls Metal in the same way. */
#ifndef EDGE_METAL_H
#define EDGE_METAL_H

#include "base.h"

/* MTLResourceStorageModeShared, MTLCommandBufferStatusError, MTLLibraryErrorCompileFailure */
enum { MTL_STORAGE_SHARED = 0, MTL_STATUS_ERROR = 5, MTL_COMPILE_FAILURE = 3 };

typedef void *metal_id;                                /* an object, a class, a selector */
typedef struct { size_t width, height, depth; } metal_size; /* MTLSize: three NSUInteger, passed by value */

/* Functions of libobjc, on which the framework depends, and of the framework. X(result, name, arguments) */
#define METAL_FUNCTIONS(X) \
    X(metal_id, objc_getClass, (const char *)) \
    X(metal_id, sel_registerName, (const char *)) \
    X(metal_id, objc_autoreleasePoolPush, (void)) \
    X(void, objc_autoreleasePoolPop, (metal_id)) \
    X(void, objc_msgSend, (void)) /* cast to each method's type: on ARM it is not variadic */ \
    X(metal_id, MTLCreateSystemDefaultDevice, (void))

/* Methods. Those named `new…` return an object that the caller releases, the others one of the autorelease pool.
 * X(result, name, selector, parameters, arguments) */
#define METAL_METHODS(X) \
    X(void, retain, "retain", (), ()) \
    X(void, release, "release", (), ()) \
    /* NSString, NSProcessInfo, NSError */ \
    X(metal_id, string_of, "stringWithUTF8String:", (, const char *text), (, text)) \
    X(const char *, utf8, "UTF8String", (), ()) \
    X(metal_id, process_info, "processInfo", (), ()) \
    X(metal_id, system_version, "operatingSystemVersionString", (), ()) \
    X(metal_id, description, "localizedDescription", (), ()) \
    X(intptr_t, code, "code", (), ()) \
    /* MTLDevice */ \
    X(metal_id, name, "name", (), ()) \
    X(size_t, longest_buffer, "maxBufferLength", (), ()) \
    X(size_t, threadgroup_memory, "maxThreadgroupMemoryLength", (), ()) \
    X(metal_id, new_queue, "newCommandQueue", (), ()) \
    X(metal_id, new_options, "new", (), ()) /* of the class MTLCompileOptions */ \
    X(void, set_fast_math, "setFastMathEnabled:", (, bool enabled), (, enabled)) \
    X(metal_id, new_library, "newLibraryWithSource:options:error:", \
      (, metal_id source, metal_id options, metal_id *error), (, source, options, error)) \
    X(metal_id, new_function, "newFunctionWithName:", (, metal_id named), (, named)) /* of MTLLibrary */ \
    X(metal_id, new_pipeline, "newComputePipelineStateWithFunction:error:", (, metal_id function, metal_id *error), \
      (, function, error)) \
    X(size_t, most_threads, "maxTotalThreadsPerThreadgroup", (), ()) /* of MTLComputePipelineState */ \
    X(metal_id, new_buffer, "newBufferWithLength:options:", (, size_t length, size_t options), (, length, options)) \
    X(metal_id, new_buffer_of, "newBufferWithBytesNoCopy:length:options:deallocator:", \
      (, const void *bytes, size_t length, size_t options, metal_id deallocator), (, bytes, length, options, deallocator)) \
    X(void *, contents, "contents", (), ()) /* of MTLBuffer */ \
    /* MTLCommandQueue, MTLCommandBuffer, MTLComputeCommandEncoder */ \
    X(metal_id, command_buffer, "commandBuffer", (), ()) \
    X(metal_id, encoder, "computeCommandEncoder", (), ()) /* its dispatches run one after the other */ \
    X(void, set_pipeline, "setComputePipelineState:", (, metal_id pipeline), (, pipeline)) \
    X(void, set_buffer, "setBuffer:offset:atIndex:", (, metal_id buffer, size_t offset, size_t index), \
      (, buffer, offset, index)) \
    X(void, set_bytes, "setBytes:length:atIndex:", (, const void *bytes, size_t length, size_t index), \
      (, bytes, length, index)) \
    X(void, dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", (, metal_size groups, metal_size threads), \
      (, groups, threads)) \
    X(void, end_encoding, "endEncoding", (), ()) \
    X(void, commit, "commit", (), ()) \
    X(void, await, "waitUntilCompleted", (), ()) \
    X(size_t, status, "status", (), ()) \
    X(metal_id, error, "error", (), ())

enum { MOST_SENT = 32 }; /* submitted command buffers: a queue has 64 by default, and blocks beyond */

typedef struct {
#define MEMBER(result, name, arguments) result(*name) arguments;
    METAL_FUNCTIONS(MEMBER)
#undef MEMBER
#define MEMBER(result, name, selector, parameters, arguments) metal_id name;
    struct { METAL_METHODS(MEMBER) } selectors;
#undef MEMBER
    metal_id device, queue;
    metal_id weights;                    /* a buffer of the mapped file; NULL: weights are copied */
    metal_id sent[MOST_SENT];            /* command buffers, a ring: those that may not have completed */
    uint32_t first_sent, sent_count;
} metal;

/* send_NAME(m, to, ...) sends the message to an object. */
#define METAL_OPEN(...) __VA_ARGS__
#define METHOD(result, name, selector, parameters, arguments) \
    static inline result send_##name(const metal *m, metal_id to METAL_OPEN parameters) \
    { \
        return ((result(*)(metal_id, metal_id METAL_OPEN parameters))m->objc_msgSend)(to, m->selectors.name \
                                                                                      METAL_OPEN arguments); \
    }
METAL_METHODS(METHOD)
#undef METHOD

#endif
