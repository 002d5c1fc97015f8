/* A chat in a terminal: see README.md for how to build it.
 *
 *     chat [MODEL] [-p PROMPT] [-n TOKENS] [-s SYSTEM]
 *
 * MODEL is model.edge beside the program, unless it is named. With -p: answers this, and ends. A line of your own is a
 * turn; an empty one, or Ctrl-D, ends the chat. Ctrl-C ends an answer.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
#include <shellapi.h>
#endif

#include "edge.h"

static edge_session *session;
static edge_role role = EDGE_USER;
static edge_error error = {.size = sizeof(edge_error)};

static void check(edge_status status)
{
    if (status < 0) {
        fprintf(stderr, "chat: %s\n", error.message);
        exit(1);
    }
}

static void misused(void)
{
    fputs("usage: chat [MODEL] [-p PROMPT] [-n TOKENS] [-s SYSTEM]\n", stderr);
    exit(2);
}

static uint32_t number_of(const char *word) /* from 1 to UINT32_MAX */
{
    char *end;
    unsigned long long number = strtoull(word, &end, 10); /* takes signs and spaces, too; ULLONG_MAX: too large */
    if (*word < '0' || *word > '9' || *end || !number || number > UINT32_MAX)
        misused();
    return (uint32_t)number;
}

static void on_interrupt(int number)
{
    (void)number;
    edge_cancel(session); /* the only function that may be called while another one runs */
}

static void answer(const char *text, size_t length)
{
    check(edge_append(session, role, text, length, &error));
    edge_piece piece = {.size = sizeof piece};
    while (!piece.finish) {
        check(edge_next(session, &piece, &error));
        fwrite(piece.text, 1, piece.length, stdout);
        fflush(stdout);
    }
    putchar('\n');
}

static void talk(void)
{
    static char line[1 << 16];
    while (fputs("> ", stdout), fflush(stdout), fgets(line, sizeof line, stdin)) {
        size_t length = strcspn(line, "\n");
        if (!length)
            break;
        answer(line, length);
        edge_usage use = {.size = sizeof use};
        check(edge_use(session, &use, &error));
        fprintf(stderr, "[%u of %u rows, %.1f s]\n", use.rows, use.capacity, use.seconds);
    }
}

static const char *beside(const char *program) /* the path of model.edge */
{
    static char path[4096];
    const char *end = strrchr(program, '/');
#ifdef _WIN32
    end = strrchr(program, '\\') > end ? strrchr(program, '\\') : end;
#endif
    snprintf(path, sizeof path, "%.*smodel.edge", end ? (int)(end - program + 1) : 0, program);
    return path;
}

#ifdef _WIN32
static char **in_utf8(int *count) /* the words of the command line, which main has in some other encoding */
{
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), count);
    char **words = calloc((size_t)*count + 1, sizeof *words);
    for (int i = 0; words && i < *count; i++) {
        int size = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        words[i] = malloc((size_t)size);
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, words[i], size, NULL, NULL);
    }
    SetConsoleCP(CP_UTF8);
    SetConsoleOutputCP(CP_UTF8);
    return words;
}
#endif

int main(int count, char **words)
{
#ifdef _WIN32
    words = in_utf8(&count);
#endif
    edge_source source = {.size = sizeof source, .path = beside(words[0]), .fd = -1};
    edge_options options = EDGE_OPTIONS;
    const char *prompt = NULL, *system = NULL;
    for (int i = 1; i < count; i++) {
        if (words[i][0] != '-') {
            source.path = words[i];
            continue;
        }
        const char *option = words[i], *next = ++i < count ? words[i] : NULL;
        if (next && !strcmp(option, "-p"))
            prompt = next;
        else if (next && !strcmp(option, "-s"))
            system = next;
        else if (next && !strcmp(option, "-n"))
            options.max_tokens = number_of(next);
        else
            misused();
    }
    edge_model *model;
    check(edge_open(&source, &model, &error));
    edge_model_info info = {.size = sizeof info};
    check(edge_info(model, &info, &error));
    if (!info.chat)
        role = EDGE_RAW; /* no chat template: the model continues a text */
    check(edge_begin(model, &options, &session, &error));
    if (system)
        check(edge_append(session, EDGE_SYSTEM, system, strlen(system), &error));
    signal(SIGINT, on_interrupt);
    if (prompt)
        answer(prompt, strlen(prompt));
    else
        talk();
    edge_end(session);
    check(edge_close(model, &error));
    if (fflush(stdout) || ferror(stdout))
        return fputs("chat: stdout cannot be written\n", stderr), 1;
    return 0;
}
