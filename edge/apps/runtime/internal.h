/* What the files of the runtime know of each other, from the ground up:
 *
 *     system.h     cpu.c             memory, files, clocks and threads of the system; instruction sets
 *     error.c                        messages
 *     model.c      hash.c            model.edge: sections, checked once
 *     utf8.c       words.c           characters; words, as pre-tokenizers cut them
 *     vocabulary.c  tokenizer.c      tables of tokens; text to ids and back
 *     chat.c                         the chat template as data
 *     sampler.c    stops.c           ids from logits; stop strings
 *     governor.c   watch.c           budgets: the decisions of edge/run/budgets/governor.py, and its readings
 *     rows.c  kv.c  policy.c         what a KV row looks like; which rows there are; which stay
 *     drafts.c                       the tokens that may come next, and how many of them to verify
 *     pass.c       table.c           threads that run the compiled pass; rows that a pass reads from the file
 *     head.c                         a head in two stages
 *     gpu/         npu/              the pass on a GPU, on an NPU, in bundles that have one
 *     context.c  turns.c             the conversation and its tokens; the loop of answers
 *     state.c      adapter.c         saved conversations; LoRA adapters
 *     open.c     session.c           the functions of edge.h: of models, of sessions
 *
 * constants.h is written when the runtime is compiled: numbers and structs that Python has, too (apps/constants.py).
 * Every part has a struct, and `x_layout` that takes the memory for it from an arena: called once without memory, to
 * count, and once with it. Functions that can fail take `edge_error *` last and return edge_status.
 */
#ifndef EDGE_INTERNAL_H
#define EDGE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "constants.h"
#include "edge.h"
#include "system.h"

#ifdef __clang__ /* in packages that others compile; GCC has -ffp-contract=off, and warns of this */
#pragma STDC FP_CONTRACT OFF /* products and sums round apart, as NumPy's do */
#endif

#ifdef __SANITIZE_ADDRESS__
void __asan_poison_memory_region(const volatile void *at, size_t size);
void __asan_unpoison_memory_region(const volatile void *at, size_t size);
#endif

/* ---- error.c --------------------------------------------------------------------------------------------------- */

/* Sets *error (unless NULL), shortened to what fits, and returns code. Knows %s (const char *), %d (int64_t). */
edge_status edge_fail(edge_error *error, edge_status code, const char *form, ...);

/* ---- hash.c ---------------------------------------------------------------------------------------------------- */

typedef struct { uint32_t state[8]; uint64_t length; uint8_t block[64]; } hasher; /* SHA-256 */
void hash_start(hasher *h);
void hash_add(hasher *h, const void *data, uint64_t size);
void hash_end(hasher *h, uint8_t digest[32]);

/* ---- an arena --------------------------------------------------------------------------------------------------- */

typedef struct { uint8_t *memory; uint64_t used; } arena; /* memory NULL: only counts, also what no memory could hold */
/* 64-byte aligned zeros; NULL while counting. Sanitizers see what lies between two parts as out of bounds. */
static inline void *take(arena *from, uint64_t size)
{
    uint64_t at = (from->used + 63) / 64 * 64;
    from->used = at + size;
#ifdef __SANITIZE_ADDRESS__
    from->used += 64;
    if (from->memory)
        __asan_poison_memory_region(from->memory + at + size, 64);
#endif
    return from->memory ? from->memory + at : NULL;
}

/* ---- model.c: model.edge ---------------------------------------------------------------------------------------- */

/* Little-endian. A header, the sections' table, and the sections, each at a multiple of 64 bytes, WEIGHTS of 16384. The
 * structs are in constants.h, their fields explained in edge/apps/model_file.py, which writes them. */
/* Section DESIGNS: uint32 count, uint32 0, then the designs, then their tables. The pass reads `table` (its numbers are
 * offsets into weights and scratch); they are for CONFIG.threads threads, and hold for fewer. */
