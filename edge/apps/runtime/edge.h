/* edge: a language model inside an app, within stated budgets.
 *
 *     edge_source source = {sizeof source, "model.edge", -1};
 *     edge_options options = EDGE_OPTIONS;
 *     edge_error error = {sizeof error};
 *     edge_model *model;
 *     edge_session *session;
 *     if (edge_open(&source, &model, &error) || edge_begin(model, &options, &session, &error) ||
 *         edge_append(session, EDGE_USER, "Why is the sky blue?", 20, &error))
 *         return fprintf(stderr, "%s\n", error.message), 1;
 *     for (edge_piece piece = {sizeof piece}; !edge_next(session, &piece, &error) && !piece.finish;)
 *         fwrite(piece.text, 1, piece.length, stdout);
 *
 * A model may be used by several threads; a session by one at a time, but for edge_cancel, edge_trim, edge_use and edge_tokenize. A
 * forked child can use the models that its parent has opened, and of its parent's sessions edge_end: other calls are EDGE_BUSY.
 * Nothing is allocated after edge_begin but by edge_constrain and edge_tokenize, nothing aborts, nothing is global. Every struct
 * begins with its size in bytes, which the caller sets; the library refuses structs smaller than its own, except edge_error. Text
 * is UTF-8; invalid bytes become U+FFFD. A function that returns an edge_status less than 0 sets *error, which may be NULL.
 */
#ifndef EDGE_H
#define EDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EDGE_ABI 1 /* grows with each release for which programs must be compiled again, as when a struct grows */

#if defined(_WIN32)
#define EDGE_API
#else
#define EDGE_API __attribute__((visibility("default")))
#endif

typedef struct edge_model edge_model;
typedef struct edge_session edge_session;

typedef int32_t edge_status;
enum {
    /* generated: Status */
    EDGE_OK = 0,
    EDGE_BAD_ARGUMENT = -1, /* An invalid value, or a call out of order. */
    EDGE_BAD_FILE = -2, /* model.edge or a saved state is unreadable, damaged, cut short, or of another version. */
    EDGE_UNSUPPORTED = -3, /* This CPU, model or policy cannot do that. */
    EDGE_NO_MEMORY = -4,
    EDGE_BUSY = -5, /* Another thread or process uses the session, or sessions of the model are open. */
    EDGE_FULL = -6, /* The text has more tokens than there are free rows, and the policy evicts none. */
    EDGE_FAILED = -7, /* The model computed no number (NaN). */
    /* end */
};

typedef struct {
    uint32_t size;
    edge_status code;
    char message[248]; /* one line that says what was wrong and what to do; ends with \0 */
} edge_error;

typedef struct { /* the place of model.edge: a path, or an open file in which it begins at a multiple of 64 bytes */
    uint32_t size;
    const char *path; /* NULL: fd */
    int32_t fd; /* here and in edge_stream, on Windows a handle */
    uint64_t offset, length; /* of the file within fd; 0, 0: all of it */
} edge_source;

typedef struct { /* strings belong to the model */
    uint32_t size;
    /* generated: ModelInfo */
    uint32_t abi; /* EDGE_ABI of the library. */
    const char *name;
    const char *license;
    const char *policy; /* The policy that evicts KV rows. */
    const char *kv_dtype; /* Type of KV rows. */
    const char *isa; /* The best instruction set of this CPU. */
    uint32_t vocab; /* Tokens of the vocabulary. */
    uint32_t context; /* Positions that the model has learned. */
    uint32_t capacity; /* KV rows. */
    uint32_t threads; /* The most threads of a session. */
    uint32_t chat; /* Whether the model has a chat template. */
    uint64_t weights; /* Bytes of weights; like the next two, planned for one session. */
    uint64_t kv; /* Bytes of KV rows. */
    uint64_t scratch; /* Bytes of scratch memory. */
    uint32_t lora_rank; /* Rank of the largest adapter for which sessions have room; 0: none. */
    uint32_t dimensions; /* Values of an embedding; 0: the bundle makes none. */
    /* end */
} edge_model_info;

