/* What tests call of the C tokenizer, and a program that compares. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct { edge_model model; edge_config config; tokenizer *tokens; void *memory; } opened;
typedef struct { int32_t *ids; int64_t count, most; } list;

/* Sections, which must stay where they are. NULL: they are damaged. */
opened *tokens_open(const uint8_t *tokens, uint64_t token_bytes, const uint8_t *words_, uint64_t word_bytes,
                    uint32_t vocab, edge_error *error)
{
    opened *o = calloc(1, sizeof *o);
    o->config.vocab = vocab;
    o->model.config = &o->config;
    o->model.sections[SECTION_TOKENIZER] = tokens;
    o->model.sizes[SECTION_TOKENIZER] = token_bytes;
    o->model.sections[SECTION_WORDS] = words_;
    o->model.sizes[SECTION_WORDS] = word_bytes;
    if (tokenizer_check(&o->model, error)) {
        free(o);
        return NULL;
    }
    arena counting = {NULL, 0}, held = {NULL, 0};
    tokenizer_layout(&counting, &o->model);
    held.memory = o->memory = aligned_alloc(64, (counting.used + 63) / 64 * 64);
    o->tokens = tokenizer_layout(&held, &o->model);
    return o;
}

static bool collect(void *to, const int32_t *ids, size_t count)
{
    list *all = to;
    for (size_t i = 0; i < count; i++, all->count++)
        if (all->count < all->most)
            all->ids[all->count] = ids[i];
    return all->count < all->most;
}

int64_t tokens_encode(opened *o, const char *text, size_t length, int special, int start, int32_t *ids, int64_t most)
{
    list all = {ids, 0, most};
    tokenizer_encode(o->tokens, text, length, special, start, collect, &all, NULL);
    return all.count;
}

/* out: 3 KiB for each id and 16 bytes. */
int64_t tokens_decode(opened *o, const int32_t *ids, int64_t count, char *out)
{
    utf8_joiner joiner = {{0}, 0};
    size_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        size_t length;
        const char *piece = tokenizer_piece(o->tokens, ids[i], &length);
        used += utf8_feed(&joiner, piece, length, out + used);
    }
    return (int64_t)(used + utf8_rest(&joiner, out + used));
}
