/* Reads a moment in seconds from each line, takes a reading then, and prints what the kit would say of its joules. */
#include <stdio.h>

#include "energy.h"

int main(void)
{
    double at;
    energy_reading first = {0}, before, reading = {0};
    for (int line = 0; scanf("%lf", &at) == 1; line++) {
        if (!line) {
            energy_begin(at);
            first = energy_read(at);
        }
        before = line ? reading : first;
        reading = energy_read(at);
        printf("%s %.9g %.9g %.9g\n", energy_source() ? energy_source() : "none", energy_between(&before, &reading),
               energy_between(&first, &reading), energy_battery_watts());
        fflush(stdout);
    }
    return 0;
}
