"""Conversations as a chat template can write them: tools, calls, results and roles that it lacks, in other words.

A repair changes only the messages that need it, in their places, so that the rows of the prompt before them stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge.model.chat.messages import Message
from edge.model.chat.parts import Segment, Text

SYSTEMS = ("system", "developer")
_BETWEEN = "\n\n"  # texts of messages that are joined
_BEGINS = "[The conversation begins.]"  # the user's message before one of the assistant, where the user must begin

Tools = list[dict[str, Any]]
Repair = Callable[[list[Message]], list[Message]]


def repaired(messages: list[Message], tools: Tools | None, lacks: set[str]) -> tuple[list[Message], Tools | None]:
    """Messages and tools for a template that lacks these things: names of `REPAIRS`, or "tools"."""
    for name, repair in REPAIRS.items():
        if name == "system" and tools and "tools" in lacks:
            messages, tools = spelled_tools(messages, tools), None
        if name in lacks:
            messages = repair(messages)
    return messages, tools


def spelled_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the tools described in the system prompt."""
    from edge.tools import common_form

    system = messages[0] if messages and messages[0].role in SYSTEMS else None
    said = [Segment(f"{system.content}{_BETWEEN}", trusted=False)] if system and system.content else []
    text = (
        *said,
        Segment(common_form.TOOLS, trusted=True),
        Segment(common_form.describe(tools), trusted=False, embedded=True),
        Segment(common_form.TOOLS_END, trusted=True),
    )
    return [Message(system.role if system else "system", text), *messages[1 if system else 0 :]]


def _responses_within(messages: list[Message]) -> list[Message]:
    """Move results of tools, and the answer that follows them, into the message with their calls."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last.calls and message.role == "tool":
            found[-1] = replace(last, responses=(*last.responses, message))
        elif (
            last is not None and last.responses and message.role == "assistant" and not (last.content or message.calls)
        ):
            found[-1] = replace(last, content=message.content)
        else:
            found.append(message)
    return found


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result."""
    found: list[Message] = []
    several = {call.id for each in messages if len(each.calls) > 1 for call in each.calls}
    for message in messages:
        if len(message.calls) < 2:
            found += [message] if message.role != "tool" or message.call_id not in several else []
            continue
        for number, call in enumerate(message.calls):
            found.append(replace(message, calls=(call,)) if number == 0 else Message("assistant", calls=(call,)))
            found += [each for each in messages if each.role == "tool" and each.call_id == call.id]
    return found


def _folded_systems(messages: list[Message]) -> list[Message]:
    """System messages behind others as a part of the user's message after or before them, or as one of the user's."""
    found: list[Message] = []
    before: Text = ""  # text for the user's next message
    for at, message in enumerate(messages):
        following = messages[at + 1].role if at + 1 < len(messages) else None
        if message.role in SYSTEMS and at:
            before = _both(before, message.content)
            if following == "user" or following in SYSTEMS:
                continue
            if found[-1].role == "user":
                found[-1] = replace(found[-1], content=_both(found[-1].content, before))
            else:
                found.append(Message("user", before))
        else:
            found.append(replace(message, content=_both(before, message.content)) if before else message)
        before = ""
    return found


def _texts_in_results(messages: list[Message]) -> list[Message]:
    """The user's text behind a tool's result as the end of the result."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == "tool" and message.role == "user":
            found[-1] = replace(found[-1], content=_both(found[-1].content, message.content))
        else:
            found.append(message)
    return found


def _joined_neighbours(messages: list[Message]) -> list[Message]:
    """Neighbouring messages of the user as one, and of the assistant likewise."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last.role == message.role and message.role in ("user", "assistant"):
            thoughts = "\n".join(each for each in (last.thoughts, message.thoughts) if each) or None
            found[-1] = replace(
                last, content=_both(last.content, message.content), calls=(*last.calls, *message.calls),
                thoughts=thoughts,
            )  # fmt: skip
        else:
            found.append(message)
    return found


def _system_in_question(messages: list[Message]) -> list[Message]:
    """The system prompt before the text of the user's first message."""
    if not messages or messages[0].role not in SYSTEMS:
        return messages
    system, *others = messages
    if not others or others[0].role != "user":
        return [replace(system, role="user"), *others]
    first = others[0]
    between = Segment(_BETWEEN, trusted=True)  # as in prompts of chats, where the system prompt's rows are shared
    text = (*_segments(system.content), between, *_segments(first.content)) if first.content else system.content
    return [replace(first, content=text), *others[1:]]


def opened_by_user(messages: list[Message]) -> list[Message]:
    """The messages with one of the user before the assistant's first."""
    at = int(bool(messages) and messages[0].role in SYSTEMS)
    if len(messages) > at and messages[at].role == "user":
        return messages
    return [*messages[:at], Message("user", _BEGINS), *messages[at:]]


def _spelled_results(messages: list[Message]) -> list[Message]:
    """The messages with results of tools as messages of the user, consecutive results in one."""
    from edge.tools import common_form

    found: list[Message] = []
    before: tuple[Segment, ...] = ()  # results in the last message
    for message in messages:
        if message.role != "tool":
            found, before = [*found, message], ()
            continue
        text = (
            *before,
            Segment("\n" * bool(before) + common_form.RESULT, trusted=True),
            *_segments(message.content),
            Segment(common_form.RESULT_END, trusted=True),
        )
        found[len(found) - bool(before) :] = [Message("user", text)]
        before = text
    return found


def _spelled_calls(messages: list[Message]) -> list[Message]:
    """The messages with calls as text after the assistant's answer."""
    return [_spelled(each) for each in messages]


def _spelled(message: Message) -> Message:
    from edge.tools import common_form

    if not message.calls:
        return message
    said = message.content
    parts = [Segment(f"{said}\n", trusted=False)] if said and isinstance(said, str) else [*_segments(said)]
    for number, call in enumerate(message.calls):
        written = common_form.write_call(call.name, call.parsed)
        parts += [
            Segment("\n" * (number > 0) + common_form.CALL, trusted=True),
            Segment(written, trusted=False, embedded=True),
            Segment(common_form.CALL_END, trusted=True),
        ]
    return replace(message, content=tuple(parts), calls=())


def _both(one: Text, other: Text) -> Text:
    """Two texts as one, in paragraphs of their own."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return one + _BETWEEN + other
    return (*_segments(one), Segment(_BETWEEN, trusted=False), *_segments(other))


def _segments(text: Text) -> tuple[Segment, ...]:
    return (Segment(text, trusted=False),) if isinstance(text, str) else text


# By what a template lacks, in the order in which they are applied.
REPAIRS: dict[str, Repair] = {
    "results apart": _responses_within,  # Gemma 4's first template
    "later systems": _folded_systems,
    "calls": _spelled_calls,
    "results": _spelled_results,
    "parallel": _one_call_each,
    "system": _system_in_question,
    "behind results": _texts_in_results,
    "neighbours": _joined_neighbours,
    "answers first": opened_by_user,
}
# What a refusal may be due to, in the order in which it is supposed.
SUPPOSED = (
    "parallel", "later systems", "behind results", "neighbours", "system", "answers first", "results", "calls",
)  # fmt: skip