typedef int32_t edge_engine;
enum {
    /* generated: Engine */
    EDGE_ENGINE_AUTO = 0, /* CPU or GPU: the faster, timed when the first session begins; a GPU needs edge_options.cache. */
    EDGE_ENGINE_CPU = 1,
    EDGE_ENGINE_GPU = 2, /* Where the bundle has programs for it (edge export --gpu), and the device runs them. */
    EDGE_ENGINE_NPU = 3, /* Where the bundle has graphs for it (edge export --npu), and the app brings ONNX Runtime. */
    /* end */
};

typedef int32_t edge_speculate;
enum {
    /* generated: Speculate */
    EDGE_SPECULATE_AUTO = 0, /* Where drafts pay, on the CPU. Not with h2o. */
    EDGE_SPECULATE_OFF = 1, /* Every token runs on its own. */
    /* end */
};

typedef struct { /* the options of `edge run`; EDGE_OPTIONS leaves all to the model and its bundle */
    uint32_t size;
    /* generated: Options */
    uint32_t threads; /* CPU threads. 0: the cores of the fastest cluster, as far as the bundle has room for them. */
    uint64_t cpu_mask; /* Bit i: threads may run on CPU i. 0: all of them. */
    /* Instruction set, such as dotprod; read when a session begins only. NULL: the best of this CPU. */
    const char *isa;
    double temperature; /* 0 is greedy: the same answer every time. Less than 0: as the model recommends. */
    int32_t top_k; /* Draw from the k likeliest; 0 is off. Less than 0: as the model recommends. */
    double top_p; /* Draw from the likeliest that make up p; 1 is off. Less than 0: as the model recommends. */
    double min_p; /* Drop tokens below p times the likeliest; 0 is off. Less than 0: as the model recommends. */
    double repeat_penalty; /* Penalty on the last 64 tokens; 1 is off. Less than 0: as the model recommends. */
    uint32_t seeded; /* 0: a new one for every answer */
    uint64_t seed; /* Seed of the draws. */
    double presence_penalty; /* Subtracted from the logits of the last 64 tokens; 0 is off. */
    /* Subtracted from the logits of the last 64 tokens, as often as each was drawn; 0 is off. */
    double frequency_penalty;
    double dry_multiplier; /* DRY penalty on tokens that would continue a repetition; 0 is off, 0.8 is usual. */
    double dry_base; /* By which the DRY penalty grows with each repeated token. Less than 0: 1.75. */
    int32_t dry_allowed_length; /* Longest repetition without a DRY penalty, in tokens. Less than 0: 2. */
    int32_t dry_last_n; /* Tokens of the answer in which DRY looks for repetitions. Less than 0: 1024. */
    double xtc_probability; /* How often XTC excludes the likeliest tokens; 0 is off. */
    /* XTC excludes all tokens of this probability but the least likely of them; more than 0.5 is off. Less than 0: 0.1.
     * */
    double xtc_threshold;
    uint32_t max_tokens; /* Tokens to generate. 0: no limit. */
    uint32_t speculate; /* An edge_speculate. Whether drafts of repeated text are verified; the answer is the same. */
    uint32_t ignore_eos; /* Never end the turn; go on. */
    const char *const *stop; /* Texts before which an answer ends: 16 of 128 bytes at most. */
    uint32_t stop_count;
    double time; /* Seconds that an answer and the prompt before it may take. 0: no limit. */
    /* Joules that an answer and the prompt before it may cost, estimated without readings. 0: no limit. */
    double energy;
    double power; /* Watts on average, estimated without readings; held by pauses. 0: no limit. */
    double max_temp; /* Degrees Celsius that the processor may have, by readings; held by pauses. 0: no limit. */
    /* Limit of thermal headroom, by readings, on Android's scale, where the system throttles at 1; held by pauses. 0:
     * no limit. */
    double headroom;
    /* An edge_engine. What computes: by default the faster of CPU and GPU, which are never timed under time or energy;
     * read when a session begins only. */
    uint32_t engine;
    /* A folder for kernels that the GPU's driver has compiled, and for the faster engine; read when a session begins
     * only. NULL: every session compiles, and by default the CPU computes. */
    const char *cache;
    const char *npu; /* The bundle's folder npu, for the engine npu; read when a session begins only. NULL: none. */
    /* end */
} edge_options;
/* generated: EDGE_OPTIONS */
#define EDGE_OPTIONS {sizeof(edge_options), 0, 0, NULL, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, -1, -1, -1, 0, -1, 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, NULL}
/* end */

