/* Reports of answers, as `edge run` prints them. */
#ifndef REPORT_H
#define REPORT_H

#include "edge.h"

typedef struct {
    uint32_t prompt, generated;            /* tokens */
    double began, first, last, ended;      /* seconds of a clock; first, last: tokens of the answer */
    double load;                           /* seconds */
    edge_finish finish;
} outcome;

void print_line(const outcome *of, const edge_usage *use, const edge_options *limits, double memory);
/* With the answer, in the form of `edge run --json`. sensor: of joules; NULL: they are estimated. */
void print_json(const outcome *of, const edge_usage *use, const edge_options *limits, double memory, const char *sensor,
                const edge_model_info *info, const char *text, size_t length);

#endif
