#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name; double factor; } unit;
typedef struct { const char *what, *example; const unit *units; } quantity; /* units: up to one without a name */
typedef enum { NUMBER, WHOLE, SEED, AMOUNT, CHOICE } kind;
typedef struct {
    const char *name;
    kind kind;
    size_t place; /* in edge_options */
    double low, high;
    const char *range; /* in words; of a choice: the words, in the order of their numbers */
    const quantity *amount;
    const char *help;
} flag;

#include "flags.h"
#include "reasons.h"

enum { SHORT = 40, LARGEST_BARE = 1 << 16 }; /* bytes of a value in messages; fewer bytes are meant in MiB */

void fail(int code, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    for (char *each = line; *each; each++)
        if ((unsigned char)*each < ' ')
            *each = ' ';
    fprintf(stderr, "edge-mini: %s\n", line);
    exit(code);
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static bool is_whole(const char *text)
{
    text += *text == '-';
    size_t digits = strspn(text, "0123456789");
    return digits && !text[digits] && digits <= 20;
}

static double factor_of(const unit *units, const char *name, size_t length) /* 0: there is no such unit */
{
    for (; units->name; units++)
        if (strlen(units->name) == length && !strncmp(units->name, name, length))
            return units->factor;
    return 0;
}

/* `edge/budget.py`: a number and its unit. */
static double amount_of(const char *text, const quantity *of)
{
    char number[64], name[16] = "";
    const char *at = text + strspn(text, " ");
    size_t whole = strspn(at, "0123456789"), dot = at[whole] == '.';
    size_t part = dot ? strspn(at + whole + 1, "0123456789") : 0;
    size_t length = whole + dot + part;
    const char *word = at + length + strspn(at + length, " ");
    size_t letters = 0;
    while (isalpha((unsigned char)word[letters]) || (unsigned char)word[letters] > 127) /* °C */
        letters++;
    bool understood = whole + part && length < sizeof number && letters < sizeof name;
    understood = understood && !word[letters + strspn(word + letters, " ")];
    double factor = understood ? factor_of(of->units, word, letters) : 0;
    if (understood && !factor) {
        for (size_t i = 0; i < letters; i++)
            name[i] = (char)tolower((unsigned char)word[i]);
        factor = factor_of(of->units, name, letters);
    }
    if (understood && !letters && !factor)
        fail(WRONG, "%s %.*s has no unit: write it like %s", of->what, (int)length, at, of->example);
    if (!factor)
        fail(WRONG, "%s '%.*s' is not understood: write it like %s", of->what, SHORT, text, of->example);
    snprintf(number, sizeof number, "%.*s", (int)length, at);
    double amount = strtod(number, NULL) * factor;
    if (amount <= 0)
        fail(WRONG, "%s '%.*s' must be greater than zero", of->what, SHORT, text);
    if (!letters && amount < LARGEST_BARE)
        fail(WRONG, "%s %.0f is a number of bytes: did you mean %.0fMiB?", of->what, amount, amount);
    return amount;
}

static double number_of(const flag *of, const char *text)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end)
        fail(WRONG, "%s must be a number, not '%.*s'", of->name, SHORT, text);
    if (of->kind != NUMBER && !is_whole(text))
        fail(WRONG, "%s must be a whole number, not '%.*s'", of->name, SHORT, text);
    if (!(number >= of->low && number <= of->high)) /* NaN is never within bounds */
        fail(WRONG, "%s must be %s, not %.*s", of->name, of->range, SHORT, text);
    return number;
}

static uint32_t choice_of(const flag *of, const char *text)
{
    uint32_t number = 0;
    for (const char *word = of->range, *end; word; word = end ? end + strlen(" or ") : NULL, number++) {
        end = strchr(word, ' ');
        if (strlen(text) == strcspn(word, " ") && !strncmp(word, text, strlen(text)))
            return number;
    }
    fail(WRONG, "%s must be %s, not '%.*s'", of->name, of->range, SHORT, text);
}

static uint32_t tokens_of(const char *text)
{
    double number = is_whole(text) ? strtod(text, NULL) : 0;
    if (number == -1)
        return 0; /* no limit */
    if (number < 1 || number > UINT32_MAX)
        fail(WRONG, "--max-tokens must be a whole number, at least 1, or -1 for no limit, not %.*s", SHORT, text);
    return (uint32_t)number;
}