typedef struct { /* measurements of the app; less than 0: none */
    uint32_t size;
    /* generated: Readings */
    /* Energy since a fixed moment. Read it before a prompt, too: later consumption is estimated until the next reading.
     * */
    double joules;
    double celsius; /* Temperature of the processor. */
    double headroom; /* Android's thermal headroom: the system throttles at 1. */
    int64_t available; /* Bytes that this process may still take. */
    /* end */
} edge_readings;
/* generated: EDGE_READINGS */
#define EDGE_READINGS {sizeof(edge_readings), -1, -1, -1, -1}
/* end */

typedef int32_t edge_role;
enum {
    /* generated: Role */
    EDGE_SYSTEM = 0, /* Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room. */
    EDGE_USER = 1, /* A turn. Its text never becomes a control token. */
    EDGE_ASSISTANT = 2, /* An answer from an earlier conversation. */
    EDGE_RAW = 3, /* Text without the chat template, in which control tokens are recognized. */
    EDGE_IDS = 4, /* Token ids, int32_t; count is their number. */
    EDGE_RESULT = 5, /* The result of a call of the last answer: of its first one, then of the next. */
    /* end */
};

typedef struct { /* a call of a tool; its strings are valid until the next answer begins */
    uint32_t size;
    const char *id;        /* of this call among those of the conversation */
    const char *name;      /* of the function */
    const char *arguments; /* a JSON object; it matches the function's schema where a call was required */
} edge_call;

typedef int32_t edge_form;
enum {
    /* generated: Form */
    EDGE_FREE = 0, /* Any text. */
    EDGE_JSON_SCHEMA = 1, /* JSON that matches a schema. */
    EDGE_REGEX = 2, /* Text that matches a regular expression as a whole. */
    /* end */
};

typedef int32_t edge_finish;
enum {
    /* generated: Finish */
    EDGE_GOING, EDGE_EOS, EDGE_STOP, EDGE_LENGTH, EDGE_CAPACITY, EDGE_INTERRUPTED, EDGE_TIME, EDGE_ENERGY, EDGE_POWER,
    EDGE_THERMAL, EDGE_MEMORY, EDGE_TOOL_CALLS
    /* end */
};

typedef struct {
    uint32_t size;
    int32_t token;      /* the generated token; -1: none, the piece is the rest of a text */
    edge_finish finish; /* EDGE_GOING, or why the answer has ended */
    uint32_t length;    /* of text in bytes; may be 0 */
    char text[256];     /* whole characters, without \0; the next piece continues a longer text */
    uint32_t done, asked; /* tokens of the prompt that have run, and all that are known of it */
} edge_piece;

typedef struct {
    uint32_t size;
    /* generated: Usage */
    uint32_t rows; /* Rows of the KV cache in use. */
    uint32_t capacity; /* Rows of the KV cache. */
    uint32_t threads;
    uint64_t weights; /* Bytes of weights. */
    uint64_t kv; /* Bytes of KV rows. */
    uint64_t scratch; /* Bytes of scratch memory. */
    uint64_t lora; /* Bytes of room for adapters; 0 on a GPU, whose buffers have it. */
    uint64_t file; /* Bytes of model.edge that are mapped. */
    /* Resident anonymous bytes of the whole process (RssAnon); 0 where the system does not report them. */
    uint64_t anonymous;
    uint64_t swapped; /* Bytes of the process in swap space (VmSwap). Google Play counts both together. */
    uint64_t tokens; /* Tokens that ran since the session began. */
    uint64_t evicted; /* Rows that the policy evicted. */
    uint64_t drafted; /* Verified drafted tokens since the session began; next, the accepted ones. */
    uint64_t accepted;
    double joules; /* Joules and seconds of the last answer and its prompt. */
    double seconds;
    uint32_t measured; /* Whether the app read the joules; otherwise they are estimated. */
    uint32_t engine; /* An edge_engine. What computes. */
    const char *engine_why; /* Why this engine was chosen; empty: the app chose it. */
    const char *gpu; /* Name of the GPU or of the NPU's runtime; empty: the CPU computes. */
    /* Bytes of the GPU's buffers, which are in the process where memory is shared. For an NPU: bytes of rows, inputs
     * and outputs in the process. */
    uint64_t gpu_bytes;
    double gain; /* Speed-up of the last answer by drafts, from the times of its passes; 0: not known. */
    /* Bytes of an encoder, its file included: eyes.edge's during edge_image, sounds.edge's during edge_sound,
     * ears.edge's from edge_listen on. */
    uint64_t encoder;
    uint64_t pictures; /* Bytes of rows of pictures that may still run. */
    /* Joules (estimated) and seconds of all calls of edge_image and edge_sound; joules and seconds have those of
     * transcripts. */
    double picture_joules;
    double picture_seconds;
    /* end */
} edge_usage;

