/* The driver of Metal, on iOS and macOS. The system compiles sources in a process of its own and caches the result; only a
 * failure is kept in the app's cache folder.
 *
 * On Apple's chips GPU and CPU share memory, so that weights stay in the mapped file. */
#include <string.h>

#include "gpu.h"
#include "metal.h"
#include "system.h"

#ifdef GPU_BY_METAL

/* error: an NSError; NULL if Metal gives none. */
static void failed(gpu *g, metal_id error)
{
    const metal *m = g->own;
    metal_id said = error ? send_description(m, error) : NULL;
    const char *text = said ? send_utf8(m, said) : NULL;
    gpu_fail(g, FAILED, text, text ? strlen(text) : 0);
}

/* ---- the framework and its device -------------------------------------------------------------------------------- */

static void *layout(arena *from, const gpu_config *config)
{
    (void)config;
    return take(from, sizeof(metal));
}

static bool load(gpu *g)
{
    metal *m = g->own;
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at);
    void *library = kernels->length[GPU_METAL] ? metal_library() : NULL;
    if (!library)
        return false;
    bool whole = true;
#define LOAD(result, name, arguments) \
    *(void **)&m->name = gpu_function(library, #name); \
    whole = whole && m->name;
    METAL_FUNCTIONS(LOAD)
#undef LOAD
    if (!whole)
        return false;
#define REGISTER(result, name, selector, parameters, arguments) m->selectors.name = m->sel_registerName(selector);
    METAL_METHODS(REGISTER)
#undef REGISTER
    return true;
}

static void copy_text(const metal *m, metal_id string, char *to, size_t size)
{
    const char *text = string ? send_utf8(m, string) : NULL;
    size_t length = text ? strlen(text) : 0;
    memcpy(to, text ? text : "", length < size ? length : size - 1);
}

static edge_status find_device(gpu *g, edge_error *error)
{
    metal *m = g->own;
    const char *why = NULL;
    m->device = m->MTLCreateSystemDefaultDevice();
    if (!m->device)
        return edge_fail(error, EDGE_UNSUPPORTED, "Metal has no GPU here: set engine to cpu or auto");
    copy_text(m, send_name(m, m->device), g->name, sizeof g->name);
    copy_text(m, send_system_version(m, send_process_info(m, m->objc_getClass("NSProcessInfo"))), g->version,
              sizeof g->version);
    if (send_longest_buffer(m, m->device) < largest_buffer(g))
        why = "its buffers are too small";
    else if (send_threadgroup_memory(m, m->device) < g->config->shared)
        why = "its workgroups are too small";
    if (why)
        return edge_fail(error, EDGE_UNSUPPORTED, "Metal's device cannot run the bundle (%s): set engine to cpu or auto", why);
    m->queue = send_new_queue(m, m->device);
    return m->queue ? EDGE_OK : edge_fail(error, EDGE_UNSUPPORTED, "%s cannot be opened: set engine to cpu or auto", g->name);
}

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

static void make_kernel(gpu *g, uint32_t number, metal_id options)
{
    const metal *m = g->own;
    const gpu_kernel *kernel = (const gpu_kernel *)gpu_table(g, g->config->kernels_at) + number;
    const char *source = (const char *)g->section + kernel->source[GPU_METAL]; /* ends with a zero */
    metal_id strings = m->objc_getClass("NSString"), error = NULL, function = NULL;
    metal_id library = send_new_library(m, m->device, send_string_of(m, strings, source), options, &error);
    if (library)
        function = send_new_function(m, library, send_string_of(m, strings, kernel->name));
    if (function)
        g->kernels[number] = send_new_pipeline(m, m->device, function, &error);
    if (!g->kernels[number]) {
        failed(g, error);
        if (!library && error && send_code(m, error) == MTL_COMPILE_FAILURE)
            g->failure = REFUSED;
    } else if (send_most_threads(m, g->kernels[number]) < (size_t)kernel->threads[0] * kernel->threads[1])
        gpu_fail(g, REFUSED, "a kernel needs too many registers", 33);
    if (function)
        send_release(m, function);
    if (library)
        send_release(m, library);
}

