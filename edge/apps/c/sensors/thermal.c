#define _GNU_SOURCE
#include "thermal.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "files.h"

enum { MOST_ZONES = 128, MOST_MONITORS = 32, MOST_TRIPS = 16 };

static bool of_processor(const char *name)
{
    static const char *const known[] = {"cpu", "x86_pkg", "soc", "package", "tdie", "coretemp", "k10temp", "acpitz"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strncasecmp(name, known[i], strlen(known[i])))
            return true;
    return false;
}

double thermal_read(const thermometer *from)
{
    double celsius = *from->path ? read_number("%s", from->path) / 1000 : UNREADABLE;
    return celsius > -40 && celsius < 150 ? celsius : UNREADABLE;
}

static double passive_trip(int zone)
{
    double trip = 0;
    for (int i = 0; i < MOST_TRIPS; i++) {
        char path[128], type[32];
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/trip_point_%d", zone, i);
        if (!read_text(type, sizeof type, "%s_type", path) || strcmp(type, "passive"))
            continue;
        double celsius = read_number("%s_temp", path) / 1000;
        if (celsius > 0 && celsius < 150 && (!trip || celsius < trip))
            trip = celsius;
    }
    return trip;
}

bool thermal_find(thermometer *found) /* that of the processor, or else the first that can be read */
{
    *found = (thermometer){.trip = 0};
    for (int i = 0; i < MOST_ZONES + MOST_MONITORS; i++) {
        thermometer each = {.trip = 0};
        bool zone = i < MOST_ZONES;
        int number = zone ? i : i - MOST_ZONES;
        const char *folder = zone ? "thermal/thermal_zone" : "hwmon/hwmon";
        snprintf(each.path, sizeof each.path, "/sys/class/%s%d/%s", folder, number, zone ? "temp" : "temp1_input");
        read_text(each.name, sizeof each.name, "/sys/class/%s%d/%s", folder, number, zone ? "type" : "name");
        bool own = of_processor(each.name);
        if ((!own && (*found->path || !zone)) || thermal_read(&each) == UNREADABLE)
            continue;
        each.trip = zone ? passive_trip(number) : 0;
        *found = each;
        if (own)
            break;
    }
    return *found->path;
}