/* Section ANGLES: for the short, then (if long_from) the long factors, for every kind of layers an angles_config and
 * double radians[head / 2].
 * Section NORMALS: float[layers * kv_heads * head] of reflections, if kv_dtype is int4.
 * Section TABLE, the last: a row of layers * layer_inputs values for each token, in blocks of GGUF; see table.c.
 * Section ADAPTERS: an adapters_config, and an `adapted` for each matrix that may have an adapter.
 * Section NPU: an npu_config, and its npu_options; see npu/.
 * Section GPU: a gpu_config, its tables and sources (edge/apps/gpu_programs.py); GPU_WEIGHTS: the content of buffers.
 * Section STRINGS: of name, license, policy, kv_dtype, each ends with \0. */

struct edge_model {
    mapping file;
    edge_config settings; /* read also when the file is gone */
    const edge_config *config;
    const layer_config *layers;
    const uint8_t *sections[SECTIONS];
    uint64_t sizes[SECTIONS]; /* 0: absent */
    uint64_t table;           /* where section TABLE begins, which is not in memory */
    const char *name, *license, *policy, *kv_dtype;
    volatile int32_t sessions; /* open */
};

/* Maps the file into *model and checks all sections but TOKENIZER, WORDS and CHAT, which their owners check. */
edge_status model_map(const edge_source *source, edge_model *model, edge_error *error);
edge_status model_is_whole(const edge_model *model, edge_error *error); /* before the file is read */
const adapters_config *model_adapters(const edge_model *model); /* NULL: there is no room for any */
uint32_t model_designs(const edge_model *model, const design_config **designs); /* their number, the best first */
edge_status find_design(const edge_model *model, const char *isa, const design_config **design, edge_error *error);
/* Checks that the angles are there; radians[head / 2]. */
const angles_config *find_angles(const edge_model *model, uint32_t kind, bool lengthened);

/* ---- tokenizer.c ------------------------------------------------------------------------------------------------ */

typedef struct tokenizer tokenizer; /* tables in model.edge, and working memory */
tokenizer *tokenizer_layout(arena *from, const edge_model *model);
edge_status tokenizer_check(const edge_model *model, edge_error *error); /* at edge_open, in constant time */
/* Encodes a text block by block, as Tokenizer.encode_blocks: ids go to `out` until it returns false. start: the text
 * opens a prompt. special: control tokens are recognized. Returns false if `out` did. */
typedef bool (*ids_out)(void *to, const int32_t *ids, size_t count);
bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool special, bool start, ids_out out, void *to);
/* The bytes that a token adds to a text, valid as long as the model. *length: at most 1024, may be 0. */
const char *tokenizer_piece(const tokenizer *t, int32_t token, size_t *length);
bool tokenizer_ends(const tokenizer *t, int32_t token); /* a turn */
uint32_t tokenizer_banned(const tokenizer *t, const int32_t **ids); /* never generated */
uint32_t tokenizer_end_ids(const tokenizer *t, const int32_t **ids);
int32_t tokenizer_bos(const tokenizer *t); /* -1 if prompts do not begin with it */

/* ---- words.c ----------------------------------------------------------------------------------------------------- */

typedef struct { /* the rules of a pre-tokenizer: expressions that are applied one after the other */
    const uint16_t *blocks;
    const uint8_t *classes;
    const uint16_t *moves[MOST_SPLITS];
    uint32_t class_count, splits;
} words;
edge_status words_find(const edge_model *model, words *found, edge_error *error); /* checks the whole section */
typedef struct { const words *rules; const uint8_t *text; size_t left[MOST_SPLITS + 1]; } word_cutter;
void words_begin(word_cutter *cutter, const words *rules, const uint8_t *text, size_t count); /* valid UTF-8 */
size_t words_next(word_cutter *cutter, const uint8_t **word); /* the bytes of the next word; 0: no more */

/* ---- utf8.c ------------------------------------------------------------------------------------------------------ */

enum { UTF8_REPLACEMENT = 0xFFFD };
/* One character from `count` bytes, at least 1. Returns its bytes; *point is U+FFFD for bytes that are none. *whole:
 * false if more bytes could make them one. */
