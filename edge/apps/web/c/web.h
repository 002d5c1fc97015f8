/* What JavaScript calls of a module for web pages: numbers in, numbers out. A module has one model and one session.
 *
 * The module imports its memory, which threads share ("env" "memory"), and what only the host knows:
 *
 *     env.now()             f64, seconds of a monotonic clock
 *     env.random()          i32, 32 random bits
 *     env.write(from, size) i32, takes the next bytes of a state that is being saved; less than 0: it cannot
 *     env.read(to, size)    i32, gives the next bytes of a state that is being loaded, or of an adapter; how many, fewer at
 *                           its end
 *     env.gpu(job)          i32, 1: it ran a pass; or how many tokens it has chosen; 0: the module runs the pass; -1: it
 *                           runs this one and all others, so that it may verify drafts. job: 28 words, addresses and
 *                           numbers of pass_input (accelerator.h), in the order of gpu.c, of `pick` whether there is one, what it may
 *                           choose, banned tokens, their number, and where those that it chooses go; then normals; of both
 *                           arenas: rows, keys, values, their scales, `changed`
 *     env.row(at, to, size) i32, reads bytes of model.edge that are not in memory, from f64 at on; how many
 *
 * so that a state needs no memory of the module, nor does a table of embeddings: modules of models without one do not
 * import env.row, nor those of sites without WebGPU env.gpu. None of them may throw. env.gpu may suspend web_append and
 * web_next (JavaScript's promise integration).
 *
 * Every thread is an instance of its own with the same memory. The first thread, which makes all other calls, asks for the
 * stack of another, web_stack(number). Before anything else, that thread's instance sets its `__stack_pointer` to it, then
 * it calls web_thread(number), which works for all sessions and returns after web_close. Texts and numbers travel
 * through memory at addresses that these functions return. Functions that return int32_t are 0 or more, or an edge_status,
 * whose message is at web_message().
 */
#ifndef EDGE_WEB_H
#define EDGE_WEB_H

#include <stdint.h>

#include "edge.h"

#define WEB_API(name) __attribute__((export_name(#name)))

enum { WEB_MOST_THREADS = 16 };

WEB_API(web_message) const char *web_message(void);      /* UTF-8, ends with \0 */
/* Memory for something of so many bytes that JavaScript will write: model.edge, a text. 0: no memory is left. */
WEB_API(web_take) void *web_take(uint32_t bytes);
WEB_API(web_give) void web_give(void *memory, uint32_t bytes);

WEB_API(web_open) int32_t web_open(const void *file, uint32_t bytes);  /* model.edge up to a table of embeddings; stays where it is until web_close */
WEB_API(web_close) int32_t web_close(void);
WEB_API(web_info) const edge_model_info *web_info(void); /* 0: no model is open */

/* The end of the stack of thread 1 …; 0: no memory is left. The first thread asks, before it starts the other. */
WEB_API(web_stack) void *web_stack(uint32_t number);
WEB_API(web_thread) void web_thread(uint32_t number);
WEB_API(web_threads) uint32_t web_threads(void);         /* how many have called web_thread and wait there */

/* Of edge_begin and edge_set; they stay between calls. module.js knows where the fields are. */
WEB_API(web_options) edge_options *web_options(void);
/* stops: texts, each ends with \0. */
WEB_API(web_begin) int32_t web_begin(const char *stops, uint32_t stop_count);
WEB_API(web_set) int32_t web_set(const char *stops, uint32_t stop_count);
WEB_API(web_end) void web_end(void);

WEB_API(web_append) int32_t web_append(int32_t role, const void *text, uint32_t count);
/* One piece of the answer: returns its finish. */
WEB_API(web_next) int32_t web_next(void);
WEB_API(web_piece) const char *web_piece(void);          /* its text, without \0 */
WEB_API(web_piece_length) uint32_t web_piece_length(void);
WEB_API(web_piece_token) int32_t web_piece_token(void);
/* Not 0 in this int32 cancels the answer, from any thread; web_append sets it to 0. It is the session's. */
WEB_API(web_cancelled) int32_t *web_cancelled(void);
WEB_API(web_rewind) int32_t web_rewind(uint32_t turns);
WEB_API(web_state) int64_t web_state(void);              /* bytes that web_save would write; or an edge_status */
WEB_API(web_save) int32_t web_save(void);                /* to env.write */
WEB_API(web_load) int32_t web_load(void);                /* from env.read */
/* From env.read, or none. The whole conversation is forgotten. */
WEB_API(web_set_adapter) int32_t web_set_adapter(uint32_t given, double scale);
WEB_API(web_use) const edge_usage *web_use(void);        /* 0: no session has begun */
WEB_API(web_tokenize) int32_t web_tokenize(const char *text, uint32_t bytes, uint32_t special, int32_t *ids,
                                           uint32_t room);

#endif
