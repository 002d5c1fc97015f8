/* Functions of the C library that zig's own runtime library lacks. With them a module needs no C library, which zig would
 * compile for half a minute. */
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

/* 1 + x rounds; the quotient takes the error back (W. Kahan). */
double log1p(double x)
{
    double sum = 1 + x;
    return sum == 1 ? x : log(sum) * x / (sum - 1);
}
