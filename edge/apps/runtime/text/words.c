/* Cuts text into words, as the regular expressions of a pre-tokenizer (edge/model/tokens/pre_tokenizers.py). edge/apps/sections/words.py has
 * compiled each to an automaton. Matches are those of a backtracking matcher: the order of alternatives decides, not their
 * lengths. Section WORDS:
 *
 *     words_config
 *     uint16 blocks[0x110000 / 128]      number of the block of classes of a code point
 *     uint8  classes[block_count][128]   classes of the block's code points
 *     uint16 moves[…][class_count + 1]   for each expression, by state and class of the next character (the last class:
 *                                        end of text): the next state, 0 if no longer match is possible; and
 *                                        WORDS_ENDS if a match ends before that character
 */
#include <string.h>

#include "utf8.h"
#include "words.h"

enum { START = 1 };

/* Finds the tables, and checks every number, since they are small. */
static bool find_tables(const edge_model *model, words *found)
{
    const words_config *config = (const words_config *)model->sections[SECTION_WORDS];
    uint64_t size = model->sizes[SECTION_WORDS];
    memset(found, 0, sizeof *found);
    if (size < sizeof *config || config->block_count > CODE_POINTS / WORDS_BLOCK || !config->class_count
        || config->class_count > 255 || config->splits > MOST_SPLITS)
        return false;
    const uint16_t *blocks = (const uint16_t *)(config + 1);
    const uint8_t *classes = (const uint8_t *)(blocks + CODE_POINTS / WORDS_BLOCK);
    uint64_t class_bytes = (uint64_t)config->block_count * WORDS_BLOCK, width = config->class_count + 1, moves = 0;
    for (uint32_t i = 0; i < config->splits; i++) {
        if (config->states[i] <= START || config->states[i] >= WORDS_ENDS)
            return false;
        moves += config->states[i] * width;
    }
    if (size != sizeof *config + 2 * (CODE_POINTS / WORDS_BLOCK) + class_bytes + 2 * moves)
        return false;
    for (size_t i = 0; i < CODE_POINTS / WORDS_BLOCK; i++)
        if (blocks[i] >= config->block_count)
            return false;
    for (uint64_t i = 0; i < class_bytes; i++)
        if (classes[i] >= config->class_count)
            return false;
    *found = (words){.blocks = blocks, .classes = classes, .class_count = config->class_count,
                     .splits = config->splits};
    const uint16_t *table = (const uint16_t *)(classes + class_bytes);
    for (uint32_t i = 0; i < config->splits; i++) {
        found->moves[i] = table;
        for (uint64_t j = 0; j < config->states[i] * width; j++)
            if ((table[j] & ~WORDS_ENDS) >= config->states[i])
                return false;
        table += config->states[i] * width;
    }
    return true;
}

edge_status words_find(const edge_model *model, words *found, edge_error *error)
{
    return find_tables(model, found) ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its rules for "
                                                           "words): copy or export it again");
}

static uint32_t class_of(const words *rules, const uint8_t *text, size_t count, size_t *taken)
{
    uint32_t point = text[0];
    bool whole;
    *taken = point < 0x80 ? 1 : utf8_read(text, count, &point, &whole);
    return rules->classes[(size_t)rules->blocks[point / WORDS_BLOCK] * WORDS_BLOCK + point % WORDS_BLOCK];
}

/* Returns the length of the match at text[0]; 0: none. */
static size_t match(const words *rules, uint32_t split, const uint8_t *text, size_t count)
{
    const uint16_t *moves = rules->moves[split];
    size_t width = rules->class_count + 1, at = 0, matched = 0;
    uint32_t state = START;
    while (state) {
        size_t taken = 0;
        uint32_t class = at < count ? class_of(rules, text + at, count - at, &taken) : rules->class_count;
        uint32_t move = moves[state * width + class];
        if (move & WORDS_ENDS)
            matched = at;
        if (at == count)
            break;
        state = move & ~(uint32_t)WORDS_ENDS;
        at += taken;
    }
    return matched;
}

/* Returns the length of the first piece: a match, or the text before the next match. */
static size_t piece(const words *rules, uint32_t split, const uint8_t *text, size_t count)
{
    size_t at = match(rules, split, text, count);
    if (at)
        return at;
    while (at < count && !match(rules, split, text + at, count - at)) {
        size_t taken;
        class_of(rules, text + at, count - at, &taken);
        at += taken;
    }
    return at;
}

void words_begin(word_cutter *cutter, const words *rules, const uint8_t *text, size_t count)
{
    memset(cutter, 0, sizeof *cutter);
    cutter->rules = rules;
    cutter->text = text;
    cutter->left[0] = count;
}

size_t words_next(word_cutter *cutter, const uint8_t **word)
{
    uint32_t last = cutter->rules->splits, level = last;
    while (level && !cutter->left[level])
        level--;
    if (!cutter->left[level])
        return 0;
    for (; level < last; level++) { /* left[level]: bytes that level has yet to cut; all begin at cutter->text */
        size_t count = piece(cutter->rules, level, cutter->text, cutter->left[level]);
        cutter->left[level] -= count;
        cutter->left[level + 1] = count;
    }
    *word = cutter->text;
    size_t count = cutter->left[last];
    cutter->left[last] = 0;
    cutter->text += count;
    return count;
}