size_t utf8_read(const uint8_t *bytes, size_t count, uint32_t *point, bool *whole);
size_t utf8_write(uint32_t point, uint8_t *out); /* at most 4 bytes */
/* Joins the bytes of tokens to whole characters (invalid bytes become U+FFFD). Returns the bytes written. */
typedef struct { uint8_t held[4]; uint32_t count; } utf8_joiner;
size_t utf8_feed(utf8_joiner *joiner, const char *bytes, size_t length, char *out); /* out: 3 * length + 12 bytes */

/* ---- chat.c ------------------------------------------------------------------------------------------------------ */

/* The parts around texts of people, as ids: enum chat_part. Section CHAT: chat_header, then the ids, part by part; a count
 * of CHAT_ABSENT: the template has none.
 *
 *     CHAT_FIRST          before the first user's text
 *     CHAT_SYSTEM         the same, up to the system prompt's text
 *     CHAT_AFTER_SYSTEM   from there to the first user's text
 *     CHAT_OPENING        from the user's text to the answer
 *     CHAT_PAST           the same in an answered turn, whose answer is appended
 *     CHAT_NEXT           from the end of an answer to the next user's text */
edge_status chat_check(const edge_model *model, edge_error *error);
const int32_t *chat_ids(const edge_model *model, enum chat_part part, uint32_t *count); /* NULL: the template has none */
bool chat_starts(const edge_model *model, enum chat_part part); /* the text after this part opens the prompt */

/* ---- sampler.c, stops.c ------------------------------------------------------------------------------------------ */

typedef struct sampler sampler;
sampler *sampler_layout(arena *from, uint32_t vocab);
#define MEMBER(type, name) type name;
typedef struct { SAMPLING_OPTIONS(MEMBER, MEMBER) uint64_t seed; } sampling;
#undef MEMBER
void sampler_start(sampler *s, const sampling *params, const int32_t *banned, uint32_t banned_count,
                   const int32_t *more, uint32_t more_count);
/* The next token of logits [vocab], which it changes; -1 for NaN. As edge/run/sampling/sampler.py, token by token. */
int32_t sampler_next(sampler *s, float *logits);
/* Whether a device may choose the next token: the likeliest but for those that this writes, [MOST_BANS], at most. */
bool sampler_picks(const sampler *s, int32_t *banned, uint32_t *count);
uint32_t sampler_candidates(const sampler *s); /* how many of the largest logits are enough, up to MOST_TOP; 0: all are read */

typedef struct stops stops;
stops *stops_layout(arena *from);
/* Those of before stay if one of them is refused. */
edge_status stops_set(stops *s, const char *const *texts, uint32_t count, edge_error *error);
void stops_start(stops *s);
/* The text that may be shown, in `out` (length + LONGEST_STOP bytes). *met: a stop string was found. */
size_t stops_feed(stops *s, const char *text, size_t length, char *out, bool *met);
size_t stops_rest(stops *s, char *out);

/* ---- drafts.c ---------------------------------------------------------------------------------------------------- */

typedef struct drafts drafts;
drafts *drafts_layout(arena *from);
void drafts_clear(drafts *d);
void drafts_begin(drafts *d); /* another answer, whose gain is counted anew */
void drafts_add(drafts *d, const int32_t *tokens, uint32_t count); /* the text goes on with them */
/* Writes the tokens to verify behind the last one, and returns how many, at most `most`: none where that would not pay.
 * behind: the rows that they read. */
uint32_t drafts_propose(drafts *d, uint32_t most, uint32_t behind, int32_t *draft);
void drafts_time(drafts *d, uint32_t tokens, uint32_t behind, double seconds); /* that a pass over them took */
void drafts_judge(drafts *d, uint32_t drafted, uint32_t accepted); /* the first `accepted` of the last draft were right */
double drafts_gain(const drafts *d); /* how many times as fast as one by one the answer came; 0: not known */

/* ---- governor.c --------------------------------------------------------------------------------------------------- */

