/* ONNX Runtime: the app's library, the provider, and sessions on the graphs of a folder. The library is never unloaded,
 * since it has threads. It checks names, types and shapes of all inputs, so that graphs of another model end with an
 * error. */
#include <dlfcn.h>
#include <string.h>

#include "npu.h"
#include "system.h"

enum { MOST_OPTIONS = 8 };

/* ---- texts -------------------------------------------------------------------------------------------------------- */

/* Appends a text and, unless it is negative, a number, as far as they fit. */
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

/* Whether a call failed. Keeps the first code and message; writes this message, one line, to `said` unless it is NULL. */
static bool refused(npu *n, ort_handle status, char said[160])
{
    if (!status)
        return false;
    const char *message = n->ort.GetErrorMessage(status);
    char line[sizeof n->failed_by] = "";
    for (size_t at = 0; at + 1 < sizeof line && message[at]; at++)
        line[at] = (char)(message[at] == '\n' || message[at] == '\r' ? ' ' : message[at]);
    if (!n->failure) {
        memcpy(n->failed_by, line, sizeof line);
        n->failure = n->ort.GetErrorCode(status); /* last: the message must be there when it is set */
    }
    if (said)
        memcpy(said, line, sizeof line);
    n->ort.ReleaseStatus(status);
    return true;
}

/* ---- the library -------------------------------------------------------------------------------------------------- */

static edge_status load_library(npu *n, const char *folder, edge_error *error)
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
#define LOAD(number, result, name, arguments) memcpy(&n->ort.name, api + number, sizeof(void *));
    ORT_FUNCTIONS(LOAD)
#undef LOAD
    append(n->name, sizeof n->name, "ONNX Runtime ", -1);
    append(n->name, sizeof n->name, base()->version(), -1);
    append(n->name, sizeof n->name, ", ", -1);
    append(n->name, sizeof n->name, n->config->provider[0] ? n->config->provider : "CPUExecutionProvider", -1);
    return EDGE_OK;
}

/* Finds the plugin's NPU, or else any device of it. */
static ort_handle find_device(npu *n, char said[160])
{
    const ort_handle *devices;
    ort_handle found = NULL;
    size_t count;
    if (refused(n, n->ort.GetEpDevices(n->env, &devices, &count), said))
        return NULL;
    for (size_t i = 0; i < count; i++)
        if (!strcmp(n->ort.EpDevice_EpName(devices[i]), n->config->provider)
            && (!found || n->ort.HardwareDevice_Type(n->ort.EpDevice_Device(devices[i])) == ORT_NPU))
            found = devices[i];
    return found;
}

static edge_status add_provider(npu *n, ort_handle options, const char *folder, edge_error *error)
{
    const npu_config *config = n->config;
    const npu_option *pairs = (const npu_option *)(config + 1);
    const char *names[MOST_OPTIONS], *values[MOST_OPTIONS];
    char said[160] = "it finds no device", beside[LONGEST_PATH];
    size_t count = config->options < MOST_OPTIONS ? config->options : MOST_OPTIONS;
    for (size_t i = 0; i < count; i++)
        names[i] = pairs[i].name, values[i] = pairs[i].value;
    ort_handle device = find_device(n, said);
    if (!device) { /* register the plugin; refused if another session does so at this moment */
        bool is_beside = join(folder, config->library, beside) && dlopen(beside, RTLD_NOW | RTLD_LOCAL);
        const char *library = is_beside ? beside : config->library;
        refused(n, n->ort.RegisterExecutionProviderLibrary(n->env, config->provider, library), said);
        device = find_device(n, said);
    }
    if (!device || refused(n, n->ort.SessionOptionsAppendExecutionProvider_V2(options, n->env, &device, 1, names, values, count),
                           said))
        return edge_fail(error, EDGE_UNSUPPORTED, "%s of %s cannot be used (%s): bring it with the app, or set engine to cpu",
                         config->provider, config->library, said);
    return EDGE_OK;
}

