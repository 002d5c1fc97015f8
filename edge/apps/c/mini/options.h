/* The command line of edge-mini. Names, ranges, units and help are those of edge itself: mini.py writes flags.h. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>

#include "edge.h"

enum { MOST_STOPS = 16 };

typedef struct {
    bool chat, json, quiet, raw, from_stdin; /* from_stdin: its text goes before the prompt */
    const char *model, *prompt, *system;
    double memory; /* bytes; 0: not stated */
    edge_options options;
    const char *stops[MOST_STOPS];
} request;

request read_command(int count, char **words); /* or ends the program: with one line and WRONG, or with the help */
void fail(int code, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3))); /* one line */

#endif
