"""Chat templates: convert a conversation's turns to the text format that a model was trained on.

A template comes from the model file, so it is untrusted code. The turns of a chat are rendered once, when the model is
opened: by minijinja (Jinja2's language without Python, limited by fuel), in a forked child with limited memory. It
never sees the user's text: it renders placeholders, which are replaced afterwards. Special tokens are recognized only
in the template's own text, so a user who types `<|im_end|>` does not end a turn. Conversations given as messages, with
tools, are rendered on demand in the same way, by a long-lived child (`rendering.py`).

Templates of thinking models are rendered for each mode that they may support: thinking on, off, or with an effort.
"""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from edge.devices.keys import key_of
from edge.errors import CacheError, InputError, ModelFormatError, UnsupportedError
from edge.model.chat.messages import THOUGHT_NAMES, Marked, Message, parse_messages, parse_tools
from edge.model.chat.parts import MEDIA, Segment
from edge.model.chat.rendering import CHILD_SECONDS, GUISES, MOST_TEXT, OWN, TOO_MUCH, Compiled, Renderer, limit_process
from edge.model.chat.repairs import SUPPOSED, Tools, opened_by_user, repaired
from edge.model.chat.thinking import EFFORTS, Think, find_family
from edge.records import dataclass
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

_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}  # efforts that no template has

OF_MODEL = "the model's chat template"  # what errors call one that no file replaces
_FORMS = 3  # version of cached forms: increment it when this module, or one that it renders with, changes them

_LISTS = "default/lists"  # among the forms: the template drops contents unless they are lists of parts

Forms = dict[str, dict[str, str]]
"""By mode and conversation (`on/first`): {"text": …} or {"error": …}."""


_DEFAULT = Think()


@dataclass(frozen=True)
class _Rendered:
    """A conversation as a template writes it."""

    marked: Marked
    text: str
    fault: str = ""  # why it cannot be the prompt
    lacks: frozenset[str] = frozenset()  # of REPAIRS, or "tools": what the text shows to be lacking