typedef int32_t edge_pooling;
enum {
    /* generated: Pooling */
    EDGE_POOLING_MODEL = 0, /* As the model's file says. */
    EDGE_POOLING_MEAN = 1, /* The mean of all hidden states. */
    EDGE_POOLING_CLS = 2, /* The state of the first token. */
    EDGE_POOLING_LAST = 3, /* The state of the last token. */
    /* end */
};

typedef struct { /* how edge_embed makes vectors; EDGE_EMBEDDING leaves all to the model */
    uint32_t size;
    /* generated: Embedding */
    const char *prompt; /* Name of the model's prompt before texts, such as query or document. NULL: its own, if any. */
    uint32_t dimensions; /* The first values only, for models that were trained for that. 0: all. */
    uint32_t pooling; /* An edge_pooling. */
    uint32_t unscaled; /* Vectors are not scaled to length 1. */
    uint32_t truncate; /* Leave out the end of a text that is longer than the cache. */
    /* end */
} edge_embedding;
/* generated: EDGE_EMBEDDING */
#define EDGE_EMBEDDING {sizeof(edge_embedding), NULL, 0, 0, 0, 0}
/* end */

typedef struct { /* how a sound is heard; EDGE_HEARING leaves all but the rate to the model */
    uint32_t size;
    /* generated: Hearing */
    uint32_t rate; /* Samples per second, from 1000 to 192000; there is no default. */
    const char *language; /* A code such as en. NULL: the likeliest of the first window with a voice. */
    uint32_t translate; /* Write in English what was said in another language. */
    const char *prompt; /* Text that might have come before, for names and style. NULL: none. */
    /* The only one that is tried, from 0 to 1. Less than 0: 0, and higher ones while a text repeats itself or is
     * improbable. */
    double temperature;
    uint32_t everything; /* Ask the model about silence and steady noise, too, which are passed over otherwise. */
    uint32_t alone; /* The text of a window is no prompt for the next. */
    uint32_t live; /* The sound is made meanwhile: a window ends at a pause, instead of after 30 s. */
    uint32_t words; /* Each word gets its times. */
    /* end */
} edge_hearing;
/* generated: EDGE_HEARING */
#define EDGE_HEARING {sizeof(edge_hearing), 0, NULL, 0, NULL, -1, 0, 0, 0, 0}
/* end */

typedef struct { /* a part of a transcript; its strings and tokens are valid until the session's next call */
    uint32_t size;
    /* generated: Segment */
    uint32_t id; /* Its number in the transcript. */
    uint32_t finish; /* An edge_finish: why the transcript has ended. */
    const char *text; /* What was said; empty: no segment is complete yet. */
    uint32_t length; /* Bytes of the text. */
    double start; /* Seconds in the sound at which it begins, and next, ends. */
    double end;
    const char *language; /* The code of the language; empty: not yet known. */
    const char *words; /* If asked for, in JSON: a list of objects with word, start, end, probability; else empty. */
    const int32_t *tokens; /* With timestamps. */
    uint32_t tokens_count;
    double temperature; /* Of the window it was found in, as the next three. */
    double avg_logprob; /* Mean natural logarithm of the probabilities of tokens. */
    double compression_ratio; /* Of the text's bytes to those of zlib: repetition if it is high. */
    double no_speech_prob; /* Probability that nothing was said. */
    double heard; /* Seconds of sound that were taken so far. */
    /* end */
} edge_segment;