/* A port of decide and affordable (edge/run/budgets/governor.py); NAN: None. */
typedef struct { double deadline, energy, power, max_temp; } run_limits;
typedef struct { double needed, spare, priv, limit, available, stalled; } memory_reading;
typedef struct { double time, joules, celsius; bool has_memory; memory_reading memory; } sample;
typedef struct {
    sample last;
    double token, each, pace, debt, idle, duty, rest, error, corrected_at, paused, coolest, cooled_at, gave_at;
    int64_t ran;
    int32_t shorts;
} governor_state;
enum cause { CAUSE_NONE, CAUSE_LIMIT, CAUSE_FREE, CAUSE_PRESSURE };
typedef struct { edge_finish stop; double pause, give; enum cause cause; } decision;
void governor_init(governor_state *state, double time);
decision governor_decide(const run_limits *limits, governor_state *state, const sample *now, int64_t tokens);
int64_t governor_affordable(const run_limits *limits, const governor_state *state, int64_t tokens, double now,
                            double spent);

/* ---- watch.c ------------------------------------------------------------------------------------------------------- */

typedef struct { /* the budgets of one answer: a port of Watch (edge/run/budgets/meters.py) */
    run_limits limits;
    governor_state state;
    edge_readings readings;   /* the newest, by the app */
    double read_at, first_joules, joules, estimated; /* at the newest: joules of the answer; the estimate's then */
    double celsius_limit, headroom_limit, started, paused, bytes, on_gpu, celsius_at, memory_at;
    const edge_config *config;
    bool measured, memory_is_new;
} watch;
void watch_start(watch *w, const edge_config *config, const edge_options *options, const edge_readings *readings);
void watch_read(watch *w, const edge_readings *readings, bool answering);
void watch_bytes(watch *w, double bytes); /* read from memory, for estimates */
/* For estimates: a GPU has worked, which no clock of the process shows. core_seconds: its seconds, times the plan's cores;
 * cpu: seconds of them that the process's clock shows. */
void watch_gpu(watch *w, double core_seconds, double cpu);
double watch_joules(const watch *w);
edge_finish watch_spent(const watch *w); /* the budget that is spent; never waits */
/* Why the answer must end, EDGE_GOING to go on; waits as long as limits want it, unless *cancelled. tokens: run since.
 * *give: bytes to return to the system. needed, spare: of the process, in bytes. */
edge_finish watch_look(watch *w, int64_t tokens, const volatile int32_t *cancelled, double needed, double spare,
                       double *give);
/* At the end of an answer: waits until the last tokens, too, are within the power limit. */
void watch_pay(watch *w, const volatile int32_t *cancelled, double needed, double spare, double *give);
int64_t watch_affordable(const watch *w, int64_t tokens);

/* ---- rows.c ------------------------------------------------------------------------------------------------------- */

/* What a GPU does with rows in its memory: gpu/gpu_rows.c. Errors are kept, and the next pass fails. */
typedef struct rows_device rows_device;
typedef struct {
    void (*move)(rows_device *device, uint32_t source, uint32_t target); /* may wait until: */
    void (*settle)(rows_device *device);
    void (*save)(rows_device *device, uint32_t row, uint8_t *out);
    void (*restore)(rows_device *device, uint32_t row, const uint8_t *saved);
    void (*key)(rows_device *device, uint32_t row, uint32_t head, float *key);
    void (*set_key)(rows_device *device, uint32_t row, uint32_t head, float *key);
} rows_work;
struct rows_device { const rows_work *work; };

