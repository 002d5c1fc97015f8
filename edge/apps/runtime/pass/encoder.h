/* An encoder whose inputs are rows instead of tokens: a file of its own, such as eyes.edge, which is mapped while it encodes.
 * edge/apps/sections/encoder_file.py writes the file, and the encoder_kind into trusted.c. */
#ifndef EDGE_ENCODER_H
#define EDGE_ENCODER_H

#include "base.h"
#include "bundle.h"
#include "model.h"
#include "pass.h"

typedef struct encoder encoder;
/* Maps the file, checks it, allocates the memory of a pass, and starts threads. isa: as in edge_options, or NULL. A kind's own
 * section is checked by its owner. */
edge_status encoder_open(const encoder_kind *kind, const edge_source *source, const char *isa, uint32_t threads, uint64_t cpu_mask,
                         encoder **made, edge_error *error);
void encoder_close(encoder *e); /* gives back all that encoder_open took. e: may be NULL */
const edge_model *encoder_model(const encoder *e);
uint64_t encoder_bytes(const encoder *e); /* of memory, and of the file, which is mapped */
void encoder_use_threads(encoder *e, uint32_t threads, uint64_t cpu_mask); /* starts others where these differ */
int32_t encoder_thread_id(const encoder *e, uint32_t number); /* as pass_thread_id; 0: there is none */
void encoder_release(encoder *e); /* returns memory to the system until the next encoder_run */
/* The inputs of the next pass, [CONFIG.capacity][*stride], to be written before each encoder_run. */
float *encoder_inputs(encoder *e, uint32_t *stride);
/* Runs layers over the first `count` rows of the inputs. Returns the states [count][*stride] behind them, and behind
 * the norm of the last, in place of the inputs; NULL: the file was cut short, a thread was lost, or count is 0 or more
 * than CONFIG.capacity. */
float *encoder_run(encoder *e, const text_places *places, uint32_t count, uint32_t *stride);

#endif