typedef struct { /* a picture, upright */
    uint32_t size;
    const void *pixels; /* rows from the top, of red, green and blue bytes, and perhaps alpha, which is not multiplied in */
    uint32_t width, height;
    uint32_t stride;   /* bytes from one row to the next */
    uint32_t channels; /* 3: RGB. 4: RGBA, which is composed on white. */
    uint32_t tokens;   /* at most; 0: as many as the bundle was exported for */
} edge_picture;

typedef struct { /* the place of a saved state: a buffer or an open file */
    uint32_t size;
    int32_t fd; /* -1: buffer */
    void *buffer;
    uint64_t capacity; /* of the buffer */
    uint64_t length;   /* set by edge_save: bytes of the state, even if the buffer is too small or NULL */
} edge_stream;

typedef int32_t edge_trim_level;
enum {
    /* generated: Trim */
    EDGE_TRIM_SOFT = 0, /* Unused pages. The next tokens take them again. */
    EDGE_TRIM_HALF = 1, /* Half of the rows that can be spared, too. */
    EDGE_TRIM_ALL = 2, /* All of them. */
    /* end */
};

/* Maps and checks model.edge. Weights are read from the file while it is open: replace it by renaming a new file over it, never
 * in place. If it is cut short, calls return EDGE_BAD_FILE from the next pass on; in the middle of a pass, the system ends the
 * process (SIGBUS), as for any mapped file. */
EDGE_API edge_status edge_open(const edge_source *source, edge_model **model, edge_error *error);
/* EDGE_BUSY while sessions of the model are open. model: may be NULL. */
EDGE_API edge_status edge_close(edge_model *model, edge_error *error);
EDGE_API edge_status edge_info(const edge_model *model, edge_model_info *info, edge_error *error);

/* Begins a session and allocates all of its memory. options: NULL for EDGE_OPTIONS. */
EDGE_API edge_status edge_begin(edge_model *model, const edge_options *options, edge_session **session, edge_error *error);
/* Frees a session. No other call of it may be running. session: may be NULL. */
EDGE_API void edge_end(edge_session *session);
/* Sets the options of the next and later answers. */
EDGE_API edge_status edge_set(edge_session *session, const edge_options *options, edge_error *error);
/* Sets the form of the next and later answers, from their first byte to their last: a JSON schema, or a regular expression that the
 * whole answer matches. An answer ends where its form does; within max_tokens, unless the shortest one is longer. The first call
 * allocates the tables that edge_usage counts as scratch memory; EDGE_FREE frees them. If the text is refused, answers are free.
 * EDGE_UNSUPPORTED names what cannot be enforced. length: bytes of the text. */
EDGE_API edge_status edge_constrain(edge_session *session, edge_form form, const char *text, size_t length, edge_error *error);
/* Adds to the logits of tokens, in the next and later answers: 100 makes a token all but certain, -100 rules it out. count: at most
 * 1024, of different tokens; 0: none. Refused, as edge_constrain and edge_choose are, while an answer is under way. */
typedef struct { int32_t token; float bias; } edge_logit_bias;
EDGE_API edge_status edge_bias(edge_session *session, const edge_logit_bias *biases, size_t count, edge_error *error);
/* States the functions of the app that answers may call, before the conversation begins: a JSON array in the form of OpenAI's
 * protocol. The chat template writes them into the prompt. The first call allocates their memory; NULL: no tools, and frees it.
 * Where one is strict, calls match their schemas wherever they are allowed. EDGE_UNSUPPORTED if the template writes tools in a notation
 * that apps lack, or names what of strict tools cannot be enforced. length: bytes of the text. */
EDGE_API edge_status edge_tools(edge_session *session, const char *tools, size_t length, edge_error *error);
/* Sets what the next and later answers may call: "auto" (NULL: the same), "none", "required", or the name of the one function
 * that they must call. Calls that must be made, and those of strict tools, match their schemas, as answers by edge_constrain
 * do; such an answer has no other form. parallel: several calls may follow each other. */