/* Keys, values and scales of rows of some layers' heads in one arena, in the layout of backends/tvm/kv/rows.py. */
typedef struct {
    rows_device *device;               /* where they are; NULL: here */
    uint32_t dtype, head, count;       /* head: values; count: rows */
    uint32_t stride;                   /* values of a normal: of the largest head */
    uint8_t *arrays[4];                /* keys, values, key scales, value scales */
    uint32_t widths[4], item[4];       /* elements of a row, bytes of an element */
    const float *normals;              /* [layers * kv_heads][stride], NULL without reflections */
    uint8_t *changed;                  /* of each tile: it was written since a device last read it; NULL without one */
    float *work;                       /* [head] */
} kv_rows;
/* elsewhere: they will have a device, and take no memory. */
void rows_layout(arena *from, kv_rows *rows, const edge_model *model, uint32_t head, uint32_t count, bool elsewhere);
void rows_move(kv_rows *rows, uint32_t source, uint32_t target); /* no row twice before: */
void rows_settle(kv_rows *rows);
void rows_shift(kv_rows *rows, uint32_t source, uint32_t target, uint32_t count); /* neighbours, in whole tiles */
void rows_release(kv_rows *rows, uint32_t first, uint32_t count);                 /* whole pages go back */
void rows_key(const kv_rows *rows, uint32_t row, uint32_t head, float *key);      /* head: of all layers' */
void rows_set_key(kv_rows *rows, uint32_t row, uint32_t head, float *key);        /* may change the key */
void rows_written(kv_rows *rows, uint32_t first, uint32_t count);                  /* by compiled code */
float rows_from_half(uint16_t half);
uint16_t rows_to_half(float x);
size_t rows_bytes(const kv_rows *rows);                                            /* of one row */
void rows_save(const kv_rows *rows, uint32_t row, uint8_t *out);
void rows_restore(kv_rows *rows, uint32_t row, const uint8_t *saved);

/* ---- kv.c ---------------------------------------------------------------------------------------------------------- */

/* Which rows there are: HeadKV, RowLists, PinnedKeys, Ring and Regions of backends/. Lists are one for all heads until a
 * policy keeps different rows in them; all heads keep equally many. */
typedef struct kv kv;
kv *kv_layout(arena *from, const edge_model *model, bool elsewhere); /* as rows_layout */
uint32_t kv_arena(const kv *k, uint32_t number);   /* rows of an arena: of all layers or those without a ring; of rings */
void kv_attach(kv *k, uint32_t number, rows_device *device);
void kv_clear(kv *k);
uint32_t kv_length(const kv *k);   /* rows in use */
uint32_t kv_free(const kv *k);
uint32_t kv_capacity(const kv *k);
int64_t kv_next_position(const kv *k);
int64_t kv_next_rope_position(const kv *k);
bool kv_lengthened(const kv *k);                   /* whether LongRoPE's long factors hold now */
uint32_t kv_foresight(const kv *k);                /* tokens to come that kv_announce must count; 0 once it has */
void kv_announce(kv *k, uint32_t count);           /* `count` tokens will come: chooses RoPE's factors */
void kv_prepare(kv *k, uint32_t count);            /* at most a chunk, and kv_free: fills starts, lengths, positions,
                                                      attention for a pass */
void kv_appended(kv *k, uint32_t count);           /* the pass has written them */
void kv_keep(kv *k, const int32_t *rows, uint32_t count);  /* the same of all heads, ascending; closes gaps */
/* Others in each head, whose `count` rows `choose` writes, ascending. rows: room for them. */
typedef void (*kv_choice)(void *from, uint32_t head, int32_t *rows);
void kv_keep_heads(kv *k, uint32_t count, kv_choice choose, void *from, int32_t *rows);
void kv_renumber(kv *k);
bool kv_can_truncate(const kv *k, uint32_t length);
uint32_t kv_at_once(const kv *k, uint32_t count);  /* of `count` rows, how many may be appended at once, and all
                                                      but the first dropped again */
void kv_drop(kv *k, uint32_t count);               /* the last rows, of those that kv_at_once allowed */
void kv_truncate(kv *k, uint32_t length);
void kv_shrink(kv *k, uint32_t capacity);
void kv_release(kv *k); /* gives pages that hold nothing back to the system; they come again when they are written */
uint64_t kv_bytes(const kv *k);                    /* of the rows that policies evict, at the present capacity */
uint64_t kv_fixed(const kv *k);                    /* bytes of rings and of the fixed state */
/* Takes a snapshot of the fixed state, for kv_truncate to come back to the present length, as long as nothing is evicted
 * and no SNAPSHOTS others have followed. kept: the length at which an earlier one stays; 0: none. */
