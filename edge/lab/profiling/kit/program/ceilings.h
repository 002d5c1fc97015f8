/* Ceilings of this machine: memory bandwidth and arithmetic. */
#ifndef CEILINGS_H
#define CEILINGS_H

#include <stdint.h>

/* Prints a field of the result: rates of `threads` threads, of one, and of each kind of cores if there are several. seconds: of
 * each measurement. */
void print_ceilings(uint32_t threads, double seconds, void (*say)(const char *what, double done));

#endif
