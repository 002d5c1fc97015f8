/* Chooses CPU or GPU for sessions with engine AUTO by timing both, as edge/run/starting/race.py and by the rule of
 * edge/plan/engines.py, within about a second. Sessions with limits of time or energy are never timed.
 *
 * The cache folder keeps the result for this bundle, system and library of webgpu.h, so that no driver is loaded for a
 * slower GPU. If the GPU was faster, the result holds for the same driver only. Failures are not kept. The two sessions run
 * one after the other, so that memory is that of one. */
#include <math.h>
#include <string.h>

#include "bundle.h"
#include "gpu.h"
#include "hash.h"
#include "kv.h"
#include "pass.h"
#include "session.h"
#include "system.h"

static const double LAP_S = 0.2; /* about, for a lap; there are four */

static const char FAILED_CPU[] = "the CPU failed when it was timed";
static const char COUNTED[] = "nothing is timed in a session with a limit of time or energy";

typedef struct { double prefill, decode; } pace; /* tokens per second */
typedef struct { pace paces[2]; uint8_t driver[32]; } record; /* of CPU and GPU; SHA-256 of the GPU's driver */

static double request_seconds(pace p)
{
    double prompt = RACE_PROMPT, answer = RACE_ANSWER;
    return p.prefill > 0 && p.decode > 0 ? prompt / p.prefill + answer / p.decode : HUGE_VAL;
}

/* Adds the seconds of a pass. Returns false if it failed or a logit is not finite. */
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

/* Times a prompt and the first tokens behind it; fewer of both on slow engines. */
static bool lap(edge_session *s, pace *found)
{
    int32_t tokens[RACE_PROMPT];
    uint32_t capacity = kv_capacity(s->rows), most = smaller(smaller(s->chunk, RACE_PROMPT), capacity / 2);
    uint32_t count = smaller(RACE_FEW, most), steps = 0;
    double unmeasured = 0, prompt = 0, spent = 0;
    for (uint32_t i = 0; i < RACE_PROMPT; i++)
        tokens[i] = (int32_t)((i * 2654435761u >> 8) % s->model->config->vocab);
    kv_clear(s->rows);
    if (!timed(s, tokens, smaller(2, count), &unmeasured) || !timed(s, tokens, count, &prompt))
        return false;
    if (most > count && prompt * most / count < LAP_S / 2) {
        kv_clear(s->rows);
        count = most, prompt = 0;
        if (!timed(s, tokens, count, &prompt))
            return false;
    }
    if (!timed(s, tokens, 1, &unmeasured))
        return false;
    for (; steps < smaller(RACE_STEPS, capacity / 4) && (!steps || spent < LAP_S / 2); steps++)
        if (!timed(s, tokens + steps, 1, &spent))
            return false;
    *found = (pace){count / prompt, steps / spent};
    return true;
}

/* Finds the best lap. Returns false if the engine failed. */
static bool race(edge_session *s, pace *best)
{
    double began = now_seconds();
    *best = (pace){0, 0};
    for (uint32_t round = 0; round < RACE_ROUNDS && now_seconds() - began < LAP_S; round++) {
        pace found;
        if (!lap(s, &found))
            return false;
        if (request_seconds(found) < request_seconds(*best))
            *best = found;
    }
    kv_clear(s->rows);
    return true;
}

/* Writes the path of the result's file, by the bundle, instruction set, threads, system, and library of webgpu.h. */
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
    uint32_t library = webgpu_version();
    hash_add(&h, &library, sizeof library);
    hash_end(&h, digest);
    return kept_path(options->cache, digest, ".race", path);
}

static bool read_record(const char *path, record *found)
{
    kept_file kept;
    kept_read(path, &kept);
    bool whole = kept.size == sizeof *found;
    if (whole)
        memcpy(found, kept.data, sizeof *found);
    if (kept.data)
        unmap_memory(kept.data, kept.size + 32);
    return whole;
}

