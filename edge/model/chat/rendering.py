"""Rendering of chat templates, which are untrusted code: by minijinja, in a process with limited memory and time.

A template never sees a text of users: it renders marks, which `edge/model/chat/messages.py` makes and replaces.

This file is also the program of the long-lived child that renders conversations (`Renderer`), which starts in 30 ms
because it imports nothing of edge's. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

FUEL = 1_000_000  # minijinja instructions; real templates use a few thousand for one exchange
FUEL_PER_MESSAGE = 5_000
CHILD_MEMORY = 64 << 20  # bytes that rendering may allocate
CHILD_SECONDS = 5
MOST_TEXT = 1 << 20  # characters that a template may put around conversations
_IDLE_SECONDS = 60  # after which the long-lived child exits and frees its memory
TOO_MUCH = "it takes too much memory or time"

# Variables that a caller cannot set.
OWN = {"self", "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}

# A mark stands for a text of a user. It has nine characters, the length that Mistral's templates require of the
# identifier of a call, all of them from a plane of Unicode that is for private use.
# Its first character says how the text is written: as it is, or escaped as in JSON, as in ASCII JSON, or as by `repr`.
RAW, JSON, JSON_ASCII, REPR, _END = "\U0010ff00", "\U0010ff01", "\U0010ff02", "\U0010ff03", "\U0010ff04"
_DIGITS = "\U0010ff10\U0010ff11\U0010ff12\U0010ff13\U0010ff14\U0010ff15\U0010ff16\U0010ff17\U0010ff18\U0010ff19"
MARK = re.compile(f"([{RAW}-{REPR}])([{_DIGITS}]{{7}}){_END}")

# Blanks at the ends of a text stand beside its mark, so that templates can trim them, in the guise of other blanks.
BLANKS = " \t\n\r\v\f"
GUISES = "\u2000\u2001\u2002\u2003\u2004\u2005"
_REVEAL = str.maketrans(GUISES, BLANKS)

# Tags around the assistant's words, which only training needs. Transformers adds them to Jinja2 by an extension.
_GENERATION = r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}"

Answer = dict[str, str]  # {"text": …} or {"error": …}


def mark(number: int) -> str:
    return RAW + f"{number:07}".translate(str.maketrans("0123456789", _DIGITS)) + _END


def number_of(digits: str) -> int:
    return int(digits.translate(str.maketrans(_DIGITS, "0123456789")))


def written(text: str, kind: str) -> str:
    """The text that replaces its mark. kind: the first character of the mark."""
    if kind == RAW:
        return text
    if kind == REPR:
        return repr(text + '"')[1:-2]  # so that Python chooses the other quotes
    return json.dumps(text, ensure_ascii=kind == JSON_ASCII)[1:-1]


def reveal(text: str) -> str:
    """The text with its disguised blanks restored."""
    return text.translate(_REVEAL)


class Compiled:
    """A template, compiled. bos, eos: texts of these tokens."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source = re.sub(
            _GENERATION, lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source
        )
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._environment: Any = None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **names: Any) -> Answer:
        """Render up to the beginning of the answer. names: values of further template variables."""
        try:
            if self._environment is None:
                self._environment = _environment(self._source)
            self._environment.fuel = FUEL + FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
            text = self._environment.render_template(
                "chat",
                messages=messages,
                add_generation_prompt=True,
                tools=tools,  # none, as in transformers: many templates test whether they are none
                documents=None,
                **self._tokens,
                **names,
            )
            return {"text": text}
        except Exception as error:  # minijinja's own, and those of the two functions
            first_line = str(error).strip().partition("\n")[0][:200]
            return {"error": "".join(filter(str.isprintable, first_line)).strip() or "it gives no reason"}


def _environment(source: str) -> Any:
    from minijinja import Environment  # here: a parent that renders templates in a child does not need it

    environment: Any = Environment(templates={"chat": source}, pycompat=True, fuel=FUEL)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.add_function("raise_exception", _raise)
    environment.add_function("strftime_now", _strftime_now)
    environment.add_filter("tojson", _to_json)
    environment.add_filter("string", _to_string)
    environment.add_test("iterable", lambda value: isinstance(value, Iterable))  # none is not iterable
    return environment


