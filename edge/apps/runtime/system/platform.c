/* Memory and files, for all systems: whole pages, parts of files. posix.c, linux.c, apple.c and windows.c have the rest. */
#include <string.h>

#include "system.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Returns the bytes of the whole pages within a range of memory. *first: the first page. */
static uint64_t whole_pages(const void *memory, size_t size, void **first)
{
    uint64_t page = system_page_size(), begin = ((uint64_t)(uintptr_t)memory + page - 1) / page * page;
    uint64_t end = ((uint64_t)(uintptr_t)memory + size) / page * page;
    *first = (void *)(uintptr_t)begin;
    return begin < end ? end - begin : 0;
}

void release_memory(void *memory, size_t size)
{
    void *first;
    uint64_t bytes = whole_pages(memory, size, &first);
    if (bytes)
        system_clear(first, bytes);
}

void forget_memory(const void *memory, size_t size)
{
    void *first;
    uint64_t bytes = whole_pages(memory, size, &first);
    if (bytes)
        system_forget(first, bytes);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static edge_status cannot_map(edge_error *error)
{
    return edge_fail(error, EDGE_BAD_FILE, "model.edge cannot be mapped: it must be a file on a disk, open for "
                     "reading");
}

static edge_status map_open_file(int32_t fd, const edge_source *source, mapping *file, edge_error *error)
{
    int64_t found = system_size(fd);
    if (found < 0)
        return cannot_map(error);
    uint64_t size = (uint64_t)found, offset = source->offset;
    if (offset > size || source->length > size - offset)
        return edge_fail(error, EDGE_BAD_FILE, "offset and length of model.edge reach beyond its file, which has %d "
                         "bytes", found);
    uint64_t length = source->length ? source->length : size - offset, before = offset % system_mapping_step();
    if (!length)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is empty: copy it again");
    int32_t own = system_duplicate(fd);
    if (own < 0)
        return edge_fail(error, EDGE_NO_MEMORY, "the process may open no more files: close others");
    uint8_t *base = system_map(own, offset - before, length + before);
    if (!base) {
        system_close(own);
        return cannot_map(error);
    }
    *file = (mapping){base + before, length, base, length + before, own, offset + length};
    return EDGE_OK;
}

edge_status map_file(const edge_source *source, mapping *file, edge_error *error)
{
    memset(file, 0, sizeof *file);
    if (!source->path)
        return map_open_file(source->fd, source, file, error);
    int32_t fd = system_open(source->path);
    if (fd < 0)
        return edge_fail(error, EDGE_BAD_FILE, "cannot open %s: check that it is there and may be read", source->path);
    edge_status status = map_open_file(fd, source, file, error);
    system_close(fd);
    return status;
}

bool read_file(const mapping *file, uint64_t at, void *to, uint64_t size)
{
    uint64_t start = file->end - file->size + at, done = 0;
    while (done < size) {
        int64_t count = system_read_at(file->fd, (uint8_t *)to + done, size - done, start + done);
        if (count <= 0)
            return false;
        done += (uint64_t)count;
    }
    return true;
}

void unmap_file(mapping *file)
{
    if (file->base) {
        system_unmap(file->base, file->mapped);
        system_close(file->fd);
    }
    memset(file, 0, sizeof *file);
}

enum { MOST_AT_ONCE = 1 << 30 }; /* bytes per call; Linux and macOS transfer at most 2 GiB, Windows 4 GiB */

int64_t read_fd(int32_t fd, void *to, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        uint64_t rest = size - done;
        int64_t count = system_read(fd, (uint8_t *)to + done, rest < MOST_AT_ONCE ? rest : MOST_AT_ONCE);
        if (count < 0)
            return -1;
        if (count == 0)
            break;
        done += (uint64_t)count;
    }
    return (int64_t)done;
}

int64_t write_fd(int32_t fd, const void *from, uint64_t size)
{
    uint64_t done = 0;
    while (done < size) {
        uint64_t rest = size - done;
        int64_t count = system_write(fd, (const uint8_t *)from + done, rest < MOST_AT_ONCE ? rest : MOST_AT_ONCE);
        if (count <= 0)
            return -1;
        done += (uint64_t)count;
    }
    return (int64_t)done;
}

bool replace_file(const char *path, const void *data, uint64_t size)
{
    char temporary[LONGEST_PATH + 32];
    size_t length = strlen(path);
    if (length > LONGEST_PATH)
        return false;
    memcpy(temporary, path, length);
    temporary[length++] = '.';
    for (uint64_t number = random_seed(); number; number /= 10)
        temporary[length++] = (char)('0' + number % 10);
    temporary[length] = 0;
    int32_t fd = system_create(temporary);
    if (fd < 0)
        return false;
    bool written = write_fd(fd, data, size) >= 0;
    system_close(fd);
    if (written && system_move(temporary, path))
        return true;
    system_delete(temporary);
    return false;
}

/* ---- seeds ------------------------------------------------------------------------------------------------------- */

uint64_t random_seed(void)
{
    uint64_t value = 0;
    if (!system_random(&value)) {
        double times[2] = {now_seconds(), cpu_seconds()};
        uint64_t bits[2];
        memcpy(bits, times, sizeof bits);
        value = (bits[0] ^ (uint64_t)(uintptr_t)&value) * 0x9E3779B97F4A7C15u + bits[1];
    }
    return value;
}
