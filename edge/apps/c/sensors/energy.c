/* The sensor of joules, as devices/power chooses and reads it: the input rail, which feeds the whole board, the
 * Raspberry Pi 5's power controller, counters of processor packages, the battery. */
#define _GNU_SOURCE
#include "energy.h"

#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"

enum { MOST_PARTS = 32, MOST_RAILS = 64 };
#define HWMON "/sys/class/hwmon"
#define POWERCAP "/sys/class/powercap"
#define SUPPLIES "/sys/class/power_supply"

typedef struct { char path[320], channel[8]; double range, last; } part; /* a rail, a package or a battery */
static part parts[MOST_PARTS];
static uint32_t count;
static const char *name;
static double (*read_watts)(void);
static energy_reading total;
static double watts = -1, at;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Calls `take` for each entry of a folder. */
static void for_each(const char *folder, void (*take)(const char *path, const char *entry))
{
    DIR *open = open_folder(folder);
    char path[320];
    for (struct dirent *entry; open && (entry = readdir(open));)
        if (*entry->d_name != '.' && snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) < (int)sizeof path)
            take(path, entry->d_name);
    if (open)
        closedir(open);
}

static void add(const char *path, const char *channel, double range)
{
    if (count == MOST_PARTS)
        return;
    part *own = parts + count++;
    *own = (part){.range = range};
    snprintf(own->path, sizeof own->path, "%s", path);
    snprintf(own->channel, sizeof own->channel, "%s", channel);
}

/* ---- rails: INA3221, INA226, INA219 ------------------------------------------------------------------------------ */

static bool is_one_of(const char *text, const char *const *known)
{
    while (*known && strcmp(text, *known))
        known++;
    return *known;
}

static void add_rails(const char *path, const char *entry)
{
    static const char *const inputs[] = {"VDD_IN", "VIN_SYS_5V0", "POM_5V_IN", NULL}; /* which feed all others */
    char text[32];
    (void)entry;
    if (!read_text(text, sizeof text, "%s/name", path) || strcmp(text, "ina3221"))
        return;
    for (int channel = 0; channel < 16; channel++) {
        char label[32], number[8];
        if (!read_text(label, sizeof label, "%s/in%d_label", path, channel) || !is_one_of(label, inputs))
            continue;
        snprintf(number, sizeof number, "%d", channel);
        add(path, number, 0);
    }
}

static double rails_watts(void)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        double volts = read_number("%s/in%s_input", parts[i].path, parts[i].channel);
        double amperes = read_number("%s/curr%s_input", parts[i].path, parts[i].channel);
        if (volts == UNREADABLE || amperes == UNREADABLE)
            return -1;
        sum += volts * 1e-3 * amperes * 1e-3;
    }
    return sum;
}

static void add_monitor(const char *path, const char *entry)
{
    static const char *const known[] = {"ina226", "ina219", "ina231", NULL};
    char text[32];
    (void)entry;
    if (read_text(text, sizeof text, "%s/name", path) && is_one_of(text, known))
        add(path, "", 0);
}

static double monitor_watts(void)
{
    double micro = read_number("%s/power1_input", parts[0].path);
    return count != 1 || micro == UNREADABLE ? -1 : micro * 1e-6; /* of several rails, the input is unknown */
}

/* ---- the Raspberry Pi 5's power controller ----------------------------------------------------------------------- */

/* Lines such as `3V3_SYS_A current(1)=0.05A` and `3V3_SYS_V volt(9)=3.31V`: for rails with both, the products. */
static double pmic_watts(void)
{
    static struct { char name[64]; double values[2]; bool known[2]; } rails[MOST_RAILS];
    char line[256];
    uint32_t found = 0;
    double sum = -1;
    FILE *pipe = popen("vcgencmd pmic_read_adc </dev/null 2>/dev/null", "r");
    while (pipe && fgets(line, sizeof line, pipe)) {
        char rail[64], unit;
        double value;
        if (sscanf(line, " %63[A-Za-z0-9_] %*[a-z](%*d)=%lf%c", rail, &value, &unit) != 3)
            continue;
        size_t length = strlen(rail);
        if (length < 3 || rail[length - 2] != '_' || rail[length - 1] != unit || (unit != 'A' && unit != 'V'))
            continue;
        rail[length - 2] = 0;
        uint32_t i = 0;
        while (i < found && strcmp(rails[i].name, rail))
            i++;
        if (i == MOST_RAILS)
            continue;
        if (i == found) {
            memset(&rails[i], 0, sizeof *rails);
            strcpy(rails[found++].name, rail);
        }
        rails[i].values[unit == 'V'] = value, rails[i].known[unit == 'V'] = true;
    }
    bool ended = pipe && !pclose(pipe);
    for (uint32_t i = 0; ended && i < found; i++)
        if (rails[i].known[0] && rails[i].known[1])
            sum = (sum < 0 ? 0 : sum) + rails[i].values[0] * rails[i].values[1];
    return sum;
}

