"""Shapes of conversations that programs send, with a word of its own in each text."""

from __future__ import annotations

from itertools import count
from typing import Any

Messages = list[dict[str, Any]]
_SHORT = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}

# By name: roles, of which calls are c with their names and identifiers (`c:look=1,time=2`), results r (`r:1`).
SHAPES = {
    "a question": "u", "a system prompt": "s u", "turns": "s u a u a u", "two system prompts first": "s s u",
    "a developer's prompt": "d u a u", "a system and a developer's prompt": "s d u a u",
    "a system message between turns": "s u a s u", "a system message behind a question": "u s a u",
    "a system message last": "s u a u s", "a developer's message between turns": "s u a d u",
    "a system message and no first one": "u a s u", "two questions": "s u u",
    "three questions and an answer": "u u u a u", "two answers": "s u a a u", "an answer first": "a u",
    "an answer behind the system prompt": "s a u a u", "a call": "s u c:look=1 r:1",
    "parallel calls": "s u c:look=1,time=2 r:1 r:2 a u", "calls in a row": "u c:look=1 c:time=2 r:1 r:2",
    "identifiers numbered anew": "u c:look=0,time=1 r:0 r:1 a u c:time=0,look=1 r:0 r:1",
    "a question behind a result": "s u c:look=1 r:1 u",
    "a system message behind a result": "s u c:look=1 r:1 s c:time=2 r:2", "a result without its call": "s u r:1 a u",
    "a call without its result": "u c:look=1 u a u", "a system prompt alone": "s",
}  # fmt: skip


def conversation(shape: str) -> Messages:
    """Messages of a shape; the texts are word0, word1 and so on."""
    numbers, found = count(), Messages()
    for part in shape.split():
        kind, _, rest = part.partition(":")
        text = f"word{next(numbers)}."
        if kind == "c":
            calls = [one.partition("=") for one in rest.split(",")]
            listed = [
                {"id": f"identity{number}", "type": "function",
                 "function": {"name": name, "arguments": f'{{"place": "word{next(numbers)}."}}'}}
                for name, _, number in calls
            ]  # fmt: skip
            found.append({"role": "assistant", "content": "", "tool_calls": listed})
        elif kind == "r":
            found.append({"role": "tool", "tool_call_id": f"identity{rest}", "content": text})
        else:
            found.append({"role": _SHORT[kind], "content": text})
    return found
