/* Tools as an app states them: a JSON array in the form of OpenAI's protocol. */
#include <string.h>

#include "calls.h"
#include "json.h"

uint32_t tool_function(const json_tree *tree, uint32_t tool)
{
    const uint32_t own = json_named(tree, tool, "function");
    return own ? own : tool;
}

uint32_t tool_named(const tool_list *tools, const char *name, size_t length)
{
    const json_value *values = tools->tree->values;
    for (uint32_t tool = tools->first; tool; tool = values[tool].next) {
        const uint32_t function = tool_function(tools->tree, tool), own = json_named(tools->tree, function, "name");
        if (own && values[own].length == length && !memcmp(values[own].text, name, length))
            return function;
    }
    return 0;
}