EDGE_API edge_status edge_choose(edge_session *session, const char *choice, uint32_t parallel, edge_error *error);
/* Returns the number of complete calls of the last answer, which pieces of text leave out; an answer with calls ends with
 * EDGE_TOOL_CALLS. call: filled with call `index`, or NULL. Append the result of each as EDGE_RESULT, in their order, and call edge_next. */
EDGE_API int64_t edge_calls(edge_session *session, uint32_t index, edge_call *call, edge_error *error);
/* Passes readings of sensors to the session, between two calls of edge_next. */
EDGE_API edge_status edge_read(edge_session *session, const edge_readings *readings, edge_error *error);
/* Adds a text to the conversation; the next edge_next does most of the work. A text longer than the cache runs at once, chunk by
 * chunk; if a budget or edge_cancel ends that, edge_next reports it, and the rest of the text is lost. Ends an answer that was
 * not read to its end. A user's text behind another that has no answer gives that an empty one. count: bytes, or ids. */
EDGE_API edge_status edge_append(edge_session *session, edge_role role, const void *text, size_t count, edge_error *error);
/* Blocks until the next piece of the answer, which has at most one token, or until a chunk of a long prompt has run: then the
 * piece has no token and no text. A question, or the results of calls, whose answer ends as EDGE_INTERRUPTED before its first token
 * are taken back, as if they had not been appended; after evictions, what has run of it stays. After the end of an answer it returns EDGE_BAD_ARGUMENT. */
EDGE_API edge_status edge_next(edge_session *session, edge_piece *piece, edge_error *error);
/* Ends the answer before its next token, or its prompt, from any thread. Between answers it does nothing. */
EDGE_API void edge_cancel(edge_session *session);
/* Forgets the last turns, each a question with its answer; UINT32_MAX: all, with the system prompt. EDGE_UNSUPPORTED if that is
 * impossible, after evictions: then rewind all turns and append the conversation again. With sliding windows or a recurrent
 * state, some of the remaining tokens may run again with the next prompt. If all turns are forgotten, the KV rows of the system
 * prompt stay where possible. Pictures that wait for a text are forgotten first; 0: they alone. */
EDGE_API edge_status edge_rewind(edge_session *session, uint32_t turns, edge_error *error);
/* The conversation with its KV rows, for edge_load in a session of the same bundle. Results of calls must have their answer. */
EDGE_API edge_status edge_save(edge_session *session, edge_stream *stream, edge_error *error);
/* Replaces the conversation. If the state is refused by its header (no state, another bundle or adapter, more rows than there are),
 * or a buffer is damaged, the conversation stays as it was; if a file is damaged behind its header, it is empty. */
EDGE_API edge_status edge_load(edge_session *session, const edge_stream *stream, edge_error *error);
/* Sets a LoRA adapter, made by `edge export-adapter`, in place of the previous one; NULL: none. scale: factor of its change,
 * usually 1. The session has memory for the adapter. Forgets the whole conversation, whose rows belong to the previous adapter.
 * If the file is refused, the session has no adapter. EDGE_UNSUPPORTED if the bundle has no room for it. */
EDGE_API edge_status edge_set_adapter(edge_session *session, const edge_stream *adapter, double scale,
                                      edge_error *error);
/* Returns memory to the system; rows, with HALF and ALL, are lost for good. From any thread: a call that is running in another
 * thread does it before its next pass, or at its end. */
EDGE_API edge_status edge_trim(edge_session *session, edge_trim_level level, edge_error *error);
/* From any thread, at once: while another thread computes, figures of before its last pass. Does not affect an answer. */
EDGE_API edge_status edge_use(const edge_session *session, edge_usage *usage, edge_error *error);
/* Writes the system's ids of the threads that compute, for hints to its scheduler such as Android's: first that of the calling
 * thread, since the thread that calls edge_append and edge_next computes too, then those of the session's own threads, which
 * change with edge_set. It may be called between tokens; EDGE_BUSY while another thread computes. Returns the number of ids, of
 * which at most `capacity` are written, or an edge_status; 0 on other systems than Linux and Android. */
