"""Items of OpenAI's responses as messages of a chat. Items that no function call or message can say become a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edge.model.chat.parts import newest
from edge.server.prompts import content_of, said_by, text_of
from edge.server.protocols.offered import Offered
from edge.server.refusal import RefusedError

Messages = list[dict[str, Any]]

_ROLES = ("system", "developer", "user", "assistant")
_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "computer_call": "action",
    "mcp_call": "arguments",
}  # by kind: the field of the arguments
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "computer_call_output")


def messages_of(items: Sequence[dict[str, Any]], offered: Offered) -> Messages:
    """The messages of a conversation. Raises RefusedError for malformed items, and for what the user asks now in
    anything but text."""
    roles = [_role_of(each) for each in items]
    question, found, thoughts = newest(roles), Messages(), ""
    for number, (item, role) in enumerate(zip(items, roles, strict=True)):
        said: dict[str, Any]
        where, kind = f"input[{number}]", _kind_of(item)
        if kind == "reasoning":
            thoughts = text_of(item.get("content"), f"{where}.content")
            continue
        if kind == "message":
            if role not in _ROLES:
                raise RefusedError(400, f"{where}.role is {role[:40]!r}", param=where, code="invalid_value")
            content = said_by(role, item.get("content"), f"{where}.content", strict=number == question)
            said = {"role": "system" if role == "developer" else role, "content": content}
        elif kind in _CALLS:
            said = {"role": role, "content": "", "tool_calls": [_call(item, kind, offered)]}
        elif kind in _RESULTS:
            content = content_of(_listed(item.get("output")), f"{where}.output")
            said = {"role": role, "tool_call_id": item.get("call_id"), "content": content}
        else:
            said = {"role": role, "content": _line(item)}
        last = found[-1] if found else {}
        if role == "assistant" and thoughts:
            said["reasoning_content"] = thoughts
        elif "tool_calls" in said and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *said["tool_calls"]]
            continue
        thoughts = ""
        found.append(said)
        if kind == "mcp_call" and item.get("output"):  # its result is a part of it
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": str(item["output"])})
    return found


def _kind_of(item: dict[str, Any]) -> str:
    return str(item.get("type") or "message")


def _role_of(item: dict[str, Any]) -> str:
    kind = _kind_of(item)
    if kind == "message":
        return str(item.get("role"))
    if kind in _RESULTS:
        return "tool"
    return "assistant" if kind.endswith("_call") or kind == "reasoning" else "system"


def _call(item: dict[str, Any], kind: str, offered: Offered) -> dict[str, Any]:
    name = offered.seen(item.get("name"), item.get("namespace")) or kind.removesuffix("_call")
    given = item.get(_CALLS[kind])
    if kind == "custom_tool_call":
        given = {"input": given}
    arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    function = {"name": name, "arguments": arguments or "{}"}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _listed(output: Any) -> Any:
    return [output] if isinstance(output, dict) else output


def _line(item: dict[str, Any]) -> str:
    """What stood in the place of an item: its text, or its kind and a few words."""
    for name in ("text", "summary", "content"):
        if isinstance(item.get(name), str) and item[name]:
            return str(item[name])
    action = item.get("action")
    query = action.get("query") if isinstance(action, dict) else item.get("query")
    kind = str(item.get("type"))[:40]
    return f"[{kind}: {query[:200]}]" if isinstance(query, str) else f"[{kind} left out]"
