/* Joules by this machine's best sensor. */
#ifndef ENERGY_H
#define ENERGY_H

#include <stdint.h>

typedef struct { double joules, measured, missed; } energy_reading; /* joules; seconds with and without readings */

void energy_begin(double now);            /* finds the sensor */
energy_reading energy_read(double now);   /* totals since energy_begin; from any thread */
double energy_between(const energy_reading *before, const energy_reading *after); /* joules; -1: some lack */
const char *energy_source(void);          /* NULL: nothing was measured */
double energy_battery_watts(void);        /* at the last reading; -1: the sensor is no battery, or it charges */

#endif
