/* CPU or GPU, for sessions that leave it open: both are timed, by the rule of edge/plan/engines.py and as
 * edge/run/starting/race.py does it, but for a second at most. The cache folder keeps what was measured, for a bundle on
 * a version of the system: then no driver is loaded for a GPU that is slower. Never both at once: the memory is that of
 * one session. */
#include <math.h>
#include <string.h>

#include "gpu.h"
#include "session.h"

static const double LAP_S = 0.2; /* of a lap, about: there are four */

typedef struct { double prefill, decode; } pace; /* tokens per second; 0: the engine has failed */

static double request_seconds(pace p)
{
    double prompt = RACE_PROMPT, answer = RACE_ANSWER;
    return p.prefill > 0 && p.decode > 0 ? prompt / p.prefill + answer / p.decode : HUGE_VAL;
}

/* Adds the seconds of a pass. False: it failed, or its logits are no numbers. */
static bool timed(edge_session *s, const int32_t *tokens, uint32_t count, double *seconds)
{
    double began = now_seconds();
    const float *logits = pass_run(s->pass, tokens, count, 0, NULL);
    *seconds += now_seconds() - began;
    for (uint32_t i = 0; logits && i < s->model->config->vocab; i++)
        if (!isfinite(logits[i]))
            return false;
    return logits != NULL;
}

static uint32_t least(uint32_t one, uint32_t other)
{
    return one < other ? one : other;
}

/* A prompt and the first tokens behind it. Slow engines run fewer. */
static bool lap(edge_session *s, pace *found)
{
    int32_t tokens[RACE_PROMPT];
    uint32_t capacity = kv_capacity(s->rows), most = least(least(s->chunk, RACE_PROMPT), capacity / 2);
    uint32_t count = least(RACE_FEW, most), steps = 0;
    double unmeasured = 0, prompt = 0, spent = 0;
    for (uint32_t i = 0; i < RACE_PROMPT; i++)
        tokens[i] = (int32_t)((i * 2654435761u >> 8) % s->model->config->vocab);
    kv_clear(s->rows);
    if (!timed(s, tokens, least(2, count), &unmeasured) || !timed(s, tokens, count, &prompt))
        return false;
    if (most > count && prompt * most / count < LAP_S / 2) {
        kv_clear(s->rows);
        count = most, prompt = 0;
        if (!timed(s, tokens, count, &prompt))
            return false;
    }
    if (!timed(s, tokens, 1, &unmeasured))
        return false;
    for (; steps < least(RACE_STEPS, capacity / 4) && (!steps || spent < LAP_S / 2); steps++)
        if (!timed(s, tokens + steps, 1, &spent))
            return false;
    *found = (pace){count / prompt, steps / spent};
    return true;
}

static pace race(edge_session *s)
{
    pace best = {0, 0}, found;
    double began = now_seconds();
    for (uint32_t round = 0; round < RACE_ROUNDS && now_seconds() - began < LAP_S; round++) {
        if (!lap(s, &found)) {
            best = (pace){0, 0};
            break;
        }
        if (request_seconds(found) < request_seconds(best))
            best = found;
    }
    kv_clear(s->rows);
    return best;
}

/* Of the file that keeps what was measured: for these sections of the bundle, instruction set, threads, and system. */
static bool name_record(const edge_options *options, char *path)
{
    hasher h;
    uint8_t digest[32];
    hash_start(&h);
    hash_add(&h, EDGE_TRUSTED, sizeof EDGE_TRUSTED);
    if (!options->cache || !hash_system(&h))
        return false;
    if (options->isa)
        hash_add(&h, options->isa, strlen(options->isa));
    hash_add(&h, &options->threads, sizeof options->threads);
    hash_add(&h, &options->cpu_mask, sizeof options->cpu_mask);
    hash_end(&h, digest);
    return kept_path(options->cache, digest, ".race", path);
}

static bool read_record(const char *path, pace paces[2])
{
    kept_file kept;
    kept_read(path, &kept);
    bool whole = kept.size == 2 * sizeof *paces;
    if (whole)
        memcpy(paces, kept.data, 2 * sizeof *paces);
    if (kept.data)
        unmap_memory(kept.data, kept.size + 32);
    return whole;
}

static void keep_record(const char *path, const pace paces[2])
{
    uint8_t memory[2 * sizeof *paces + 32];
    kept_file made = {memory, 0, 2 * sizeof *paces};
    memcpy(memory, paces, 2 * sizeof *paces);
    kept_write(path, &made);
}

static bool gpu_is_faster(const pace paces[2])
{
    return request_seconds(paces[1]) < request_seconds(paces[0]);
}

static void tell(edge_session *s, const pace paces[2])
{
    double seconds[] = {request_seconds(paces[0]), request_seconds(paces[1])};
    bool on_gpu = gpu_is_faster(paces);
    edge_error said = {.size = sizeof said};
    if (isfinite(seconds[0]) && isfinite(seconds[1]))
        edge_fail(&said, EDGE_OK, "the %s was faster: %d tokens of a prompt and %d of an answer take it %d ms, the %s %d ms "
                  "(measured)", on_gpu ? "GPU" : "CPU", (int64_t)RACE_PROMPT, (int64_t)RACE_ANSWER,
                  (int64_t)(1000 * seconds[on_gpu]), on_gpu ? "CPU" : "GPU", (int64_t)(1000 * seconds[!on_gpu]));
    else
        edge_fail(&said, EDGE_OK, "the %s failed when both were timed", on_gpu ? "CPU" : "GPU");
    memcpy(s->why, said.message, sizeof s->why);
}

/* The CPU's session, and why there is none on a GPU: the part of a message that does not say what to do. */
static edge_status begin_on_cpu(edge_model *model, const edge_options *options, const char *why, edge_session **session,
                                edge_error *error)
{
    edge_status status = begin_on(model, options, NULL, session, error);
    for (size_t i = 0; !status && why[i] && why[i] != ':' && i + 1 < sizeof (*session)->why; i++)
        (*session)->why[i] = why[i];
    return status;
}

edge_status begin_faster(edge_model *model, const edge_options *options, edge_session **session, edge_error *error)
{
    char path[LONGEST_PATH];
    pace paces[2] = {{0, 0}, {0, 0}}; /* of the CPU, of the GPU */
    edge_error unable = {.size = sizeof unable};
    if (!name_record(options, path))
        return begin_on_cpu(model, options, "no cache folder is set, which would keep what a race measures", session, error);
    bool known = read_record(path, paces);
    if (!known) {
        if (begin_on(model, options, EDGE_GPU, session, &unable))
            return begin_on_cpu(model, options, unable.message, session, error);
        paces[1] = race(*session);
        edge_end(*session);
    }
    edge_status status = EDGE_OK;
    if (!known || !gpu_is_faster(paces)) {
        if ((status = begin_on(model, options, NULL, session, error)))
            return status;
        if (!known) {
            paces[0] = race(*session);
            keep_record(path, paces);
        }
    }
    if (gpu_is_faster(paces)) {
        if (!known)
            edge_end(*session);
        if (begin_on(model, options, EDGE_GPU, session, &unable))
            return begin_on_cpu(model, options, unable.message, session, error);
    }
    tell(*session, paces);
    return EDGE_OK;
}
