/* UTF-8 as Python decodes it with errors="replace": each maximal subpart of an ill-formed sequence becomes one U+FFFD. */
#include "utf8.h"

size_t utf8_read(const uint8_t *bytes, size_t count, uint32_t *point, bool *whole)
{
    uint8_t first = bytes[0], low = 0x80, high = 0xBF;
    size_t more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
    *whole = true;
    *point = UTF8_REPLACEMENT;
    if (first >= 0x80 && (first < 0xC2 || first > 0xF4))
        return 1;
    if (first == 0xE0)
        low = 0xA0; /* smaller ones would be overlong */
    else if (first == 0xED)
        high = 0x9F; /* surrogates */
    else if (first == 0xF0)
        low = 0x90;
    else if (first == 0xF4)
        high = 0x8F; /* beyond U+10FFFF */
    uint32_t value = more ? first & (0x3Fu >> more) : first;
    for (size_t i = 1; i <= more; i++) {
        if (i == count) {
            *whole = false;
            return i;
        }
        if (bytes[i] < low || bytes[i] > high)
            return i;
        value = value << 6 | (bytes[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *point = value;
    return more + 1;
}

size_t utf8_write(uint32_t point, uint8_t *out)
{
    if (point < 0x80) {
        out[0] = (uint8_t)point;
        return 1;
    }
    size_t more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    for (size_t i = more; i; i--, point >>= 6)
        out[i] = (uint8_t)(0x80 | (point & 0x3F));
    out[0] = (uint8_t)(0xF0u << (3 - more) | point);
    return more + 1;
}

size_t utf8_feed(utf8_joiner *joiner, const char *bytes, size_t length, char *out)
{
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        joiner->held[joiner->count++] = (uint8_t)bytes[i];
        while (joiner->count) {
            uint32_t point;
            bool whole;
            size_t taken = utf8_read(joiner->held, joiner->count, &point, &whole);
            if (!whole)
                break;
            used += utf8_write(point, (uint8_t *)out + used);
            joiner->count -= (uint32_t)taken;
            for (uint32_t j = 0; j < joiner->count; j++)
                joiner->held[j] = joiner->held[j + taken];
        }
    }
    return used;
}
