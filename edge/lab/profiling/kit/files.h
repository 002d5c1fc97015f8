/* Files of /proc and /sys, of which any may be missing: on phones many are. */
#ifndef FILES_H
#define FILES_H

#include <dirent.h>
#include <math.h>
#include <stddef.h>

#define UNREADABLE (-HUGE_VAL)

/* /sys and the device tree are below the folder that EDGE_SENSORS names, as for edge itself. */
size_t read_text(char *text, size_t size, const char *format, ...); /* the beginning, without blanks at its end; length */
double read_number(const char *format, ...);                        /* UNREADABLE if there is none */
DIR *open_folder(const char *path);                                 /* NULL if there is none */

#endif
