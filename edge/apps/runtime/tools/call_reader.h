/* A reader of text that may be calls. Functions return READ_OTHER where the text has another form, READ_MORE where it ends too
 * early to tell. */
#ifndef EDGE_CALL_READER_H
#define EDGE_CALL_READER_H

#include "calls.h"

typedef enum { READ_FINE, READ_OTHER, READ_MORE } reading_result;
enum { LONGEST_CALL_NAME = 128, DEEPEST_CALL = 64 }; /* characters; nested values */

typedef struct {
    const call_form *form;
    const tool_list *tools;
    const uint8_t *text;
    size_t at, count;
    bool ended, strict;  /* nothing follows the text; strings have no control characters */
    uint32_t begun;      /* calls that have begun in this text */
    uint32_t open;       /* function of the call that has begun and not ended; 0: none */
    size_t after;        /* the end of the last call */
    /* Complete calls and arguments. */
    found_call *found;   /* [MOST_CALLS] */
    char *arguments;     /* [MOST_ARGUMENTS] */
    uint32_t complete, used, start;
} call_reader;

#define TRY(step) do { reading_result result_ = (step); if (result_) return result_; } while (0)
enum { TEXT_ENDS = -1, TEXT_WAITS = -2 }; /* in place of a byte: nothing follows; more must come first */
int next_byte(const call_reader *in);
int behind_blanks(call_reader *in); /* skips blanks; the byte behind them */
#define NEXT(in, byte) do { if (((byte) = next_byte(in)) == TEXT_WAITS) return READ_MORE; } while (0)
#define SKIP_BLANKS(in, byte) do { if (((byte) = behind_blanks(in)) == TEXT_WAITS) return READ_MORE; } while (0)

static inline bool is_blank(int byte)
{
    return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n';
}

reading_result read_calls(call_reader *in, span mark); /* reads the calls behind a mark; mark.length 0: calls without one */

/* Of call_values.c. */
reading_result expect(call_reader *in, const char *text, size_t length);
reading_result give_json(call_reader *in, const char *text, size_t length); /* adds to the arguments of the call */
reading_result give_word(call_reader *in, const char *text);           /* which ends with \0 */
reading_result give_quoted(call_reader *in, const uint8_t *text, size_t length); /* as within quotation marks in JSON */
reading_result give_string(call_reader *in, const uint8_t *text, size_t length); /* with the marks */
/* Reads a name up to the character `mark`, and takes the mark, too. */
reading_result read_until(call_reader *in, char mark, const uint8_t **name, size_t *length);
/* Finds a mark and takes it; *length: bytes of the text before it. */
reading_result find_mark(call_reader *in, span mark, const uint8_t **text, size_t *length);
reading_result read_json(call_reader *in, bool kept, int depth);        /* a value, given if it is kept */
/* A string of at most LONGEST_CALL_NAME characters. out: room for 4 bytes of each, and \0. */
reading_result read_short(call_reader *in, char *out, size_t *length);
reading_result give_escape(call_reader *in, uint32_t code);             /* a character, as JSON escapes it */
bool is_json(const uint8_t *text, size_t length, uint8_t *first); /* *first: of its value */
size_t unescape(const uint8_t *json, size_t length, char *out);         /* the inside of a JSON string as text */

/* Of call_literals.c. */
reading_result read_fields(call_reader *in, char closing, char assign, int depth); /* keys and values of literals, as JSON */
void trim_text(const uint8_t **text, size_t *length);                   /* blanks at both ends, of Unicode */
/* Literals of Python and JSON as JSON; NULL: it is none. */
const char *literal_of(const uint8_t *text, size_t length);

#endif
