/* What windows.c has of system.h: windows_system FOLDER. Prints "fine", or the line of the first surprise. */
#include <stdio.h>
#include <string.h>
#include <windows.h>

#include "system.h"

#define EXPECT(what) \
    do \
        if (!(what)) \
            return printf("line %d: %s\n", __LINE__, #what), 1; \
    while (0)

static edge_error error = {.size = sizeof error};

static int memory(void)
{
    uint64_t page = system_page_size(), size = 1000 * page, before, after, swapped;
    uint8_t *found = map_memory(size);
    EXPECT(found && !found[0] && !found[size - 1]);
    memset(found, 7, size);
    private_bytes(&before, &swapped);
    EXPECT(before >= size && !swapped);
    release_memory(found + 10, size - page);
    EXPECT(found[page - 1] == 7 && !found[page] && !found[size - page - 1] && found[size - page] == 7);
    private_bytes(&after, &swapped);
    found[page] = 8; /* it is there again */
    EXPECT(after <= before);
    release_memory(found + 1, 100); /* no whole page */
    EXPECT(found[1] == 7);
    unmap_memory(found, size);
    unmap_memory(NULL, 0);
    EXPECT(!map_memory((uint64_t)1 << 62));
    return 0;
}

static int files(const char *folder)
{
    static uint8_t content[200000], copy[200000];
    char path[512], other[512];
    mapping file;
    for (size_t i = 0; i < sizeof content; i++)
        content[i] = (uint8_t)(i * 2654435761u >> 16);
    snprintf(path, sizeof path, "%s\\\xc3\xa9\xe6\xa8\xa1\xf0\x9f\x98\x80.edge", folder); /* é, a kanji, an emoji */
    snprintf(other, sizeof other, "%s\\nothing\\here", folder);
    EXPECT(replace_file(path, content, 10) && replace_file(path, content, sizeof content));
    EXPECT(!replace_file(other, content, 10) && !replace_file("\xff", content, 10));
    edge_source source = {sizeof source, path, -1, 0, 0};
    EXPECT(!map_file(&source, &file, &error) && file.size == sizeof content);
    EXPECT(!memcmp(file.data, content, sizeof content) && file_is_whole(&file));
    EXPECT(read_file(&file, 150000, copy, 1000) && !memcmp(copy, content + 150000, 1000));
    EXPECT(!read_file(&file, 199999, copy, 2));
    forget_memory(file.data, sizeof content);
    EXPECT(!memcmp(file.data, content, sizeof content));
    unmap_file(&file);
    source = (edge_source){sizeof source, NULL, system_open(path), 66000, 70000}; /* no multiple of 64 KiB */
    EXPECT(read_fd(source.fd, copy, 7) == 7);
    EXPECT(!map_file(&source, &file, &error) && file.size == 70000 && !memcmp(file.data, content + 66000, 70000));
    EXPECT(read_fd(source.fd, copy, sizeof copy) == sizeof content - 7);
    EXPECT(!memcmp(copy, content + 7, sizeof content - 7));
    unmap_file(&file);
    source.offset = 200001;
    EXPECT(map_file(&source, &file, &error) == EDGE_BAD_FILE && strstr(error.message, "which has 200000 bytes"));
    system_close(source.fd);
    const char *bad[] = {other, folder, "\xff", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        source = (edge_source){sizeof source, bad[i], -1, 0, 0};
        EXPECT(map_file(&source, &file, &error) == EDGE_BAD_FILE && strstr(error.message, "cannot open"));
    }
    source = (edge_source){sizeof source, NULL, -1, 0, 0};
    EXPECT(map_file(&source, &file, &error) == EDGE_BAD_FILE && strstr(error.message, "a file on a disk"));
    return 0;
}

static int pipes(void)
{
    HANDLE out, into;
    char text[8];
    EXPECT(CreatePipe(&out, &into, NULL, 0));
    int32_t from = (int32_t)(intptr_t)out, to = (int32_t)(intptr_t)into;
    EXPECT(system_size(from) == -1 && write_fd(to, "abcde", 5) == 5);
    CloseHandle(into);
    EXPECT(read_fd(from, text, 8) == 5 && !memcmp(text, "abcde", 5));
    CloseHandle(out);
    EXPECT(read_fd(from, text, 1) == -1 && write_fd(to, text, 1) == -1);
    return 0;
}

static int clocks(void)
{
    double began = now_seconds(), used = cpu_seconds();
    sleep_seconds(0.02);
    sleep_seconds(-1);
    sleep_seconds(0.0 / (began > 1e300)); /* NaN */
    EXPECT(now_seconds() - began >= 0.02);
    while (cpu_seconds() <= used) /* it counts what this loop takes */
        ;
    EXPECT(random_seed() != random_seed() && process_id() == GetCurrentProcessId());
    return 0;
}

static int cpus(void)
{
    DWORD_PTR own, all;
    cpu_binding before;
    GetProcessAffinityMask(GetCurrentProcess(), &own, &all);
    EXPECT(fastest_cores() >= 1 && fastest_cores() <= GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
    EXPECT(!bind_thread(0, &before));
    uint64_t first = own & (0 - own);
    EXPECT(bind_thread(first, &before) && before.bits[0] == own);
    unbind_thread(&before);
    EXPECT(bind_thread(own, &before) && before.bits[0] == own);
    return 0;
}

int main(int count, char **given)
{
    if (count < 2 || memory() || files(given[1]) || pipes() || clocks() || cpus())
        return 1;
    puts("fine");
    return 0;
}