static void set(edge_options *options, const flag *of, const char *text)
{
    void *place = (char *)options + of->place;
    if (of->kind == AMOUNT)
        *(double *)place = amount_of(text, of->amount);
    else if (of->kind == CHOICE)
        *(uint32_t *)place = choice_of(of, text);
    else if (of->kind == NUMBER)
        *(double *)place = number_of(of, text);
    else if (of->kind == WHOLE)
        *(int32_t *)place = (int32_t)number_of(of, text);
    else {
        number_of(of, text);
        errno = 0;
        options->seeded = 1;
        options->seed = strtoull(text, NULL, 10);
        if (errno)
            fail(WRONG, "%s must be %s, not %.*s", of->name, of->range, SHORT, text);
    }
}

/* ---- the command line -------------------------------------------------------------------------------------------- */

static void help(void)
{
    puts("edge-mini run MODEL [PROMPT] [OPTIONS]   answers one prompt, which is read from stdin if there is none\n"
         "edge-mini chat MODEL [OPTIONS]           answers each line of stdin\n\n"
         "MODEL is the model.edge that was exported with this program. Options are those of edge run:\n\n"
         "  -p, --prompt           The prompt; text from stdin goes before it if - is given, too.\n"
         "  -n, --max-tokens       Tokens to generate; -1 has no limit (default: 512).\n"
         "  --system               System prompt.\n"
         "  --raw                  Continue the prompt as it is, without a chat template.\n"
         "  --stop                 Stop before this text; may be repeated.\n"
         "  --ignore-eos           Never end the turn; go on.\n"
         "  --json                 Print JSON to stdout.\n"
         "  -q, --quiet            No report on stderr.");
    printf("  %-22s %s\n", "--memory", MEMORY_HELP);
    for (const flag *each = FLAGS; each->name; each++)
        printf("  %-22s %s\n", each->name, each->help);
    exit(0);
}

static bool is_switch(request *asked, const char *word)
{
    const struct { const char *name; bool *place; } known[] = {
        {"--json", &asked->json}, {"--raw", &asked->raw}, {"-q", &asked->quiet}, {"--quiet", &asked->quiet},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(word, known[i].name))
            return *known[i].place = true;
    return !strcmp(word, "--ignore-eos") && (asked->options.ignore_eos = 1);
}

static void take_prompt(request *asked, const char *text)
{
    if (asked->prompt || asked->chat)
        fail(WRONG, asked->chat ? "edge-mini chat takes no prompt: its turns are the lines of stdin"
                                : "give the prompt once: with -p, or after MODEL");
    asked->prompt = text;
}

/* Takes an option with a value; false: there is none of this name. */
static bool take(request *asked, const char *name, const char *value)
{
    static const char *const own[] = {"-p", "--prompt", "-n", "--max-tokens", "--system", "--stop", "--memory", NULL};
    const flag *found = FLAGS;
    const char *const *other = own;
    while (found->name && strcmp(found->name, name))
        found++;
    while (*other && strcmp(*other, name))
        other++;
    if (!found->name && !*other)
        return false;
    if (!value)
        fail(WRONG, "%s needs a value: edge-mini --help", name);
    if (found->name)
        set(&asked->options, found, value);
    else if (other < own + 2)
        take_prompt(asked, value);
    else if (other < own + 4)
        asked->options.max_tokens = tokens_of(value);
    else if (other == own + 4)
        asked->system = value;
    else if (other == own + 6)
        asked->memory = floor(amount_of(value, &MEMORY));
    else if (asked->options.stop_count == MOST_STOPS)
        fail(WRONG, "there may be %d --stop at most", MOST_STOPS);
    else
        asked->stops[asked->options.stop_count++] = value;
    return true;
}

request read_command(int count, char **words)
{
    request asked = {.options = EDGE_OPTIONS};
    char name[32];
    for (int i = 1; i < count; i++)
        if (!strcmp(words[i], "--help") || !strcmp(words[i], "-h"))
            help();
    if (count < 2 || (strcmp(words[1], "run") && strcmp(words[1], "chat")))
        fail(WRONG, "begin with run or chat: edge-mini --help");
    asked.chat = !strcmp(words[1], "chat");
    asked.options.max_tokens = 512;
    for (int i = 2; i < count; i++) {
        const char *word = words[i], *equals = strncmp(word, "--", 2) ? NULL : strchr(word, '=');
        if (!strcmp(word, "-"))
            asked.from_stdin = true;
        else if (*word != '-' && !asked.model)
            asked.model = word;
        else if (*word != '-')
            take_prompt(&asked, word);
        else if (!is_switch(&asked, word)) {
            snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - word) : (int)sizeof name, word);
            if (!take(&asked, name, equals ? equals + 1 : i + 1 < count ? words[i + 1] : NULL))
                fail(WRONG, "No such option: %.*s (see edge-mini --help)", SHORT, name);
            i += !equals;
        }
    }
    if (!asked.model)
        fail(WRONG, "no model: give the model.edge that was exported with this program");
    return asked;
}
