/* The processor's thermometer, as devices/thermal.py finds it. */
#ifndef THERMAL_H
#define THERMAL_H

#include <stdbool.h>

typedef struct { char path[128], name[64]; double trip; } thermometer; /* trip: °C at which it throttles; 0: not known */

bool thermal_find(thermometer *found);
double thermal_read(const thermometer *from); /* °C; UNREADABLE: none, or no possible value */

#endif
