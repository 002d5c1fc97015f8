/* Shows pictures of any size, right and wrong, by whole and damaged encoders, among texts, answers, saved states and rewinds:
 *
 *     image_fuzz MODEL EYES DAMAGED SEED STEPS
 *
 * DAMAGED is written. Prints the pictures that were taken and refused. */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "edge.h"

static uint64_t state;
static uint32_t below(uint32_t count) /* SplitMix64 */
{
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ z >> 31) % count);
}

static edge_error error = {sizeof error, 0, ""};
static int64_t held(int64_t status)
{
    if (status < 0 && (error.code != status || !error.message[0] || strchr(error.message, '\n'))) {
        fprintf(stderr, "a failure without a line\n");
        exit(1);
    }
    return status;
}

/* Copies the encoder with a few bytes changed, or without its end. */
static void damage(const char *from, const char *to)
{
    static char data[1 << 20];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t size = read(in, data, sizeof data);
    for (uint32_t i = below(6); i > 0; i--)
        data[below(below(2) ? 8192 : (uint32_t)size)] ^= (char)(1 << below(8));
    if (write(out, data, (size_t)size - (below(4) ? 0 : below((uint32_t)size))) < 0)
        exit(2);
    close(in);
    close(out);
}

/* Shows one in a block of exactly the bytes that it says. Returns its status. */
static int64_t show(edge_session *session, const edge_model *model, const char *eyes)
{
    uint32_t width = 1 + below(below(2) ? 8 : 120), height = 1 + below(below(2) ? 8 : 120), channels = 3 + below(2);
    uint32_t stride = channels * width + below(9);
    size_t size = (size_t)stride * (height - 1) + (size_t)channels * width;
    uint8_t *data = malloc(size);
    for (size_t i = 0; data && i < size; i++)
        data[i] = (uint8_t)below(256);
    edge_source source = {sizeof source, eyes, -1, 0, 0};
    edge_picture picture = {sizeof picture, data, width, height, stride, channels, below(3) ? 0 : below(40)};
    const uint32_t odd = below(24);
    if (odd == 0)
        picture.width = below(2) ? 0 : UINT32_MAX;
    else if (odd == 1)
        picture.stride = below(channels * width);
    else if (odd == 2)
        picture.channels = below(2) ? 0 : 5;
    else if (odd == 3)
        picture.pixels = NULL;
    else if (odd == 4)
        picture.size = below(8);
    else if (odd == 5)
        picture.height = UINT32_MAX;
    else if (odd == 6)
        source.path = below(2) ? "" : "/nowhere";
    int64_t counted = held(edge_image_tokens(model, picture.width, picture.height, picture.tokens, &error));
    int64_t status = held(edge_image(session, odd == 7 ? NULL : &source, odd == 8 ? NULL : &picture, &error));
    if (!status && counted <= 0)
        exit(3);
    free(data);
    return status;
}

int main(int count, char **values)
{
    if (count != 6)
        return 1;
    edge_source source = {sizeof source, values[1], -1, 0, 0};
    edge_options options = EDGE_OPTIONS;
    edge_model *model;
    edge_session *session;
    state = (uint64_t)atoi(values[4]);
    options.max_tokens = 3;
    options.temperature = 0;
    if (edge_open(&source, &model, &error) || edge_begin(model, &options, &session, &error)) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    static uint8_t saved[1 << 22];
    edge_stream stream = {sizeof stream, -1, saved, sizeof saved, 0};
    uint32_t taken = 0, refused = 0;
    for (int step = atoi(values[5]); step > 0; step--) {
        const uint32_t what = below(12);
        if (what < 4) {
            bool broken = below(3) == 0;
            if (broken)
                damage(values[2], values[3]);
            if (show(session, model, broken ? values[3] : values[2]))
                refused++;
            else
                taken++;
        } else if (what < 8) {
            held(edge_append(session, below(5) ? EDGE_USER : (edge_role)below(5), "What is it now?", 12, &error));
            edge_piece piece = {.size = sizeof piece};
            for (uint32_t i = below(6); i > 0 && !held(edge_next(session, &piece, &error)) && !piece.finish; i--) {
            }
        } else if (what == 8) {
            held(edge_rewind(session, below(3) ? below(3) : UINT32_MAX, &error));
        } else if (what == 9) {
            held(edge_save(session, &stream, &error));
        } else if (what == 10) {
            if (below(3) == 0)
                saved[below(sizeof saved)] ^= 1;
            held(edge_load(session, &stream, &error));
        } else {
            held(edge_trim(session, (edge_trim_level)below(3), &error));
        }
    }
    edge_end(session);
    edge_close(model, &error);
    printf("%u %u\n", taken, refused);
    return 0;
}
