/* What web.c uses of platform.c beyond runtime/system.h. */
#ifndef EDGE_WEB_PLATFORM_H
#define EDGE_WEB_PLATFORM_H

#include "base.h"
#include "web.h"

void count_cpu(bool begins);     /* a call of the engine begins or ends: cpu_seconds counts in between */
uint32_t waiting_threads(void);
uint32_t working_threads(void);
void sit_down(uint32_t number);  /* thread `number` works for start_worker until dismiss_threads */
void dismiss_threads(void);      /* none works */

#endif
