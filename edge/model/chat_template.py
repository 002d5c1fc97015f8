"""Chat templates: from the turns of a conversation to the text format that a model was trained on.

A template comes from the model file, so it is untrusted code. It runs once, when the model is opened: in minijinja
(Jinja2's language without Python, its work limited by fuel), in a forked child with limited memory. It never sees the
user's text: it renders placeholders, which are replaced afterwards. Special tokens are recognized only in the
template's own text, so a user who types `<|im_end|>` does not end a turn.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minijinja import Environment

from edge.errors import ModelFormatError, UnsupportedError

_FUEL = 1_000_000  # minijinja instructions; real templates use a few thousand for one exchange
_CHILD_MEMORY = 64 << 20  # bytes that rendering may allocate
_CHILD_SECONDS = 5
_MOST_TEXT = 1 << 20  # characters that a template may put around a conversation
_USER, _ASSISTANT, _SYSTEM = (f"\ue000{role}\ue001" for role in ("user", "assistant", "system"))

# The prompts that sessions need: a first turn with and without a system prompt, and a turn after a reply.
_CONVERSATIONS = {
    "first": [("user", _USER)],
    "system": [("system", _SYSTEM), ("user", _USER)],
    "next": [("user", "x"), ("assistant", _ASSISTANT), ("user", _USER)],
}


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. `trusted` text is the template's own: its special tokens are recognized."""

    text: str | Iterable[str]
    trusted: bool


class ChatTemplate:
    """The `tokenizer.chat_template` of a model, rendered once. Raises ModelFormatError when used if it is broken."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self._forms: dict[str, dict[str, str]] = _in_child(source, bos, eos)

    def first_turn(self, user: str | Iterable[str], system: str | None = None) -> list[Segment]:
        """The prompt of a conversation's first turn, up to the beginning of the assistant's answer."""
        rendered = self._form("first" if system is None else "system")
        return _fill(rendered, {_USER: user} if system is None else {_USER: user, _SYSTEM: system})

    def next_turn(self, user: str | Iterable[str]) -> list[Segment]:
        """The text after an assistant's reply: the end of its turn, the user's text, the opening of the next answer."""
        _, mark, rest = self._form("next").partition(_ASSISTANT)
        if not mark:
            raise UnsupportedError("the chat template drops the assistant's replies: it cannot continue a conversation")
        return _fill(rest, {_USER: user})

    def _form(self, name: str) -> str:
        form = self._forms[name]
        if "error" in form:
            raise ModelFormatError(f"the model's chat template fails ({form['error']}): use --raw to prompt without it")
        return form["text"]


def _fill(rendered: str, contents: dict[str, str | Iterable[str]]) -> list[Segment]:
    """Replace the placeholders in the rendered text by the contents."""
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


def _render_forms(source: str, bos: str, eos: str) -> dict[str, dict[str, str]]:
    forms = {}
    for name, turns in _CONVERSATIONS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            environment: Any = Environment(templates={"chat": source}, pycompat=True, fuel=_FUEL)
            environment.trim_blocks = environment.lstrip_blocks = True
            environment.add_function("raise_exception", _raise)
            environment.add_function("strftime_now", lambda form: datetime.datetime.now().strftime(form))
            environment.add_test("iterable", lambda value: isinstance(value, Iterable))  # none is not iterable
            text = environment.render_template(
                "chat",
                messages=messages,
                add_generation_prompt=True,
                bos_token=bos,
                eos_token=eos,
                tools=None,  # passed as in transformers: many templates test whether they are none
                documents=None,
            )
            forms[name] = {"text": text} if len(text) <= _MOST_TEXT else {"error": "it writes too much"}
        except Exception as error:  # minijinja's own, and those of the two functions
            first_line = str(error).partition("\n")[0][:200]
            forms[name] = {"error": "".join(filter(str.isprintable, first_line))}
    return forms


def _raise(message: str) -> None:
    raise ValueError(message)


def _in_child(source: str, bos: str, eos: str) -> dict[str, dict[str, str]]:
    """Render in a forked child, so that a template that doubles a string forever kills only the child."""
    if not hasattr(os, "fork"):
        return _render_forms(source, bos, eos)
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # forking beside BLAS threads is safe here: the child calls minijinja and exits
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _limit_child()
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(_render_forms(source, bos, eos), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    try:
        forms: dict[str, dict[str, str]] = json.loads(answer)
        return forms
    except json.JSONDecodeError:
        return {name: {"error": "it takes too much memory or time"} for name in _CONVERSATIONS}


def _limit_child() -> None:
    import faulthandler
    import resource

    faulthandler.disable()  # a killed child prints no traceback
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CHILD_SECONDS)
    with open("/dev/null", "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux: the fuel and the alarm remain
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _CHILD_MEMORY, mapped + _CHILD_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
