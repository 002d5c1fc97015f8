/* A session of a bundle for a test in another process: a line is a command, and so is its answer. Texts, paths and
 * structs are bytes in hexadecimal.
 *
 *     open PATH [CACHE]           with CACHE, its session is to run on a GPU
 *     hold PATH START LENGTH      opens a part of a file by its handle
 *     set OPTIONS    append ROLE TEXT    next    rewind TURNS    use    cancel    save PATH    load PATH
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#include "edge.h"

static edge_error error = {.size = sizeof error};
static edge_model *model;
static edge_session *session;
static char line[1 << 20], cache[1024];
static uint8_t bytes[1 << 19];

static size_t read_hex(const char *text)
{
    size_t count = 0;
    for (unsigned value; text && sscanf(text, "%2x", &value) == 1; text += 2)
        bytes[count++] = (uint8_t)value;
    bytes[count] = 0;
    return count;
}

static void print_hex(const void *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        printf("%02x", ((const uint8_t *)data)[i]);
}

static int32_t open_handle(const char *path, DWORD access, DWORD how)
{
    wchar_t wide[MAX_PATH];
    MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, MAX_PATH);
    return (int32_t)(intptr_t)CreateFileW(wide, access, 0, NULL, how, 0, NULL);
}

static void close_handle(int32_t fd)
{
    CloseHandle((HANDLE)(intptr_t)fd);
}

static edge_status begin(const edge_source *source)
{
    edge_options options = EDGE_OPTIONS;
    if (*cache) {
        options.engine = EDGE_ENGINE_GPU;
        options.cache = cache;
    }
    edge_status status = edge_open(source, &model, &error);
    return status ? status : edge_begin(model, &options, &session, &error);
}

static edge_status hold(const char *path, uint64_t start, uint64_t length)
{
    edge_source source = {sizeof source, NULL, open_handle(path, GENERIC_READ, OPEN_EXISTING), start, length};
    edge_status status = begin(&source);
    close_handle(source.fd);
    return status;
}

static edge_status move_state(const char *path, int saved)
{
    DWORD access = saved ? GENERIC_WRITE : GENERIC_READ, how = saved ? CREATE_ALWAYS : OPEN_EXISTING;
    edge_stream stream = {.size = sizeof stream, .fd = open_handle(path, access, how)};
    edge_status status = saved ? edge_save(session, &stream, &error) : edge_load(session, &stream, &error);
    close_handle(stream.fd);
    return status;
}

static DWORD WINAPI cancel(void *unused)
{
    (void)unused;
    edge_cancel(session);
    return 0;
}

static edge_status cancel_elsewhere(void)
{
    HANDLE thread = CreateThread(NULL, 0, cancel, NULL, 0, NULL);
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
    return EDGE_OK;
}

static edge_status set(void)
{
    edge_options options;
    memcpy(&options, bytes, sizeof options);
    return edge_set(session, &options, &error);
}

static edge_status next(void)
{
    edge_piece piece = {.size = sizeof piece};
    edge_status status = edge_next(session, &piece, &error);
    if (!status) {
        printf("%d %d ", piece.token, piece.finish);
        print_hex(piece.text, piece.length);
    }
    return status;
}

static edge_status use(void)
{
    edge_usage usage = {.size = sizeof usage};
    edge_status status = edge_use(session, &usage, &error);
    usage.engine_why = usage.gpu = NULL;
    print_hex(&usage, status ? 0 : sizeof usage);
    return status;
}

static edge_status obey(const char *command, const char *first, const char *second, const char *third)
{
    if (!strcmp(command, "append")) {
        size_t count = read_hex(second);
        edge_role role = atoi(first);
        return edge_append(session, role, bytes, role == EDGE_IDS ? count / sizeof(int32_t) : count, &error);
    }
    if (!strcmp(command, "open") && second)
        memcpy(cache, bytes, read_hex(second) + 1); /* the GPU is to compute */
    read_hex(first);
    const char *text = (const char *)bytes;
    if (!strcmp(command, "open"))
        return begin(&(edge_source){.size = sizeof(edge_source), .path = text, .fd = -1});
    if (!strcmp(command, "hold"))
        return hold(text, strtoull(second, NULL, 10), strtoull(third, NULL, 10));
    if (!strcmp(command, "set"))
        return set();
    if (!strcmp(command, "next"))
        return next();
    if (!strcmp(command, "rewind"))
        return edge_rewind(session, (uint32_t)strtoul(first, NULL, 10), &error);
    if (!strcmp(command, "use"))
        return use();
    if (!strcmp(command, "cancel"))
        return cancel_elsewhere();
    return move_state(text, !strcmp(command, "save"));
}

int main(void)
{
    uint16_t precision = 0x027F; /* of x87: 53 bits, as Windows starts threads; MinGW's programs change it */
    __asm__ volatile("fldcw %0" : : "m"(precision));
    while (fgets(line, sizeof line, stdin)) {
        const char *words[4];
        for (int i = 0; i < 4; i++)
            words[i] = strtok(i ? NULL : line, " \r\n");
        if (obey(words[0], words[1], words[2], words[3]) < 0)
            printf("error %d %s", error.code, error.message);
        putchar('\n');
        fflush(stdout);
    }
    edge_end(session);
    return edge_close(model, &error);
}