/* ---- counters of processor packages ------------------------------------------------------------------------------ */

static void add_package(const char *path, const char *entry)
{
    const char *colon = strchr(entry, ':');
    if (!strncmp(entry, "intel-rapl:", 11) && !strchr(colon + 1, ':')) /* entries below a package are parts of it */
        add(path, "", read_number("%s/max_energy_range_uj", path));
}

/* Joules since the previous call; -1: a counter cannot be read. Counters wrap around at their range. */
static double counted(void)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        double now = read_number("%s/energy_uj", parts[i].path);
        if (now == UNREADABLE || parts[i].range == UNREADABLE)
            return -1;
        sum += now - parts[i].last + (now < parts[i].last ? parts[i].range + 1 : 0);
        parts[i].last = now;
    }
    return sum * 1e-6;
}

/* ---- batteries --------------------------------------------------------------------------------------------------- */

static void add_battery(const char *path, const char *entry)
{
    char type[32], scope[32];
    (void)entry;
    read_text(scope, sizeof scope, "%s/scope", path);
    if (read_text(type, sizeof type, "%s/type", path) && !strcmp(type, "Battery") && strcmp(scope, "Device"))
        add(path, "", 0); /* not the battery of a mouse */
}

/* Watts; -1 while a battery charges or is full, when its current is not the device's. */
static double battery_watts(void)
{
    static const char *const plugged[] = {"Charging", "Full", "Not charging", NULL};
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        char status[32];
        if (read_text(status, sizeof status, "%s/status", parts[i].path) && is_one_of(status, plugged))
            return -1;
        double micro = read_number("%s/power_now", parts[i].path), volts = read_number("%s/voltage_now", parts[i].path);
        double amperes = read_number("%s/current_now", parts[i].path); /* negative on some devices */
        if (micro == UNREADABLE && (volts == UNREADABLE || amperes == UNREADABLE))
            return -1;
        if (micro == UNREADABLE)
            micro = volts * amperes * 1e-6;
        sum += (micro < 0 ? -micro : micro) * 1e-6;
    }
    return sum;
}

/* ---- joules ------------------------------------------------------------------------------------------------------ */

/* Whether a sensor of watts has parts that can be read now. */
static bool found(const char *called, double (*read)(void))
{
    if ((count || read == pmic_watts) && (watts = read()) >= 0)
        name = called, read_watts = read;
    else
        count = 0;
    return name;
}

static void find_sensor(void)
{
    char model[128];
    for_each(HWMON, add_rails);
    if (found("INA3221", rails_watts))
        return;
    for_each(HWMON, add_monitor);
    if (found("INA226", monitor_watts))
        return;
    read_text(model, sizeof model, "/proc/device-tree/model");
    if (strstr(model, "Raspberry Pi 5") && found("Pi 5 PMIC", pmic_watts))
        return;
    for_each(POWERCAP, add_package);
    if (count && counted() >= 0) {
        name = "RAPL";
        return;
    }
    count = 0;
    for_each(SUPPLIES, add_battery);
    if (count) /* the charger may be unplugged later */
        name = "battery", read_watts = battery_watts, watts = battery_watts();
}

void energy_begin(double now)
{
    count = 0, name = NULL, read_watts = NULL, watts = -1, at = now;
    total = (energy_reading){0, 0, 0};
    find_sensor();
}

energy_reading energy_read(double now)
{
    pthread_mutex_lock(&lock);
    double since = now > at ? now - at : 0, before = watts;
    double joules = name && !read_watts ? counted() : -1;
    watts = read_watts ? read_watts() : -1;
    if (before >= 0 && watts >= 0)
        joules = (before + watts) / 2 * since;
    if (joules >= 0)
        total.joules += joules, total.measured += since;
    else
        total.missed += since;
    at = now > at ? now : at;
    energy_reading reading = total;
    pthread_mutex_unlock(&lock);
    return reading;
}

double energy_between(const energy_reading *before, const energy_reading *after)
{
    return !name || after->missed > before->missed ? -1 : after->joules - before->joules;
}

const char *energy_source(void)
{
    return total.measured > 0 ? name : NULL;
}

double energy_battery_watts(void)
{
    pthread_mutex_lock(&lock);
    double now = read_watts == battery_watts ? watts : -1;
    pthread_mutex_unlock(&lock);
    return now;
}
