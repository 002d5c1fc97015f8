/* A transcript of a sound: a port of edge/run/speech/transcript.py.
 *
 *     samples --windows--> samples at 16 kHz --mel--> spectrogram --stem--> rows --encoder--> states
 *     states --pass--> keys and values that the decoder reads across --decoding--> tokens --> segments, one at a time
 *
 * The encoder is a file of its own, ears.edge, which edge_listen opens first; it stays until the session ends. A session has
 * one sound at a time. `next` of `parts` segments of the last window are yet to come; without any, the next window begins at
 * frame `seek`. */
#include <math.h>
#include <string.h>

#include "align.h"
#include "bundle.h"
#include "context.h"
#include "decoding.h"
#include "ears.h"
#include "encoder.h"
#include "hearing.h"
#include "kv.h"
#include "mel.h"
#include "pass.h"
#include "session.h"
#include "stem.h"
#include "tokenizer.h"
#include "windowing.h"

/* Its tokens, seconds from the window's beginning, and words. */
typedef struct { uint32_t first, last; double start, end; uint32_t first_word, words; } part;

struct listener {
    const hearing_config *config;
    encoder *encoder;           /* NULL until ears.edge is open */
    const stem_config *stem_data;
    windows *windows;
    mel *mel;
    stem *stem;
    decoder *decoder;
    float *spectrogram;         /* [frames][mels] */
    part *parts;                /* [context / 2] */
    int32_t *before;            /* [context]: tokens of the text before */
    char *text;                 /* [text_bytes + 1]: of a segment */
    aligner *aligner;
    int32_t *spoken;            /* [context]: a window's tokens without timestamps … */
    float *logprobs;            /* … and their log-probabilities */

    /* The sound. */
    bool listening, voice, continued, translates, by_words;
    int32_t language;           /* number of the language; -1: not yet known */
    double temperature;
    uint64_t seek;
    uint32_t before_count, segments;
    double ended;               /* seconds at which the last word ended */

    /* Its last window. */
    decoded found;
    double offset;
    uint32_t part_count, next;
    timed_word *words;          /* of all parts, in seconds of the sound */
};

static listener *layout(arena *from, const edge_model *model)
{
    const hearing_config *config = model_hearing(model);
    if (!config)
        return NULL;
    const uint32_t context = model->config->context;
    listener *e = take(from, sizeof *e), counted, *own = e ? e : &counted;
    own->config = config;
    own->windows = windows_layout(from, config->frames);
    own->mel = mel_layout(from, config->mels);
    own->stem = stem_layout(from, config->mels, model->config->hidden);
    own->decoder = decoder_layout(from, model);
    own->spectrogram = take(from, (uint64_t)config->frames * config->mels * sizeof *own->spectrogram);
    own->parts = take(from, context / 2 * sizeof *own->parts);
    own->before = take(from, context * sizeof *own->before);
    own->text = take(from, config->text_bytes + 1ull);
    own->aligner = aligner_layout(from, model);
    own->spoken = take(from, context * sizeof *own->spoken);
    own->logprobs = take(from, context * sizeof *own->logprobs);
    return e;
}

static void end(listener *own)
{
    if (own)
        encoder_close(own->encoder);
}

/* ---- edge_listen ---------------------------------------------------------------------------------------------------- */

static edge_status open_encoder(edge_session *s, const edge_source *source, edge_error *error)
{
    listener *e = s->ears;
    if (!source)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the first edge_listen of a session needs the bundle's file ears.edge");
    if (source->size < sizeof *source)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_source.size is %d: set it", (int64_t)source->size);
    edge_status status = encoder_open(EDGE_HEARS, source, NULL, pass_threads(s->pass), s->next_options.cpu_mask, &e->encoder, error);
    if (status)
        return status;
    const edge_model *own = encoder_model(e->encoder);
    e->stem_data = find_stem(own, e->config->mels, s->model->config->hidden, e->config->frames / 2);
    if (e->stem_data && own->config->hidden == s->model->config->hidden && own->config->capacity == e->config->frames / 2) {
        mel_start(e->mel, stem_filters(e->stem_data));
        s->encoder = e->encoder;
        return EDGE_OK;
    }
    encoder_close(e->encoder);
    e->encoder = NULL;
    return edge_fail(error, EDGE_BAD_FILE, "ears.edge is damaged (its convolutions): copy or export it again");
}

