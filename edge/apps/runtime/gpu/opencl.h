/* The functions of OpenCL 1.2 that the pass needs, from the system's libOpenCL: there may be none, and headers of it are
 * not needed to build a bundle. */
#ifndef EDGE_OPENCL_H
#define EDGE_OPENCL_H

#include "base.h"

typedef void *cl_handle; /* platforms, devices, contexts, queues, buffers, programs, kernels */

enum {
    CL_SUCCESS = 0, CL_OUT_OF_MEMORY_FIRST = -6, CL_OUT_OF_MEMORY_LAST = -4, /* allocation, resources, host memory */
    CL_BUILD_PROGRAM_FAILURE = -11,
    CL_DEVICE_TYPE_ALL_GPUS = 4 | 8, CL_DEVICE_TYPE_ANY = -1,
    CL_DEVICE_MAX_WORK_GROUP_SIZE = 0x1004, CL_DEVICE_MAX_MEM_ALLOC_SIZE = 0x1010, CL_DEVICE_MEM_BASE_ADDR_ALIGN = 0x1019,
    CL_DEVICE_LOCAL_MEM_SIZE = 0x1023, CL_DEVICE_ENDIAN_LITTLE = 0x1026, CL_DEVICE_AVAILABLE = 0x1027,
    CL_DEVICE_COMPILER_AVAILABLE = 0x1028, CL_DEVICE_NAME = 0x102B, CL_DRIVER_VERSION = 0x102D,
    CL_DEVICE_HOST_UNIFIED_MEMORY = 0x1035,
    CL_MEM_READ_WRITE = 1, CL_MEM_READ_ONLY = 4, CL_MEM_USE_HOST_PTR = 8, CL_BUFFER_CREATE_TYPE_REGION = 0x1220,
    CL_PROGRAM_BINARY_SIZES = 0x1165, CL_PROGRAM_BINARIES = 0x1166
};

typedef struct { size_t origin, size; } cl_region;

/* X(result, name, arguments) */
#define OPENCL_FUNCTIONS(X) \
    X(int32_t, clGetPlatformIDs, (uint32_t, cl_handle *, uint32_t *)) \
    X(int32_t, clGetDeviceIDs, (cl_handle, uint64_t, uint32_t, cl_handle *, uint32_t *)) \
    X(int32_t, clGetDeviceInfo, (cl_handle, uint32_t, size_t, void *, size_t *)) \
    X(cl_handle, clCreateContext, (const intptr_t *, uint32_t, const cl_handle *, void *, void *, int32_t *)) \
    X(cl_handle, clCreateCommandQueue, (cl_handle, cl_handle, uint64_t, int32_t *)) \
    X(cl_handle, clCreateBuffer, (cl_handle, uint64_t, size_t, void *, int32_t *)) \
    X(cl_handle, clCreateSubBuffer, (cl_handle, uint64_t, uint32_t, const void *, int32_t *)) \
    X(cl_handle, clCreateProgramWithSource, (cl_handle, uint32_t, const char **, const size_t *, int32_t *)) \
    X(cl_handle, clCreateProgramWithBinary, \
      (cl_handle, uint32_t, const cl_handle *, const size_t *, const uint8_t **, int32_t *, int32_t *)) \
    X(int32_t, clBuildProgram, (cl_handle, uint32_t, const cl_handle *, const char *, void *, void *)) \
    X(int32_t, clGetProgramInfo, (cl_handle, uint32_t, size_t, void *, size_t *)) \
    X(cl_handle, clCreateKernel, (cl_handle, const char *, int32_t *)) \
    X(int32_t, clSetKernelArg, (cl_handle, uint32_t, size_t, const void *)) \
    X(int32_t, clEnqueueNDRangeKernel, (cl_handle, cl_handle, uint32_t, const size_t *, const size_t *, const size_t *, \
                                        uint32_t, const cl_handle *, cl_handle *)) \
    X(int32_t, clEnqueueFillBuffer, (cl_handle, cl_handle, const void *, size_t, size_t, size_t, uint32_t, \
                                     const cl_handle *, cl_handle *)) \
    X(int32_t, clEnqueueWriteBuffer, (cl_handle, cl_handle, uint32_t, size_t, size_t, const void *, uint32_t, \
                                      const cl_handle *, cl_handle *)) \
    X(int32_t, clEnqueueReadBuffer, (cl_handle, cl_handle, uint32_t, size_t, size_t, void *, uint32_t, \
                                     const cl_handle *, cl_handle *)) \
    X(int32_t, clFinish, (cl_handle)) \
    X(int32_t, clFlush, (cl_handle)) \
    X(int32_t, clReleaseMemObject, (cl_handle)) \
    X(int32_t, clReleaseKernel, (cl_handle)) \
    X(int32_t, clReleaseProgram, (cl_handle)) \
    X(int32_t, clReleaseCommandQueue, (cl_handle)) \
    X(int32_t, clReleaseContext, (cl_handle))

typedef struct {
#define MEMBER(result, name, arguments) result(*name) arguments;
    OPENCL_FUNCTIONS(MEMBER)
#undef MEMBER
    cl_handle device, context, queue;
    cl_handle *parts; /* sub-buffers, by the numbers of parts; NULL: the part is a whole buffer */
} opencl;

#endif
