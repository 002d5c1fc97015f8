/* Prints the token ids of greedy answers: answers MODEL COUNT [SECONDS], a question on each line of stdin, each a
 * conversation of so many seconds at most. At the end it says on stderr how many KiB were resident at most. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edge.h"

static edge_error error = {.size = sizeof error};

static void check(edge_status status)
{
    if (status < 0) {
        fprintf(stderr, "answers: %s\n", error.message);
        exit(1);
    }
}

static void say_peak(void)
{
    char line[256];
    FILE *file = fopen("/proc/self/status", "r");
    for (long peak; file && fgets(line, sizeof line, file);)
        if (sscanf(line, "VmHWM: %ld", &peak) == 1)
            fprintf(stderr, "%ld\n", peak);
    if (file)
        fclose(file);
}

int main(int count, char **values)
{
    edge_source source = {.size = sizeof source, .path = count > 1 ? values[1] : "", .fd = -1};
    edge_options options = EDGE_OPTIONS;
    options.temperature = 0;
    options.ignore_eos = 1;
    options.max_tokens = count > 2 ? (uint32_t)atoi(values[2]) : 1;
    options.time = count > 3 ? atof(values[3]) : 0;
    edge_model *model;
    edge_session *session;
    check(edge_open(&source, &model, &error));
    edge_model_info info = {.size = sizeof info};
    check(edge_info(model, &info, &error));
    check(edge_begin(model, &options, &session, &error));
    static char line[1 << 18];
    while (fgets(line, sizeof line, stdin)) {
        check(edge_append(session, info.chat ? EDGE_USER : EDGE_RAW, line, strcspn(line, "\n"), &error));
        edge_piece piece = {.size = sizeof piece};
        while (!piece.finish) {
            check(edge_next(session, &piece, &error));
            if (piece.token >= 0)
                printf("%d ", piece.token);
        }
        putchar('\n');
        fflush(stdout);
        check(edge_rewind(session, UINT32_MAX, &error));
    }
    say_peak();
    edge_end(session);
    check(edge_close(model, &error));
    return 0;
}
