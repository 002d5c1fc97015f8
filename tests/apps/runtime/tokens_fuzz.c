/* Encodes and decodes with damaged tables. Arguments: files of sections TOKENIZER, WORDS and NORMALIZER, of a text, a
 * seed, and the number of mutants. What may not happen is found by sanitizers; it prints how many mutants could be
 * opened. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

typedef struct opened opened;
opened *tokens_open(const uint8_t *tokens, uint64_t token_bytes, const uint8_t *rules, uint64_t rule_bytes,
                    const uint8_t *letters, uint64_t letter_bytes, uint32_t vocab, size_t mapped, edge_error *error);
void tokens_close(opened *o);
int64_t tokens_encode(opened *o, const char *text, size_t length, int special, int start, int32_t *ids, int64_t most);
int64_t tokens_decode(opened *o, const int32_t *ids, int64_t count, char *out);

enum { HEAD = 2200, MOST_CHANGES = 8, MOST_IDS = 1 << 16 };
typedef struct { uint8_t *data; size_t size; } bytes;
typedef struct { bytes *in; size_t at; uint8_t was[4]; } change;

static uint64_t state;

static uint32_t below(uint32_t count) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717u) >> 33) % count;
}

static bytes read_whole(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        exit(1);
    fseek(file, 0, SEEK_END);
    bytes found = {NULL, (size_t)ftell(file)};
    rewind(file);
    found.data = malloc(found.size ? found.size : 1); /* exactly: the next byte is a sanitizer's */
    if (fread(found.data, 1, found.size, file) != found.size)
        exit(1);
    fclose(file);
    return found;
}

/* Four bytes become others: any, few bits, or a number near 0 or near what was there. */
static void mutate(change *made, bytes *in)
{
    uint32_t old, new, room = (uint32_t)(in->size / 4), head = room < HEAD / 4 ? room : HEAD / 4;
    made->in = in;
    made->at = 4 * (size_t)below(below(2) ? head : room);
    memcpy(&old, in->data + made->at, 4);
    memcpy(made->was, &old, 4);
    switch (below(5)) {
    case 0: new = below(1u << 16) << 16 | below(1u << 16); break;
    case 1: new = old ^ 1u << below(32); break;
    case 2: new = below(4) - 2; break;
    case 3: new = old + below(9) - 4; break;
    default: new = old ^ below(256) << 8 * below(4); break;
    }
    memcpy(in->data + made->at, &new, 4);
}

int main(int count, char **arguments)
{
    if (count != 7)
        return 1;
    bytes tokens = read_whole(arguments[1]), rules = read_whole(arguments[2]), letters = read_whole(arguments[3]);
    bytes text = read_whole(arguments[4]);
    state = strtoull(arguments[5], NULL, 10) * 2 + 1;
    long mutants = strtol(arguments[6], NULL, 10), ran = 0;
    uint32_t vocab;
    memcpy(&vocab, tokens.data + 8, sizeof vocab);
    int32_t *ids = malloc(MOST_IDS * sizeof *ids);
    char *out = malloc(3 * 1024 * 64 + 16);
    for (long i = 0; i < mutants; i++) {
        change changes[MOST_CHANGES];
        uint32_t made = 1 + below(MOST_CHANGES);
        for (uint32_t j = 0; j < made; j++)
            mutate(changes + j, below(3) ? &tokens : rules.size ? &rules : letters.size ? &letters : &tokens);
        edge_error error = {.size = sizeof error};
        opened *o = tokens_open(tokens.data, tokens.size, rules.data, rules.size, letters.data, letters.size, vocab, 0,
                                &error);
        if (o) {
            ran++;
            int64_t found = tokens_encode(o, (char *)text.data, text.size, below(2) != 0, below(2) != 0, ids, MOST_IDS);
            tokens_decode(o, ids, found < 32 ? found : 32, out);
            for (int j = 0; j < 32; j++)
                ids[j] = (int32_t)below(vocab + 2) - 1;
            tokens_decode(o, ids, 32, out);
            tokens_close(o);
        } else if (error.code != EDGE_BAD_FILE || !error.message[0]) {
            return 1;
        }
        while (made--)
            memcpy(changes[made].in->data + changes[made].at, changes[made].was, 4);
    }
    printf("%ld\n", ran);
    free(tokens.data);
    free(rules.data);
    free(letters.data);
    free(text.data);
    free(ids);
    free(out);
    return 0;
}