class ChatTemplate:
    """A model's `tokenizer.chat_template`, rendered once. Methods raise ModelFormatError if it is broken.

    family: how the model marks thoughts, None if it does not think. think: the thinking mode; methods raise
    UnsupportedError for one that the model lacks.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "", name: str = OF_MODEL) -> None:
        """name: what errors call it."""
        self._name = name
        self.family = find_family(source)
        self._forms = _known_forms(source, bos, eos, thinks=self.family is not None)
        self._renderer = Renderer(source, bos, eos)
        self._words = frozenset(re.findall(r"\w+", source))
        self._guises = {*source}.isdisjoint(GUISES)
        self._lists = _LISTS in self._forms  # contents must be lists of parts
        # What the template cannot write: "tools", and names of REPAIRS.
        self._lacks = frozenset(() if "tools" in self._words else ("tools", "calls", "results"))
        self._lacks |= {
            kind for kind, word in MEDIA.items() if self._words.isdisjoint((word, f"{word}_url", f"input_{word}"))
        }
        if "tool_calls[0]" in source and not re.search(r"\bin\s+\w+\.tool_calls", source):
            self._lacks |= {"parallel"}
        # Gemma 4's first template expects results within the message of their calls, and has no role for them.
        if "tool_responses" in self._words and not re.search(r"[=!]=\s*['\"]tool['\"]", source):
            self._lacks |= {"results apart"}

    def first_turn(
        self, user: str | Iterable[str], system: str | None = None, think: Think = _DEFAULT, *, answered: bool = False
    ) -> list[Segment]:
        """The prompt of a conversation's first turn, up to the beginning of the answer; `answered`: as the template
        writes an earlier turn, without thoughts."""
        rendered = self._form("first" if system is None else "system", think)
        contents = {_USER: user} if system is None else {_USER: user, _SYSTEM: system}
        return _fill(self._with_opening(rendered, think, answered), contents, self._name)

    def next_turn(self, user: str | Iterable[str], think: Think = _DEFAULT, *, answered: bool = False) -> list[Segment]:
        """The text after an assistant's reply: the end of its turn, the user's text, the opening of the next answer."""
        _, mark, rest = self._form("next", think).partition(_ASSISTANT)
        if not mark:
            raise UnsupportedError(f"{self._name} drops the assistant's replies: it cannot continue a conversation")
        return _fill(self._with_opening(rest, think, answered), {_USER: user}, self._name)

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
        *,
        continues: bool = True,
        markers: Mapping[str, str] | None = None,
    ) -> tuple[list[Segment], bool]:
        """The prompt of a whole conversation, and whether the answer begins inside a thought. continues: an answer to a
        last message of the assistant goes on from it. markers: what a template of the model's family writes for media
        that the model perceives, by their kinds.

        messages, tools: as in OpenAI's protocol. variables: template variables such as `enable_thinking`, beyond those
        of `think`. Raises InputError for messages that the template refuses or whose text it drops, UnsupportedError
        for a mode of thinking that the model lacks.
        """
        if think.chosen:
            self._form("first", think)  # refuses a choice that the model lacks
        said, known = parse_messages(messages, senses=markers or ()), parse_tools(tools)
        if known:
            from edge.json_schema import with_properties

            known = with_properties(known)
        if "developer" not in self._words:
            said = [replace(each, role="system") if each.role == "developer" else each for each in said]
        begun = said.pop() if continues and said[-1].role == "assistant" and not said[-1].calls else None
        names = {**_MODES[think.mode], **_checked(variables or {})}
        rendered = self._repaired(said or opened_by_user(said), known, names, markers or {})
        filled = rendered.marked.fill(rendered.text, self._name)
        segments, thinks = self._opened(filled, think, calls=bool(known) and not begun)
        return self._begun(segments, thinks, begun) if begun else (segments, thinks)

    def _repaired(
        self, messages: list[Message], tools: Tools | None, names: Mapping[str, Any], markers: Mapping[str, str]
    ) -> _Rendered:  # fmt: skip
        """The rendered conversation, with as few repairs as the template needs. Raises InputError."""
        lacks, supposed = set(self._lacks), list[str]()
        first = found = self._render(messages, tools, names, lacks, markers)
        while found.fault:
            before = repaired(messages, tools, lacks)
            more = found.lacks - lacks or next(
                (frozenset({name}) for name in SUPPOSED if repaired(messages, tools, lacks | {name}) != before),
                frozenset(),
            )
            if not more or TOO_MUCH in found.fault:
                raise InputError(f"{self._name} {first.fault}")
            supposed += more - found.lacks
            lacks |= more
            found = self._render(messages, tools, names, lacks, markers)
        for name in supposed[:-1]:  # the last one was needed
            less = self._render(messages, tools, names, lacks - {name}, markers)
            if not less.fault:
                lacks, found = lacks - {name}, less
        return found

    def _render(
        self,
        messages: list[Message],
        tools: Tools | None,
        names: Mapping[str, Any],
        lacks: set[str],
        markers: Mapping[str, str],
    ) -> _Rendered:
        """The conversation, with repairs of what the template lacks, and its mistakes."""
        said, offered = repaired(messages, tools, lacks)
        written = {kind: marker for kind, marker in markers.items() if kind not in lacks}
        marked = Marked(said, offered, guises=self._guises, lists=self._lists, markers=written)
        answer = self._renderer.render(marked.messages, marked.tools, **names)
        if (text := answer.get("text")) is None:
            return _Rendered(marked, "", f"refuses these messages: {answer['error']}")
        dropped = [marked.messages[index] for index in marked.dropped(text)]
        calls = [call.name for each in messages for call in each.calls]
        found = {
            "tools": any(not marked.shows(text, tool["function"]["name"], of_tool=True) for tool in offered or ()),
            "calls": "calls" not in lacks and any(not marked.shows(text, name) for name in calls),
            "results": any(each["role"] == "tool" for each in dropped),
        } | dict.fromkeys(marked.media_missing(text), True)
        roles = [each["role"] for each in dropped if not each.get("tool_calls")]
        fault = f"drops the text of the {roles[0]}" if roles else ""
        if not fault and any(found.values()):
            medium = next((kind for kind in MEDIA if found.get(kind)), "call")
            fault = f"drops a {medium}"
        return _Rendered(marked, text, fault, frozenset(name for name, lacking in found.items() if lacking))

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

    def _begun(self, segments: list[Segment], thinks: bool, begun: Message) -> tuple[list[Segment], bool]:
        """The prompt with the beginning of its answer, behind thoughts only if it has some."""
        family, text = self.family, str(begun.content)
        said = [Segment(text, trusted=False)] if text else []
        if family is None or not (text or begun.thoughts) or not (thinks or begun.thoughts):
            return [*segments, *said], thinks
        opening = str(segments[-1].text) if segments and segments[-1].trusted else ""
        segments = segments[: -1 if opening else None]
        if begun.thoughts:
            if not opening.rstrip().endswith(family.opening.rstrip()):
                opening = opening.removesuffix(family.empty or "") + family.opening
            ended = [Segment(family.cut, trusted=True)] if text else []
            said = [Segment(begun.thoughts, trusted=False), *ended, *said]
        else:
            opening = family.emptied(opening) or opening
        return [*segments, Segment(opening, trusted=True), *said], not text

    def nearest(self, think: Think) -> Think:
        """The mode of the template that is nearest to a hint of a program, since programs ask every model alike; the
        default where there is none. The hint's effort may also be minimal, xhigh or max."""
        if self.family is None or not think.chosen:
            return Think()
        efforts = "low/first" in self._forms
        if think.effort and efforts:
            return replace(think, effort=_NEAREST.get(think.effort, think.effort))
        if think.effort:
            think = replace(think, effort=None, enabled=think.effort != "minimal")
        try:
            self.opening(think)
        except UnsupportedError:  # it cannot be kept from thinking
            return Think(effort="low") if efforts else Think()
        return think

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
            raise UnsupportedError(f"--think=off: neither {self._name} nor the model's family has a switch for it")
        return emptied

    def _form(self, name: str, think: Think) -> str:
        if think.chosen and self.family is None:
            raise UnsupportedError(f"--think: this model does not think, by {self._name}: leave the option out")
        form = self._forms.get(f"{think.mode}/{name}", self._forms[f"default/{name}"])
        if "error" in form:
            raise ModelFormatError(f"{self._name} fails ({form['error']}): use --raw to prompt without it")
        if think.effort and f"{think.mode}/{name}" not in self._forms:
            raise UnsupportedError(f"--think={think.effort}: {self._name} knows no efforts: on, off or a budget")
        return form["text"]


