/* Pictures to rows: a port of edge/model/towers/ and edge/run/sight.py. Section EYES, made by edge/apps/eyes_file.py, is an
 * eyes_config, a stem_matrix for each eyes_matrix, and eyes_texts, each with \0. model.edge has it, too, so that the tokens of a
 * picture are known without the encoder.
 *
 *     pixels --resize, tiles--> values --patches, STEM--> rows --encoder--> states --joined, STEM--> rows for the text model */
#ifndef EDGE_EYES_H
#define EDGE_EYES_H

#include "base.h"
#include "encoder.h"
#include "model.h"

/* A picture's place in a prompt: `tiles` parts with `each` rows, the last of them the whole picture. */
typedef struct { uint32_t width, height; /* before it is divided */ uint32_t down, across, tiles, each; } eyes_layout;

const eyes_config *eyes_of(const edge_model *model); /* NULL: the bundle has none, or its section is damaged */
const char *eyes_text(const eyes_config *c, enum eyes_text text);
edge_status eyes_lay_out(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *layout,
                         edge_error *error);
enum { LONGEST_MARK = 512 }; /* bytes of the text before a part */
/* Writes the text before part `number` of the layout, or behind the last one; returns its length. */
uint32_t eyes_mark(const eyes_config *c, const eyes_layout *layout, uint32_t number, char mark[LONGEST_MARK]);
/* Writes the rows of a picture, [tiles * each][projected]. e: of eyes.edge, whose section must have the values of `like`, of
 * model.edge. cancelled: ends it between two passes if not 0. */
edge_status eyes_encode(encoder *e, const eyes_config *like, const edge_picture *picture, const eyes_layout *layout,
                        const volatile int32_t *cancelled, float *rows, edge_error *error);

#endif
