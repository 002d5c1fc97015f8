/* Prints the token ids of greedy answers: answers MODEL COUNT, a question on each line of stdin, each a conversation. */
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

int main(int count, char **values)
{
    edge_source source = {.size = sizeof source, .path = count > 1 ? values[1] : "", .fd = -1};
    edge_options options = EDGE_OPTIONS;
    options.temperature = 0;
    options.ignore_eos = 1;
    options.max_tokens = count > 2 ? (uint32_t)atoi(values[2]) : 1;
    edge_model *model;
    edge_session *session;
    check(edge_open(&source, &model, &error));
    check(edge_begin(model, &options, &session, &error));
    static char line[1 << 16];
    while (fgets(line, sizeof line, stdin)) {
        check(edge_append(session, EDGE_USER, line, strcspn(line, "\n"), &error));
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
    edge_end(session);
    check(edge_close(model, &error));
    return 0;
}
