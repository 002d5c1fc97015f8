/* Definitions in a bundle's own C files, which edge export writes: passes.c and trusted.c. Pointers are NULL in bundles that
 * cannot use a part, so that the linker leaves its code out. */
#ifndef EDGE_BUNDLE_H
#define EDGE_BUNDLE_H

#include "accelerator.h"
#include "base.h"
#include "compose.h"
#include "drafter.h"
#include "ears.h"
#include "embed.h"
#include "pieces.h"
#include "scores.h"

/* A compiled pass (backends/tvm/cpu/generator.py). Every thread calls it, and leaves it when the job is QUIT. To thread 0
 * it returns after each job; to the others only after QUIT, but in WebAssembly after each job, since a function that is
 * running is not replaced by its optimized version. */
typedef void compiled_run(int64_t *job, int32_t *lines, const uint8_t *weights, const int64_t *table, float *floats,
                          int32_t *integers, void *keys, void *values, void *key_scales, void *value_scales,
                          const int32_t *lengths, const int32_t *positions, const int32_t *tokens, float *logits,
                          const float *rope, float *attention, const int32_t *starts, void *ring_keys,
                          void *ring_values, void *ring_key_scales, void *ring_value_scales,
                          const int32_t *ring_positions, float *states, const uint8_t *lora, void *cross_keys,
                          void *cross_values, int64_t thread);
typedef struct compiled_pass { const char *isa; compiled_run *run; } compiled_pass;
extern const compiled_pass EDGE_PASSES[]; /* passes.c: the best instruction set first; ends with NULL */

/* trusted.c: SHA-256 of the sections CONFIG, LAYERS, DESIGNS, ANGLES, NORMALS, ADAPTERS, GPU and NPU, one behind the
 * other. */
extern const uint8_t EDGE_TRUSTED[32];

/* An encoder whose inputs are rows: the name of its file, its passes, and the hash of its trusted sections. See encoder.h. */
typedef struct { const char *file; const compiled_pass *passes; uint8_t trusted[32]; } encoder_kind;

/* Reads the rows of section TABLE of these tokens into inputs [count][layers][layer_inputs, padded to 16], times
 * sqrt(layer_inputs / 2); of given rows, -1, those of token 0. Returns false if the file was cut short. There is one
 * reader for each block type: table.c. */
typedef bool table_reader(const edge_model *model, const int32_t *tokens, uint32_t count, float *inputs);
extern table_reader *const EDGE_TABLE;
#define TABLE_READER(name, values, bytes) table_reader table_##name;
TABLE_TYPES(TABLE_READER)
#undef TABLE_READER

/* Loads an adapter for edge_set_adapter; stream NULL removes it: adapter.c. */
typedef edge_status adapter_reader(edge_session *session, const edge_stream *stream, double scale, edge_error *error);
extern adapter_reader *const EDGE_ADAPTERS;
adapter_reader read_adapter;

extern const scores_kind *const EDGE_SCORES, edge_scores; /* scores.c, for policies that rank rows */

/* Splits the words of encoders' texts: pieces.c. */
extern piece_splitter *const EDGE_PIECES;

extern text_composer *const EDGE_COMPOSER; /* compose.c */
extern embedder *const EDGE_EMBED;         /* embed.c */
extern const ears_kind *const EDGE_EARS;   /* ears.c */
extern const encoder_kind *const EDGE_HEARS; /* of ears.edge */

/* Code for pictures, for edge_image and edge_append: see.c. */
typedef struct {
    int64_t (*count)(const edge_model *model, uint32_t width, uint32_t height, uint32_t most, edge_error *error);
    edge_status (*show)(edge_session *s, const edge_source *eyes, const edge_picture *picture, edge_error *error);
    bool (*takes)(const edge_session *s, uint32_t form);
    void (*say)(edge_session *s, uint32_t form, int32_t bos);
} eyes_kind;
extern const eyes_kind *const EDGE_EYES, edge_eyes;
extern const encoder_kind *const EDGE_SEES; /* eyes.edge, or sounds.edge */

/* What edge_sound calls in bundles that hear sounds of prompts, whose texts and rows are as those of pictures: sounds.c. */
typedef struct {
    int64_t (*count)(const edge_model *model, uint64_t samples, uint32_t rate, edge_error *error);
    edge_status (*play)(edge_session *s, const edge_source *file, const float *samples, size_t count, uint32_t rate, edge_error *error);
} sounds_kind;
extern const sounds_kind *const EDGE_SOUNDS, edge_sounds;

extern const drafter_kind *const EDGE_DRAFTER; /* assistant.c, draft_model.c, mtp_layer.c */
extern const encoder_kind *const EDGE_DRAFTS;  /* of section DRAFT */

/* Accelerators of a session, and of a page. */
extern const accelerator_kind *const EDGE_GPU, *const EDGE_NPU, *const EDGE_PAGE;
extern const accelerator_kind edge_gpu, edge_onnxruntime, edge_page;

/* Begins a session on the CPU or the GPU, whichever answers sooner: gpu/gpu_race.c. */
typedef edge_status session_racer(edge_model *model, const edge_options *options, edge_session **session, edge_error *error);
extern session_racer *const EDGE_RACE;
session_racer begin_faster;

#endif
