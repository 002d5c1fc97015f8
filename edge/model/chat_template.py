"""Chat templates: convert a conversation's turns to the text format that a model was trained on.

A template comes from the model file, so it is untrusted code. It is rendered once, when the model is opened: by
minijinja (Jinja2's language without Python, limited by fuel), in a forked child with limited memory. It never sees the
user's text: it renders placeholders, which are replaced afterwards. Special tokens are recognized only in the
template's own text, so a user who types `<|im_end|>` does not end a turn.

Templates of thinking models are rendered for each mode that they may support: thinking on, off, or with an effort.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minijinja import Environment

from edge.errors import ModelFormatError, UnsupportedError
from edge.model.thinking import EFFORTS, Think, find_family

_FUEL = 1_000_000  # minijinja instructions; real templates use a few thousand for one exchange
_CHILD_MEMORY = 64 << 20  # bytes that rendering may allocate
_CHILD_SECONDS = 5
_MOST_TEXT = 1 << 20  # characters that a template may put around conversations, in all its forms
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
# A reply with thoughts, by the names that templates have for them: whether they stay when the conversation goes on.
_THOUGHTFUL = _REPLY | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHTS)

# What templates call the choice. Modes whose names a template does not contain are not rendered.
_SWITCHES = ("enable_thinking", "thinking")
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "on": dict.fromkeys(_SWITCHES, True),
    "off": dict.fromkeys(_SWITCHES, False),
    **{effort: dict.fromkeys(_SWITCHES, True) | {"reasoning_effort": effort} for effort in EFFORTS},
}

# Marks around the assistant's words that only training needs, and that Jinja2 knows by an extension of transformers.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

Forms = dict[str, dict[str, str]]
"""By mode and conversation (`on/first`): {"text": …} or {"error": …}."""


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. `trusted` text is the template's own: its special tokens are recognized."""

    text: str | Iterable[str]
    trusted: bool


_DEFAULT = Think()


class ChatTemplate:
    """A model's `tokenizer.chat_template`, rendered once. Methods raise ModelFormatError if it is broken.

    family: how the model marks thoughts, None if it does not think. think: the thinking mode; methods raise
    UnsupportedError for one that the model lacks.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self.family = find_family(source)
        self._forms = _in_child(source, bos, eos, thinks=self.family is not None)

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
        return self.family.headed if state is None else state

    @property
    def keeps_thoughts(self) -> bool:
        """Whether a turn keeps its thoughts when the next one follows."""
        return _THOUGHTS in self._forms.get("default/thoughtful", {}).get("text", "")

    def _with_opening(self, rendered: str, think: Think, answered: bool) -> str:
        before, mark, opening = rendered.rpartition(_USER)
        if not mark:
            return rendered  # it drops the user's text, which is said elsewhere
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
    source = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
    forms, left = {}, _MOST_TEXT
    for mode, names in modes.items():
        for conversation, messages in conversations.items():
            form = _render(source, messages, bos_token=bos, eos_token=eos, **names)
            left -= len(form.get("text", ""))
            forms[f"{mode}/{conversation}"] = form if left >= 0 else {"error": "it writes too much"}
    return forms


def _render(source: str, messages: list[dict[str, str]], **names: Any) -> dict[str, str]:
    try:
        environment: Any = Environment(templates={"chat": source}, pycompat=True, fuel=_FUEL)
        environment.trim_blocks = environment.lstrip_blocks = True
        environment.add_function("raise_exception", _raise)
        environment.add_function("strftime_now", lambda form: datetime.datetime.now().strftime(form))
        environment.add_filter("tojson", _to_json)
        environment.add_test("iterable", lambda value: isinstance(value, Iterable))  # none is not iterable
        text = environment.render_template(
            "chat",
            messages=messages,
            add_generation_prompt=True,
            tools=None,  # passed as in transformers: many templates test whether they are none
            documents=None,
            **names,
        )
        return {"text": text}
    except Exception as error:  # minijinja's own, and those of the two functions
        first_line = str(error).strip().partition("\n")[0][:200]
        return {"error": "".join(filter(str.isprintable, first_line)).strip() or "it gives no reason"}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The JSON filter as transformers defines it; Jinja2's own would escape `<` and the like for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ValueError(message)


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
            _limit_child()
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
        return {f"default/{name}": {"error": "it takes too much memory or time"} for name in _CONVERSATIONS}


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
