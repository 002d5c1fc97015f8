/* Sessions of one model on several threads at once, each with threads of its own: `threads model.edge SEEDS`. Some end while
 * others begin; all are cancelled and looked at from outside. The same seed must give the same tokens. ThreadSanitizer
 * watches. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "edge.h"

enum { SESSIONS = 3, TOKENS = 12 };
typedef struct { edge_model *model; uint64_t seed; int32_t tokens[TOKENS]; edge_session *volatile shown; } talk;

static void hold(edge_status status, const edge_error *error)
{
    if (status >= 0)
        return;
    fprintf(stderr, "%s\n", error->message);
    exit(1);
}

static void *converse(void *argument)
{
    talk *own = argument;
    edge_error error = {.size = sizeof error};
    edge_options options = EDGE_OPTIONS;
    edge_session *session;
    options.ignore_eos = options.seeded = 1;
    options.seed = own->seed;
    options.temperature = 2;
    options.threads = 2;
    hold(edge_begin(own->model, &options, &session, &error), &error);
    hold(edge_append(session, EDGE_RAW, "Once upon a time", 16, &error), &error);
    for (int at = 0; at < TOKENS;) {
        edge_piece piece = {.size = sizeof piece};
        hold(edge_next(session, &piece, &error), &error);
        if (piece.token >= 0)
            own->tokens[at++] = piece.token;
    }
    options.threads = 1;
    hold(edge_set(session, &options, &error), &error);
    hold(edge_rewind(session, UINT32_MAX, &error), &error);
    hold(edge_append(session, EDGE_RAW, "Once", 4, &error), &error);
    __atomic_store_n(&own->shown, session, __ATOMIC_RELEASE);
    edge_piece piece = {.size = sizeof piece};
    while (!piece.finish) /* until it is cancelled */
        hold(edge_next(session, &piece, &error), &error);
    if (piece.finish != EDGE_INTERRUPTED)
        exit(2);
    edge_end(session);
    return NULL;
}

int main(int count, char **values)
{
    edge_source source = {.size = sizeof source, .path = values[1], .fd = -1};
    edge_error error = {.size = sizeof error};
    edge_model *model;
    hold(edge_open(&source, &model, &error), &error);
    for (int round = 0; round < (count > 2 ? atoi(values[2]) : 1); round++) {
        pthread_t threads[SESSIONS];
        talk talks[SESSIONS];
        for (int i = 0; i < SESSIONS; i++) {
            talks[i] = (talk){.model = model, .seed = (uint64_t)round};
            pthread_create(&threads[i], NULL, converse, &talks[i]);
        }
        for (int i = 0; i < SESSIONS; i++) {
            edge_session *session;
            while (!(session = __atomic_load_n(&talks[i].shown, __ATOMIC_ACQUIRE)))
                sched_yield();
            edge_usage usage = {.size = sizeof usage};
            edge_model_info info = {.size = sizeof info};
            for (int looks = 0; looks < 5000; looks++) /* some between two tokens: they must not fail edge_next */
                if (edge_use(session, &usage, &error) != EDGE_BUSY && usage.threads != 1)
                    return 3;
            hold(edge_info(model, &info, &error), &error);
            if (edge_close(model, &error) != EDGE_BUSY)
                return 4;
            edge_cancel(session);
            pthread_join(threads[i], NULL);
            for (int at = 0; at < TOKENS; at++)
                if (talks[i].tokens[at] != talks[0].tokens[at])
                    return 5;
        }
    }
    hold(edge_close(model, &error), &error);
    return 0;
}
