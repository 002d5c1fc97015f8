/* Output of the kit: progress to standard error, figures to standard output. */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <stdint.h>

void fail(const char *what); /* prints the reason and ends the program */

void expect_all(double length);            /* estimated seconds of all stages */
void begin_stage(double length);           /* estimated seconds of this stage */
void say(const char *what, double done);   /* prints the step; done: share of the stage */
void say_again(void);                      /* repeats it; from any thread */

/* Prints a field: p10, p50 and p90 of the values, which it sorts, and their number. */
void print_spread(const char *name, double *values, uint32_t count);

#endif