/* Without fast math, which assumes that no value is infinite or NaN: scores of masked rows are infinite, and the pass looks
 * for NaN. */
static edge_status make_kernels(gpu *g, const char *cache, edge_error *error)
{
    const metal *m = g->own;
    char path[LONGEST_PATH];
    bool keeps = cache && kept_kernels(g, GPU_METAL, cache, ".metal", path);
    if (keeps)
        fail_as_before(g, path);
    bool known = g->failure != 0;
    metal_id options = send_new_options(m, m->objc_getClass("MTLCompileOptions"));
    send_set_fast_math(m, options, false);
    for (uint32_t i = 0; i < g->config->kernels && !g->failure; i++)
        make_kernel(g, i, options);
    send_release(m, options);
    if (!g->failure)
        return EDGE_OK;
    if (keeps && !known && g->failure == REFUSED) /* other failures may be temporary */
        keep_failure(g, path);
    return edge_fail(error, EDGE_UNSUPPORTED, "%s cannot compile the bundle's kernels (%s): set engine to cpu or auto",
                     g->name, g->failed_by);
}

/* ---- buffers ------------------------------------------------------------------------------------------------------- */

/* Wraps the mapped weights in one buffer, without a copy. Metal needs whole pages; the weights of a file of its own begin
 * with one. NULL: they have to be copied. */
static metal_id map_weights(gpu *g)
{
    const metal *m = g->own;
    const uint8_t *data = g->model->sections[SECTION_GPU_WEIGHTS];
    uint64_t page = system_page_size(), size = (g->model->sizes[SECTION_GPU_WEIGHTS] + page - 1) / page * page;
    if ((uintptr_t)data % page || size > send_longest_buffer(m, m->device))
        return NULL;
    return send_new_buffer_of(m, m->device, data, size, MTL_STORAGE_SHARED, NULL);
}

static edge_status make_buffers(gpu *g, edge_error *error)
{
    metal *m = g->own;
    const gpu_buffer *buffers = gpu_table(g, g->config->buffers_at);
    m->weights = map_weights(g);
    for (uint32_t i = 0; i < g->config->buffers; i++) {
        if (m->weights && buffers[i].loaded)
            send_retain(m, g->buffers[i] = m->weights);
        else /* zeros */
            g->buffers[i] = send_new_buffer(m, m->device, buffers[i].size, MTL_STORAGE_SHARED);
        if (!g->buffers[i])
            return edge_fail(error, EDGE_NO_MEMORY, "%s cannot hold the model: set engine to cpu or auto", g->name);
        g->bytes += buffers[i].size;
        if (g->buffers[i] != m->weights && buffers[i].loaded)
            load_weights(g, i, buffers + i);
    }
    return EDGE_OK;
}

/* Offset of a buffer of the bundle in Metal's buffer. */
static uint64_t start_of(const gpu *g, uint32_t buffer)
{
    metal *m = g->own;
    const gpu_buffer *buffers = gpu_table(g, g->config->buffers_at);
    return g->buffers[buffer] == m->weights ? buffers[buffer].weights : 0;
}

static edge_status open_device(gpu *g, const char *cache, bool software, edge_error *error)
{
    metal *m = g->own;
    metal_id pool = m->objc_autoreleasePoolPush();
    edge_status status = find_device(g, error);
    (void)software; /* Metal has only GPUs */
    if (!status)
        status = make_kernels(g, cache, error);
    if (!status)
        status = make_buffers(g, error);
    m->objc_autoreleasePoolPop(pool);
    return status;
}

/* ---- work ---------------------------------------------------------------------------------------------------------- */

