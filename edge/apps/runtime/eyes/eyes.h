/* Pictures to rows: a port of edge/model/towers/ and edge/run/senses/sight.py. Section EYES, made by edge/apps/sections/eyes_file.py, is an
 * eyes_config, a stem_matrix for each eyes_matrix, and for each eyes_part_matrix of each part of a row, and eyes_texts, each
 * with \0. model.edge has it, too, so that the tokens of a picture are known without the encoder.
 *
 *     pixels --resize, tiles--> values --patches.c--> rows --encoder--> states --project.c--> rows for the text model
 *
 * What families share is data. What is left are their layouts, in layout.c. */
#ifndef EDGE_EYES_H
#define EDGE_EYES_H

#include "base.h"
#include "encoder.h"
#include "model.h"

/* A picture's place in a prompt: `tiles` parts with `each` rows, but the last of them, the whole picture, has `last`. */
typedef struct {
    uint32_t width, height;             /* of the picture before it is divided */
    uint32_t down, across, tiles, each;
    uint32_t last, last_down, last_across; /* rows, and patches of the sides */
} eyes_layout;

static inline uint32_t eyes_tokens(const eyes_layout *layout) /* rows of a picture */
{
    return (layout->tiles - 1) * layout->each + layout->last;
}

static inline uint32_t eyes_width(const eyes_config *c) /* values of a row */
{
    return c->projected * c->parts;
}

const eyes_config *eyes_of(const edge_model *model); /* NULL: the bundle has none, or its section is damaged */
const char *eyes_text(const eyes_config *c, enum eyes_text text);
edge_status eyes_lay_out(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *layout,
                         edge_error *error);
/* Width and height with this longer side, of pictures in square tiles. */
void within_side(uint32_t *width, uint32_t *height, uint32_t longest);
enum { LONGEST_MARK = 512 }; /* bytes of the text before a part */
/* Writes the text before part `number` of the layout, or behind the last one; returns its length. */
uint32_t eyes_mark(const eyes_config *c, const eyes_layout *layout, uint32_t number, char mark[LONGEST_MARK]);
/* Writes the rows of a picture, [eyes_tokens][eyes_width]. e: of eyes.edge, whose section must have the values of `like`, of
 * model.edge. cancelled: ends it between two passes if not 0. */
edge_status eyes_encode(encoder *e, const eyes_config *like, const edge_picture *picture, const eyes_layout *layout,
                        const volatile int32_t *cancelled, float *rows, edge_error *error);

#endif
