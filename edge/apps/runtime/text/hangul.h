/* Hangul syllables, which Unicode composes of two or three parts by arithmetic. */
#ifndef EDGE_HANGUL_H
#define EDGE_HANGUL_H

#include <stdbool.h>
#include <stdint.h>

enum { HANGUL = 0xAC00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11A7, LEADS = 19, VOWELS = 21, TAILS = 28,
       SYLLABLES = LEADS * VOWELS * TAILS };

/* Writes the parts of a character, and returns their number; 0: it is no syllable. */
static inline uint32_t hangul_parts(uint32_t point, uint32_t *parts)
{
    const uint32_t syllable = point - HANGUL;
    if (syllable >= SYLLABLES)
        return 0;
    parts[0] = HANGUL_L + syllable / (VOWELS * TAILS);
    parts[1] = HANGUL_V + syllable / TAILS % VOWELS;
    parts[2] = HANGUL_T + syllable % TAILS;
    return syllable % TAILS ? 3 : 2;
}

/* Returns the syllable of two parts; 0: they make none. */
static inline uint32_t hangul_composed(uint32_t first, uint32_t second)
{
    if (first - HANGUL_L < LEADS && second - HANGUL_V < VOWELS)
        return HANGUL + ((first - HANGUL_L) * VOWELS + second - HANGUL_V) * TAILS;
    bool open = first - HANGUL < SYLLABLES && (first - HANGUL) % TAILS == 0;
    return open && second - HANGUL_T - 1 < TAILS - 1 ? first + second - HANGUL_T : 0;
}

#endif
