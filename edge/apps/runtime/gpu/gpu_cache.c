/* Files in the app's cache folder: compiled kernels, failures to compile, and results of races. Each ends with the SHA-256
 * of its content, so that damaged files are ignored. */
#include <string.h>

#include "gpu.h"
#include "hash.h"
#include "system.h"

bool kept_path(const char *folder, const uint8_t digest[32], const char *suffix, char *path)
{
    size_t length = strlen(folder), at = length;
    if (!length || length > LONGEST_PATH - 64)
        return false;
    memcpy(path, folder, length);
    memcpy(path + at, "/edge-", 6);
    at += 6;
    for (int i = 0; i < 16; i++) {
        path[at++] = "0123456789abcdef"[digest[i] >> 4];
        path[at++] = "0123456789abcdef"[digest[i] & 15];
    }
    memcpy(path + at, suffix, strlen(suffix) + 1);
    return true;
}

void hash_driver(hasher *h, const gpu *g)
{
    hash_add(h, g->name, strlen(g->name));
    hash_add(h, g->version, strlen(g->version));
    if (g->library)
        hash_add(h, &g->library, sizeof g->library);
}

bool kept_kernels(const gpu *g, uint32_t language, const char *folder, const char *suffix, char *path)
{
    const gpu_kernel *kernels = gpu_table(g, g->config->kernels_at); /* their sources are the end of the section, in order */
    hasher h;
    uint8_t digest[32];
    hash_start(&h);
    hash_add(&h, g->section + kernels->source[language], g->model->sizes[SECTION_GPU] - kernels->source[language]);
    hash_driver(&h, g);
    hash_end(&h, digest);
    return kept_path(folder, digest, suffix, path);
}

static void digest_of(const uint8_t *data, uint64_t size, uint8_t digest[32])
{
    hasher h;
    hash_start(&h);
    hash_add(&h, data, size);
    hash_end(&h, digest);
}

void kept_read(const char *path, kept_file *kept)
{
    edge_source source = {sizeof source, path, -1, 0, 0};
    mapping file;
    *kept = (kept_file){0};
    if (map_file(&source, &file, NULL) != EDGE_OK)
        return;
    if (file.size > 32 && file.size < MOST_KEPT) {
        uint8_t digest[32];
        digest_of(file.data, file.size - 32, digest);
        if (!memcmp(digest, file.data + file.size - 32, 32) && (kept->data = map_memory(file.size))) {
            memcpy(kept->data, file.data, file.size);
            kept->size = file.size - 32;
        }
    }
    unmap_file(&file);
}

void kept_write(const char *path, kept_file *made)
{
    digest_of(made->data, made->at, made->data + made->at);
    replace_file(path, made->data, made->at + 32); /* if it fails, the next session makes it again */
}

void fail_as_before(gpu *g, const char *path)
{
    kept_file kept;
    kept_read(path, &kept);
    if (kept.size == sizeof g->failed_by) {
        memcpy(g->failed_by, kept.data, sizeof g->failed_by - 1);
        g->failure = REFUSED;
    }
    if (kept.data)
        unmap_memory(kept.data, kept.size + 32);
}

void keep_failure(const gpu *g, const char *path)
{
    uint8_t memory[sizeof g->failed_by + 32];
    kept_file made = {memory, 0, sizeof g->failed_by};
    memcpy(memory, g->failed_by, sizeof g->failed_by);
    kept_write(path, &made);
}
