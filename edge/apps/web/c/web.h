/* Exports of a module for web pages, whose arguments and results are numbers. A module has one model and one session.
 *
 * The module imports its memory, which threads share ("env" "memory"), and functions of the host:
 *
 *     env.now()             f64, seconds of a monotonic clock
 *     env.random()          i32, 32 random bits
 *     env.write(from, size) i32, takes the next bytes of a state that is being saved; less than 0: it fails
 *     env.read(to, size)    i32, writes the next bytes of a state that is being loaded, or of an adapter; returns bytes,
 *                           fewer at its end
 *     env.gpu(job)          i32, runs a pass on the page's GPU; returns 1, or the number of tokens that it has chosen; 0: the
 *                           module must run this pass; -1: the module must run all passes from now on, and may verify
 *                           drafts. job: 36 words, addresses and numbers of pass_input (accelerator.h), in the order of
 *                           gpu.c
 *     env.adapt(at, piece, size, scale)
 *                           i32, takes bytes of an adapter's part for the GPU, from f64 `at` of it, and multiplies its
 *                           matrices B by f64 `scale`, by web_scale; size 0: removes the adapter. Returns 0 if a value
 *                           overflows, otherwise 1
 *     env.row(at, to, size) i32, reads bytes of model.edge that are not in memory, at f64 `at`; returns bytes
 *
 * So neither a state nor a table of embeddings needs memory of the module. Modules of models without a table do not import
 * env.row, and those of sites without WebGPU import neither env.gpu nor env.adapt. None of these functions may throw. env.gpu
 * may suspend web_append and web_next (JavaScript's promise integration).
 *
 * Each thread is an instance of its own with the same memory. The first thread makes all calls but web_thread. For another
 * thread it calls web_stack(number); that thread's instance first sets its `__stack_pointer` to the result, then calls
 * web_thread(number), which works for all sessions and returns after web_close. Texts and structs are in memory, at addresses
 * that these functions return. A result of type int32_t is 0 or more, or an edge_status, whose message is at web_message().
 */
#ifndef EDGE_WEB_H
#define EDGE_WEB_H

#include <stdint.h>

#include "edge.h"

#define WEB_API(name) __attribute__((export_name(#name)))

enum { WEB_MOST_THREADS = 16 };

WEB_API(web_message) const char *web_message(void);      /* UTF-8, ends with \0 */
/* Memory that JavaScript writes, such as model.edge or a text. 0: no memory is left. */
WEB_API(web_take) void *web_take(uint32_t bytes);
WEB_API(web_give) void web_give(void *memory, uint32_t bytes);

WEB_API(web_open) int32_t web_open(const void *file, uint32_t bytes);  /* file: model.edge up to a table of
                                          embeddings; must stay there until web_close */
WEB_API(web_close) int32_t web_close(void);
WEB_API(web_info) const edge_model_info *web_info(void); /* 0: no model is open */

/* Returns the end of the stack of a thread, from 1 on; 0: no memory is left. The first thread calls it before it starts the
 * other. */
WEB_API(web_stack) void *web_stack(uint32_t number);
WEB_API(web_thread) void web_thread(uint32_t number);
WEB_API(web_threads) uint32_t web_threads(void);         /* number of threads that wait in web_thread */

/* The options of web_begin and web_set, which last between calls. module.js knows the offsets of fields. */
WEB_API(web_options) edge_options *web_options(void);
/* stops: texts, each ends with \0. */
WEB_API(web_begin) int32_t web_begin(const char *stops, uint32_t stop_count);
WEB_API(web_set) int32_t web_set(const char *stops, uint32_t stop_count);
WEB_API(web_end) void web_end(void);

