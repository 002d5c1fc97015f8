"""Tools as text, in the form of Hermes and Qwen, for chat templates that lack tools, or drop calls or results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

CALL, CALL_END = "<tool_call>\n", "\n</tool_call>"
RESULT, RESULT_END = "<tool_response>\n", "\n</tool_response>"
TOOLS = "You may call functions to answer the user. These are their signatures, in JSON:\n<tools>\n"
TOOLS_END = (
    "\n</tools>\n\nTo call one, write a JSON object with its name and arguments within these tags:\n"
    '<tool_call>\n{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>'
)


def describe(tools: Iterable[Mapping[str, Any]]) -> str:
    """The tools' signatures as JSON, one a line."""
    return "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)


def write_call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
