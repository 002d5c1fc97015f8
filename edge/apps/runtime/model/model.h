/* model.edge: a header, a table of sections, and the sections, all little-endian. A section begins at a multiple of 64 bytes,
 * weights at one of 16384. The structs are in constants.h; edge/apps/sections/model_file.py writes the file and explains the fields.
 *
 *     CONFIG       an edge_config
 *     LAYERS       a layer_config for each layer
 *     DESIGNS      uint32 count, uint32 0, design_config[count], then the tables of the designs: offsets into weights and
 *                  scratch, which only compiled code reads. They are for CONFIG.threads threads, and valid for fewer.
 *     ANGLES       for each kind of layers an angles_config and double radians[head / 2], of which `pairs` are used:
 *                  LongRoPE's short factors, then, if long_from is set, its long factors
 *     NORMALS      float[layers * kv_heads * head]: normals of the keys' reflections, if kv_dtype is int4
 *     STRINGS      name, license, policy, kv_dtype, each ends with \0
 *     TOKENIZER    see vocabulary.h
 *     WORDS        see words.c
 *     CHAT         see chat.h
 *     ADAPTERS     an adapters_config, and an `adapted` for each matrix that may have an adapter
 *     WEIGHTS      packed weights
 *     GPU          a gpu_config with its tables and sources (edge/apps/gpu_programs.py)
 *     GPU_WEIGHTS  content of buffers
 *     NPU          an npu_config and its npu_options
 *     EMBED        see embed.c
 *     NORMALIZER   see letters.h
 *     EYES         see eyes.h
 *     HEARING      see ears/hearing.h
 *     STEM         matrices around an encoder's layers, of files such as eyes.edge and ears.edge
 *     IMPORTANCE   of each head of layers without a ring, float[ranked + IMPORTANCE_EXTRA]: see kv_keys.c
 *     PREFIX       rows of a soft prompt as `rows_save` writes them, of one head after the other
 *     DRAFT        a file like this one, of layers that draft; see drafter.h
 *     ASSISTANT    what is around these layers
 *     TABLE        the last, and not mapped: a row of layers * layer_inputs values for each token; see table.c
 */
#ifndef EDGE_MODEL_H
#define EDGE_MODEL_H

#include "base.h"
#include "system.h"

struct edge_model {
    mapping file;
    edge_config settings; /* a copy, which can be read even when the file is gone */
    const edge_config *config;
    const layer_config *layers;
    const uint8_t *sections[SECTIONS];
    uint64_t sizes[SECTIONS]; /* bytes; 0: the section is absent */
    uint64_t table;           /* offset of section TABLE in the file */
    const char *name, *license, *policy, *kv_dtype;
    edge_model *draft;        /* of section DRAFT; NULL: there is none, or the library has no code for it */
    const struct compiled_pass *passes; /* NULL: those of the library's own model */
    volatile int32_t sessions; /* open */
};

/* Maps the file and checks all sections but TOKENIZER, WORDS, CHAT, EMBED, NORMALIZER, EYES, HEARING, STEM and
 * ASSISTANT, which their owners check. */
edge_status model_map(const edge_source *source, edge_model *model, edge_error *error);
/* As model_map, of the file in a section; it lasts as long as the outer one. */
edge_status model_inside(const edge_model *outer, enum section_kind kind, edge_model *model, edge_error *error);
/* Fails if the file was cut short after it was mapped. */
static inline edge_status model_is_whole(const edge_model *model, edge_error *error)
{
    return file_is_whole(&model->file) ? EDGE_OK
        : edge_fail(error, EDGE_BAD_FILE, "model.edge was cut short while it was open: copy it again, and open that one");
}

static inline const adapters_config *model_adapters(const edge_model *model) /* NULL: the bundle has no room for adapters */
{
    bool whole = model->sizes[SECTION_ADAPTERS] >= sizeof(adapters_config);
    return whole ? (const adapters_config *)model->sections[SECTION_ADAPTERS] : NULL;
}

const embed_config *model_embed(const edge_model *model); /* NULL: the bundle makes no vectors */
/* Returns the number of designs, and in *designs the first; the best come first. */
uint32_t model_designs(const edge_model *model, const design_config **designs);
edge_status find_design(const edge_model *model, const char *isa, const design_config **design, edge_error *error);
/* RoPE angles of a kind of layers; double radians[head / 2] and find_components follow the struct. lengthened: with
 * LongRoPE's long factors. */
const angles_config *find_angles(const edge_model *model, uint32_t kind, bool lengthened);
/* Sets *radians to the angle per position of a pair of a key's values. Returns false if the pair is not rotated. */
static inline bool find_radians(const angles_config *angles, uint32_t pair, double *radians)
{
    bool rotated = pair >= angles->first && pair - angles->first < angles->pairs;
    *radians = rotated ? ((const double *)(angles + 1))[pair - angles->first] : 0;
    return rotated;
}
/* The component of a position by which each pair goes. */
static inline const uint8_t *find_components(const edge_config *config, const angles_config *angles)
{
    return (const uint8_t *)((const double *)(angles + 1) + config->head / 2);
}
/* The factor by which queries at a position are scaled (temperatures of edge/model/architectures/angles.py). */
float temperature_at(const edge_config *config, int64_t position);

#endif
