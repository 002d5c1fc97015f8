/* Libraries of drivers, and the version of the system, of which drivers are a part. */
#ifndef _WIN32
#define _GNU_SOURCE /* RTLD_DEFAULT */
#define _DARWIN_C_SOURCE
#endif
#include <string.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <sys/utsname.h>
#endif

#include "gpu.h"
#include "hash.h"

#ifdef _WIN32

void *opencl_library(void)
{
    return LoadLibraryExA("OpenCL.dll", NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
}

bool webgpu_library(void **library)
{
    static const char *const names[] = {"wgpu_native.dll", "webgpu_dawn.dll"};
    *library = NULL;
    for (size_t i = 0; !*library && i < sizeof names / sizeof *names; i++)
        if (!(*library = GetModuleHandleA(names[i])))
            *library = LoadLibraryExA(names[i], NULL, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    return *library;
}

void *gpu_function(void *library, const char *name)
{
    FARPROC found = GetProcAddress(library, name);
    void *function;
    memcpy(&function, &found, sizeof function);
    return function;
}

bool hash_system(hasher *h)
{
    RTL_OSVERSIONINFOW about = {.dwOSVersionInfoSize = sizeof about};
    LONG(WINAPI *ask)(RTL_OSVERSIONINFOW *); /* GetVersionEx returns the version that the program was made for */
    void *function = gpu_function(GetModuleHandleA("ntdll.dll"), "RtlGetVersion");
    memcpy(&ask, &function, sizeof ask);
    if (!ask || ask(&about))
        return false;
    hash_add(h, &about, sizeof about);
    return true;
}

#else

void *metal_library(void)
{
    /* On macOS MTLCreateSystemDefaultDevice needs CoreGraphics, as its documentation says, which command-line tools do
     * not load by themselves. */
    dlopen("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics", RTLD_NOW | RTLD_LOCAL);
    return dlopen("/System/Library/Frameworks/Metal.framework/Metal", RTLD_NOW | RTLD_LOCAL);
}

void *opencl_library(void)
{
    static const char *const names[] = {
        "libOpenCL.so.1", "libOpenCL.so", "/vendor/lib64/libOpenCL.so", "/system/vendor/lib64/libOpenCL.so",
    };
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

/* A library that the process has loaded, or else a file. */
bool webgpu_library(void **library)
{
    static const char *const names[] = {"libwgpu_native.so", "libwebgpu_dawn.so"};
    bool here = dlsym(*library = RTLD_DEFAULT, "wgpuCreateInstance");
    for (size_t i = 0; !here && i < sizeof names / sizeof *names; i++)
        here = (*library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL));
    return here;
}

void *gpu_function(void *library, const char *name)
{
    return dlsym(library, name);
}

bool hash_system(hasher *h)
{
    struct utsname about;
    if (uname(&about))
        return false;
    hash_add(h, about.release, strlen(about.release));
    hash_add(h, about.version, strlen(about.version));
    return true;
}

#endif