/* plain: options of ONNX Runtime's own provider. */
static edge_status make_options(npu *n, const edge_options *chosen, bool plain, ort_handle *options, edge_error *error)
{
    uint32_t threads = chosen->threads ? chosen->threads : fastest_cores(), most = n->model->config->threads;
    bool failed = refused(n, n->ort.CreateSessionOptions(options), NULL)
        || refused(n, n->ort.DisableMemPattern(*options), NULL) /* it would keep memory for each of two graphs */
        || refused(n, n->ort.SetSessionLogSeverityLevel(*options, ORT_FATAL), NULL)
        || refused(n, n->ort.SetIntraOpNumThreads(*options, (int32_t)(threads < most ? threads : most)), NULL)
        || refused(n, n->ort.SetInterOpNumThreads(*options, 1), NULL)
        /* On x86 without VNNI: slower products that do not saturate. */
        || refused(n, n->ort.AddSessionConfigEntry(*options, "session.x64quantprecision", "1"), NULL)
        || (!plain && refused(n, n->ort.AddSessionConfigEntry(*options, "session.disable_cpu_ep_fallback", "1"), NULL))
        || (!plain && refused(n, n->ort.AddSessionConfigEntry(*options, "ep.share_ep_contexts", "1"), NULL));
    if (failed)
        return edge_fail(error, EDGE_UNSUPPORTED, "ONNX Runtime refuses its options (%s): bring another version of it",
                         n->failed_by);
    return plain ? EDGE_OK : add_provider(n, *options, chosen->npu, error);
}

/* ---- inputs and outputs ------------------------------------------------------------------------------------------- */

static npu_tensor *find_tensor(npu *n, const char *name)
{
    for (uint32_t i = 0; i < n->tensor_count; i++)
        if (!strcmp(n->tensors[i].name, name))
            return n->tensors + i;
    return NULL;
}

/* Returns the tensor of this name, with a number behind it unless that is negative; makes a new one if there is none. */
static npu_tensor *name_tensor(npu *n, const char *name, int64_t number, bool output)
{
    char whole[sizeof((npu_tensor *)0)->name] = {0};
    append(whole, sizeof whole, name, number);
    npu_tensor *found = find_tensor(n, whole);
    if (!found && (found = find_tensor(n, "")))
        memcpy(found->name, whole, sizeof whole), found->output = output;
    return found;
}

typedef struct { int64_t sizes[4]; } shape; /* 0 ends it */

static bool add(npu *n, npu_tensor *to, enum npu_size size, void *data, int32_t type, shape of)
{
    size_t rank = 0, bytes = type == ORT_INT64 ? 8 : type == ORT_FLOAT ? 4 : 2;
    for (; rank < 4 && of.sizes[rank]; rank++)
        bytes *= (size_t)of.sizes[rank];
    return to && !refused(n, n->ort.CreateTensorWithDataAsOrtValue(n->memory, data, bytes, of.sizes, rank, type, &to->values[size]),
                          NULL);
}

/* The tensor of a kind of RoPE or of a window: number 0 has a name without a dot. */
static npu_tensor *numbered(npu *n, const char *name, const char *with_dot, uint32_t number)
{
    return number ? name_tensor(n, with_dot, number, false) : name_tensor(n, name, -1, false);
}