def _fill(rendered: str, contents: dict[str, str | Iterable[str]], name: str) -> list[Segment]:
    """Replace placeholders in the rendered text by contents."""
    for mark, what in ((_USER, "user's text"), (_SYSTEM, "system prompt")):
        if mark in contents and mark not in rendered:
            raise ModelFormatError(f"{name} drops the {what}: use --raw to prompt without it")
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
    forms: Forms = {}
    left, lists = MOST_TEXT, False

    def render(messages: list[dict[str, str]], names: Mapping[str, Any]) -> dict[str, str]:
        parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return template.render(parts if lists else messages, **names)

    first = conversations["first"]
    if _USER not in render(first, {}).get("text", ""):
        lists = True
        lists = _USER in render(first, {}).get("text", "")
    if lists:
        forms[_LISTS] = {"text": ""}
    for mode, names in modes.items():
        for conversation, messages in conversations.items():
            form = render(messages, names)
            if conversation == "system" and _SYSTEM not in form.get("text", ""):  # it has no system prompt
                form = render([{"role": "user", "content": f"{_SYSTEM}\n\n{_USER}"}], names)
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


def _known_forms(source: str, bos: str, eos: str, thinks: bool) -> Forms:
    """The rendered forms. Forms that were rendered before come from the cache folder, without a child."""
    depends = (source, bos, eos, thinks, version_of("minijinja"), edge_version(), _FORMS)
    key = key_of(repr(depends))
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
