/* Writes what is said in a sound: see README.md for how to build it.
 *
 *     hear SOUND [LANGUAGE]
 *
 * SOUND is a WAV file of 16 bits, of any rate; channels are averaged. LANGUAGE is a code such as en, else it is found.
 * model.edge and ears.edge lie beside the program.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edge.h"

enum { PIECE = 4096 }; /* samples that are read at once */

static edge_error error = {.size = sizeof(edge_error)};

static void check(int64_t status)
{
    if (status < 0) {
        fprintf(stderr, "hear: %s\n", error.message);
        exit(1);
    }
}

static uint32_t number_at(const unsigned char *bytes, int count) /* little endian */
{
    uint32_t found = 0;
    while (count--)
        found = found << 8 | bytes[count];
    return found;
}

static void no_wav(const char *path)
{
    fprintf(stderr, "hear: %s is no WAV file of 16 bits\n", path);
    exit(1);
}

static FILE *open_wav(const char *path, uint32_t *rate, uint32_t *channels) /* up to the first sample */
{
    unsigned char head[16];
    FILE *file = fopen(path, "rb");
    if (!file || fread(head, 1, 12, file) < 12 || memcmp(head, "RIFF", 4) || memcmp(head + 8, "WAVE", 4))
        no_wav(path);
    for (*channels = 0; fread(head, 1, 8, file) == 8 && memcmp(head, "data", 4);) {
        uint32_t size = number_at(head + 4, 4), own = 0;
        if (!memcmp(head, "fmt ", 4) && size >= 16 && (own = 16) && fread(head, 1, 16, file) == 16) {
            *channels = number_at(head + 14, 2) == 16 ? number_at(head + 2, 2) : 0;
            *rate = number_at(head + 4, 4);
        }
        for (size -= own, size += size & 1; size; size--)
            if (getc(file) == EOF)
                no_wav(path);
    }
    if (!*channels || *channels > 8 || feof(file))
        no_wav(path);
    return file;
}

static size_t read_samples(FILE *file, uint32_t channels, float *samples)
{
    static unsigned char bytes[8 * 2 * PIECE];
    const size_t found = fread(bytes, 2 * channels, PIECE, file);
    for (size_t i = 0; i < found; i++) {
        float sum = 0;
        for (uint32_t c = 0; c < channels; c++)
            sum += (int16_t)number_at(bytes + 2 * (i * channels + c), 2);
        samples[i] = sum / (float)channels / 32768;
    }
    return found;
}

static const char *beside(const char *program, const char *name, char *path, size_t size)
{
    const char *end = strrchr(program, '/');
#ifdef _WIN32
    end = strrchr(program, '\\') > end ? strrchr(program, '\\') : end;
#endif
    snprintf(path, size, "%.*s%s", end ? (int)(end - program + 1) : 0, program, name);
    return path;
}

int main(int count, char **words)
{
    if (count < 2 || count > 3)
        return fputs("usage: hear SOUND [LANGUAGE]\n", stderr), 2;
    static char paths[2][4096];
    static float samples[PIECE];
    const char *model_path = beside(words[0], "model.edge", paths[0], sizeof paths[0]);
    const char *ears_path = beside(words[0], "ears.edge", paths[1], sizeof paths[1]);
    edge_source source = {.size = sizeof source, .path = model_path, .fd = -1};
    edge_source ears = {.size = sizeof ears, .path = ears_path, .fd = -1};
    edge_hearing how = EDGE_HEARING;
    how.language = count > 2 ? words[2] : NULL;
    uint32_t channels;
    FILE *file = open_wav(words[1], &how.rate, &channels);
    edge_model *model;
    edge_session *session;
    check(edge_open(&source, &model, &error));
    check(edge_begin(model, NULL, &session, &error));
    check(edge_listen(session, &ears, &how, &error));
    edge_segment segment = {.size = sizeof segment};
    for (size_t at = 0, read = 0; !segment.finish;) {
        if (at == read) /* no samples: the sound has ended */
            at = 0, read = read_samples(file, channels, samples);
        const int64_t taken = edge_hear(session, samples + at, read - at, &segment, &error);
        check(taken);
        at += (size_t)taken;
        if (segment.length) {
            printf("[%.2f - %.2f]%.*s\n", segment.start, segment.end, (int)segment.length, segment.text);
            fflush(stdout);
        }
    }
    edge_end(session);
    check(edge_close(model, &error));
    fclose(file);
    if (fflush(stdout) || ferror(stdout))
        return fputs("hear: stdout cannot be written\n", stderr), 1;
    return 0;
}