static void keep_record(const char *path, const record *found)
{
    uint8_t memory[sizeof *found + 32];
    kept_file made = {memory, 0, sizeof *found};
    memcpy(memory, found, sizeof *found);
    kept_write(path, &made);
}

static bool gpu_is_faster(const record *found)
{
    return request_seconds(found->paces[1]) < request_seconds(found->paces[0]);
}

static void tell(edge_session *s, const record *found)
{
    double seconds[] = {request_seconds(found->paces[0]), request_seconds(found->paces[1])};
    bool on_gpu = gpu_is_faster(found);
    edge_error said = {.size = sizeof said};
    edge_fail(&said, EDGE_OK, "the %s was faster: %d tokens of a prompt and %d of an answer take it %d ms, the %s %d ms "
              "(measured)", on_gpu ? "GPU" : "CPU", (int64_t)RACE_PROMPT, (int64_t)RACE_ANSWER,
              (int64_t)(1000 * seconds[on_gpu]), on_gpu ? "CPU" : "GPU", (int64_t)(1000 * seconds[!on_gpu]));
    memcpy(s->why, said.message, sizeof s->why);
}

/* Begins a session on the CPU. why: the reason against the GPU; its part behind a colon, which advises, is cut. */
static edge_status begin_on_cpu(edge_model *model, const edge_options *options, const char *why, edge_session **session,
                                edge_error *error)
{
    edge_status status = begin_on(model, options, NULL, session, error);
    for (size_t i = 0; !status && why[i] && why[i] != ':' && i + 1 < sizeof (*session)->why; i++)
        (*session)->why[i] = why[i];
    return status;
}

/* Times the GPU, on the session that has begun, then the CPU; begins a session on the faster one. */
static edge_status begin_timed(edge_model *model, const edge_options *options, const char *path, record *found,
                               edge_session **session, edge_error *error)
{
    edge_error unable = {.size = sizeof unable};
    bool works = race(*session, &found->paces[1]);
    edge_end(*session);
    if (!works)
        return begin_on_cpu(model, options, "the GPU failed when it was timed", session, error);
    edge_status status = begin_on(model, options, NULL, session, error);
    if (status)
        return status;
    works = race(*session, &found->paces[0]);
    if (works)
        keep_record(path, found);
    if (!works || gpu_is_faster(found)) {
        edge_end(*session);
        if (begin_on(model, options, EDGE_GPU, session, &unable))
            return begin_on_cpu(model, options, unable.message, session, error);
    }
    if (works)
        tell(*session, found);
    else
        memcpy((*session)->why, FAILED_CPU, sizeof FAILED_CPU);
    return EDGE_OK;
}

edge_status begin_faster(edge_model *model, const edge_options *options, edge_session **session, edge_error *error)
{
    char path[LONGEST_PATH];
    record found = {0};
    edge_error unable = {.size = sizeof unable};
    bool counted = options->time > 0 || options->energy > 0;
    if (!name_record(options, path))
        return begin_on_cpu(model, options, "no cache folder is set, which would keep what a race measures", session, error);
    bool known = read_record(path, &found);
    if (!known && counted)
        return begin_on_cpu(model, options, COUNTED, session, error);
    if (known && !gpu_is_faster(&found)) {
        edge_status status = begin_on(model, options, NULL, session, error);
        if (!status)
            tell(*session, &found);
        return status;
    }
    if (begin_on(model, options, EDGE_GPU, session, &unable))
        return begin_on_cpu(model, options, unable.message, session, error);
    hasher h;
    uint8_t driver[32];
    hash_start(&h);
    hash_driver(&h, (const gpu *)(*session)->accelerator);
    hash_end(&h, driver);
    if (known && !memcmp(driver, found.driver, sizeof driver)) {
        tell(*session, &found);
        return EDGE_OK;
    }
    if (counted) {
        edge_end(*session);
        return begin_on_cpu(model, options, COUNTED, session, error);
    }
    memcpy(found.driver, driver, sizeof driver);
    return begin_timed(model, options, path, &found, session, error);
}
