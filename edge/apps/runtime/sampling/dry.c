/* "Don't Repeat Yourself" (text-generation-webui #5677). */
#include "dry.h"

#include <math.h>

/* The token `back` tokens before the end; 0: the last one. */
static int32_t before_end(const dry_text *text, uint32_t back)
{
    return text->tokens[(text->count - 1 - back) % MOST_DRY];
}

void dry_add(dry_text *text, int32_t token)
{
    text->tokens[text->count++ % MOST_DRY] = token;
}

/* Number of tokens, at most `most`, that end alike at the end of the text and `back` tokens before it. */
static uint32_t length_alike(const dry_text *text, uint32_t back, uint32_t most)
{
    uint32_t length = 0;
    while (length < most && before_end(text, back + length) == before_end(text, length))
        length++;
    return length;
}

void dry_penalize(const dry_text *text, dry_options how, dry_breaks breaks, const void *vocabulary, int32_t *lengths,
                  float *logits)
{
    uint32_t count = text->count < how.last_n ? text->count : how.last_n, limit = 0;
    while (limit < count && !breaks(vocabulary, before_end(text, limit)))
        limit++;
    if (count <= how.allowed_length || limit < how.allowed_length)
        return;
    const int32_t last = before_end(text, 0);
    for (uint32_t back = 1; back < count; back++)
        lengths[before_end(text, back - 1)] = 0;
    for (uint32_t back = 1; back < count; back++)
        if (before_end(text, back) == last) {
            uint32_t most = count - back < limit ? count - back : limit;
            int32_t following = before_end(text, back - 1), length = (int32_t)length_alike(text, back, most);
            lengths[following] = length > lengths[following] ? length : lengths[following];
        }
    for (uint32_t back = 1; back < count; back++) {
        int32_t token = before_end(text, back - 1);
        int64_t over = (int64_t)lengths[token] - how.allowed_length;
        lengths[token] = 0; /* once for each token */
        if (over < 0 || breaks(vocabulary, token))
            continue;
        logits[token] -= (float)fmin(how.multiplier * exp(fmin((double)over * log(how.base), LARGEST_EXPONENT)), LARGEST_PENALTY);
    }
}
