/* What tests call of tokenizer.c and words.c; tokens_fuzz.c is a program around it. */
#include <stdlib.h>
#include <string.h>

#include "bundle.h"
#include "model.h"
#include "system.h"
#include "tokenizer.h"
#include "utf8.h"
#include "words.h"

typedef struct { edge_model model; edge_config config; tokenizer *tokens; void *memory; size_t size; } opened;
typedef struct { int32_t *ids; int64_t count, most; } list;

/* Of any of the tokenizers of encoders; a bundle has one. */
static bool split(const vocabulary *in, const letter_tables *of, piece_room room, const uint8_t *text, size_t count, ids_out out,
                  void *to)
{
    return (in->config->kind == KIND_BERT ? split_word_pieces : split_unigrams)(in, of, room, text, count, out, to);
}

piece_splitter *const EDGE_PIECES = split;
text_composer *const EDGE_COMPOSER = compose_text;

/* Of sections TOKENIZER, WORDS and NORMALIZER, which stay where they are. mapped: they are part of a file. NULL: they are
 * damaged. */
opened *tokens_open(const uint8_t *tokens, uint64_t token_bytes, const uint8_t *rules, uint64_t rule_bytes,
                    const uint8_t *letters, uint64_t letter_bytes, uint32_t vocab, size_t mapped, edge_error *error)
{
    opened *o = calloc(1, sizeof *o);
    o->config.vocab = vocab;
    o->model.config = &o->config;
    o->model.file.mapped = mapped;
    o->model.sections[SECTION_TOKENIZER] = tokens;
    o->model.sizes[SECTION_TOKENIZER] = token_bytes;
    o->model.sections[SECTION_WORDS] = rules;
    o->model.sizes[SECTION_WORDS] = rule_bytes;
    o->model.sections[SECTION_NORMALIZER] = letters;
    o->model.sizes[SECTION_NORMALIZER] = letter_bytes;
    if (tokenizer_check(&o->model, error)) {
        free(o);
        return NULL;
    }
    arena counting = {NULL, 0}, held = {NULL, 0};
    tokenizer_layout(&counting, &o->model);
    o->size = counting.used;
    held.memory = o->memory = map_memory(o->size);
    o->tokens = tokenizer_layout(&held, &o->model);
    return o;
}

void tokens_close(opened *o)
{
    unmap_memory(o->memory, o->size);
    free(o);
}

static bool collect(void *to, const int32_t *ids, size_t count)
{
    list *all = to;
    for (size_t i = 0; i < count; i++, all->count++)
        if (all->count < all->most)
            all->ids[all->count] = ids[i];
    return all->count < all->most;
}

/* Ids, of which `most` are written; it stops when there are as many. */
int64_t tokens_encode(opened *o, const char *text, size_t length, int special, int start, int32_t *ids, int64_t most)
{
    list all = {ids, 0, most};
    tokenizer_encode(o->tokens, text, length, special, start, collect, &all);
    return all.count;
}

/* The text of ids, joined to whole characters token by token. out: 3 KiB for each id and 16 bytes. */
int64_t tokens_decode(opened *o, const int32_t *ids, int64_t count, char *out)
{
    utf8_joiner joiner = {{0}, 0};
    size_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        size_t length;
        const char *piece = (const char *)vocabulary_piece(tokenizer_vocabulary(o->tokens), ids[i], &length);
        used += utf8_feed(&joiner, piece, length, out + used);
    }
    if (joiner.count)
        used += utf8_write(UTF8_REPLACEMENT, (uint8_t *)out + used);
    return (int64_t)used;
}

/* Writes BOS or -1, then the tokens that end a turn and the banned ones, each list after its count. */
int64_t tokens_about(opened *o, int32_t *out)
{
    const vocabulary *in = tokenizer_vocabulary(o->tokens);
    const int32_t *ids[] = {in->ends, in->banned};
    const uint32_t counts[] = {in->config->ends, in->config->banned};
    int64_t used = 0;
    out[used++] = in->config->bos;
    for (int each = 0; each < 2; each++) {
        out[used++] = (int32_t)counts[each];
        for (uint32_t i = 0; i < counts[each]; i++)
            out[used++] = ids[each][i];
    }
    return used;
}

/* The lengths of a text's words by section WORDS; -1: it is damaged. */
int64_t words_cut(const uint8_t *rules, uint64_t size, const uint8_t *text, uint64_t length, int32_t *lengths)
{
    edge_model model = {0};
    words found;
    word_cutter cutter;
    const uint8_t *word;
    int64_t count = 0;
    model.sections[SECTION_WORDS] = rules;
    model.sizes[SECTION_WORDS] = size;
    if (words_find(&model, &found, NULL))
        return -1;
    words_begin(&cutter, &found, text, length);
    for (size_t bytes; (bytes = words_next(&cutter, &word));)
        lengths[count++] = (int32_t)bytes;
    return count;
}
