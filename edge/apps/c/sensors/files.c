#define _GNU_SOURCE
#include "files.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void place(char *path, size_t size, const char *format, va_list arguments)
{
    const char *root = getenv("EDGE_SENSORS");
    char named[1024];
    vsnprintf(named, sizeof named, format, arguments);
    bool sensors = !strncmp(named, "/sys/", 5) || !strncmp(named, "/proc/device-tree/", 18);
    snprintf(path, size, "%s%s", sensors && root ? root : "", named);
}

static size_t read_from(char *text, size_t size, const char *format, va_list arguments)
{
    char path[4096];
    place(path, sizeof path, format, arguments);
    FILE *file = fopen(path, "r");
    size_t length = file ? fread(text, 1, size - 1, file) : 0;
    if (file)
        fclose(file);
    while (length && (text[length - 1] == '\n' || text[length - 1] == ' ' || !text[length - 1]))
        length--;
    text[length] = 0;
    return length;
}

size_t read_text(char *text, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t length = read_from(text, size, format, arguments);
    va_end(arguments);
    return length;
}

double read_number(const char *format, ...)
{
    char text[64], *end;
    va_list arguments;
    va_start(arguments, format);
    size_t length = read_from(text, sizeof text, format, arguments);
    va_end(arguments);
    double number = length ? strtod(text, &end) : 0;
    return !length || end == text || *end ? UNREADABLE : number;
}

static DIR *open_at(const char *format, ...)
{
    char path[4096];
    va_list arguments;
    va_start(arguments, format);
    place(path, sizeof path, format, arguments);
    va_end(arguments);
    return opendir(path);
}

DIR *open_folder(const char *path)
{
    return open_at("%s", path);
}