void kv_remember(kv *k, uint32_t kept);
uint32_t kv_latest(const kv *k, uint32_t length);  /* rows of the last snapshot of no more than that; 0 without one */
uint64_t kv_remembered(const kv *k);               /* bytes of snapshots; 0 for models without such a state */
/* For policies that observe: of a head of the layers without a ring, by logical row, attention and ages [length]. */
uint32_t kv_heads(const kv *k);
void kv_attention(const kv *k, uint32_t head, float *paid, int32_t *ages);
/* The pass's arguments, in the order of generator.exported_pointers from "keys" on. */
typedef struct {
    void *keys, *values, *key_scales, *value_scales;
    int32_t *lengths, *positions;
    float *paid;
    int32_t *starts;
    void *ring_keys, *ring_values, *ring_key_scales, *ring_value_scales; /* the same unless rings lie apart */
    int32_t *ring_positions;
    float *states;
} kv_pointers;
kv_pointers kv_arguments(kv *k);
kv_rows *kv_arenas(kv *k);                          /* [2]: of `keys`, and of `ring_keys`, without rows unless it lies apart */
void kv_written(kv *k, uint32_t count);             /* rows behind all others, by compiled code */
uint64_t kv_saved_bytes(const kv *k);
bool kv_save(const kv *k, bool (*out)(void *to, const void *bytes, size_t size), void *to);
edge_status kv_load(kv *k, bool (*in)(void *from, void *bytes, size_t size), void *from, edge_error *error);

/* ---- policy.c ------------------------------------------------------------------------------------------------------- */

typedef struct policy policy;
policy *policy_layout(arena *from, const edge_model *model);
bool policy_evicts(const policy *p);
bool policy_observes(const policy *p); /* every query: h2o */
/* Pins the first `count` rows of a conversation, as far as the plan and a cache of `capacity` rows have room for them, and
 * at least the sinks. */
void policy_pin(policy *p, uint32_t count, uint32_t capacity);
uint32_t policy_pinned(const policy *p);
uint32_t evicted_share(uint32_t rows); /* that a full cache frees at once */
uint32_t least_rows(uint32_t pinned); /* of a cache: the pinned ones, as many recent ones, and a few to write to */
/* Evicts until no more than `budget` rows are left. Returns how many went. */
uint32_t policy_shrink(policy *p, kv *k, uint32_t budget);
/* Evicts until `count` more fit, as Context.make_room. False if it may not evict and they do not fit. */
bool policy_make_room(policy *p, kv *k, uint32_t count, uint64_t *evicted);

/* ---- gpu/, npu/: the pass on a GPU or an NPU ------------------------------------------------------------------------ */

/* Tokens that a device chooses itself: each the likeliest after the one before, the lowest of equals, and none of `banned`.
 * Or none: then the `enough` largest logits are wanted, up to MOST_TOP, and all others may be -INFINITY. */
typedef struct {
    uint32_t most;               /* to choose; 0: none */
    uint32_t enough;
    int32_t banned[MOST_BANS];
    uint32_t banned_count;
    int32_t *chosen;             /* [most] */
    uint32_t count;              /* it has chosen; 0: it chose none, and the logits tell */
} picking;
/* Rows for which a pass over `count` tokens is prepared. */
static inline uint32_t most_rows(uint32_t count, const picking *pick)
{
    return pick && pick->most ? pick->most : count;
}

