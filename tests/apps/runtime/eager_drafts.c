/* drafts.c for tests: whenever the text has been the same before, as many tokens are drafted as may be, whatever a pass
 * takes, and however few were right. */
#include "drafts.h"

#define LEAST_GAIN 0.0
#define CAUTION 0.0
#define FIRST_COST 1.0
#define FIRST_COST_EACH 0.0
#define drafts_time not_called
void not_called(drafts *d, uint32_t tokens, uint32_t behind, double seconds);
#include "drafts.c"
#undef drafts_time

void drafts_time(drafts *d, uint32_t tokens, uint32_t behind, double seconds)
{
    (void)d, (void)tokens, (void)behind, (void)seconds;
}
