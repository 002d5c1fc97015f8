/* Functions of platform.c that runtime/system/system.h does not declare. */
#ifndef EDGE_WEB_PLATFORM_H
#define EDGE_WEB_PLATFORM_H

#include "base.h"
#include "web.h"

void count_cpu(bool begins);     /* begins or ends a call of the engine: cpu_seconds counts calls */
uint32_t waiting_threads(void);
uint32_t working_threads(void);
void sit_down(uint32_t number);  /* the calling thread works for start_worker until dismiss_threads */
void dismiss_threads(void);      /* no thread may be working */

#endif