typedef struct gpu gpu; /* a device with the programs, weights and rows of a session; first its gpu_host; each host has its own */
typedef struct {
    const int32_t *tokens;
    uint32_t count;
    int64_t position, rope_position;
    bool lengthened;
    const int32_t *starts, *lengths, *positions; /* of kv_pointers */
    const float *inputs;                         /* as a table_reader writes them; NULL: the model has no table */
    picking *pick;                               /* NULL: all logits are wanted */
} gpu_input;
typedef bool (*adapter_source)(void *from, void *bytes, size_t size); /* the next bytes of an adapter; false: there are fewer */
typedef struct {
    edge_engine engine;
    const char *called;                                       /* in messages */
    bool picks;                                               /* it can choose tokens */
    /* A session with the engine that answers sooner: both are timed, once. NULL for an NPU. */
    edge_status (*begin_faster)(edge_model *model, const edge_options *options, edge_session **session, edge_error *error);
    gpu *(*layout)(arena *from, const edge_model *model);
    rows_device *(*rows)(gpu *g, bool rings, uint32_t count); /* an arena of so many rows */
    edge_status (*open)(gpu *g, const edge_options *options, const volatile int32_t *cancelled, edge_error *error);
    void (*close)(gpu *g);                                    /* also after `open` has failed */
    bool (*run)(gpu *g, const gpu_input *input, float *logits); /* false: the device has failed, or *cancelled */
    const char *(*failure)(const gpu *g);                     /* the driver's first one, in words; NULL: none */
    uint64_t (*bytes)(const gpu *g);                          /* of the device */
    const char *(*name)(const gpu *g);
    uint64_t (*adapter_bytes)(const gpu *g);                  /* of the part of an adapter's file that is for this host */
    /* Reads it, and multiplies B. in NULL: no adapter any more; nor if it returns false: a part is missing. *finite: no
     * value became too large. */
    bool (*adapt)(gpu *g, adapter_source in, void *from, float scale, bool *finite);
} gpu_host;
extern const gpu_host *const EDGE_GPU, *const EDGE_NPU; /* trusted.c; NULL for bundles without: libraries have no code */
extern const gpu_host edge_gpu, edge_onnxruntime;
static inline const gpu_host *host_of(const gpu *g)
{
    return *(const gpu_host *const *)g;
}

/* ---- head.c --------------------------------------------------------------------------------------------------------- */

/* left: tokens still to come whose head is read as a whole. length: how many the next run of such tokens will be (0: none
 * has been, as 1). */
typedef struct { uint32_t left, length; } head_stages;
/* Whether the `wanted` largest logits of the next token are worth two stages; 0: all are wanted. Once for each token: if
 * not, `left` is one less. */
bool head_pays(head_stages *h, const design_config *design, uint32_t wanted);
/* Lists the tiles that may hold one of the `wanted` largest logits, and returns their number. floats, integers: scratch. */
uint32_t head_survivors(head_stages *h, const design_config *design, uint32_t vocab, float *floats, int32_t *integers,
                        uint32_t wanted);

/* ---- pass.c --------------------------------------------------------------------------------------------------------- */

typedef struct pass pass;
/* design: of the instruction set that will run; NULL: on_gpu. */
pass *pass_layout(arena *from, const edge_model *model, const design_config *design, kv *rows, gpu *on_gpu);
float temperature_at(const edge_config *config, int64_t position); /* the factor of a query there */
/* Starts threads, of which one is the caller's, or changes their number. Cannot fail for one thread. */
edge_status pass_start(pass *p, uint32_t threads, uint64_t cpu_mask, edge_error *error);
void pass_stop(pass *p);
uint32_t pass_threads(const pass *p);
/* Runs tokens and appends their rows, for which there is room; calls kv_announce, kv_prepare and kv_appended. observed:
 * the number of last tokens to observe. Returns the logits [vocab] after the last token, which are valid until the next
 * call and may be changed. NULL, and nothing has changed: cancelled on a GPU, more than a chunk or than there is room for, no token of the
 * vocabulary, a position beyond those that the model has learned, or a file that was cut short.
 *
 * pick: NULL: all logits are wanted; or, behind a single token, which are enough, and what a device may choose, of `most` up
 * to pass_picks, kv_free and kv_at_once. Then the rows of all chosen tokens but the last are appended, too, and there are no
 * logits if it has chosen any. */
float *pass_run(pass *p, const int32_t *tokens, uint32_t count, uint32_t observed, picking *pick);
uint32_t pass_picks(const pass *p); /* tokens that a device may choose at once; 0: none */
/* The same for a token and drafts behind it, as many as `pass_drafts` and kv_at_once allow: the logits [count, padded
 * vocabulary] after each, as passes of their own would give them. The fixed state follows with `pass_settle`, which must come
 * before anything else reads or changes rows: the last `dropped` tokens leave nothing behind. */
