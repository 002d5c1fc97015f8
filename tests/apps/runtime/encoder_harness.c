/* Encodes rows, twice, and writes the states of both passes:
 *
 *     encoder FILE ISA THREADS INPUT OUTPUT
 *
 * INPUT is int32: texts, and of each its end; then float32 [rows][hidden]. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encoder.h"
#include "system.h"

extern const encoder_kind *const ENCODER; /* trusted.c */

static edge_error failure = {sizeof failure, 0, ""};

int main(int count, char **values)
{
    encoder *e = NULL;
    edge_source source = {sizeof source, count == 6 ? values[1] : "", -1, 0, 0};
    if (count != 6 || encoder_open(ENCODER, &source, values[2], (uint32_t)atoi(values[3]), 0, &e, &failure)) {
        fprintf(stderr, "%s\n", failure.message);
        return 1;
    }
    int in = open(values[4], O_RDONLY), out = open(values[5], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    uint32_t ends[64], texts, stride, hidden = encoder_model(e)->config->hidden;
    read_fd(in, &texts, sizeof texts);
    read_fd(in, ends, texts * sizeof *ends);
    uint32_t rows = ends[texts - 1];
    float *read = calloc((size_t)rows * hidden, sizeof *read);
    if (!read || read_fd(in, read, (size_t)rows * hidden * sizeof *read) < 0)
        return 1;
    const text_places texts_of = {.ends = ends};
    for (int run = 0; run < 2; run++) {
        float *inputs = encoder_inputs(e, &stride);
        for (uint32_t row = 0; row < rows; row++)
            memcpy(inputs + (size_t)row * stride, read + (size_t)row * hidden, hidden * sizeof *read);
        const float *states = encoder_run(e, &texts_of, rows, &stride);
        if (!states || encoder_run(e, &texts_of, encoder_model(e)->config->capacity + 1, &stride))
            return 2;
        for (uint32_t row = 0; row < rows; row++)
            write_fd(out, states + (size_t)row * stride, hidden * sizeof *states);
    }
    free(read);
    encoder_close(e);
    return 0;
}