static bool same(const char *one, const char *other)
{
    return strlen(one) == strlen(other) && !memcmp(one, other, strlen(one));
}

/* Finds a language by its code. *language: -1: not yet known. */
static edge_status find_language(const listener *e, const char *code, int32_t *language, edge_error *error)
{
    *language = e->config->languages ? -1 : 0;
    if (!code)
        return EDGE_OK;
    if (!e->config->languages)
        return same(code, "en") ? EDGE_OK : edge_fail(error, EDGE_BAD_ARGUMENT, "the model knows English alone: leave language out");
    for (uint32_t i = 0; i < e->config->languages; i++)
        if (same(code, hearing_name(e->config, i))) {
            *language = (int32_t)i;
            return EDGE_OK;
        }
    return edge_fail(error, EDGE_BAD_ARGUMENT, "the model has no language %s: state a code such as en", code);
}

typedef struct { listener *ears; uint32_t most; } prompt_ids;

/* Keeps the last tokens of a prompt. */
static bool keep_ids(void *to, const int32_t *ids, size_t count)
{
    listener *e = ((prompt_ids *)to)->ears;
    const uint32_t most = ((prompt_ids *)to)->most;
    for (size_t i = 0; i < count; i++) {
        if (e->before_count == most)
            memmove(e->before, e->before + 1, --e->before_count * sizeof *e->before);
        e->before[e->before_count++] = ids[i];
    }
    return true;
}

static void take_prompt(edge_session *s, const char *prompt)
{
    prompt_ids to = {s->ears, s->model->config->context / 2 - 1};
    uint32_t length = (uint32_t)strlen(prompt);
    const char *text = stripped(prompt, &length);
    s->ears->before_count = 0;
    if (length)
        tokenizer_encode_after(s->tokenizer, " ", text, length, keep_ids, &to);
}

static edge_status listen(edge_session *s, const edge_source *source, const edge_hearing *options, edge_error *error)
{
    listener *e = s->ears;
    int32_t language;
    edge_status status;
    if (options->rate < SLOWEST_SOUND || options->rate > FASTEST_SOUND)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "rate must be from %d to %d samples per second, not %d", (int64_t)SLOWEST_SOUND,
                         (int64_t)FASTEST_SOUND, (int64_t)options->rate);
    if (!(options->temperature <= 1))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "temperature must be from 0 to 1, or less than 0 for openai-whisper's own");
    if (options->translate && !e->config->languages)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the model knows English alone, and translates nothing: leave translate out");
    if ((status = find_language(e, options->language, &language, error)) || (!e->encoder && (status = open_encoder(s, source, error))))
        return status;
    if (options->words && !can_align(encoder_model(e->encoder), e->stem_data, s->model))
        return edge_fail(error, EDGE_UNSUPPORTED, "ears.edge names no heads for the times of words: export the bundle again");
    e->language = language;
    e->by_words = options->words, e->ended = 0;
    take_prompt(s, options->prompt ? options->prompt : "");
    e->listening = true;
    e->voice = !options->everything, e->continued = !options->alone, e->translates = options->translate;
    e->temperature = options->temperature;
    e->seek = 0;
    e->segments = e->part_count = e->next = 0;
    windows_start(e->windows, options->rate, options->live);
    context_begin(s);
    return EDGE_OK;
}

/* ---- a window ------------------------------------------------------------------------------------------------------- */

/* Frames to pass over: all without a voice, but for those at the end in which one may begin, or a long silence before
 * the first. */