def _strftime_now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The JSON filter as transformers defines it; Jinja2's own would escape `<` and the like for HTML."""
    result = json.dumps(_revealed(value), ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        parts = re.split(f"([^\\x00-\\x7f{RAW}-{_DIGITS[-1]}]+)", result)
        result = "".join(json.dumps(part)[1:-1] if index % 2 else part for index, part in enumerate(parts))
    return result.replace(RAW, JSON_ASCII if ensure_ascii else JSON)


def _to_string(value: Any) -> str:
    """The text of a value as Python writes it."""
    if isinstance(value, str):
        return value
    text = re.sub(r"\\U0010ff(\d\d)", lambda escaped: chr(0x10FF00 + int(escaped[1], 16)), str(_revealed(value)))
    return text.replace(RAW, REPR)


def _revealed(value: Any) -> Any:
    if isinstance(value, str):
        return reveal(value)
    if isinstance(value, Mapping):
        return {_revealed(key): _revealed(each) for key, each in value.items()}
    return [_revealed(each) for each in value] if isinstance(value, list | tuple) else value


def _raise(message: str) -> None:
    raise ValueError(message)


def limit_process() -> None:
    """Limit what this rendering process may still allocate to CHILD_MEMORY, on Linux."""
    import faulthandler

    faulthandler.disable()  # a killed child prints no traceback
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    if sys.platform == "win32":
        return  # the fuel remains
    import resource

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # not Linux: the fuel and the alarm remain
    resource.setrlimit(resource.RLIMIT_AS, (mapped + CHILD_MEMORY, mapped + CHILD_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Renderer:
    """Renders conversations by one template, in a child process that the first one starts. Any thread may call it."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._template = {"source": source, "bos": bos, "eos": eos}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._compiled: Compiled | None = None
        self._process = 0  # the process that started the child

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **names: Any) -> Answer:
        """Render up to the beginning of the answer: {"text": …} or {"error": …}."""
        request = {"messages": messages, "tools": tools, "names": names}
        with self._lock:
            if not hasattr(os, "fork"):  # there is no way to limit a process either
                self._compiled = self._compiled or Compiled(**self._template)
                return self._compiled.render(messages, tools, **names)
            if self._process != os.getpid():
                self._child = None  # it belongs to the parent of this fork
            if self._child is not None and (answer := self._ask(request)) is not None:
                return answer
            try:
                self._start()  # the first, or the last one was idle too long and has exited
            except OSError as error:
                return {"error": f"no process can be started ({error.strerror})"}
            answer = self._ask(request)
            return {"error": TOO_MUCH} if answer is None else answer

    def _ask(self, request: object) -> Answer | None:
        """The child's answer; None if the child has exited."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request, ensure_ascii=False) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if line.endswith("\n"):
                answer: Answer = json.loads(line)
                return answer
        self._child = None
        self._finalize()
        return None

    def _start(self) -> None:
        import subprocess  # here: runs of one prompt start none

        places = [os.path.abspath(place) for place in sys.path]
        begin = f"import runpy, sys; sys.path[:] = {places!r}; runpy.run_path({__file__!r}, run_name='__main__')"
        self._child = child = subprocess.Popen(
            [sys.executable, "-S", "-c", begin], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        self._process = os.getpid()
        self._finalize = weakref.finalize(self, _end, child, self._process)
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(self._template) + "\n")


def _end(child: subprocess.Popen[str], process: int) -> None:
    if os.getpid() != process:
        return  # a fork exits: the child belongs to its parent
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # flushing the rest of a request fails
            if pipe:
                pipe.close()


def _serve() -> None:
    """Render for the parent until it exits, or has sent no request for `_IDLE_SECONDS`."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    compiled = Compiled(**json.loads(lines.readline()))
    limit_process()
    while True:
        line = lines.readline()
        if not line:
            return
        _alarm(CHILD_SECONDS)
        request = json.loads(line)
        try:
            answer = compiled.render(request["messages"], request["tools"], **request["names"])
        except MemoryError:
            answer = {"error": TOO_MUCH}
        if len(answer.get("text", "")) > MOST_TEXT + 16 * len(line):
            answer = {"error": "it writes too much"}
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()
        _alarm(0)
        if sys.platform != "win32" and not select.select([0], [], [], _IDLE_SECONDS)[0]:
            return


def _alarm(seconds: int) -> None:
    """Kill this process after `seconds`, except on Windows; 0 cancels."""
    if sys.platform != "win32":
        signal.alarm(seconds)


if __name__ == "__main__":
    _serve()
