/* ONNX Runtime: the app's library, the provider, and sessions on the graphs of a folder.
 *
 * The library is never unloaded: it has threads. It checks names, types and shapes of what a session is given, so graphs
 * of another model end with an error. */
#include <dlfcn.h>
#include <string.h>

#include "npu.h"
#include "system.h"

enum { MOST_OPTIONS = 8 };

/* ---- texts -------------------------------------------------------------------------------------------------------- */

/* Appends what fits, with a number if it is not negative. */
static void append(char *to, size_t room, const char *text, int64_t number)
{
    size_t at = strlen(to);
    while (*text && at + 1 < room)
        to[at++] = *text++;
    char digits[20];
    size_t count = 0;
    for (; number >= 0 && (!count || number); number /= 10)
        digits[count++] = (char)('0' + number % 10);
    while (count && at + 1 < room)
        to[at++] = digits[--count];
    to[at] = 0;
}

static bool join(const char *folder, const char *name, char path[LONGEST_PATH])
{
    path[0] = 0;
    append(path, LONGEST_PATH, folder, -1);
    append(path, LONGEST_PATH, "/", -1);
    append(path, LONGEST_PATH, name, -1);
    return strlen(path) + 1 < LONGEST_PATH;
}

/* Whether a call was refused. Notes its code, and its message in one line; `said` may be NULL. */
static bool refused(gpu *g, ort_handle status, char said[160])
{
    if (!status)
        return false;
    const char *message = g->ort.GetErrorMessage(status);
    char line[sizeof g->failed_by] = "";
    for (size_t at = 0; at + 1 < sizeof line && message[at]; at++)
        line[at] = (char)(message[at] == '\n' || message[at] == '\r' ? ' ' : message[at]);
    if (!g->failure) {
        memcpy(g->failed_by, line, sizeof line);
        g->failure = g->ort.GetErrorCode(status); /* last: whoever sees it reads the message */
    }
    if (said)
        memcpy(said, line, sizeof line);
    g->ort.ReleaseStatus(status);
    return true;
}

/* ---- the library -------------------------------------------------------------------------------------------------- */

static edge_status load_library(gpu *g, const char *folder, edge_error *error)
{
    const char *names[] = {NULL, "libonnxruntime.so", "libonnxruntime.so.1"};
    char beside[LONGEST_PATH];
    names[0] = join(folder, "libonnxruntime.so", beside) ? beside : names[1];
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return edge_fail(error, EDGE_UNSUPPORTED, "there is no libonnxruntime.so: bring ONNX Runtime " ORT_FIRST " or later with "
                         "the app, or set engine to cpu");
    const ort_base *(*base)(void);
    *(void **)&base = dlsym(library, "OrtGetApiBase");
    if (!base)
        return edge_fail(error, EDGE_UNSUPPORTED, "libonnxruntime.so has no OrtGetApiBase: bring ONNX Runtime " ORT_FIRST " or "
                         "later with the app, or set engine to cpu");
    const void *const *api = base()->get_api(ORT_API);
    if (!api)
        return edge_fail(error, EDGE_UNSUPPORTED, "libonnxruntime.so is version %s: bring ONNX Runtime " ORT_FIRST " or later "
                         "with the app, or set engine to cpu", base()->version());
#define LOAD(number, result, name, arguments) memcpy(&g->ort.name, api + number, sizeof(void *));
    ORT_FUNCTIONS(LOAD)
#undef LOAD
    append(g->name, sizeof g->name, "ONNX Runtime ", -1);
    append(g->name, sizeof g->name, base()->version(), -1);
    append(g->name, sizeof g->name, ", ", -1);
    append(g->name, sizeof g->name, g->config->provider[0] ? g->config->provider : "CPUExecutionProvider", -1);
    return EDGE_OK;
}

/* The plugin's device: an NPU, or else any. */
static ort_handle find_device(gpu *g, char said[160])
{
    const ort_handle *devices;
    ort_handle found = NULL;
    size_t count;
    if (refused(g, g->ort.GetEpDevices(g->env, &devices, &count), said))
        return NULL;
    for (size_t i = 0; i < count; i++)
        if (!strcmp(g->ort.EpDevice_EpName(devices[i]), g->config->provider)
            && (!found || g->ort.HardwareDevice_Type(g->ort.EpDevice_Device(devices[i])) == ORT_NPU))
            found = devices[i];
    return found;
}