float *pass_verify(pass *p, const int32_t *tokens, uint32_t count);
void pass_settle(pass *p, uint32_t dropped);
uint32_t pass_drafts(const pass *p); /* at most, behind a token; 0: the pass verifies none, as long as a device may run it */
bool pass_reaches(const pass *p, uint32_t count); /* false: the model has learned fewer positions */
uint64_t pass_bytes(const pass *p); /* scratch */
/* The table of the pass and the memory for an adapter, where the model has room for one. */
typedef struct { int64_t *table; uint8_t *memory; } adapter_room;
adapter_room pass_adapter(const pass *p);
void pass_release(pass *p); /* gives scratch back until the next pass writes it; the last logits stay */

/* A pass for a device beside the processor. It reads rows of arenas that are `changed`, and writes those that it appends
 * to the arenas, too: so rows are saved, moved and rotated here, and the processor can go on at any time. */
typedef struct {
    const int32_t *tokens;
    uint32_t count;
    int32_t position;                  /* of the first token */
    const float *angles;               /* of the first token, as `fill_angles` writes them; those of each kind … */
    uint32_t angles_stride;            /* … are so many values apart */
    const float *temperatures;         /* [count], NULL: none */
    const int32_t *starts, *lengths;   /* [layers * kv_heads] */
    const int32_t *positions;          /* of the rows of the arena that has windows */
    float *logits;
    picking *pick;                     /* NULL: all logits are wanted */
    const float *normals;              /* section NORMALS; NULL: keys are not reflected */
    const kv_rows *arenas;             /* [2]: see kv_arenas */
} device_job;
typedef enum { DEVICE_LEFT = -1, DEVICE_WAITS, DEVICE_RAN } device_answer; /* it will run no pass; not this one; it ran */
typedef device_answer device_run(const device_job *job); /* unless it ran, nothing has changed but `changed` */
extern device_run *const EDGE_DEVICE; /* trusted.c; NULL without a device, so that libraries have no code */
device_run run_on_page;               /* web/c/gpu.c */

/* The compiled pass of an instruction set (backends/tvm/cpu/generator.py). Every thread calls it until it has done the job
 * QUIT. It returns to thread 0 after each job; to the others after QUIT, or in WebAssembly, where a function that runs is
 * not replaced by a faster version of it, after each job, too. */
typedef void compiled_run(int64_t *job, int32_t *lines, const uint8_t *weights, const int64_t *table, float *floats,
                          int32_t *integers, void *keys, void *values, void *key_scales, void *value_scales,
                          const int32_t *lengths, const int32_t *positions, const int32_t *tokens, float *logits,
                          const float *rope, float *attention, const int32_t *starts, void *ring_keys,
                          void *ring_values, void *ring_key_scales, void *ring_value_scales,
                          const int32_t *ring_positions, float *states, const uint8_t *lora, int64_t thread);
typedef struct { const char *isa; compiled_run *run; } compiled_pass;
extern const compiled_pass EDGE_PASSES[]; /* passes.c, written at export: the best first; ends with NULL */
/* Reads the rows of section TABLE of these tokens into [count][layers][layer_inputs, padded to 16], times the root of half
 * of layer_inputs. False: the file was cut short. One for each type of blocks, so that libraries have no other. */
typedef bool table_reader(const edge_model *model, const int32_t *tokens, uint32_t count, float *inputs);
extern table_reader *const EDGE_TABLE; /* trusted.c; NULL for models without a table */
#define TABLE_READER(name, values, bytes) table_reader table_##name;
TABLE_TYPES(TABLE_READER)
#undef TABLE_READER
/* Of edge_set_adapter. */
typedef edge_status adapter_reader(edge_session *session, const edge_stream *adapter, double scale, edge_error *error);
extern adapter_reader *const EDGE_ADAPTERS; /* trusted.c; NULL for models without room, so that libraries have no code */
adapter_reader read_adapter;
/* SHA-256 of the sections CONFIG, LAYERS, DESIGNS, ANGLES, NORMALS, ADAPTERS, GPU and NPU, one behind the other: trusted.c, from
 * export. */
extern const uint8_t EDGE_TRUSTED[32];

#endif
