/* What the kit says: progress to standard error, figures to standard output. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <stdint.h>

void fail(const char *what); /* says why, and ends the program */

void expect(double length);                /* seconds of all stages together, about */
void begin_stage(double length);           /* one of them */
void say(const char *what, double done);   /* the step, and the part of its stage that is done */
void say_again(void);                      /* from any thread, now and then */

/* A field: p10, p50 and p90 of the values, which it sorts, and their number. */
void print_spread(const char *name, double *values, uint32_t count);

#endif