static uint32_t quiet(listener *e, uint32_t frames)
{
    const uint32_t kept = windows_go_on(e->windows, e->seek + frames) ? FRAMES_BEFORE + VOICE_SHORTEST : 0;
    const voiced *found;
    if (!windows_voices(e->windows, e->seek, frames, &found))
        return frames > kept ? frames - kept : 1;
    return found->begin >= FRAMES_BEFORE + STILL_FRAMES ? found->begin - FRAMES_BEFORE : 0;
}

/* Encodes a window, whose states the decoder's cross attention then reads. */
static bool encode(edge_session *s, uint32_t frames)
{
    listener *e = s->ears;
    const uint32_t mels = e->config->mels, count = e->config->frames / 2;
    uint32_t stride;
    mel_write(e->mel, windows_around(e->windows, e->seek, frames), frames, e->spectrogram);
    memset(e->spectrogram + (size_t)frames * mels, 0, (size_t)(e->config->frames - frames) * mels * sizeof(float));
    float *rows = encoder_inputs(e->encoder, &stride);
    stem_run(e->stem, e->stem_data, e->spectrogram, 2 * count, count, rows, stride);
    encoder_use_threads(e->encoder, pass_threads(s->pass), s->next_options.cpu_mask); /* edge_set may have come */
    const float *states = encoder_run(e->encoder, &(text_places){.ends = &count}, count, &stride);
    return states && pass_cross(s->pass, states, count, stride);
}

/* Divides the tokens of a window into segments; returns the frames that they cover. */
static uint32_t divide(listener *e, uint32_t frames)
{
    const int32_t *tokens = e->found.tokens, first = (int32_t)e->config->first_timestamp;
    const uint32_t count = e->found.count;
    const bool whole = count > 1 && tokens[count - 1] >= first && tokens[count - 2] < first; /* nothing is said behind it */
    uint32_t start = 0;
    e->part_count = e->next = 0;
    for (uint32_t at = 1; at <= count; at++)
        if ((at < count && tokens[at - 1] >= first && tokens[at] >= first) || (at == count && whole && start)) {
            e->parts[e->part_count++] = (part){start, at, (tokens[start] - first) * STAMP_S, (tokens[at - 1] - first) * STAMP_S, 0, 0};
            start = at;
        }
    if (!start) { /* no pair of timestamps */
        uint32_t last = count;
        while (last && tokens[last - 1] < first)
            last--;
        const int32_t stamp = last ? tokens[last - 1] - first : 0;
        if (count)
            e->parts[e->part_count++] = (part){0, count, 0, stamp ? stamp * STAMP_S : frames * ((double)MEL_HOP / SOUND_RATE), 0, 0};
        return frames;
    }
    const uint32_t passed = whole ? frames : (uint32_t)(tokens[start - 1] - first) * STAMP_FRAMES;
    return passed < 1 ? 1 : smaller(passed, frames);
}

static const char *const UNSPACED[] = {"zh", "ja", "th", "lo", "my", "yue"}; /* languages whose words no spaces part */

static double hundredths(double seconds)
{
    return rint(seconds * 100) / 100;
}

static const char *language_of(const listener *e)
{
    return e->config->languages ? hearing_name(e->config, (uint32_t)e->language) : "en";
}

/* The first words after a pause do not reach into it. */
static void shorten_first(timed_word *words, uint32_t count, double ended, double median)
{
    const double most = 2 * median;
    timed_word *second = count > 1 ? words + 1 : NULL;
    if (words->end - ended <= 4 * median)
        return;
    if (words->end - words->start > most || (second && second->end - words->start > 2 * most)) {
        if (second && second->end - second->start > most)
            second->start = words->end = second->end / 2 > second->end - most ? second->end / 2 : second->end - most;
        words->start = words->end > most ? words->end - most : 0;
    }
}

/* Times of a segment are those of its words, unless a first or last word is much longer than the segment says. */
static void settle(part *own, timed_word *words, uint32_t count, double median)
{
    timed_word *first = words, *last = words + count - 1;
    if (own->start < first->end && own->start - 0.5 > first->start) {
        const double start = first->end - median < own->start ? first->end - median : own->start;
        first->start = start > 0 ? start : 0;
    } else {
        own->start = first->start;
    }
    if (own->end > last->start && own->end + 0.5 < last->end)
        last->end = last->start + median > own->end ? last->start + median : own->end;
    else
        own->end = last->end;
}

