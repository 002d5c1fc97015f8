/* A session's KV cache and policy, for tests that call them through ctypes. */
#include <stdlib.h>
#include <string.h>

#include "bundle.h"
#include "kv.h"
#include "model.h"
#include "policy.h"
#include "system.h"

const accelerator_kind *const EDGE_PAGE = NULL; /* which trusted.c has elsewhere */
const scores_kind *const EDGE_SCORES = &edge_scores;

typedef struct {
    edge_model model;
    kv *cache;
    policy *policy;
    void *memory;
    size_t size;
} kv_session;

kv_session *make_session(const void *config, const void *layers, const void *angles, const void *normals, const void *importance);
void free_session(kv_session *session);
kv *session_kv(kv_session *session);
policy *session_policy(kv_session *session);
size_t save_session(kv_session *session, uint8_t *out);
edge_status load_session(kv_session *session, const uint8_t *saved, size_t size, edge_error *error);

kv_session *make_session(const void *config, const void *layers, const void *angles, const void *normals, const void *importance)
{
    kv_session *session = calloc(1, sizeof *session);
    if (!session)
        return NULL;
    session->model.config = config;
    session->model.layers = layers;
    session->model.sections[SECTION_ANGLES] = angles;
    session->model.sections[SECTION_NORMALS] = normals;
    session->model.sections[SECTION_IMPORTANCE] = importance;
    arena from = {NULL, 0};
    kv_layout(&from, &session->model, false);
    policy_layout(&from, &session->model);
    session->size = from.used;
    session->memory = map_memory(from.used);
    if (!session->memory)
        return NULL;
    from = (arena){session->memory, 0};
    session->cache = kv_layout(&from, &session->model, false);
    session->policy = policy_layout(&from, &session->model);
    if (from.used != session->size)
        return NULL;
    return session;
}

void free_session(kv_session *session)
{
    unmap_memory(session->memory, session->size);
    free(session);
}

kv *session_kv(kv_session *session) { return session->cache; }
policy *session_policy(kv_session *session) { return session->policy; }

typedef struct { uint8_t *out; const uint8_t *in, *end; } bytes;

static bool put(void *to, const void *from, size_t size)
{
    bytes *b = to;
    memcpy(b->out, from, size);
    b->out += size;
    return true;
}

static bool get(void *from, void *to, size_t size)
{
    bytes *b = from;
    if ((size_t)(b->end - b->in) < size)
        return false;
    memcpy(to, b->in, size);
    b->in += size;
    return true;
}

/* `out` has kv_saved_bytes. Returns the bytes that were written. */
size_t save_session(kv_session *session, uint8_t *out)
{
    bytes b = {out, NULL, NULL};
    return kv_save(session->cache, put, &b) ? (size_t)(b.out - out) : 0;
}

edge_status load_session(kv_session *session, const uint8_t *saved, size_t size, edge_error *error)
{
    bytes b = {NULL, saved, saved + size};
    return kv_load(session->cache, get, &b, error);
}