static edge_status add_provider(gpu *g, ort_handle options, const char *folder, edge_error *error)
{
    const npu_config *config = g->config;
    const npu_option *pairs = (const npu_option *)(config + 1);
    const char *names[MOST_OPTIONS], *values[MOST_OPTIONS];
    char said[160] = "it finds no device", beside[LONGEST_PATH];
    size_t count = config->options < MOST_OPTIONS ? config->options : MOST_OPTIONS;
    for (size_t i = 0; i < count; i++)
        names[i] = pairs[i].name, values[i] = pairs[i].value;
    ort_handle device = find_device(g, said);
    if (!device) { /* no other session has registered the plugin, or does so at this moment: then ours is refused */
        bool is_beside = join(folder, config->library, beside) && dlopen(beside, RTLD_NOW | RTLD_LOCAL);
        const char *library = is_beside ? beside : config->library;
        refused(g, g->ort.RegisterExecutionProviderLibrary(g->env, config->provider, library), said);
        device = find_device(g, said);
    }
    if (!device || refused(g, g->ort.SessionOptionsAppendExecutionProvider_V2(options, g->env, &device, 1, names, values, count),
                           said))
        return edge_fail(error, EDGE_UNSUPPORTED, "%s of %s cannot be used (%s): bring it with the app, or set engine to cpu",
                         config->provider, config->library, said);
    return EDGE_OK;
}

/* plain: for ONNX Runtime's own provider. */
static edge_status make_options(gpu *g, const edge_options *chosen, bool plain, ort_handle *options, edge_error *error)
{
    uint32_t threads = chosen->threads ? chosen->threads : fastest_cores(), most = g->model->config->threads;
    bool failed = refused(g, g->ort.CreateSessionOptions(options), NULL)
        || refused(g, g->ort.DisableMemPattern(*options), NULL) /* which would keep memory for each of two graphs */
        || refused(g, g->ort.SetSessionLogSeverityLevel(*options, ORT_FATAL), NULL)
        || refused(g, g->ort.SetIntraOpNumThreads(*options, (int32_t)(threads < most ? threads : most)), NULL)
        || refused(g, g->ort.SetInterOpNumThreads(*options, 1), NULL)
        /* Where products of unsigned inputs and signed weights saturate (x86 without VNNI), slower ones that do not. */
        || refused(g, g->ort.AddSessionConfigEntry(*options, "session.x64quantprecision", "1"), NULL)
        || (!plain && refused(g, g->ort.AddSessionConfigEntry(*options, "session.disable_cpu_ep_fallback", "1"), NULL))
        || (!plain && refused(g, g->ort.AddSessionConfigEntry(*options, "ep.share_ep_contexts", "1"), NULL));
    if (failed)
        return edge_fail(error, EDGE_UNSUPPORTED, "ONNX Runtime refuses its options (%s): bring another version of it",
                         g->failed_by);
    return plain ? EDGE_OK : add_provider(g, *options, chosen->npu, error);
}

/* ---- what graphs are given ---------------------------------------------------------------------------------------- */

static npu_tensor *find_tensor(gpu *g, const char *name)
{
    for (uint32_t i = 0; i < g->tensor_count; i++)
        if (!strcmp(g->tensors[i].name, name))
            return g->tensors + i;
    return NULL;
}

/* The tensor with this name, and with a number behind it, if that is not negative; a new one if there is none. */
static npu_tensor *name_tensor(gpu *g, const char *name, int64_t number, bool output)
{
    char whole[sizeof((npu_tensor *)0)->name] = {0};
    append(whole, sizeof whole, name, number);
    npu_tensor *found = find_tensor(g, whole);
    if (!found && (found = find_tensor(g, "")))
        memcpy(found->name, whole, sizeof whole), found->output = output;
    return found;
}

typedef struct { int64_t sizes[4]; } shape; /* 0: no such dimension */

static bool add(gpu *g, npu_tensor *to, enum npu_size size, void *data, int32_t type, shape of)
{
    size_t rank = 0, bytes = type == ORT_INT64 ? 8 : type == ORT_FLOAT ? 4 : 2;
    for (; rank < 4 && of.sizes[rank]; rank++)
        bytes *= (size_t)of.sizes[rank];
    return to && !refused(g, g->ort.CreateTensorWithDataAsOrtValue(g->memory, data, bytes, of.sizes, rank, type, &to->values[size]),
                          NULL);
}

/* The name of the tables of a kind of RoPE, or of the mask of a window: the first has no number. */
static npu_tensor *numbered(gpu *g, const char *name, const char *with_dot, uint32_t number)
{
    return number ? name_tensor(g, with_dot, number, false) : name_tensor(g, name, -1, false);
}

