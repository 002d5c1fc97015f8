/* Kinds of cores, such as big and little ones. */
#ifndef CORES_H
#define CORES_H

#include <sched.h>
#include <stdint.h>

enum { MOST_KINDS = 8 };
typedef struct {
    cpu_set_t cpus;             /* CPUs that this process may use */
    uint32_t cores;             /* physical cores */
    double capacity, kilohertz; /* as Linux reports them; 0: unknown */
    char midr[24];              /* Main ID Register of an ARM core */
    const char *hybrid;         /* Intel: core, atom or lowpower */
} core_kind;

/* Finds the kinds, the fastest first, and returns their number. As core_kinds in devices/cores.py. */
uint32_t find_kinds(core_kind kinds[MOST_KINDS]);

#endif