WEB_API(web_append) int32_t web_append(int32_t role, const void *text, uint32_t count);
/* Generates a piece of the answer, or runs a chunk of its prompt; returns the piece's finish. */
WEB_API(web_next) int32_t web_next(void);
WEB_API(web_piece) const char *web_piece(void);          /* its text, without \0 */
WEB_API(web_piece_length) uint32_t web_piece_length(void);
WEB_API(web_piece_token) int32_t web_piece_token(void);
WEB_API(web_piece_done) uint32_t web_piece_done(void);   /* tokens of the prompt that have run, of … */
WEB_API(web_piece_asked) uint32_t web_piece_asked(void);
/* The session's int32 that cancels the answer if it is not 0, from any thread; web_append resets it. */
WEB_API(web_cancelled) int32_t *web_cancelled(void);
WEB_API(web_rewind) int32_t web_rewind(uint32_t turns);
WEB_API(web_state) int64_t web_state(void);              /* bytes that web_save would write; or an edge_status */
WEB_API(web_save) int32_t web_save(void);                /* to env.write */
WEB_API(web_check) int32_t web_check(void);              /* from env.read: whether web_load would take the state */
WEB_API(web_load) int32_t web_load(void);                /* from env.read */
/* given: 1: reads an adapter from env.read; 0: removes it. Forgets the whole conversation. */
WEB_API(web_set_adapter) int32_t web_set_adapter(uint32_t given, double scale);
/* With a GPU: multiplies values of an adapter's part for it, float16 or float32; returns 0 if one overflows, otherwise 1. */
WEB_API(web_scale) int32_t web_scale(void *values, uint32_t bytes, double scale);
WEB_API(web_use) const edge_usage *web_use(void);        /* 0: no session has begun */
/* As edge_constrain. */
WEB_API(web_constrain) int32_t web_constrain(int32_t form, const char *text, uint32_t bytes);
/* As edge_bias. */
WEB_API(web_bias) int32_t web_bias(const void *biases, uint32_t count);
/* As edge_tools, edge_choose. bytes 0: no tools. choice ends with \0. */
WEB_API(web_tools) int32_t web_tools(const char *tools, uint32_t bytes);
WEB_API(web_choose) int32_t web_choose(const char *choice, uint32_t parallel);
WEB_API(web_calls) int32_t web_calls(void); /* the number of calls of the last answer; or an edge_status */
/* Of call `index`: its identifier (0), name (1) or arguments (2), which end with \0; 0: it has none. */
WEB_API(web_call) const char *web_call(uint32_t index, uint32_t field);
/* Writes vectors as edge_embed does, whose arrays these are. prompt: 0: the model's own. */
WEB_API(web_embed) int32_t web_embed(const char *const *texts, const size_t *lengths, uint32_t count, const char *prompt,
                                     uint32_t dimensions, uint32_t unscaled, uint32_t truncate, float *vectors, uint32_t room);
/* The options of web_listen. */
WEB_API(web_hearing) edge_hearing *web_hearing(void);
/* ears: ears.edge, which must stay there until web_end. language, prompt: 0: none. */
WEB_API(web_listen) int32_t web_listen(const void *ears, uint32_t bytes, const char *language, const char *prompt);
WEB_API(web_hear) int32_t web_hear(const float *samples, uint32_t count); /* returns the number of samples that were taken */
WEB_API(web_segment) const edge_segment *web_segment(void);               /* of the last web_hear */
/* Shows a picture, RGBA [height][width]. file: eyes.edge, which may go behind the call. tokens: at most; 0: the model's
 * default. */
WEB_API(web_image) int32_t web_image(const void *file, uint32_t bytes, const void *pixels, uint32_t width, uint32_t height,
                                     uint32_t tokens);
WEB_API(web_image_tokens) int32_t web_image_tokens(uint32_t width, uint32_t height, uint32_t tokens);
/* Plays a sound, mono. file: sounds.edge, which may go behind the call. */
WEB_API(web_sound) int32_t web_sound(const void *file, uint32_t bytes, const float *samples, uint32_t count, uint32_t rate);
WEB_API(web_sound_tokens) int32_t web_sound_tokens(uint32_t count, uint32_t rate);
WEB_API(web_tokenize) int32_t web_tokenize(const char *text, uint32_t bytes, uint32_t special, int32_t *ids,
                                           uint32_t room);

#endif