static bool add_tensors(gpu *g, enum npu_size size)
{
    const edge_config *c = g->model->config;
    npu_arrays *arrays = g->sizes + size;
    int64_t n = arrays->tokens, half = c->head / 2, width = c->head, heads = c->kv_heads;
    int32_t type = g->rows.item == 4 ? ORT_FLOAT : ORT_FLOAT16;
    bool added = add(g, name_tensor(g, "tokens", -1, false), size, arrays->ids, ORT_INT64, (shape){{1, n}})
        && add(g, name_tensor(g, "positions", -1, false), size, arrays->positions, ORT_INT64, (shape){{1, n}})
        && add(g, name_tensor(g, "x", -1, false), size, arrays->x, ORT_FLOAT, (shape){{1, n, c->hidden}})
        && add(g, name_tensor(g, "y", -1, false), size, arrays->x, ORT_FLOAT, (shape){{1, n, c->hidden}})
        && add(g, name_tensor(g, "temperatures", -1, false), size, arrays->temperatures, ORT_FLOAT, (shape){{1, n, 1}})
        && add(g, name_tensor(g, "logits", -1, true), size, g->logits, ORT_FLOAT, (shape){{1, 1, c->vocab}});
    for (uint32_t kind = 0; added && kind < c->rope_kinds; kind++)
        added = add(g, numbered(g, "cos", "cos.", kind), size, arrays->tables[2 * kind], ORT_FLOAT, (shape){{1, n, half}})
            && add(g, numbered(g, "sin", "sin.", kind), size, arrays->tables[2 * kind + 1], ORT_FLOAT, (shape){{1, n, half}});
    for (uint32_t each = 0; added && each < g->windows; each++) {
        uint32_t layer = g->window_layers[each];
        added = add(g, numbered(g, "mask", "mask.", g->model->layers[layer].window), size, arrays->masks[each], ORT_FLOAT,
                    (shape){{1, 1, n, npu_layer_rows(g, layer) + n}});
    }
    for (uint32_t layer = 0; added && layer < c->layers; layer++) {
        size_t item = g->rows.item, past = g->starts[layer] * c->head * item, of_layer = (size_t)(heads * n * width) * item;
        uint8_t *made = arrays->rows + 2 * layer * of_layer;
        shape rows = {{1, heads, npu_layer_rows(g, layer), width}}, ours = {{1, heads, n, width}};
        added = add(g, name_tensor(g, "past_key.", layer, false), size, g->rows.keys + past, type, rows)
            && add(g, name_tensor(g, "past_value.", layer, false), size, g->rows.values + past, type, rows)
            && add(g, name_tensor(g, "key.", layer, true), size, made, type, ours)
            && add(g, name_tensor(g, "value.", layer, true), size, made + of_layer, type, ours);
    }
    return added;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------- */

/* Finds what a session wants. Of its outputs, it may have others, which are left to it. */
static bool bind_side(gpu *g, npu_graph *graph, enum npu_size size, bool outputs)
{
    size_t count;
    if (refused(g, (outputs ? g->ort.SessionGetOutputCount : g->ort.SessionGetInputCount)(graph->session, &count), NULL))
        return false;
    for (size_t i = 0; i < count; i++) {
        char *name;
        if (refused(g, (outputs ? g->ort.SessionGetOutputName : g->ort.SessionGetInputName)(graph->session, i, g->allocator,
                                                                                              &name), NULL))
            return false;
        npu_tensor *tensor = *name ? find_tensor(g, name) : NULL;
        refused(g, g->ort.AllocatorFree(g->allocator, name), NULL);
        size_t at = graph->inputs + graph->outputs;
        if (!tensor && outputs)
            continue;
        if (!tensor || at == g->tensor_count)
            return false;
        graph->names[at] = tensor->name, graph->values[at] = tensor->values[size];
        tensor->written[size] |= outputs;
        *(outputs ? &graph->outputs : &graph->inputs) += 1;
    }
    return true;
}

static edge_status fail_graph(const char *name, const char *why, edge_error *error)
{
    return edge_fail(error, EDGE_BAD_FILE, "ONNX Runtime cannot load %s (%s): copy the bundle's folder npu again", name, why);
}

static edge_status open_graph(gpu *g, const char *folder, const char *name, ort_handle options, ort_handle *session,
                              edge_error *error)
{
    char path[LONGEST_PATH], said[160];
    if (!join(folder, name, path))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_options.npu is too long: %d bytes at most", (int64_t)LONGEST_PATH - 64);
    return refused(g, g->ort.CreateSession(g->env, path, options, session), said) ? fail_graph(name, said, error) : EDGE_OK;
}

static edge_status bind_graph(gpu *g, npu_graph *graph, enum npu_size size, const char *name, edge_error *error)
{
    if (bind_side(g, graph, size, false) && bind_side(g, graph, size, true))
        return EDGE_OK;
    return fail_graph(name, "its inputs are those of another model", error);
}

static edge_status open_shards(gpu *g, const edge_options *chosen, ort_handle options, edge_error *error)
{
    for (int size = 0; size < NPU_SIZES; size++) {
        for (uint32_t shard = 0; shard < g->config->shards; shard++) {
            char name[48] = {0};
            npu_graph *graph = g->sizes[size].graphs + 1 + shard;
            append(name, sizeof name, "npu.", shard);
            append(name, sizeof name, ".", size);
            append(name, sizeof name, ".onnx", -1);
            edge_status status = open_graph(g, chosen->npu, name, options, &graph->session, error);
            if (status || (status = bind_graph(g, graph, size, name, error)))
                return status;
        }
        for (uint32_t i = 0; i < g->tensor_count; i++)
            if (g->tensors[i].output && !g->tensors[i].written[size])
                return fail_graph("npu.*.onnx", "an output is missing", error);
    }
    return EDGE_OK;
}

static edge_status open_embedding(gpu *g, const edge_options *chosen, ort_handle options, edge_error *error)
{
    static const char name[] = "embed.onnx";
    edge_status status = open_graph(g, chosen->npu, name, options, &g->embedding, error);
    for (int size = 0; !status && size < NPU_SIZES; size++) {
        g->sizes[size].graphs->session = g->embedding;
        status = bind_graph(g, g->sizes[size].graphs, size, name, error);
    }
    return status;
}

edge_status npu_open(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error)
{
    ort_handle plain = NULL, own = NULL;
    g->cancelled = cancelled;
    if (!options->npu || !*options->npu)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "engine npu needs edge_options.npu: the path of the bundle's folder npu");
    edge_status status = load_library(g, options->npu, error);
    if (status)
        return status;
    if (refused(g, g->ort.CreateEnv(ORT_FATAL, "edge", &g->env), NULL)
        || refused(g, g->ort.CreateCpuMemoryInfo(ORT_ARENA, ORT_DEFAULT_MEMORY, &g->memory), NULL)
        || refused(g, g->ort.GetAllocatorWithDefaultOptions(&g->allocator), NULL)
        || !add_tensors(g, NPU_CHUNK) || !add_tensors(g, NPU_STEP))
        return edge_fail(error, EDGE_NO_MEMORY, "ONNX Runtime cannot begin (%s): end other sessions",
                         g->failure ? g->failed_by : "memory is short");
    status = make_options(g, options, true, &plain, error);
    if (!status && g->config->provider[0])
        status = make_options(g, options, false, &own, error);
    if (!status)
        status = open_embedding(g, options, plain, error);
    if (!status)
        status = open_shards(g, options, own ? own : plain, error);
    if (plain)
        g->ort.ReleaseSessionOptions(plain);
    if (own)
        g->ort.ReleaseSessionOptions(own);
    if (!status)
        g->failure = 0; /* of a plugin's first try */
    return status;
}

void npu_close(gpu *g)
{
    for (int size = 0; size < NPU_SIZES; size++) {
        for (uint32_t shard = 1; shard < 1 + g->config->shards; shard++)
            if (g->sizes[size].graphs[shard].session)
                g->ort.ReleaseSession(g->sizes[size].graphs[shard].session);
        for (uint32_t i = 0; i < g->tensor_count; i++)
            if (g->tensors[i].values[size])
                g->ort.ReleaseValue(g->tensors[i].values[size]);
    }
    if (g->embedding)
        g->ort.ReleaseSession(g->embedding);
    if (g->memory)
        g->ort.ReleaseMemoryInfo(g->memory);
    if (g->env)
        g->ort.ReleaseEnv(g->env);
}

bool npu_run(gpu *g, const npu_graph *graph)
{
    return !g->failure
        && !refused(g, g->ort.Run(graph->session, NULL, graph->names, graph->values, graph->inputs, graph->names + graph->inputs,
                                  graph->outputs, graph->values + graph->inputs), NULL);
}
