"""Conversations of programs under templates that refuse them: repaired where Jinja2 refuses or drops text, and nowhere
else."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from conversation_shapes import SHAPES, Messages, conversation
from strict_templates import FAMILIES, source_of, template_of
from test_chat import joined
from test_messages import oracle
from tool_templates import TIME

from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.messages import parse_messages

LOOK = {"type": "function", "function": {"name": "look", "description": "Look around", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}  # fmt: skip
TOOLS = [LOOK, TIME]


def text_of(template: ChatTemplate, messages: Messages, tools: Any = None) -> str:
    return joined(template.conversation(messages, tools)[0])


def jinja2(family: str, messages: Messages, tools: Any = None) -> str | None:
    """Jinja2's text; None if the template refuses the messages, or drops a text, a call or a result."""
    try:
        text = oracle(source_of(FAMILIES[family]), messages, tools)
    except Exception:
        return None
    names = [each["function"]["name"] for message in messages for each in message.get("tool_calls", ())]
    whole = all(text.count(word) == 1 for word in words_of(messages)) and all(f" {name} " in text for name in names)
    return text if whole and ("<tools>" in text) == bool(tools) else None


def words_of(messages: Messages) -> list[str]:
    return re.findall(r"word\d+\.", str(messages))


def common(family: str, messages: Messages) -> Messages:
    """The messages with one system prompt at the beginning, in the role that the family knows, and an identifier of its
    own for each call."""
    systems = ("system", "developer")
    count = next((at for at, each in enumerate(messages) if each["role"] not in systems), len(messages))
    first = [{**messages[0], "content": "\n\n".join(each["content"] for each in messages[:count])}] if count else []
    roles = {} if FAMILIES[family].developer else {"developer": "system"}
    said = [{**each, "role": roles.get(each["role"], each["role"])} for each in [*first, *messages[count:]]]
    found, latest = Messages(), dict[str, str]()
    for message in copy.deepcopy(said):
        for call in message.get("tool_calls", ()):
            own = call["id"] + "_1" * (call["id"] in latest)
            latest[call["id"]] = call["id"] = own
        if message["role"] == "tool":
            message["tool_call_id"] = latest.get(message["tool_call_id"], message["tool_call_id"])
        found.append(message)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_is_written_and_minimally_repaired(family: str) -> None:
    in_order = FAMILIES[family].calls in ("all", "drop")  # others have each result behind its call
    template = template_of(family)
    for number, (name, shape) in enumerate(SHAPES.items(), start=list(FAMILIES).index(family)):
        messages = conversation(shape)
        tools = TOOLS if number % 2 else None  # each shape with tools in every other family
        text = text_of(template, messages, tools)
        if FAMILIES[family].tools or "r" not in shape:  # without tools, results are the user's
            assert jinja2(family, common(family, messages), tools) in (None, text), name
        found, words = words_of([{"": text}]), words_of(messages)
        assert found == words if in_order else sorted(found) == sorted(words), (name, text)
        assert not tools or '"look"' in text


@pytest.mark.parametrize(
    ("family", "shape", "expected"),
    [
        ("qwen35", "s u a s u", [("system", "0"), ("user", "1"), ("assistant", "2"), ("user", "3 4")]),
        ("qwen35", "s u s a u", [("system", "0"), ("user", "1 2"), ("assistant", "3"), ("user", "4")]),
        ("smollm3", "s u a s", [("system", "0"), ("user", "1"), ("assistant", "2"), ("user", "3")]),
        ("qwen35", "s", [("user", "0")]),
        ("gemma2", "s u a u", [("user", "0 1"), ("assistant", "2"), ("user", "3")]),
        ("gemma3", "s u u a a u", [("system", "0"), ("user", "1 2"), ("assistant", "3 4"), ("user", "5")]),
        ("gemma2", "d u s a u", [("user", "0 1 2"), ("assistant", "3"), ("user", "4")]),
        ("vicuna", "s u a s u", [("user", "0 1"), ("assistant", "2"), ("user", "3 4")]),
    ],
)  # fmt: skip
def test_roles_are_repaired_in_place(family: str, shape: str, expected: list[tuple[str, str]]) -> None:
    repaired = [
        {"role": role, "content": "\n\n".join(f"word{number}." for number in numbers.split())}
        for role, numbers in expected
    ]
    assert text_of(template_of(family), conversation(shape)) == jinja2(family, repaired)


@pytest.mark.parametrize(("shape", "expected"), [
    ("u c:a=0,b=1 r:0 r:1 a u c:c=0,d=1 r:0 r:1", "abcd"),
    ("u c:a=0,b=1 r:1 r:0 a u c:c=0 r:0 c:d=0 r:0", "abcd"),  # in the order of the calls
    ("u c:a=0,b=0 r:0 r:0 a u c:c=0 c:d=0 r:0 r:0", "abcd"), ("u c:a=,b= r: r:", "ab"),
    ("u c:a=,b= r:@b r:@a", "ab"),  # by name
    ("u c:a=0 u c:b=0 r:0", "b"), ("u c:a=0,b=1 r:0 u r:1", "ab"), ("u r:7 c:a=0 r:0", "?a"), ("u c:a=0 r:0 r:0", "aa"),
    ("u c:a=0 r:0 r:", "a?"),
])  # fmt: skip
def test_results_belong_to_nearest_open_call(shape: str, expected: str) -> None:
    messages = conversation(shape)
    for message in messages:
        if message["role"] == "tool":
            _, _, name = message["tool_call_id"].removeprefix("identity").partition("@")
            message |= {"tool_call_id": None, "name": name} if name else {}
        for each in [message, *message.get("tool_calls", ())]:
            each |= {key: None for key in ("id", "tool_call_id") if each.get(key) == "identity"}
    parsed = parse_messages(messages)
    ids = {call.id: call.name for each in parsed for call in each.calls}
    assert len(ids) == sum(len(each.calls) for each in parsed)
    results = [each for each in parsed if each.role == "tool"]
    assert "".join(ids.get(each.call_id or "", "?") for each in results) == expected
    assert all(each.name == ids[each.call_id] for each in results if each.call_id in ids)
