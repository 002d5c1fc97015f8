/* This machine and this process, as the kernel describes them. */
#ifndef MACHINE_H
#define MACHINE_H

#include <stdint.h>

double now(void);            /* seconds of a monotonic clock */
double cpu_now(void);        /* CPU seconds of this process */
uint64_t memory_bytes(void); /* memory of the machine */
void describe_machine(void); /* prints fields of the result */

/* Samples memory, temperature, clock and energy on a thread of its own, until print_samples; it calls `each_second`, too. */
void start_sampling(void (*each_second)(void));
void mark(const char *what);      /* names the next stage of the run */
void sampled_rows(uint32_t rows); /* KV rows in use */
void print_samples(void);

void climate_begin(void);
double climate_celsius(void); /* the highest since climate_begin; -1000: unknown */
double climate_hertz(void);   /* the mean since climate_begin; 0: unknown */

typedef struct { double busy, own, at; } others_since;
others_since others_begin(void);
double others_share(const others_since *before); /* share of all cores' time that other programs took since then */

#endif
