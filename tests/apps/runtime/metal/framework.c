/* A Metal of our own, of the selectors that runtime/gpu/metal.c sends and no others: its library (dlopen, dlsym), Objective-C
 * messages with reference counts, and kernels that the system's C++ compiler compiles and the CPU runs.
 *
 * It is as strict as it can be: what was sent is computed only when it is waited for, so that an access without waiting
 * shows; a kernel computes in coroutines, one for each thread of a threadgroup, which must all come to the same barriers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include "edge.h"

#undef dlopen
#undef dlsym
void *dlopen(const char *path, int flags);
void *dlsym(void *library, const char *name);

enum { NO_FRAMEWORK = 1, NO_DEVICE, SMALL_BUFFERS, SMALL_GROUPS, NO_COMPILER, NO_REGISTERS, NO_MEMORY, COPIES };
uint32_t driver_refuses;        /* one of these */
int64_t driver_runs;            /* kernels so far */
int64_t driver_fails_at = -1;   /* the number of the kernel from which on the device is lost */
int64_t driver_cancels_at = -1; /* the number of the kernel at which … */
edge_session *driver_session;   /* … this one's answer is cancelled */
uint32_t driver_compiles;       /* sources so far */
uint64_t driver_bytes;          /* of buffers with memory of their own */
int64_t driver_objects;         /* alive */
char driver_error[256];         /* the first thing that the real Metal would not have taken */

static void refuse(const char *form, ...)
{
    va_list values;
    va_start(values, form);
    if (!driver_error[0])
        vsnprintf(driver_error, sizeof driver_error, form, values);
    va_end(values);
}

/* ---- objects ----------------------------------------------------------------------------------------------------- */

enum { STRING = 1, CLASS, PROCESS, OPTIONS, ERROR, DEVICE, QUEUE, LIBRARY, FUNCTION, PIPELINE, BUFFER, COMMANDS, ENCODER };
enum { MOST_BUFFERS = 31, MOST_THREADS = 256, MOST_BYTES = 4096 };
typedef struct { size_t width, height, depth; } size3;
typedef struct object object;

typedef struct run {
    struct run *next;
    object *pipeline, *buffers[MOST_BUFFERS];
    size_t offsets[MOST_BUFFERS], length;
    _Alignas(16) uint8_t bytes[MOST_BYTES]; /* of the one argument that is no buffer */
    int32_t bytes_at;
    size3 groups, threads;
} run;

struct object {
    int kind;
    int64_t references;
    object *parent;           /* retained */
    char *text;               /* of strings, functions and errors */
    uint8_t *data;            /* of buffers */
    size_t size;
    bool owned, exact;        /* data is the buffer's own; options without fast math */
    void (*call)(void **);    /* of pipelines, with this number of arguments, the last two of which are places */
    int32_t count;
    run *first, *last, now;   /* of commands; of encoders */
    int status;               /* of commands: MTLCommandBufferStatus */
    object *next;             /* in the queue */
};

static object *pool[1 << 16];
static size_t pooled, pools;
static object *waiting; /* commands in the order of their commits, oldest first */

static object *make(int kind, object *parent)
{
    object *made = calloc(1, sizeof *made); /* never freed: who is told something after its end is found */
    *made = (object){.kind = kind, .references = 1, .parent = parent, .now.bytes_at = -1};
    if (parent)
        parent->references++;
    driver_objects++;
    return made;
}

static void release(object *o)
{
    if (--o->references)
        return;
    driver_objects--;
    if (o->kind == BUFFER && o->owned) {
        driver_bytes -= o->size;
        free(o->data);
    }
    if (o->kind == COMMANDS && o->status != 4 && o->status != 5)
        refuse("commands are released that were not waited for");
    for (run *each = o->first; each;) {
        run *next = each->next;
        free(each);
        each = next;
    }
    free(o->text);
    if (o->parent)
        release(o->parent);
}

static object *autorelease(object *o)
{
    if (!pools)
        refuse("an object of kind %d is made without an autorelease pool", o->kind);
    pool[pooled++] = o;
    return o;
}

void *objc_autoreleasePoolPush(void);
void *objc_autoreleasePoolPush(void)
{
    pools++;
    return (void *)(pooled + 1);
}

void objc_autoreleasePoolPop(void *mark);
void objc_autoreleasePoolPop(void *mark)
{
    pools--;
    while (pooled >= (size_t)mark)
        release(pool[--pooled]);
}

