"""`edge chat` at a pseudo-terminal: what people type, paste and interrupt."""

from __future__ import annotations

import codecs
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import GOLDEN

pty = pytest.importorskip("pty")
readline = pytest.importorskip("readline")

PROMPT = "› "
HIDDEN = "\x1b[?2004l\r\x1b[?2004h"  # readline has left the terminal, and what is typed is hidden
PATIENCE_S = 60
MODEL = str(GOLDEN / "llama-gqa-tied.gguf")


class Screen:
    """What a person sees and does. `shown` is all that the terminal was sent."""

    def __init__(self, child: int, master: int) -> None:
        self.child, self._master, self.shown, self._seen = child, master, "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def press_ctrl_c(self) -> None:
        """Wait until the prompt reads input: CPython's readline misses a signal between the prompt and select()."""
        end = time.monotonic() + PATIENCE_S
        while psutil.Process(self.child).status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end
            time.sleep(0.001)
        self.type("\x03")

    def expect(self, text: str) -> str:
        """Wait for a text behind the last that was waited for; returns what came before it."""
        end = time.monotonic() + PATIENCE_S
        while (at := self.shown.find(text, self._seen)) < 0:
            alive = self._read()
            assert alive, f"it left without {text!r}: {self.shown[self._seen :]!r}"
            assert time.monotonic() < end, f"no {text!r} in {self.shown[self._seen :]!r}"
        before, self._seen = self.shown[self._seen : at], at + len(text)
        return before

    def status(self) -> int:
        """The exit code, once it has left."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    def _read(self) -> bool:
        try:
            if select.select([self._master], [], [], 1)[0]:
                self.shown += self._decoder.decode(os.read(self._master, 1 << 16))
        except OSError:  # the child has closed its side
            return False
        return True


@contextmanager
def chatting(*flags: str, code: str = "pass", term: str = "xterm", model: str = MODEL) -> Iterator[Screen]:
    child, master = pty.fork()
    if child == 0:
        os.environ["TERM"] = term
        run = f"import sys; {code}\nfrom edge.cli import main; main()"
        os.execv(sys.executable, [sys.executable, "-c", run, "chat", model, "--backend", "reference", *flags])
    screen = Screen(child, master)
    try:
        screen.expect(PROMPT)
        yield screen
    finally:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has left
        os.close(master)


def said(path: Path) -> list[str]:
    """What the user said in a saved conversation."""
    messages = json.loads(path.read_text("utf-8"))["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def test_multiline_turns_and_input_during_answers(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with chatting("-n", "4", "-q") as screen:
        screen.type("\x1b[200~a paste\nof two lines\n\x1b[201~")  # as terminals send it
        screen.expect("of two lines")
        screen.type("\r")
        screen.expect(PROMPT)
        screen.type('"""a block\r')
        screen.expect("… ")
        screen.type('/of two lines"""\r')
        screen.expect(PROMPT)

        screen.type("/set max-tokens -1\r")
        screen.expect(PROMPT)
        screen.type("go on\r")
        screen.expect(HIDDEN)
        wait_for_an_answer(screen)
        screen.type("typed early \x1b[200~and\npasted\x1b[201~")
        wait_for_an_answer(screen)
        screen.type("\x03")
        answer = screen.expect("(interrupted)")
        assert "typed" not in answer
        screen.expect(PROMPT)
        screen.expect("typed early")
        screen.expect("pasted")
        screen.type("\r")
        screen.expect(HIDDEN)
        wait_for_an_answer(screen)
        screen.type("\x03")
        screen.expect("(interrupted)")
        screen.expect(PROMPT)
        screen.type(f"/save {saved}\r")
        screen.expect("(saved: 8 messages)")
        screen.expect(PROMPT)
        assert said(saved) == ["a paste\nof two lines", "a block\n/of two lines", "go on", "typed early and\npasted"]

        screen.press_ctrl_c()
        screen.expect("press Ctrl-C again or Ctrl-D to leave")
        screen.expect(PROMPT)
        screen.type("a line")
        screen.expect("a line")
        screen.press_ctrl_c()  # takes the line away, and asks nothing
        assert "press" not in screen.expect(PROMPT)
        screen.press_ctrl_c()
        screen.expect("press Ctrl-C again")
        screen.expect(PROMPT)
        screen.press_ctrl_c()
        assert screen.status() == 130
        assert screen.shown.count("press Ctrl-C again") == 2


def wait_for_an_answer(screen: Screen) -> None:
    """Until something more of it is there."""
    before, end = len(screen.shown), time.monotonic() + PATIENCE_S
    while len(screen.shown) < before + 8:
        assert time.monotonic() < end, screen.shown
        screen._read()


def test_paste_is_one_turn_where_readline_knows_none(tmp_path: Path) -> None:
    """libedit, as on macOS: lines that are there at once belong together. Ctrl-D leaves, the modes are as they were."""
    saved = tmp_path / "talk.json"
    code = "from edge.cli.chat import lines as c; " \
        "enter = c.Terminal.__init__; " \
        "c.Terminal.__init__ = lambda self: (enter(self), setattr(self, '_brackets', False))[0]"  # fmt: skip
    with chatting("-n", "4", code=code, term="dumb") as screen:
        screen.type("one\ntwo\nthree\n")
        screen.expect(PROMPT)
        screen.type(f"/save {saved}\r")
        screen.expect("(saved: 2 messages)")
        screen.expect(PROMPT)
        assert said(saved) == ["one\ntwo\nthree"]
        screen.type("\x04")
        assert screen.status() == 0
        assert not re.search("Traceback", screen.shown)


LATE = (  # Ctrl-C when the first answer has ended
    "import signal; from edge.cli.chat import command as c; told = c._notices; "
    "c._notices = lambda talk: (setattr(c, '_notices', told), signal.raise_signal(signal.SIGINT))"
)


def test_another_model_goes_on_with_conversation(tmp_path: Path) -> None:
    other, bare = str(GOLDEN / "qwen2.gguf"), tmp_path / "none.gguf"
    with chatting("-n", "3", "--max-kv-size", "64", "--system", "Be brief.", code=LATE) as screen:
        screen.type("one\n")
        screen.expect(PROMPT)
        screen.type("/context\n")
        before = screen.expect(PROMPT)
        assert "1 turn, 3 messages" in before
        assert re.search(r"[1-9]\d* of 64 KV rows are used; \d+ were evicted \(", before)
        screen.type(f"/model {other}\n")
        assert "(model: qwen2.gguf, qwen2" in (said_of := screen.expect(PROMPT))
        assert "the next turn runs the conversation again" in said_of
        screen.type("two\n")
        screen.expect(PROMPT)
        screen.type("/model\n")
        assert "(model: qwen2.gguf" in screen.expect(PROMPT)
        screen.type(f"/model {bare}\n")
        assert "edge: " in screen.expect(PROMPT)
        screen.type("three\n")
        screen.expect(PROMPT)
        screen.type(f"/save {tmp_path}/talk.json\n")
        screen.expect(PROMPT)
        screen.type("\x04")
        assert screen.status() == 0
    assert said(tmp_path / "talk.json") == ["one", "two", "three"]
