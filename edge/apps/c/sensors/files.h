/* Files of /proc and /sys. Any may be missing; on phones many are. */
#ifndef FILES_H
#define FILES_H

#include <dirent.h>
#include <math.h>
#include <stddef.h>

#define UNREADABLE (-HUGE_VAL)

/* EDGE_SENSORS names a folder in place of / for /sys and the device tree, as for edge itself. */
/* Reads the beginning; returns its length without trailing blanks. */
size_t read_text(char *text, size_t size, const char *format, ...);
double read_number(const char *format, ...);                        /* UNREADABLE if there is none */
DIR *open_folder(const char *path);                                 /* NULL if there is none */

#endif
