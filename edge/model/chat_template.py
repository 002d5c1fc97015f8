"""Chat templates: convert a conversation's turns to the text format that a model was trained on.

A template comes from the model file, so it is untrusted code. The turns of a chat are rendered once, when the model is
opened: by minijinja (Jinja2's language without Python, limited by fuel), in a forked child with limited memory. It
never sees the user's text: it renders placeholders, which are replaced afterwards. Special tokens are recognized only
in the template's own text, so a user who types `<|im_end|>` does not end a turn. Conversations given as messages, with
tools, are rendered on demand in the same way, by a long-lived child (`rendering.py`).

Templates of thinking models are rendered for each mode that they may support: thinking on, off, or with an effort.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from edge.errors import CacheError, InputError, ModelFormatError, UnsupportedError
from edge.model.messages import THOUGHT_NAMES, Marked, Message, Segment, parse_messages, parse_tools
from edge.model.rendering import CHILD_SECONDS, GUISES, MOST_TEXT, OWN, TOO_MUCH, Compiled, Renderer, limit_process
from edge.model.thinking import EFFORTS, Think, find_family
from edge.storage import cache
from edge.storage.versions import edge_version, version_of

_NAMES = ("user", "assistant", "system", "earlier", "thoughts")
_USER, _ASSISTANT, _SYSTEM, _EARLIER, _THOUGHTS = (f"\ue000{name}\ue001" for name in _NAMES)

# The prompts that sessions need: a first turn with and without a system prompt, and a turn after a reply.
_REPLY = {"role": "assistant", "content": _ASSISTANT}
_EXCHANGE = [{"role": "user", "content": _EARLIER}, _REPLY, {"role": "user", "content": _USER}]
_CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "first": [{"role": "user", "content": _USER}],
    "system": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}],
    "next": _EXCHANGE,
}
# A reply with thoughts, under each name that templates use: shows whether they stay when the conversation goes on.
_THOUGHTFUL = _REPLY | dict.fromkeys(THOUGHT_NAMES, _THOUGHTS)

# Template variables that choose a mode. Modes whose variables a template does not contain are not rendered.
_SWITCHES = ("enable_thinking", "thinking")
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "on": dict.fromkeys(_SWITCHES, True),
    "off": dict.fromkeys(_SWITCHES, False),
    **{effort: dict.fromkeys(_SWITCHES, True) | {"reasoning_effort": effort} for effort in EFFORTS},
}

_FORMS = 1  # version of cached forms: increment it when this module, or one that it renders with, changes them

Forms = dict[str, dict[str, str]]
"""By mode and conversation (`on/first`): {"text": …} or {"error": …}."""


_DEFAULT = Think()


class ChatTemplate:
    """A model's `tokenizer.chat_template`, rendered once. Methods raise ModelFormatError if it is broken.

    family: how the model marks thoughts, None if it does not think. think: the thinking mode; methods raise
    UnsupportedError for one that the model lacks.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self.family = find_family(source)
        self._forms = _known_forms(source, bos, eos, thinks=self.family is not None)
        self._renderer = Renderer(source, bos, eos)
        self._words = frozenset(re.findall(r"\w+", source))
        self._guises = {*source}.isdisjoint(GUISES)
        # Things that the template cannot write: "tools", "calls", "results"; several calls in a message ("parallel").
        self._lacks = frozenset(() if "tools" in self._words else ("tools", "calls", "results"))
        if "tool_calls[0]" in source and not re.search(r"\bin\s+\w+\.tool_calls", source):
            self._lacks |= {"parallel"}
        # Gemma 4's first template expects results within the message of their calls, and has no role for them.
        self._results_within = "tool_responses" in self._words and not re.search(r"[=!]=\s*['\"]tool['\"]", source)

    def first_turn(
        self, user: str | Iterable[str], system: str | None = None, think: Think = _DEFAULT, *, answered: bool = False
    ) -> list[Segment]:
        """The prompt of a conversation's first turn, up to the beginning of the answer; `answered`: as the template
        writes an earlier turn, without thoughts."""
        rendered = self._form("first" if system is None else "system", think)
        contents = {_USER: user} if system is None else {_USER: user, _SYSTEM: system}
        return _fill(self._with_opening(rendered, think, answered), contents)

    def next_turn(self, user: str | Iterable[str], think: Think = _DEFAULT, *, answered: bool = False) -> list[Segment]:
        """The text after an assistant's reply: the end of its turn, the user's text, the opening of the next answer."""
        _, mark, rest = self._form("next", think).partition(_ASSISTANT)
        if not mark:
            raise UnsupportedError("the chat template drops the assistant's replies: it cannot continue a conversation")
        return _fill(self._with_opening(rest, think, answered), {_USER: user})

    def beginning(self, system: str | None, think: Think) -> str:
        """The text before a conversation's first question, with a placeholder for the system prompt."""
        return self._form("first" if system is None else "system", think).partition(_USER)[0]

    def opening(self, think: Think = _DEFAULT, *, answered: bool = False) -> str:
        """The text between a user's words and the answer; `answered`: of an earlier turn."""
        return self._with_opening(self._form("first", think), think, answered).rpartition(_USER)[2]

    def begins_thinking(self, think: Think = _DEFAULT) -> bool:
        """Whether the answer begins inside a thought, before any mark of the model's own."""
        if self.family is None:
            return False
        state = self.family.state(self.opening(think))
        return self.family.headed is not None if state is None else state

    @property
    def keeps_thoughts(self) -> bool:
        """Whether a turn keeps its thoughts when the next one follows."""
        return _THOUGHTS in self._forms.get("default/thoughtful", {}).get("text", "")

    def conversation(
        self,
        messages: object,
        tools: object = None,
        think: Think = _DEFAULT,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[Segment], bool]:
        """The prompt of a whole conversation, and whether the answer begins inside a thought.

        messages, tools: as in OpenAI's protocol. variables: template variables such as `enable_thinking`, beyond those
        of `think`. Raises InputError for messages that the template refuses or whose text it drops, UnsupportedError
        for a mode of thinking that the model lacks.
        """
        if think.chosen:
            self._form("first", think)  # refuses a choice that the model lacks
        said, known = parse_messages(messages), parse_tools(tools)
        names = {**_MODES[think.mode], **_checked(variables or {})}
        lacks = set(self._lacks)
        while True:
            marked = Marked(*self._adapted(said, known, lacks), guises=self._guises)
            answer = self._renderer.render(marked.messages, marked.tools, **names)
            rendered = answer.get("text")
            more = self._lacking(said, known, marked, rendered, lacks) - lacks
            if not more:
                break
            lacks |= more
        if rendered is None:
            raise InputError(f"the model's chat template refuses these messages: {answer['error']}")
        for index in marked.dropped(rendered):
            if not marked.messages[index].get("tool_calls"):
                raise InputError(f"the model's chat template drops the text of the {marked.messages[index]['role']}")
        return self._opened(marked.fill(rendered), think, calls=bool(known))

    def _adapted(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, lacks: set[str]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools as the template can write them."""
        if "developer" not in self._words:
            messages = [replace(each, role="system") if each.role == "developer" else each for each in messages]
        if self._results_within:
            messages = _with_responses(messages)
        if "calls" in lacks:
            messages = [_spelled_calls(each) for each in messages]
        if "results" in lacks:
            messages = _spelled_results(messages)
        if "parallel" in lacks:
            messages = _one_call_each(messages)
        if tools and "tools" in lacks:
            messages, tools = _spelled_tools(messages, tools), None
        return messages, tools

    def _lacking(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        marked: Marked,
        rendered: str | None,
        before: set[str],
    ) -> set[str]:
        """The parts of a conversation that the template did not write."""
        calls = [call.name for each in messages for call in each.calls]
        results = any(each.role == "tool" for each in messages)
        if rendered is None:
            several = any(len(each.calls) > 1 for each in messages)
            if several and "parallel" not in before:
                return {"parallel"}
            return ({"calls"} if calls else set()) | ({"results"} if results else set())
        lacks = set()
        if marked.tools and not all(
            marked.shows(rendered, tool["function"]["name"], of_tool=True) for tool in tools or ()
        ):
            lacks.add("tools")
        if calls and "calls" not in before and not all(marked.shows(rendered, name) for name in calls):
            lacks.add("calls")
        if any(marked.messages[index]["role"] == "tool" for index in marked.dropped(rendered)):
            lacks.add("results")
        return lacks

    def _opened(self, segments: list[Segment], think: Think, *, calls: bool) -> tuple[list[Segment], bool]:
        """The prompt with the opening for `think`, and whether the answer begins inside a thought. calls: the answer
        may call tools, so its first header stays open: the header that skips thoughts names no tool."""
        opening = str(segments[-1].text) if segments and segments[-1].trusted else ""
        if think.enabled is False and not (calls and self.family is not None and self.family.headed):
            opening, before = self._closed(opening), opening
            segments = [*segments[: -1 if before else None], Segment(opening, trusted=True)]
        if self.family is None:
            return segments, False
        state = self.family.state(opening)
        return segments, self.family.headed is not None if state is None else state

    def _with_opening(self, rendered: str, think: Think, answered: bool) -> str:
        before, mark, opening = rendered.rpartition(_USER)
        if not mark:
            return rendered  # it drops the user's text: `_fill` raises the error
        if answered:
            _, mark, rest = self._form("next", think).partition(_EARLIER)
            past, reply, _ = rest.partition(_ASSISTANT)
            return before + _USER + (past if mark and reply else opening)
        return before + _USER + (self._closed(opening) if think.enabled is False else opening)

    def _closed(self, opening: str) -> str:
        """An opening after which the model does not think: the template's own, or one with an empty thought."""
        knows = self._form("first", Think(False)) != self._form("first", Think(True))
        if self.family is None or knows or self.family.state(opening) is False:
            return opening
        emptied = self.family.emptied(opening)
        if emptied is None:
            raise UnsupportedError("--think=off: neither the chat template nor the model's family has a switch for it")
        return emptied

    def _form(self, name: str, think: Think) -> str:
        if think.chosen and self.family is None:
            raise UnsupportedError("--think: this model does not think, by its chat template: leave the option out")
        form = self._forms.get(f"{think.mode}/{name}", self._forms[f"default/{name}"])
        if "error" in form:
            raise ModelFormatError(f"the model's chat template fails ({form['error']}): use --raw to prompt without it")
        if think.effort and f"{think.mode}/{name}" not in self._forms:
            raise UnsupportedError(f"--think={think.effort}: the chat template knows no efforts: on, off or a budget")
        return form["text"]


def _fill(rendered: str, contents: dict[str, str | Iterable[str]]) -> list[Segment]:
    """Replace placeholders in the rendered text by contents."""
    for mark, what in ((_USER, "user's text"), (_SYSTEM, "system prompt")):
        if mark in contents and mark not in rendered:
            raise ModelFormatError(f"the model's chat template drops the {what}: use --raw to prompt without it")
    segments: list[Segment] = []
    while rendered:
        found = [(at, mark) for mark in contents if (at := rendered.find(mark)) >= 0]
        at, mark = min(found, default=(len(rendered), ""))
        segments.append(Segment(rendered[:at], trusted=True))
        if mark:
            segments.append(Segment(contents[mark], trusted=False))
        rendered = rendered[at + len(mark) :]
    return [segment for segment in segments if segment.text]


def _render_forms(source: str, bos: str, eos: str, thinks: bool) -> Forms:
    conversations, modes = _CONVERSATIONS, {"default": _MODES["default"]}
    if thinks:
        conversations = {**conversations, "thoughtful": [_EXCHANGE[0], _THOUGHTFUL, _EXCHANGE[2]]}
        known = set(re.findall(r"\w+", source))
        left_out = set(EFFORTS) if "reasoning_effort" not in known else set()
        left_out |= {"on", "off"} if known.isdisjoint(_SWITCHES) else set()
        modes = {mode: names for mode, names in _MODES.items() if mode not in left_out}
    template = Compiled(source, bos, eos)
    forms, left = {}, MOST_TEXT
    for mode, names in modes.items():
        for conversation, messages in conversations.items():
            form = template.render(messages, **names)
            left -= len(form.get("text", ""))
            forms[f"{mode}/{conversation}"] = form if left >= 0 else {"error": "it writes too much"}
    return forms


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for a template: switches, numbers, words. Raises InputError for others."""
    for name, value in variables.items():
        word = isinstance(value, str) and re.fullmatch(r"[a-z_]{0,32}", value)
        if not (re.fullmatch(r"[a-z_]{1,64}", name) and (value is None or isinstance(value, bool | int) or word)):
            raise InputError(f"the template's variable {name!r:.40} must be true, false, a number or a word")
        if name in OWN:
            raise InputError(f"the template's variable {name!r} comes from the conversation: leave it out")
    return dict(variables)


def _spelled_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, with the tools described in the system prompt."""
    from edge.tools import common_form

    system = messages[0] if messages[0].role == "system" else None
    said = [Segment(f"{system.content}\n\n", trusted=False)] if system and system.content else []
    text = (
        *said,
        Segment(common_form.TOOLS, trusted=True),
        Segment(common_form.describe(tools), trusted=False, embedded=True),
        Segment(common_form.TOOLS_END, trusted=True),
    )
    return [Message("system", text), *messages[1 if system else 0 :]]


def _spelled_calls(message: Message) -> Message:
    """The message with its calls as text after the assistant's answer."""
    from edge.tools import common_form

    if not message.calls:
        return message
    parts = [Segment(f"{message.content}\n", trusted=False)] if message.content else []
    for number, call in enumerate(message.calls):
        written = common_form.write_call(call.name, call.parsed)
        parts += [
            Segment("\n" * (number > 0) + common_form.CALL, trusted=True),
            Segment(written, trusted=False, embedded=True),
            Segment(common_form.CALL_END, trusted=True),
        ]
    return replace(message, content=tuple(parts), calls=())


def _spelled_results(messages: list[Message]) -> list[Message]:
    """The messages with results of tools as messages of the user, consecutive results in one."""
    from edge.tools import common_form

    found: list[Message] = []
    for message in messages:
        if message.role != "tool":
            found.append(message)
            continue
        last = found[-1] if found else message
        before = last.content if last.role == "user" and isinstance(last.content, tuple) else ()
        text = (
            *before,
            Segment("\n" * bool(before) + common_form.RESULT, trusted=True),
            Segment(str(message.content), trusted=False),
            Segment(common_form.RESULT_END, trusted=True),
        )
        found[len(found) - bool(before) :] = [Message("user", text)]
    return found


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result."""
    found: list[Message] = []
    results = {each.call_id: each for each in messages if each.role == "tool" and each.call_id}
    placed: set[str | None] = set()
    for message in messages:
        if len(message.calls) < 2:
            found += [message] if message.role != "tool" or message.call_id not in placed else []
            continue
        for number, call in enumerate(message.calls):
            found.append(replace(message, calls=(call,)) if number == 0 else Message("assistant", calls=(call,)))
            if call.id in results:
                found.append(results[call.id])
                placed.add(call.id)
    return found


def _with_responses(messages: list[Message]) -> list[Message]:
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


def _known_forms(source: str, bos: str, eos: str, thinks: bool) -> Forms:
    """The rendered forms. Forms that were rendered before come from the cache folder, without a child."""
    depends = (source, bos, eos, thinks, version_of("minijinja"), edge_version(), _FORMS)
    key = hashlib.sha256(repr(depends).encode()).hexdigest()[:32]
    with suppress(CacheError, OSError, ValueError):
        if path := cache.find("templates", key, ".json"):
            known: Forms = json.loads(path.read_bytes())
            return known
    forms = _in_child(source, bos, eos, thinks)
    if "strftime_now" not in source and "text" in forms["default/first"]:  # contains no date, and kept to the limits
        with suppress(CacheError, OSError), cache.create("templates", key, ".json", about="chat template") as target:
            target.write_text(json.dumps(forms))
    return forms


def _in_child(source: str, bos: str, eos: str, thinks: bool) -> Forms:
    """Render in a forked child, so that a template that doubles a string forever kills only the child."""
    if not hasattr(os, "fork"):
        return _render_forms(source, bos, eos, thinks)
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # forking beside BLAS threads is safe here: the child calls minijinja and exits
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            limit_process()
            signal.alarm(CHILD_SECONDS)
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(_render_forms(source, bos, eos, thinks), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    try:
        forms: Forms = json.loads(answer)
        return forms
    except json.JSONDecodeError:
        return {f"default/{name}": {"error": TOO_MUCH} for name in _CONVERSATIONS}