/* Finds when words were said, and from them, when segments were, and where the next window begins. */
static edge_finish time_words(edge_session *s, const int32_t *opening, uint32_t opening_count, uint32_t frames, uint32_t *passed)
{
    listener *e = s->ears;
    const int32_t eot = (int32_t)e->config->eot, first = (int32_t)e->config->first_timestamp, *tokens = e->found.tokens;
    uint32_t count = 0, taken = 0;
    for (uint32_t i = 0; i < e->part_count; i++)
        for (uint32_t at = e->parts[i].first; at < e->parts[i].last; at++)
            if (tokens[at] < eot)
                e->spoken[count] = tokens[at], e->logprobs[count++] = e->found.logprobs[at];
    const char *language = language_of(e);
    bool spaces = true;
    for (size_t i = 0; i < sizeof UNSPACED / sizeof *UNSPACED; i++)
        spaces = spaces && !same(language, UNSPACED[i]);
    timed_words words;
    const edge_finish reason = align_words(e->aligner, s, e->stem_data, opening, opening_count, e->spoken, e->logprobs, count,
                                           frames, spaces, &words);
    if (reason)
        return reason;
    const uint32_t found = words.count;
    e->words = words.each;
    const double median = typical_length(e->aligner, e->words, found);
    double until = 0;
    for (uint32_t i = 0; i < e->part_count; i++) {
        part *own = e->parts + i;
        uint32_t wanted = 0, held = 0;
        for (uint32_t at = own->first; at < own->last; at++)
            wanted += tokens[at] < eot;
        own->start = hundredths(e->offset + own->start), own->end = hundredths(e->offset + own->end);
        own->first_word = taken;
        for (; taken < found && held < wanted; taken++) {
            timed_word *w = e->words + taken;
            held += w->last - w->first;
            w->start = hundredths(e->offset + w->start), w->end = hundredths(e->offset + w->end);
        }
        own->words = taken - own->first_word;
        if (own->words) {
            shorten_first(e->words + own->first_word, own->words, e->ended, median);
            settle(own, e->words + own->first_word, own->words, median);
            e->ended = own->end;
        }
        until = own->end;
        own->start -= e->offset, own->end -= e->offset;
    }
    const uint32_t all = e->found.count;
    const bool ended = all > 1 && tokens[all - 1] >= first && tokens[all - 2] < first;
    if (!ended && until > e->offset) { /* the words' times are closer to the truth */
        const double own = rint((until - e->offset) * ((double)SOUND_RATE / MEL_HOP));
        *passed = own < 1 ? 1 : own < frames ? (uint32_t)own : frames;
    }
    return EDGE_GOING;
}

static edge_finish decode(edge_session *s, uint32_t frames)
{
    listener *e = s->ears;
    int32_t opening[3] = {(int32_t)e->config->sot};
    uint32_t count = 1;
    edge_finish reason;
    if (e->language < 0) {
        uint32_t language;
        if ((reason = decoder_language(e->decoder, s, &language)))
            return reason;
        e->language = (int32_t)language;
    }
    if (e->config->languages) {
        opening[count++] = hearing_languages(e->config)[e->language];
        opening[count++] = (int32_t)(e->translates ? e->config->translate : e->config->transcribe);
    }
    reason = decoder_run(e->decoder, s, e->before, e->before_count, opening, count, e->seek, e->temperature, &e->found);
    if (reason)
        return reason;
    e->offset = (double)e->seek * ((double)MEL_HOP / SOUND_RATE);
    e->part_count = e->next = 0;
    uint32_t passed = e->found.silent ? frames : divide(e, frames);
    if (e->by_words && !e->found.silent && (reason = time_words(s, opening, count, frames, &passed)))
        return reason;
    e->seek += passed;
    if (!e->found.silent && (!e->continued || e->found.temperature > FORGOTTEN))
        e->before_count = 0;
    return EDGE_GOING;
}

