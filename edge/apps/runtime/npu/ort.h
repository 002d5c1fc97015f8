/* The functions of ONNX Runtime's C API that the pass calls, in the app's libonnxruntime. Bundles are built without its
 * headers: OrtApi is a struct of function pointers that only grows, so that each function is known by its number. */
#ifndef EDGE_ORT_H
#define EDGE_ORT_H

#include "base.h"

typedef struct ort_object *ort_handle; /* environments, options, sessions, values, statuses (NULL: success), … */

enum {
    ORT_API = 23, /* API version of ORT_FIRST, the first with the operators of the graphs */
    ORT_FATAL = 4, ORT_ARENA = 1, ORT_DEFAULT_MEMORY = 0, ORT_NPU = 2,
    ORT_FLOAT = 1, ORT_INT64 = 7, ORT_FLOAT16 = 10
};
#define ORT_FIRST "1.23"

/* X(number in OrtApi, result, name, arguments). int32_t stands for enums. */
#define ORT_FUNCTIONS(X) \
    X(1, int32_t, GetErrorCode, (ort_handle)) \
    X(2, const char *, GetErrorMessage, (ort_handle)) \
    X(3, ort_handle, CreateEnv, (int32_t, const char *, ort_handle *)) \
    X(7, ort_handle, CreateSession, (ort_handle, const char *, ort_handle, ort_handle *)) \
    X(9, ort_handle, Run, (ort_handle, ort_handle, const char *const *, const ort_handle *, size_t, const char *const *, \
                           size_t, ort_handle *)) \
    X(10, ort_handle, CreateSessionOptions, (ort_handle *)) \
    X(17, ort_handle, DisableMemPattern, (ort_handle)) \
    X(22, ort_handle, SetSessionLogSeverityLevel, (ort_handle, int32_t)) \
    X(24, ort_handle, SetIntraOpNumThreads, (ort_handle, int32_t)) \
    X(25, ort_handle, SetInterOpNumThreads, (ort_handle, int32_t)) \
    X(30, ort_handle, SessionGetInputCount, (ort_handle, size_t *)) \
    X(31, ort_handle, SessionGetOutputCount, (ort_handle, size_t *)) \
    X(36, ort_handle, SessionGetInputName, (ort_handle, size_t, ort_handle, char **)) \
    X(37, ort_handle, SessionGetOutputName, (ort_handle, size_t, ort_handle, char **)) \
    X(49, ort_handle, CreateTensorWithDataAsOrtValue, \
      (ort_handle, void *, size_t, const int64_t *, size_t, int32_t, ort_handle *)) \
    X(69, ort_handle, CreateCpuMemoryInfo, (int32_t, int32_t, ort_handle *)) \
    X(76, ort_handle, AllocatorFree, (ort_handle, void *)) \
    X(78, ort_handle, GetAllocatorWithDefaultOptions, (ort_handle *)) \
    X(92, void, ReleaseEnv, (ort_handle)) \
    X(93, void, ReleaseStatus, (ort_handle)) \
    X(94, void, ReleaseMemoryInfo, (ort_handle)) \
    X(95, void, ReleaseSession, (ort_handle)) \
    X(96, void, ReleaseValue, (ort_handle)) \
    X(100, void, ReleaseSessionOptions, (ort_handle)) \
    X(130, ort_handle, AddSessionConfigEntry, (ort_handle, const char *, const char *)) \
    X(301, ort_handle, RegisterExecutionProviderLibrary, (ort_handle, const char *, const char *)) \
    X(303, ort_handle, GetEpDevices, (ort_handle, const ort_handle **, size_t *)) \
    X(304, ort_handle, SessionOptionsAppendExecutionProvider_V2, \
      (ort_handle, ort_handle, const ort_handle *, size_t, const char *const *, const char *const *, size_t)) \
    X(307, int32_t, HardwareDevice_Type, (ort_handle)) \
    X(312, const char *, EpDevice_EpName, (ort_handle)) \
    X(316, ort_handle, EpDevice_Device, (ort_handle))

typedef struct {
#define MEMBER(number, result, name, arguments) result(*name) arguments;
    ORT_FUNCTIONS(MEMBER)
#undef MEMBER
} ort_api;

typedef struct { /* OrtApiBase */
    const void *const *(*get_api)(uint32_t version); /* NULL: the library is older */
    const char *(*version)(void);
} ort_base;

#endif
