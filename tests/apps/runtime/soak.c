/* Opens, answers, cancels and closes again and again: `soak model.edge TIMES`. Mappings, threads, files and resident memory
 * must stay as after the first ten times. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edge.h"

typedef struct { long maps, files, threads, resident; } held;

static long entries(const char *folder)
{
    long count = 0;
    DIR *opened = opendir(folder);
    while (opened && readdir(opened))
        count++;
    if (opened)
        closedir(opened);
    return count;
}

static held look(void)
{
    held found = {0, entries("/proc/self/fd"), entries("/proc/self/task"), 0};
    char line[512];
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof line, file))
        found.maps++;
    if (file)
        fclose(file);
    file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "RssAnon: %ld", &found.resident);
    if (file)
        fclose(file);
    return found;
}

static void hold(edge_status status, const edge_error *error)
{
    if (status < 0) {
        fprintf(stderr, "%s\n", error->message);
        exit(1);
    }
}

static void once(const char *path, int tokens)
{
    edge_source source = {.size = sizeof source, .path = path, .fd = -1};
    edge_error error = {.size = sizeof error};
    edge_model *model;
    edge_session *session;
    edge_piece piece = {.size = sizeof piece};
    hold(edge_open(&source, &model, &error), &error);
    hold(edge_begin(model, NULL, &session, &error), &error);
    hold(edge_append(session, EDGE_RAW, "Once upon a time", 16, &error), &error);
    for (int i = 0; i < tokens && !piece.finish; i++)
        hold(edge_next(session, &piece, &error), &error);
    if (!piece.finish) {
        edge_cancel(session);
        hold(edge_next(session, &piece, &error), &error);
        if (piece.finish != EDGE_INTERRUPTED && piece.finish != EDGE_GOING) {
            fprintf(stderr, "not cancelled\n");
            exit(1);
        }
    }
    edge_end(session);
    hold(edge_close(model, &error), &error);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return fprintf(stderr, "soak model.edge TIMES\n"), 2;
    held before = {0, 0, 0, 0}, after;
    for (int i = 0, times = atoi(arguments[2]); i < times; i++) {
        once(arguments[1], i % 5);
        if (i == 9)
            before = look();
    }
    after = look();
    printf("mappings %ld %ld, files %ld %ld, threads %ld %ld, resident %ld %ld KiB\n", before.maps, after.maps,
           before.files, after.files, before.threads, after.threads, before.resident, after.resident);
    return after.maps > before.maps + 2 || after.files > before.files || after.threads > before.threads ||
           after.resident > before.resident + 512;
}
