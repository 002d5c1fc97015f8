/* hears MODEL EARS SOUND RATE PIECE: hears float samples in pieces, twice, and refuses what is no sound. Prints the
 * tokens of each segment of the second time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "edge.h"

static edge_error error = {sizeof error, 0, ""};

static int fail(void)
{
    fprintf(stderr, "%s\n", error.message);
    return 1;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    const edge_source source = {sizeof source, arguments[1], -1, 0, 0}, ears = {sizeof ears, arguments[2], -1, 0, 0};
    edge_model *model;
    edge_session *session;
    if (edge_open(&source, &model, &error) || edge_begin(model, NULL, &session, &error))
        return fail();
    FILE *file = fopen(arguments[3], "rb");
    float *samples = malloc(64 << 20);
    const size_t all = file && samples ? fread(samples, sizeof *samples, (64 << 20) / sizeof *samples, file) : 0;
    const size_t piece = (size_t)atoi(arguments[5]);
    edge_hearing how = EDGE_HEARING;
    edge_segment segment = {.size = sizeof segment};
    const float none[] = {0, NAN};
    if (edge_listen(NULL, &ears, &how, &error) != EDGE_BAD_ARGUMENT || edge_listen(session, &ears, NULL, &error) != EDGE_BAD_ARGUMENT
        || edge_listen(session, &ears, &how, &error) != EDGE_BAD_ARGUMENT /* the rate is 0 */)
        return 3;
    how.rate = (uint32_t)atoi(arguments[4]);
    if (edge_listen(session, NULL, &how, &error) != EDGE_BAD_ARGUMENT)
        return 4;
    for (int time = 0; time < 2; time++) {
        how.temperature = time ? -1 : 0;
        how.live = how.words = !time;
        if (edge_listen(session, &ears, &how, &error))
            return fail();
        if (edge_hear(session, NULL, 1, &segment, &error) >= 0 || edge_hear(session, none, 2, &segment, &error) >= 0
            || edge_hear(session, samples, 1, NULL, &error) >= 0)
            return 5;
        for (size_t at = 0; !segment.finish;) {
            const int64_t taken = edge_hear(session, samples + at, all - at < piece ? all - at : piece, &segment, &error);
            if (taken < 0)
                return fail();
            at += (size_t)taken;
            for (uint32_t i = 0; time && i < segment.tokens_count; i++)
                printf("%d%c", segment.tokens[i], i + 1 < segment.tokens_count ? ' ' : '\n');
        }
        segment.finish = 0;
    }
    edge_end(session);
    if (edge_close(model, &error))
        return fail();
    free(samples);
    return fclose(file);
}
