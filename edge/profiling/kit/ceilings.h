/* What this machine can do at most. */
#ifndef CEILINGS_H
#define CEILINGS_H

#include <stdint.h>

double read_bandwidth(uint32_t threads, double seconds); /* bytes per second, from memory */
double float_rate(uint32_t threads, double seconds);     /* operations per second on float32, in registers */
double byte_rate(uint32_t threads, double seconds);      /* likewise on bytes, with sums of 32 bits; 0: no instruction */

#endif