static object *text_of(int kind, const char *text)
{
    object *made = make(kind, NULL);
    made->text = strdup(text);
    return made;
}

/* ---- threads of a threadgroup ------------------------------------------------------------------------------------ */

enum { STACK = 128 << 10 };
static struct fiber { ucontext_t start; jmp_buf here; uint8_t *stack; bool alive, done; } fibers[MOST_THREADS];
static jmp_buf scheduler;
static ucontext_t starter;
static struct { void (*call)(void **); void *arguments[MOST_BUFFERS + 2]; size_t count; uint32_t group[2]; } working;
static size_t current;

static void leave(void)
{
    if (!_setjmp(fibers[current].here))
        _longjmp(scheduler, 1);
}

static void live(void)
{
    for (;;) {
        uint32_t place[2] = {(uint32_t)current, 0};
        void *arguments[MOST_BUFFERS + 2];
        memcpy(arguments, working.arguments, sizeof arguments);
        arguments[working.count] = working.group, arguments[working.count + 1] = place;
        working.call(arguments);
        fibers[current].done = true;
        leave();
    }
}

/* Until the next barrier, or the end. */
static void resume(size_t number)
{
    struct fiber *own = fibers + number;
    current = number;
    if (_setjmp(scheduler))
        return;
    if (own->alive)
        _longjmp(own->here, 1);
    own->alive = true;
    own->stack = malloc(STACK);
    getcontext(&own->start);
    own->start.uc_stack.ss_sp = own->stack;
    own->start.uc_stack.ss_size = STACK;
    makecontext(&own->start, live, 0);
    swapcontext(&starter, &own->start);
}

static void run_group(size_t threads)
{
    size_t ended = 0;
    for (size_t i = 0; i < threads; i++)
        fibers[i].done = false;
    while (!ended) {
        for (size_t i = 0; i < threads; i++) {
            resume(i);
            ended += fibers[i].done;
        }
        if (ended && ended != threads) {
            refuse("%zu of %zu threads do not come to a barrier", ended, threads);
            abort();
        }
    }
}

static void run_kernel(const run *each)
{
    int32_t count = each->pipeline->count - 2;
    working.call = each->pipeline->call;
    working.count = (size_t)count;
    for (int32_t i = 0; i < count; i++) {
        if (i != each->bytes_at && !each->buffers[i]) {
            refuse("argument %d of a kernel is not set", i);
            return;
        }
        working.arguments[i] = i == each->bytes_at ? (void *)each->bytes : each->buffers[i]->data + each->offsets[i];
    }
    for (uint32_t y = 0; y < each->groups.height; y++)
        for (uint32_t x = 0; x < each->groups.width; x++) {
            working.group[0] = x, working.group[1] = y;
            run_group(each->threads.width);
        }
}

/* ---- methods ------------------------------------------------------------------------------------------------------- */

static void retain_(object *o, const char *s) { (void)s, o->references++; }
static void release_(object *o, const char *s) { (void)s, release(o); }

static object *string_with(object *o, const char *s, const char *text)
{
    (void)s;
    if (strcmp(o->text, "NSString"))
        refuse("%s makes no strings", o->text);
    return autorelease(text_of(STRING, text));
}

static const char *utf8(object *o, const char *s) { return (void)s, o->text; }
static object *process_info(object *o, const char *s) { return (void)s, autorelease(make(PROCESS, o)); }
static object *version(object *o, const char *s) { return (void)o, (void)s, autorelease(text_of(STRING, "Version 0")); }
static object *description(object *o, const char *s) { return (void)s, autorelease(text_of(STRING, o->text)); }
static intptr_t code(object *o, const char *s) { return (void)s, o->status; }
static object *name(object *o, const char *s) { return (void)o, (void)s, autorelease(text_of(STRING, "A GPU")); }
static size_t longest(object *o, const char *s) { return (void)o, (void)s, driver_refuses == SMALL_BUFFERS ? 1024 : 1u << 30; }
static size_t memory(object *o, const char *s) { return (void)o, (void)s, driver_refuses == SMALL_GROUPS ? 16 : 32768; }
static object *new_queue(object *o, const char *s) { return (void)s, make(QUEUE, o); }

static object *new_options(object *o, const char *s)
{
    (void)s;
    if (strcmp(o->text, "MTLCompileOptions"))
        refuse("%s has no options", o->text);
    return make(OPTIONS, NULL);
}

