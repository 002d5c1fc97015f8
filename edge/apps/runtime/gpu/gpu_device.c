/* Opens a GPU by the first driver that has one: Metal on Apple's systems; elsewhere OpenCL, or WebGPU if the app brings its
 * library. Also code that all drivers use. */
#include <string.h>

#include "gpu.h"
#include "system.h"

#ifdef GPU_BY_METAL
static const gpu_driver *const DRIVERS[] = {&METAL};
static const char NO_DRIVER[] = "there is no Metal here: set engine to cpu or auto";
#else
static const gpu_driver *const DRIVERS[] = {&OPENCL, &WEBGPU};
static const char NO_DRIVER[] = "there is neither libOpenCL nor a library of webgpu.h here: set engine to cpu or auto";
#endif
enum { DRIVERS_COUNT = sizeof DRIVERS / sizeof *DRIVERS, SLICE = 1 << 20 };
_Static_assert((int)DRIVERS_COUNT <= (int)MOST_DRIVERS, "each has a state");
static const double SENT_S = 0.02;

/* Whether a line of a driver's message is more than one of wgpu-native's headings. */
static bool says_something(const char *line, size_t length)
{
    static const char *const headings[] = {"Validation Error", "Caused by:", "In wgpu"};
    for (size_t i = 0; i < sizeof headings / sizeof *headings; i++)
        if (length >= strlen(headings[i]) && !memcmp(line, headings[i], strlen(headings[i])))
            return false;
    return length;
}

void gpu_fail(gpu *g, int32_t code, const char *text, size_t length)
{
    if (g->failure)
        return;
    edge_error said = {.size = sizeof said};
    char line[64] = "";
    for (size_t at = 0, end; text && at < length && !line[0]; at = end + 1) {
        while (at < length && text[at] == ' ')
            at++;
        for (end = at; end < length && text[end] != '\n';)
            end++;
        if (says_something(text + at, end - at))
            memcpy(line, text + at, end - at < sizeof line ? end - at : sizeof line - 1);
    }
    if (line[0])
        edge_fail(&said, EDGE_FAILED, "%s: %s", g->driver->name, line);
    else
        edge_fail(&said, EDGE_FAILED, "%s error %d", g->driver->name, (int64_t)code);
    memcpy(g->failed_by, said.message, sizeof g->failed_by - 1);
    g->failure = code;
}

uint64_t largest_buffer(const gpu *g)
{
    const gpu_buffer *buffers = gpu_table(g, g->config->buffers_at);
    uint64_t largest = 0;
    for (uint32_t i = 0; i < g->config->buffers; i++)
        largest = buffers[i].size > largest ? buffers[i].size : largest;
    return largest;
}

void load_weights(gpu *g, uint32_t number, const gpu_buffer *buffer)
{
    const uint8_t *data = g->model->sections[SECTION_GPU_WEIGHTS] + buffer->weights;
    for (uint64_t at = 0; at < buffer->size && !g->failure; at += SLICE) {
        uint64_t size = buffer->size - at < SLICE ? buffer->size - at : SLICE;
        gpu_write(g, number, at, data + at, size, true);
        forget_memory(data + at, size);
    }
}

/* Resets a driver to its state before `open`. */
static void close_driver(gpu *g)
{
    const gpu_config *c = g->config;
    g->driver->close(g);
    g->driver = NULL;
    memset(g->kernels, 0, c->kernels * sizeof *g->kernels);
    memset(g->buffers, 0, c->buffers * sizeof *g->buffers);
    g->failure = 0, g->bytes = 0, g->library = 0, g->name[0] = g->version[0] = 0;
}

void gpu_layout_drivers(arena *from, gpu *g)
{
    for (size_t i = 0; i < DRIVERS_COUNT; i++)
        g->states[i] = DRIVERS[i]->layout(from, g->config);
}

/* Tries GPUs of all drivers, then devices that run on the CPU. A driver whose device failed to open is not tried again. */
edge_status gpu_open(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error)
{
    bool software = options->engine == EDGE_ENGINE_GPU, tried[DRIVERS_COUNT] = {false}, had_device = false;
    edge_status why = EDGE_OK;
    edge_error last = {.size = sizeof last};
    g->cancelled = cancelled;
    g->sent = 1;
    for (int any = 0; any <= software; any++)
        for (size_t i = 0; i < DRIVERS_COUNT; i++) {
            g->own = g->states[i];
            if (tried[i] || !DRIVERS[i]->load(g))
                continue;
            g->driver = DRIVERS[i];
            edge_status status = g->driver->open(g, options->cache, any, &last);
            if (!status)
                return EDGE_OK;
            tried[i] = g->name[0];
            if (tried[i] || !had_device) {
                why = edge_fail(error, status, "%s", last.message);
                had_device = tried[i];
            }
            close_driver(g);
        }
    return why ? why : edge_fail(error, EDGE_UNSUPPORTED, NO_DRIVER);
}

void gpu_close(gpu *g)
{
    if (g->driver)
        g->driver->close(g);
}

void gpu_write(gpu *g, uint32_t buffer, uint64_t offset, const void *data, uint64_t size, bool wait)
{
    if (!g->failure && size)
        g->driver->write(g, buffer, offset, data, size, wait);
}

void gpu_read(gpu *g, uint32_t buffer, uint64_t offset, void *data, uint64_t size)
{
    if (!g->failure && size)
        g->driver->read(g, buffer, offset, data, size);
}

/* Submits the dispatches of a chunk in parts that take about SENT_S, since submitted work cannot be cancelled. A chunk that
 * changes fixed states runs to its end: half of one cannot be taken back. */
bool gpu_dispatch(gpu *g, enum gpu_passes which, uint32_t tokens)
{
    const gpu_pass *own = (const gpu_pass *)gpu_table(g, g->config->passes_at) + which;
    for (uint32_t at = 0, end; at < own->count && !g->failure; at = end) {
        double began = now_seconds();
        end = which == GPU_CHUNK && own->count - at > g->sent ? at + g->sent : own->count;
        g->driver->run(g, own->first + at, end - at, tokens);
        if (g->failure || which != GPU_CHUNK)
            continue;
        g->driver->wait(g);
        double each = (now_seconds() - began) / (end - at);
        g->sent = each * 2 * (end - at) < SENT_S ? 2 * (end - at) : each < SENT_S ? (uint32_t)(SENT_S / each) : 1;
        if (end < own->count && !g->model->config->states && __atomic_load_n(g->cancelled, __ATOMIC_RELAXED))
            return false;
    }
    return true;
}
