/* Looks at a picture:
 *
 *     eyes FILE ISA THREADS PICTURE OUTPUT
 *
 * PICTURE is int32 width, height and the most tokens, 0: any; then RGB. OUTPUT is the length of the prompt, the prompt, in which \1
 * stands for a row, and float32 rows. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encoder.h"
#include "eyes.h"
#include "system.h"

extern const encoder_kind *const ENCODER; /* trusted.c */

static edge_error failure = {sizeof failure, 0, ""};

static int fails(void)
{
    fprintf(stderr, "%s\n", failure.message);
    return 1;
}

int main(int count, char **values)
{
    encoder *e = NULL;
    edge_source source = {sizeof source, count == 6 ? values[1] : "", -1, 0, 0};
    if (count != 6 || encoder_open(ENCODER, &source, values[2], (uint32_t)atoi(values[3]), 0, &e, &failure))
        return fails();
    int in = open(values[4], O_RDONLY), out = open(values[5], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    uint32_t sizes[3], length = 0;
    read_fd(in, sizes, sizeof sizes);
    const size_t bytes = (size_t)sizes[0] * sizes[1] * 3;
    uint8_t *shown = malloc(bytes);
    const edge_picture picture = {sizeof picture, shown, sizes[0], sizes[1], sizes[0] * 3, 3, sizes[2]};
    const eyes_config *c = eyes_of(encoder_model(e));
    eyes_layout layout;
    if (!shown || read_fd(in, shown, bytes) < 0 || !c || eyes_lay_out(c, sizes[0], sizes[1], sizes[2], &layout, &failure))
        return fails();
    const uint32_t rows = eyes_tokens(&layout);
    char *prompt = malloc(rows + (size_t)LONGEST_MARK * (layout.tiles + 1));
    float *found = malloc((size_t)rows * eyes_width(c) * sizeof *found);
    const volatile int32_t cancelled = 0;
    if (!prompt || !found || eyes_encode(e, c, &picture, &layout, &cancelled, found, &failure))
        return fails();
    for (uint32_t tile = 0; tile <= layout.tiles; tile++) {
        length += eyes_mark(c, &layout, tile, prompt + length);
        const uint32_t own = tile == layout.tiles ? 0 : tile == layout.tiles - 1 ? layout.last : layout.each;
        memset(prompt + length, 1, own);
        length += own;
    }
    write_fd(out, &length, sizeof length);
    write_fd(out, prompt, length);
    write_fd(out, found, (size_t)rows * eyes_width(c) * sizeof *found);
    free(found);
    free(prompt);
    free(shown);
    encoder_close(e);
    return 0;
}