static void set_fast_math(object *o, const char *s, bool enabled) { (void)s, o->exact = !enabled; }

static object *fail(const char *text, int number, object **error)
{
    *error = autorelease(text_of(ERROR, text));
    (*error)->status = number;
    return NULL;
}

static object *new_library(object *o, const char *s, object *source, object *options, object **error)
{
    (void)s;
    driver_compiles++;
    if (!options || options->kind != OPTIONS || !options->exact)
        refuse("kernels are compiled with fast math");
    if (driver_refuses == NO_COMPILER)
        return fail("program_source:1:1: error: not today\nkernel void", 3, error);
    object *made = make(LIBRARY, o);
    made->text = strdup(source->text);
    return made;
}

static object *new_function(object *o, const char *s, object *named)
{
    char entry[128];
    (void)s;
    snprintf(entry, sizeof entry, "kernel void %s(", named->text);
    if (!strstr(o->text, entry))
        return NULL;
    object *made = make(FUNCTION, o);
    made->text = strdup(named->text);
    return made;
}

/* Compiled files are kept in the tests' cache folder, of which METAL_CACHE is one for each compiler and header. */
static object *new_pipeline(object *o, const char *s, object *function, object **error)
{
    char library[512], source[600], command[4096];
    uint64_t hash = 14695981039346656037u;
    (void)s;
    for (const char *at = function->parent->text; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 1099511628211u;
    snprintf(library, sizeof library, METAL_CACHE "/%s-%016llx.so", function->text, (unsigned long long)hash);
    if (access(library, R_OK)) {
        snprintf(source, sizeof source, "%s.%d.cpp", library, getpid());
        FILE *file = fopen(source, "w");
        if (!file)
            return fail("the cache folder cannot be written", 1, error);
        fprintf(file, "%s\nextern \"C\" {\nextern const int metal_count = metal::count(%s);\n"
                "void metal_call(void **from) { metal::call(%s, from); }\n}\n", function->parent->text, function->text,
                function->text);
        fclose(file);
        snprintf(command, sizeof command, "c++ -std=c++17 -O0 -w -fPIC -shared -I'" METAL_INCLUDE "' '%s' -o '%s.o' && "
                 "mv '%s.o' '%s' && rm '%s'", source, source, source, library, source);
        if (system(command))
            return fail("the C++ compiler has failed", 1, error);
    }
    void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void **barrier = loaded ? dlsym(loaded, "metal_barrier") : NULL, *call = loaded ? dlsym(loaded, "metal_call") : NULL;
    const int *count = loaded ? dlsym(loaded, "metal_count") : NULL;
    if (!barrier || !call || !count)
        return fail("the kernel cannot be loaded", 1, error);
    void (*ours)(void) = leave;
    memcpy(barrier, &ours, sizeof ours);
    object *made = make(PIPELINE, o);
    memcpy(&made->call, &call, sizeof call);
    made->count = *count;
    return made;
}

static size_t most_threads(object *o, const char *s)
{
    return (void)o, (void)s, driver_refuses == NO_REGISTERS ? 32 : MOST_THREADS;
}

static object *new_buffer(object *o, const char *s, size_t length, size_t options)
{
    (void)s;
    if (options)
        refuse("a buffer's options are %zu", options);
    if (driver_refuses == NO_MEMORY)
        return NULL;
    object *made = make(BUFFER, o);
    made->data = aligned_alloc(16384, (length + 16383) / 16384 * 16384);
    memset(made->data, 0, length);
    made->size = length, made->owned = true;
    driver_bytes += length;
    return made;
}

static object *new_buffer_of(object *o, const char *s, uint8_t *bytes, size_t length, size_t options, void *deallocator)
{
    size_t page = (size_t)getpagesize();
    (void)s;
    if ((uintptr_t)bytes % page || length % page || !length || options || deallocator)
        refuse("a buffer of %p, %zu bytes, is not one of whole pages", (void *)bytes, length);
    if (driver_refuses == COPIES)
        return NULL;
    object *made = make(BUFFER, o);
    made->data = bytes, made->size = length;
    return made;
}

static void *contents(object *o, const char *s) { return (void)s, o->data; }
static object *command_buffer(object *o, const char *s) { return (void)s, autorelease(make(COMMANDS, o)); }
static object *new_encoder(object *o, const char *s) { return (void)s, autorelease(make(ENCODER, o)); }

static void set_pipeline(object *o, const char *s, object *pipeline)
{
    (void)s;
    o->now.pipeline = pipeline->kind == PIPELINE ? pipeline : NULL;
}

static void set_buffer(object *o, const char *s, object *buffer, size_t offset, size_t index)
{
    (void)s;
    if (index >= MOST_BUFFERS || buffer->kind != BUFFER || offset >= buffer->size || offset % 256)
        refuse("buffer %zu begins at %zu of %zu bytes", index, offset, buffer->size);
    else
        o->now.buffers[index] = buffer, o->now.offsets[index] = offset;
    if (o->now.bytes_at == (int32_t)index)
        o->now.bytes_at = -1;
}

static void set_bytes(object *o, const char *s, const void *bytes, size_t length, size_t index)
{
    (void)s;
    if (length > MOST_BYTES || index >= MOST_BUFFERS)
        refuse("%zu bytes are no argument", length);
    else
        memcpy(o->now.bytes, bytes, length), o->now.length = length, o->now.bytes_at = (int32_t)index;
}

static void dispatch(object *o, const char *s, size3 groups, size3 threads)
{
    (void)s;
    if (!o->now.pipeline || threads.width > MOST_THREADS || threads.height != 1 || threads.depth != 1 || groups.depth != 1) {
        refuse("%zu × %zu × %zu threads in %zu × %zu groups", threads.width, threads.height, threads.depth, groups.width,
               groups.height);
        return;
    }
    run *made = aligned_alloc(_Alignof(run), sizeof *made);
    object *commands = o->parent;
    *made = o->now;
    made->groups = groups, made->threads = threads, made->next = NULL;
    if (commands->last)
        commands->last->next = made;
    else
        commands->first = made;
    commands->last = made;
}

static void end_encoding(object *o, const char *s) { (void)s, o->status = 1; }

static void commit(object *o, const char *s)
{
    object **end = &waiting;
    int count = 0;
    (void)s;
    for (; *end; end = &(*end)->next)
        count++;
    if (o->status || count >= 64)
        refuse("a command buffer has status %d, and %d wait", o->status, count);
    o->status = 2;
    o->references++;
    *end = o;
}

static void compute(object *o)
{
    o->status = 4;
    for (run *each = o->first; each && o->status == 4; each = each->next) {
        if (driver_fails_at >= 0 && driver_runs >= driver_fails_at) {
            o->status = 5; /* MTLCommandBufferStatusError */
        } else {
            if (driver_runs++ == driver_cancels_at)
                edge_cancel(driver_session);
            run_kernel(each);
        }
    }
}

static void await(object *o, const char *s)
{
    (void)s;
    if (o->status == 4 || o->status == 5)
        return;
    if (o->status != 2)
        refuse("what was not committed is waited for");
    while (waiting && o->status == 2) {
        object *first = waiting;
        waiting = first->next, first->next = NULL;
        compute(first);
        release(first);
    }
}

static size_t status(object *o, const char *s) { return (void)s, (size_t)o->status; }

static object *error_of(object *o, const char *s)
{
    (void)s;
    if (o->status != 5)
        return NULL;
    object *made = autorelease(text_of(ERROR, "Caused GPU Hang Error"));
    made->status = 2;
    return made;
}

/* ---- messages ------------------------------------------------------------------------------------------------------ */

#define METHOD(kind, selector, function) {kind, selector, (void (*)(void))function}
static const struct { int kind; const char *selector; void (*function)(void); } METHODS[] = {
    METHOD(0, "retain", retain_), METHOD(0, "release", release_), METHOD(CLASS, "stringWithUTF8String:", string_with),
    METHOD(STRING, "UTF8String", utf8), METHOD(CLASS, "processInfo", process_info),
    METHOD(PROCESS, "operatingSystemVersionString", version), METHOD(ERROR, "localizedDescription", description),
    METHOD(ERROR, "code", code), METHOD(DEVICE, "name", name), METHOD(DEVICE, "maxBufferLength", longest),
    METHOD(DEVICE, "maxThreadgroupMemoryLength", memory), METHOD(DEVICE, "newCommandQueue", new_queue),
    METHOD(CLASS, "new", new_options), METHOD(OPTIONS, "setFastMathEnabled:", set_fast_math),
    METHOD(DEVICE, "newLibraryWithSource:options:error:", new_library),
    METHOD(LIBRARY, "newFunctionWithName:", new_function),
    METHOD(DEVICE, "newComputePipelineStateWithFunction:error:", new_pipeline),
    METHOD(PIPELINE, "maxTotalThreadsPerThreadgroup", most_threads),
    METHOD(DEVICE, "newBufferWithLength:options:", new_buffer),
    METHOD(DEVICE, "newBufferWithBytesNoCopy:length:options:deallocator:", new_buffer_of),
    METHOD(BUFFER, "contents", contents), METHOD(QUEUE, "commandBuffer", command_buffer),
    METHOD(COMMANDS, "computeCommandEncoder", new_encoder), METHOD(ENCODER, "setComputePipelineState:", set_pipeline),
    METHOD(ENCODER, "setBuffer:offset:atIndex:", set_buffer), METHOD(ENCODER, "setBytes:length:atIndex:", set_bytes),
    METHOD(ENCODER, "dispatchThreadgroups:threadsPerThreadgroup:", dispatch),
    METHOD(ENCODER, "endEncoding", end_encoding), METHOD(COMMANDS, "commit", commit),
    METHOD(COMMANDS, "waitUntilCompleted", await), METHOD(COMMANDS, "status", status), METHOD(COMMANDS, "error", error_of),
};

static void *unknown(void) { return NULL; }

typedef void function(void);
function *metal_find(object *o, const char *selector);
function *metal_find(object *o, const char *selector)
{
    for (size_t i = 0; o && o->references > 0 && i < sizeof METHODS / sizeof *METHODS; i++)
        if ((!METHODS[i].kind || METHODS[i].kind == o->kind) && !strcmp(METHODS[i].selector, selector))
            return METHODS[i].function;
    refuse("an object of kind %d, with %d references, is sent %s", o ? o->kind : 0, o ? (int)o->references : 0, selector);
    return (function *)unknown;
}

/* Jumps to the method, with all arguments where they are, as the real one does. */
void objc_msgSend(void);
#ifdef __x86_64__
__asm__(".globl objc_msgSend\nobjc_msgSend:\n"
        "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\nsub $8, %rsp\n"
        "call metal_find\n"
        "add $8, %rsp\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\njmp *%rax\n");
#else
__asm__(".globl objc_msgSend\nobjc_msgSend:\n"
        "stp x0, x1, [sp, #-80]!\nstp x2, x3, [sp, #16]\nstp x4, x5, [sp, #32]\nstp x6, x7, [sp, #48]\nstr x30, [sp, #64]\n"
        "bl metal_find\nmov x16, x0\n"
        "ldr x30, [sp, #64]\nldp x6, x7, [sp, #48]\nldp x4, x5, [sp, #32]\nldp x2, x3, [sp, #16]\nldp x0, x1, [sp], #80\n"
        "br x16\n");
#endif

static object classes[3] = {
    {.kind = CLASS, .references = 1, .text = "NSString"}, {.kind = CLASS, .references = 1, .text = "NSProcessInfo"},
    {.kind = CLASS, .references = 1, .text = "MTLCompileOptions"},
};

static void *get_class(const char *wanted)
{
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        if (!strcmp(classes[i].text, wanted))
            return classes + i;
    return refuse("there is no class %s", wanted), NULL;
}

static void *register_name(const char *selector) { return (void *)selector; }
static void *create_device(void) { return driver_refuses == NO_DEVICE ? NULL : make(DEVICE, NULL); }

void *driver_open(const char *path, int flags);
void *driver_open(const char *path, int flags)
{
    static const char wanted[] = "/System/Library/Frameworks/Metal.framework/Metal";
    (void)flags;
    return strcmp(path, wanted) || driver_refuses == NO_FRAMEWORK ? NULL : classes;
}

void *driver_function(void *library, const char *wanted);
void *driver_function(void *library, const char *wanted)
{
    static const struct { const char *name; void (*function)(void); } functions[] = {
        {"objc_getClass", (function *)get_class}, {"sel_registerName", (function *)register_name},
        {"objc_autoreleasePoolPush", (function *)objc_autoreleasePoolPush},
        {"objc_autoreleasePoolPop", (function *)objc_autoreleasePoolPop}, {"objc_msgSend", objc_msgSend},
        {"MTLCreateSystemDefaultDevice", (function *)create_device},
    };
    void *found = NULL;
    for (size_t i = 0; library == classes && i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, wanted))
            memcpy(&found, &functions[i].function, sizeof found);
    return found;
}