EDGE_API int64_t edge_thread_ids(const edge_session *session, int32_t *ids, size_t capacity, edge_error *error);

/* Encodes a text, from any thread, at once: while another thread computes, in memory of its own. special: recognize control tokens.
 * Returns the number of ids, of which at most `capacity` are written, or an edge_status. */
EDGE_API int64_t edge_tokenize(edge_session *session, const char *text, size_t length, uint32_t special, int32_t *ids,
                               size_t capacity, edge_error *error);

/* Number of tokens that a picture of this size takes, before it is encoded; or an edge_status: EDGE_UNSUPPORTED if the bundle has
 * no eyes (edge export --mmproj), EDGE_BAD_ARGUMENT for sizes beyond the limits. most: tokens; 0: the model's own default. */
EDGE_API int64_t edge_image_tokens(const edge_model *model, uint32_t width, uint32_t height, uint32_t most, edge_error *error);
/* Encodes a picture, which stands before the text that the next edge_append adds, of a user or EDGE_RAW; several in their order.
 * eyes: the place of the bundle's eyes.edge, which is mapped, with memory for its pass, while this call encodes, and given back.
 * EDGE_FULL if the picture does not fit into the rows that are free, and the policy evicts none; EDGE_UNSUPPORTED on other
 * engines than the CPU. edge_cancel ends it between tiles: EDGE_BUSY. */
EDGE_API edge_status edge_image(edge_session *session, const edge_source *eyes, const edge_picture *picture, edge_error *error);

/* Number of tokens that a sound of so many samples takes, before it is encoded; or an edge_status: EDGE_UNSUPPORTED if the bundle
 * hears no sounds in prompts (edge export --mmproj). rate: samples per second. */
EDGE_API int64_t edge_sound_tokens(const edge_model *model, uint64_t count, uint32_t rate, edge_error *error);
/* Encodes a sound, mono, samples from -1 to 1, of any length that the KV rows allow, which stands before the text that the next
 * edge_append adds, as a picture of edge_image does. sounds: the place of the bundle's sounds.edge. Errors are those of edge_image. */
EDGE_API edge_status edge_sound(edge_session *session, const edge_source *sounds, const float *samples, size_t count, uint32_t rate,
                                edge_error *error);

/* Values of the vectors that edge_embed makes; 0: the bundle makes none. */
EDGE_API uint32_t edge_dimensions(const edge_model *model);
/* Writes the embedding of each text to vectors[text][dimensions]. An encoder's short texts run in one pass, which is faster than
 * a call for each. Forgets the conversation. lengths: bytes of the texts; NULL: they end with \0. options: NULL for
 * EDGE_EMBEDDING. capacity: floats of `vectors`. EDGE_UNSUPPORTED if the bundle makes no embeddings, or the engine is not the CPU;
 * EDGE_FULL if a text is longer than the cache, and may be neither cut nor evicted; then vectors before it may be written. */
EDGE_API edge_status edge_embed(edge_session *session, const char *const *texts, const size_t *lengths, size_t count,
                                const edge_embedding *options, float *vectors, size_t capacity, edge_error *error);

/* Begins a transcript of a sound, in place of the last one. ears: the bundle's file ears.edge, which the session's first call
 * opens, with memory for it, and the session keeps; NULL later. EDGE_UNSUPPORTED if the bundle hears nothing. The budgets of
 * edge_options hold for a sound as for an answer. */
EDGE_API edge_status edge_listen(edge_session *session, const edge_source *ears, const edge_hearing *options, edge_error *error);
/* Hears samples, mono, from -1 to 1, up to the next segment of the transcript; returns the number of samples that were taken.
 * Call it again with the rest, or, if all were taken, with the next: also behind a segment, as others of its window come then.
 * Without samples (count 0) the sound has ended: call it so until segment->finish is set, by EDGE_EOS or a budget. Blocks while a
 * window of the sound is heard. */
EDGE_API int64_t edge_hear(edge_session *session, const float *samples, size_t count, edge_segment *segment, edge_error *error);

#ifdef __cplusplus
}
#endif
#endif
