/* Kinds of cores, as of a processor with big and little ones. */
#ifndef CORES_H
#define CORES_H

#include <sched.h>
#include <stdint.h>

enum { MOST_KINDS = 8 };
typedef struct {
    cpu_set_t cpus;             /* that this process may run on */
    uint32_t cores;             /* physical ones */
    double capacity, kilohertz; /* as Linux tells them; 0: unknown */
    char midr[24];              /* the register that names an ARM core */
    const char *hybrid;         /* of Intel: core, atom or lowpower */
} core_kind;

/* The fastest first; returns their number. The rule is that of core_kinds in devices/cores.py. */
uint32_t find_kinds(core_kind kinds[MOST_KINDS]);

#endif
