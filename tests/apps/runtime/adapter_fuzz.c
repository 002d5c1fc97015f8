/* Damages an adapter again and again, repairs its hash in half of the cases, and gives it to a session, which answers. It is
 * built with ASan and UBSan, so that any access outside of the memory ends it.
 *
 *     adapter_fuzz MODEL ADAPTER COUNT SEED    prints how many were taken, of how many
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "model.h"

static uint64_t state;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static int complain(const char *what, const edge_error *error)
{
    fprintf(stderr, "%s: %s\n", what, error->message);
    return 1;
}

/* Bytes, numbers of the header, or offsets of matrices, which are often near what is possible. */
static void damage(uint8_t *bytes, uint64_t length, uint32_t places)
{
    const int64_t numbers[] = {0, 1, 16, 32, 48, 64, 63, -64, INT64_MAX, INT64_MIN, (int64_t)length, (int64_t)length / 64 * 64};
    for (uint64_t count = 1 + draw(3); count; count--) {
        int64_t number = draw(2) ? numbers[draw(sizeof numbers / sizeof *numbers)] : (int64_t)draw(length);
        uint32_t small = (uint32_t)number;
        switch (draw(4)) {
        case 0:
            bytes[draw(length)] ^= (uint8_t)(1 << draw(8));
            break;
        case 1:
            memcpy(bytes + 4 * draw(8), &small, sizeof small);
            break;
        case 2:
            memcpy(bytes + sizeof(adapter_header) + 8 * draw(places), &number, sizeof number);
            break;
        default:
            number = (int64_t)(draw(length) / 64 * 64);
            memcpy(bytes + sizeof(adapter_header) + 8 * draw(places), &number, sizeof number);
        }
    }
}

int main(int count, char **values)
{
    if (count != 5)
        return 2;
    edge_error error = {.size = sizeof error};
    edge_source source = {sizeof source, values[1], -1, 0, 0};
    edge_options options = EDGE_OPTIONS;
    edge_model *model;
    edge_session *session;
    FILE *file = fopen(values[2], "rb");
    options.threads = 1;
    options.max_tokens = 2;
    options.ignore_eos = 1;
    if (!file || edge_open(&source, &model, &error) || edge_begin(model, &options, &session, &error))
        return complain("the start", &error);
    static uint8_t whole[1 << 22];
    uint64_t size = fread(whole, 1, sizeof whole, file), accepted = 0;
    uint32_t places = 3 * ((const adapter_header *)(const void *)whole)->count;
    uint64_t tries = strtoull(values[3], NULL, 10);
    state = strtoull(values[4], NULL, 10) * 2654435761u + 1;
    for (uint64_t i = 0; i < tries; i++) {
        uint64_t length = draw(8) ? size : draw(size + 1);
        uint8_t *bytes = malloc(length + 1); /* whose end ASan knows */
        memcpy(bytes, whole, length);
        if (length == size && draw(16))
            damage(bytes, size - 32, places);
        if (length == size && draw(2)) {
            hasher sum;
            hash_start(&sum);
            hash_add(&sum, bytes, size - 32);
            hash_end(&sum, bytes + size - 32);
        }
        edge_stream stream = {sizeof stream, -1, bytes, length, 0};
        edge_piece piece = {.size = sizeof piece};
        double scales[] = {1, 0.5, -2, 0, 1e6};
        edge_status status = edge_set_adapter(session, &stream, scales[draw(5)], &error);
        free(bytes);
        accepted += !status;
        if (status && (error.code != status || !error.message[0]))
            return complain("a failure without a message", &error);
        int32_t ids[] = {5, 9, 40};
        if (edge_append(session, EDGE_IDS, ids, 3, &error))
            return complain("a session without an adapter", &error);
        while (!piece.finish && !edge_next(session, &piece, &error))
            ; /* numbers that are none end it, too */
        if (status && !piece.finish)
            return complain("a session without an adapter", &error);
    }
    edge_end(session);
    edge_close(model, &error);
    printf("%llu of %llu", (unsigned long long)accepted, (unsigned long long)tries);
    return fclose(file);
}
