/* A clock that tests set, for budgets.c, and a watch that they can make without its struct. */
#include "budgets.h"
#include "system.h"

double watch_now, watch_cpu;

double now_seconds(void) { return watch_now; }
double cpu_seconds(void) { return watch_cpu; }
void sleep_seconds(double seconds) { watch_now += seconds; }
size_t watch_size(void) { return sizeof(watch); }
bool watch_measured(const watch *w) { return w->measured; }
double watch_paused(const watch *w) { return w->paused; }