static bool add_tensors(npu *n, enum npu_size size)
{
    const edge_config *c = n->model->config;
    npu_arrays *arrays = n->sizes + size;
    int64_t count = arrays->tokens, half = c->head / 2, width = c->head, heads = c->kv_heads;
    int32_t type = n->rows.item == 4 ? ORT_FLOAT : ORT_FLOAT16;
    bool added = add(n, name_tensor(n, "tokens", -1, false), size, arrays->ids, ORT_INT64, (shape){{1, count}})
        && add(n, name_tensor(n, "positions", -1, false), size, arrays->positions, ORT_INT64, (shape){{1, count}})
        && add(n, name_tensor(n, "x", -1, false), size, arrays->x, ORT_FLOAT, (shape){{1, count, c->hidden}})
        && add(n, name_tensor(n, "y", -1, false), size, arrays->x, ORT_FLOAT, (shape){{1, count, c->hidden}})
        && add(n, name_tensor(n, "temperatures", -1, false), size, arrays->temperatures, ORT_FLOAT, (shape){{1, count, 1}})
        && add(n, name_tensor(n, "logits", -1, true), size, n->logits, ORT_FLOAT, (shape){{1, 1, c->vocab}});
    for (uint32_t kind = 0; added && kind < c->rope_kinds; kind++)
        added = add(n, numbered(n, "cos", "cos.", kind), size, arrays->tables[2 * kind], ORT_FLOAT, (shape){{1, count, half}})
            && add(n, numbered(n, "sin", "sin.", kind), size, arrays->tables[2 * kind + 1], ORT_FLOAT, (shape){{1, count, half}});
    for (uint32_t each = 0; added && each < n->windows; each++) {
        uint32_t layer = n->window_layers[each];
        added = add(n, numbered(n, "mask", "mask.", n->model->layers[layer].window), size, arrays->masks[each], ORT_FLOAT,
                    (shape){{1, 1, count, npu_layer_rows(n, layer) + count}});
    }
    for (uint32_t layer = 0; added && layer < c->layers; layer++) {
        size_t item = n->rows.item, past = n->starts[layer] * c->head * item, of_layer = (size_t)(heads * count * width) * item;
        uint8_t *made = arrays->rows + 2 * layer * of_layer;
        shape rows = {{1, heads, npu_layer_rows(n, layer), width}}, ours = {{1, heads, count, width}};
        added = add(n, name_tensor(n, "past_key.", layer, false), size, n->rows.keys + past, type, rows)
            && add(n, name_tensor(n, "past_value.", layer, false), size, n->rows.values + past, type, rows)
            && add(n, name_tensor(n, "key.", layer, true), size, made, type, ours)
            && add(n, name_tensor(n, "value.", layer, true), size, made + of_layer, type, ours);
    }
    return added;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------- */

/* Binds the inputs or outputs of a session. Unknown outputs are left out. */
static bool bind_side(npu *n, npu_graph *graph, enum npu_size size, bool outputs)
{
    size_t count;
    if (refused(n, (outputs ? n->ort.SessionGetOutputCount : n->ort.SessionGetInputCount)(graph->session, &count), NULL))
        return false;
    for (size_t i = 0; i < count; i++) {
        char *name;
        if (refused(n, (outputs ? n->ort.SessionGetOutputName : n->ort.SessionGetInputName)(graph->session, i, n->allocator,
                                                                                              &name), NULL))
            return false;
        npu_tensor *tensor = *name ? find_tensor(n, name) : NULL;
        refused(n, n->ort.AllocatorFree(n->allocator, name), NULL);
        size_t at = graph->inputs + graph->outputs;
        if (!tensor && outputs)
            continue;
        if (!tensor || at == n->tensor_count)
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

static edge_status open_graph(npu *n, const char *folder, const char *name, ort_handle options, ort_handle *session,
                              edge_error *error)
{
    char path[LONGEST_PATH], said[160];
    if (!join(folder, name, path))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_options.npu is too long: %d bytes at most", (int64_t)LONGEST_PATH - 64);
    return refused(n, n->ort.CreateSession(n->env, path, options, session), said) ? fail_graph(name, said, error) : EDGE_OK;
}

static edge_status bind_graph(npu *n, npu_graph *graph, enum npu_size size, const char *name, edge_error *error)
{
    if (bind_side(n, graph, size, false) && bind_side(n, graph, size, true))
        return EDGE_OK;
    return fail_graph(name, "its inputs are those of another model", error);
}

static edge_status open_shards(npu *n, const edge_options *chosen, ort_handle options, edge_error *error)
{
    for (int size = 0; size < NPU_SIZES; size++) {
        for (uint32_t shard = 0; shard < n->config->shards; shard++) {
            char name[48] = {0};
            npu_graph *graph = n->sizes[size].graphs + 1 + shard;
            append(name, sizeof name, "npu.", shard);
            append(name, sizeof name, ".", size);
            append(name, sizeof name, ".onnx", -1);
            edge_status status = open_graph(n, chosen->npu, name, options, &graph->session, error);
            if (status || (status = bind_graph(n, graph, size, name, error)))
                return status;
        }
        for (uint32_t i = 0; i < n->tensor_count; i++)
            if (n->tensors[i].output && !n->tensors[i].written[size])
                return fail_graph("npu.*.onnx", "an output is missing", error);
    }
    return EDGE_OK;
}

static edge_status open_embedding(npu *n, const edge_options *chosen, ort_handle options, edge_error *error)
{
    static const char name[] = "embed.onnx";
    edge_status status = open_graph(n, chosen->npu, name, options, &n->embedding, error);
    for (int size = 0; !status && size < NPU_SIZES; size++) {
        n->sizes[size].graphs->session = n->embedding;
        status = bind_graph(n, n->sizes[size].graphs, size, name, error);
    }
    return status;
}

edge_status npu_open(accelerator *a, const edge_options *options, const volatile int32_t *cancelled, edge_error *error)
{
    npu *n = (npu *)a;
    ort_handle plain = NULL, own = NULL;
    n->cancelled = cancelled;
    if (!options->npu || !*options->npu)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "engine npu needs edge_options.npu: the path of the bundle's folder npu");
    edge_status status = load_library(n, options->npu, error);
    if (status)
        return status;
    if (refused(n, n->ort.CreateEnv(ORT_FATAL, "edge", &n->env), NULL)
        || refused(n, n->ort.CreateCpuMemoryInfo(ORT_ARENA, ORT_DEFAULT_MEMORY, &n->memory), NULL)
        || refused(n, n->ort.GetAllocatorWithDefaultOptions(&n->allocator), NULL)
        || !add_tensors(n, NPU_CHUNK) || !add_tensors(n, NPU_STEP))
        return edge_fail(error, EDGE_NO_MEMORY, "ONNX Runtime cannot begin (%s): end other sessions",
                         n->failure ? n->failed_by : "memory is short");
    status = make_options(n, options, true, &plain, error);
    if (!status && n->config->provider[0])
        status = make_options(n, options, false, &own, error);
    if (!status)
        status = open_embedding(n, options, plain, error);
    if (!status)
        status = open_shards(n, options, own ? own : plain, error);
    if (plain)
        n->ort.ReleaseSessionOptions(plain);
    if (own)
        n->ort.ReleaseSessionOptions(own);
    if (!status)
        n->failure = 0; /* a plugin may fail at first */
    return status;
}

void npu_close(accelerator *a)
{
    npu *n = (npu *)a;
    for (int size = 0; size < NPU_SIZES; size++) {
        for (uint32_t shard = 1; shard < 1 + n->config->shards; shard++)
            if (n->sizes[size].graphs[shard].session)
                n->ort.ReleaseSession(n->sizes[size].graphs[shard].session);
        for (uint32_t i = 0; i < n->tensor_count; i++)
            if (n->tensors[i].values[size])
                n->ort.ReleaseValue(n->tensors[i].values[size]);
    }
    if (n->embedding)
        n->ort.ReleaseSession(n->embedding);
    if (n->memory)
        n->ort.ReleaseMemoryInfo(n->memory);
    if (n->env)
        n->ort.ReleaseEnv(n->env);
}

bool npu_run(npu *n, const npu_graph *graph)
{
    return !n->failure
        && !refused(n, n->ort.Run(graph->session, NULL, graph->names, graph->values, graph->inputs, graph->names + graph->inputs,
                                  graph->outputs, graph->values + graph->inputs), NULL);
}
