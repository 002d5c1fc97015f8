"""The functions among a request's tools, in the form of OpenAI's chats, and the tools that edge cannot offer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edge.errors import InputError
from edge.model.chat.messages import parse_tool
from edge.records import dataclass
from edge.values import brief

Tool = dict[str, Any]


@dataclass(frozen=True)
class Offered:
    """tools: what the model may call. left_out: the others, as the header Edge-Ignored names them. places: the name and
    the namespace, for functions of namespaces, by the name that the model sees."""

    tools: tuple[Tool, ...] = ()
    left_out: tuple[str, ...] = ()
    places: Mapping[str, dict[str, str]] | None = None

    def seen(self, name: Any, namespace: Any) -> Any:
        """The name that the model sees of a function in a namespace."""
        if not (self.places and isinstance(name, str) and isinstance(namespace, str)):
            return name
        names = (name, _within(namespace, name))
        return next((each for each in names if self.places.get(each, {}).get("namespace") == namespace), name)

    def place(self, seen: str) -> dict[str, str]:
        """The name of a function, and its namespace if it has one."""
        return (self.places or {}).get(seen, {"name": seen})


def of_chat(tools: Sequence[Tool] | None) -> Offered:
    """OpenAI's chats, and Ollama's. Raises InputError for a function that is none."""
    kept, left_out = list[Tool](), list[str]()
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "function") == "function":
            parse_tool(tool, f"tools[{number}]")
            kept.append(tool)
        else:
            left_out.append(_named(number, tool))
    return Offered(tuple(kept), tuple(left_out))


def of_responses(tools: Sequence[Tool] | None) -> Offered:
    """OpenAI's responses, where a namespace has functions inside. The model sees a function by its own name, unless
    another one has the same. Raises InputError for a function that is none."""
    found, left_out = list[tuple[Tool, str | None, str]](), list[str]()
    for number, tool in enumerate(tools or ()):
        kind, inner = tool.get("type"), tool.get("tools")
        if kind == "function":
            found.append((tool, None, f"tools[{number}]"))
        elif kind == "namespace" and isinstance(inner, list) and isinstance(tool.get("name"), str):
            for place, each in enumerate(inner):
                if isinstance(each, dict) and each.get("type") == "function" and isinstance(each.get("name"), str):
                    found.append((each, tool["name"], f"tools[{number}].tools[{place}]"))
                else:
                    left_out.append(f"tools[{number}].{_named(place, each)}")
        else:
            left_out.append(_named(number, tool))
    counts = Counter(tool.get("name") for tool, _, _ in found if isinstance(tool.get("name"), str))
    kept, places = list[Tool](), dict[str, dict[str, str]]()
    for tool, namespace, where in found:
        function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key)}
        parse_tool(function, where)
        if namespace is not None:
            seen = tool["name"] if counts[tool["name"]] == 1 else _within(namespace, tool["name"])
            places[seen] = {"name": tool["name"], "namespace": namespace}
            function["name"] = seen
        kept.append({"type": "function", "function": function})
    return Offered(tuple(kept), tuple(left_out), places)


def of_messages(tools: Sequence[Tool] | None) -> Offered:
    """Anthropic's messages, where tools of Anthropic's own have types of their own and no schema. Raises InputError for
    another tool that is no function."""
    kept, left_out = list[Tool](), list[str]()
    for number, tool in enumerate(tools or ()):
        where, kind, schema = f"tools[{number}]", tool.get("type"), tool.get("input_schema")
        if schema is None and isinstance(kind, str) and kind not in ("custom", "function"):
            left_out.append(_named(number, tool))
            continue
        for field in ("name", "input_schema"):
            if tool.get(field) is None:
                raise InputError(f"{where}.{field} is missing", f"{where}.{field}")
        if not isinstance(schema, dict):
            raise InputError(f"{where}.input_schema must be an object, not {brief(schema)}", f"{where}.input_schema")
        described = {"name": tool["name"], "description": tool.get("description") or ""}
        strict = {"strict": True} if tool.get("strict") is True else {}
        function = {**described, **strict, "parameters": schema or {"type": "object"}}
        parse_tool(function, where)
        kept.append({"type": "function", "function": function})
    return Offered(tuple(kept), tuple(left_out))


def _within(namespace: str, name: str) -> str:
    return f"{namespace}_{name}"


def _named(number: int, tool: Any) -> str:
    return f"tools[{number}] ({tool.get('type') if isinstance(tool, dict) else 'no object'})"