/* Waits for the oldest command buffer. */
static void await_first(gpu *g)
{
    metal *m = g->own;
    metal_id first = m->sent[m->first_sent];
    m->first_sent = (m->first_sent + 1) % MOST_SENT;
    m->sent_count--;
    send_await(m, first);
    if (send_status(m, first) == MTL_STATUS_ERROR)
        failed(g, send_error(m, first));
    send_release(m, first);
}

static void wait_for_all(gpu *g)
{
    metal *m = g->own;
    metal_id pool = m->objc_autoreleasePoolPush();
    while (m->sent_count)
        await_first(g);
    m->objc_autoreleasePoolPop(pool);
}

static void write_buffer(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait)
{
    (void)wait; /* the GPU may still read the old content */
    wait_for_all(g);
    memcpy((uint8_t *)send_contents(g->own, g->buffers[buffer]) + offset, data, size);
}

static void read_buffer(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size)
{
    wait_for_all(g);
    memcpy(data, (const uint8_t *)send_contents(g->own, g->buffers[buffer]) + offset, size);
}

/* Scalars follow the buffers in one struct, 8 bytes each. */
static void encode(gpu *g, metal_id encoder, const gpu_dispatch_config *each, uint32_t tokens)
{
    const metal *m = g->own;
    const gpu_kernel *kernel = (const gpu_kernel *)gpu_table(g, g->config->kernels_at) + each->kernel;
    const uint32_t *numbers = (const uint32_t *)gpu_table(g, g->config->numbers_at) + each->numbers;
    const gpu_part *parts = gpu_table(g, g->config->parts_at);
    send_set_pipeline(m, encoder, g->kernels[each->kernel]);
    for (uint32_t i = 0; i < each->parts; i++) {
        const gpu_part *part = parts + numbers[i];
        send_set_buffer(m, encoder, g->buffers[part->buffer], start_of(g, part->buffer) + part->offset, i);
    }
    uint64_t scalars[MOST_SCALARS];
    uint32_t count = each->scalars < MOST_SCALARS ? each->scalars : MOST_SCALARS;
    for (uint32_t i = 0; i < count; i++)
        scalars[i] = numbers[each->parts + i];
    if (count)
        send_set_bytes(m, encoder, scalars, count * sizeof *scalars, each->parts);
    uint32_t rows = rows_of_groups(each, tokens);
    metal_size groups = {each->groups[0], rows, 1}, threads = {kernel->threads[0], kernel->threads[1], 1};
    send_dispatch(m, encoder, groups, threads);
}

static void run(gpu *g, uint32_t first, uint32_t count, uint32_t tokens)
{
    metal *m = g->own;
    const gpu_dispatch_config *dispatches = gpu_table(g, g->config->dispatches_at);
    metal_id pool = m->objc_autoreleasePoolPush();
    if (m->sent_count == MOST_SENT)
        await_first(g);
    metal_id commands = send_command_buffer(m, m->queue), encoder = commands ? send_encoder(m, commands) : NULL;
    if (!encoder) {
        failed(g, NULL);
    } else {
        for (uint32_t i = first; i < first + count; i++)
            if (!g->skipped[i])
                encode(g, encoder, dispatches + i, tokens);
        send_end_encoding(m, encoder);
        send_retain(m, commands);
        send_commit(m, commands);
        m->sent[(m->first_sent + m->sent_count++) % MOST_SENT] = commands;
    }
    m->objc_autoreleasePoolPop(pool);
}

static void close_device(gpu *g)
{
    metal *m = g->own;
    wait_for_all(g);
    for (uint32_t i = 0; i < g->config->buffers; i++)
        if (g->buffers[i])
            send_release(m, g->buffers[i]);
    for (uint32_t i = 0; i < g->config->kernels; i++)
        if (g->kernels[i])
            send_release(m, g->kernels[i]);
    metal_id *own[] = {&m->weights, &m->queue, &m->device};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        if (*own[i])
            send_release(m, *own[i]);
        *own[i] = NULL;
    }
}

const gpu_driver METAL = {"Metal", layout, load, open_device, close_device, write_buffer, read_buffer, run, wait_for_all};

#endif