/* Hears the next window, if it is complete. *heard: false: more samples are needed. */
static edge_finish hear_window(edge_session *s, bool *heard)
{
    listener *e = s->ears;
    *heard = windows_ready(e->windows, e->seek);
    if (!*heard)
        return EDGE_GOING;
    const uint32_t frames = windows_frames(e->windows, e->seek);
    if (!frames)
        return EDGE_EOS;
    const uint32_t passed = e->voice ? quiet(e, frames) : 0;
    if (passed) {
        e->seek += passed;
        return EDGE_GOING;
    }
    edge_finish reason = context_look(s, e->config->frames / 2 / ENCODING_SHARE);
    if (reason)
        return reason;
    if (!encode(s, frames)) {
        s->failed = true;
        return EDGE_INTERRUPTED;
    }
    return decode(s, frames);
}

/* ---- edge_hear ------------------------------------------------------------------------------------------------------ */

/* Fills in the next segment of the window that says something; words NULL: the file is damaged. */
static bool next_segment(edge_session *s, edge_segment *segment)
{
    listener *e = s->ears;
    while (e->next < e->part_count) {
        const part *own = e->parts + e->next++;
        const double start = hundredths(e->offset + own->start), stop = hundredths(e->offset + own->end);
        const int32_t *tokens = e->found.tokens + own->first;
        const uint32_t count = own->last - own->first, length = decoder_text(e->decoder, s, tokens, count, e->text);
        uint32_t left = length;
        stripped(e->text, &left);
        if (!left || start >= stop)
            continue;
        if (e->by_words && !(segment->words = words_in_json(e->aligner, e->words + own->first_word, own->words)))
            return true;
        e->text[length] = 0;
        if (e->continued && e->found.temperature <= FORGOTTEN) {
            prompt_ids to = {e, s->model->config->context / 2 - 1};
            keep_ids(&to, tokens, count);
        }
        segment->id = e->segments++;
        segment->text = e->text, segment->length = length;
        segment->start = start, segment->end = stop;
        segment->tokens = tokens, segment->tokens_count = count;
        segment->temperature = e->found.temperature;
        segment->avg_logprob = e->found.logprob;
        segment->compression_ratio = e->found.ratio;
        segment->no_speech_prob = e->found.no_speech;
        return true;
    }
    return false;
}

static edge_status check_samples(const float *samples, size_t count, edge_error *error)
{
    for (size_t i = 0; i < count; i++)
        if (!isfinite(samples[i]))
            return edge_fail(error, EDGE_BAD_ARGUMENT, "sample %d is no finite number: samples are from -1 to 1", (int64_t)i);
    return EDGE_OK;
}

static int64_t hear(edge_session *s, const float *samples, size_t count, edge_segment *segment, edge_error *error)
{
    listener *e = s->ears;
    size_t taken = 0;
    edge_finish reason = EDGE_GOING;
    if (!e->listening)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "there is no sound to hear: call edge_listen first");
    edge_status status = check_samples(samples, count, error);
    if (status)
        return status;
    if (!count)
        windows_end(e->windows);
    *segment = (edge_segment){.size = segment->size, .text = "", .words = "", .language = language_of(e)};
    while (!next_segment(s, segment)) {
        bool heard;
        if ((reason = hear_window(s, &heard)))
            break;
        if (!heard && taken == count)
            break;
        if (!heard)
            taken += windows_take(e->windows, e->seek, samples + taken, count - taken);
    }
    const bool damaged = !segment->words;
    if (damaged)
        segment->words = "", reason = EDGE_INTERRUPTED;
    segment->language = language_of(e);
    segment->heard = hundredths(windows_seconds(e->windows));
    segment->finish = reason;
    if (reason) {
        e->listening = false;
        context_end(s);
    }
    if (damaged)
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (texts of its tokens): copy or export it again");
    return (int64_t)taken;
}

const ears_kind edge_ears = {layout, listen, hear, end};
