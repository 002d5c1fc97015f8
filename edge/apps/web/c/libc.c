/* Functions of the C library that zig's runtime library lacks. Without them zig would compile a C library, for half a
 * minute. */
#include <math.h>
#include <stdint.h>
#include <string.h>

void *memchr(const void *memory, int byte, size_t count)
{
    const uint8_t *at = memory;
    for (; count; count--, at++)
        if (*at == (uint8_t)byte)
            return (void *)at;
    return NULL;
}

int strcmp(const char *one, const char *other)
{
    for (; *one && *one == *other; one++, other++)
        ;
    return (uint8_t)*one - (uint8_t)*other;
}

char *strchr(const char *text, int c)
{
    for (;; text++)
        if (*text == (char)c)
            return (char *)text;
        else if (!*text)
            return NULL;
}

/* The quotient corrects the rounding of 1 + x (W. Kahan). */
double log1p(double x)
{
    double sum = 1 + x;
    return sum == 1 ? x : log(sum) * x / (sum - 1);
}
