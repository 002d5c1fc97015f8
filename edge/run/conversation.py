"""A conversation: its text, turn by turn, and the rows of a session's KV cache that hold it.

The model answers from the rows; people save, undo and repeat the text. Where the two differ (after evictions, with
another system prompt, with a conversation from a file), the next turn runs the conversation from its text.

Templates drop the thoughts of earlier turns. So does the cache: before the next turn, the rows after the last question
go, and the answer runs again without its thoughts. Where rows cannot be taken back, as after evictions, they stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import InputError, UnsupportedError
from edge.model.prompt import Prompt
from edge.model.spec import check_generates
from edge.model.thinking import Think
from edge.run.arguments import check_text
from edge.run.report import RunReport
from edge.run.scheduler import Pieces
from edge.run.sequence import Mark
from edge.run.session import Session
from edge.run.snapshots import changed_opening
from edge.types import IntArray

_LARGEST_FILE = 64 << 20  # bytes of a saved conversation


@dataclass(frozen=True)
class Turn:
    """before: the session's position when the turn began; None once the cache no longer holds it. opened: where its
    answer began, if thoughts that the template would drop follow there."""

    user: str
    answer: str = ""
    before: Mark | None = None
    opened: Mark | None = None


class Conversation:
    """Turns with a session, which nothing else may use while the conversation lasts.

        talk = Conversation(session, system="Be brief.")
        for piece in talk.say("Why is the sky blue?"):
            print(piece, end="")

    Raises UnsupportedError if the model has no chat template.
    """

    def __init__(self, session: Session, *, system: str | None = None) -> None:
        if not hasattr(session, "model"):
            raise InputError(f"session must be edge.Session, not {session!r:.60}")
        check_text("system", system)
        check_generates(session.spec)
        if session.model.template is None:
            raise UnsupportedError(f"{session.model.name} has no chat template: use --raw")
        self.session = session
        self.evicted = 0  # rows that the last turn made the policy evict
        self._system = system
        self._turns: list[Turn] = []
        self._held = True  # whether the cache holds all turns, but for evicted rows
        self._lora = session.lora  # under which it does
        self._think = Think()  # the last turn's choice

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in the common form: [{"role": "user", "content": …}, …]."""
        said = [] if self._system is None else [("system", self._system)]
        for turn in self._turns:
            said += [("user", turn.user), ("assistant", turn.answer)]
        if said and said[-1] == ("assistant", ""):
            said.pop()  # a question that waits for its answer
        return [{"role": role, "content": content} for role, content in said]

    @property
    def replays(self) -> bool:
        """Whether the next turn runs the whole conversation again, since the cache does not hold it."""
        return bool(self._turns) and not (self._held and self._lora is self.session.lora)

    @property
    def system(self) -> str | None:
        """The system prompt. After a change, the next turn runs the conversation again, under the new one."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        check_text("system", text)
        if text != self._system:
            self._system, self._held = text, False

    def say(self, text: str, **options: Any) -> Pieces:
        """Yield the pieces of the answer to one turn; options are those of `Session.stream`.

        The turn is part of the conversation once it has begun to run, whatever ends it: an interrupted answer stays,
        as far as it was generated. Thoughts are no part of it.
        """
        if not isinstance(text, str):
            raise InputError(f"the prompt must be text, not {text!r:.60}")
        session, fresh = self.session, not self._turns
        think = Think.parse(options.get("think"))
        before, prompt = Mark(), text  # type: Mark, str | Prompt
        self._choose(think)
        if self.replays:
            past = self._encoded()
            before = Mark(rows=past.size)
            follow_up = session.model.follow_up(text, think)
            prompt = Prompt([past, follow_up.first(None)], follow_up.thinks)
        elif not fresh:
            self._drop_thoughts()
            before = session.mark()
        last_report, answer = session.report, list[str]()
        pieces = session.stream(prompt, system=self._system, follow_up=not fresh and not self.replays, **options)
        try:
            for piece in pieces:
                answer.append(piece)
                yield piece
        finally:
            pieces.close()
            report = session.report
            if report is not None and report is not last_report:  # it ran
                if self.replays:
                    self._turns = [replace(turn, before=None) for turn in self._turns]
                self._turns.append(Turn(text, "".join(answer), before, self._opened(report, before)))
                self._held, self._lora, self.evicted = True, session.lora, report.kv.evicted - before.evicted

    def undo(self) -> str:
        """Remove the last turn, its question and its answer; returns the question. Raises InputError if there is
        none."""
        if not self._turns:
            raise InputError("there is no turn to take back")
        turn = self._turns.pop()
        self._held = self._held and turn.before is not None and self.session.rewind(turn.before)
        return turn.user

    def retry(self, **options: Any) -> Pieces:
        """Another answer to the last question. Raises InputError if there is none."""
        return self.say(self.undo(), **options)

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.session.reset()
        self._turns, self._held = [], True

    def moved(self, session: Session) -> Conversation:
        """The same conversation with another session, whose next turn runs its text."""
        other = Conversation(session, system=self._system)
        other._turns = [Turn(turn.user, turn.answer) for turn in self._turns]
        other._held = not other._turns
        return other

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON: {"messages": […]}. A saved conversation is replaced, no other file.

        Raises InputError.
        """
        from edge.devices.output import check_file, new_file

        path = Path(path).expanduser()
        if path.is_file() and path.stat().st_size:
            try:
                _turns(path)
            except InputError:
                raise InputError(f"{path} exists and holds no conversation: choose another file") from None
        check_file(path, force=True)
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        with new_file(path) as temporary:
            temporary.write_bytes(f"{text}\n".encode("utf-8", "replace"))

    def load(self, path: str | Path) -> None:
        """Replace this conversation by one from a file. It is run with the next turn.

        The file: JSON as `save` writes it, or the list of messages alone. An optional system message comes first, then
        the user's and the assistant's in turn. Raises InputError, and changes nothing, for anything else.
        """
        system, turns = _turns(Path(path).expanduser())
        self.reset()
        self._system, self._turns, self._held = system, turns, False

    def _choose(self, think: Think) -> None:
        """Run the conversation again if the template begins it otherwise for this choice than for the last one."""
        template = self.session.model.template
        assert template is not None
        if self._turns and template.beginning(self._system, think) != template.beginning(self._system, self._think):
            self._held = False
        self._think = think

    def _encoded(self) -> IntArray:
        """Token ids of the conversation so far."""
        turns = [(turn.user, turn.answer) for turn in self._turns]
        return self.session.model.past(turns, system=self._system, think=self._think)

    def _opened(self, report: RunReport, before: Mark) -> Mark | None:
        """Where the opening of the last answer ends, as far as the template writes it in an earlier turn, too; None if
        no thoughts followed, or thoughts that it keeps."""
        changed = changed_opening(self.session.model, self._think)
        if report.thoughts is None or report.tokens.cut or changed is None:
            return None
        count, instead = changed
        first = before.rows if self._held else 0
        return Mark(first + report.tokens.prompt - count, before.evicted, instead)

    def _drop_thoughts(self) -> None:
        """Take the rows of the last answer back, and leave the answer without its thoughts to be run."""
        turn = self._turns[-1]
        if turn.opened is not None:
            answer = self.session.model.tokenizer.encode(turn.answer, start=False)
            self.session.rewind(replace(turn.opened, left=np.concatenate([turn.opened.left, answer])))
            self._turns[-1] = replace(turn, opened=None)


def _turns(path: Path) -> tuple[str | None, list[Turn]]:
    """The system prompt and the turns of a saved conversation. Raises InputError."""
    messages = _read_messages(path)
    system = messages[0][1] if messages[0][0] == "system" else None
    turns: list[Turn] = []
    expected = "user"
    for number, (role, content) in enumerate(messages, 1):
        if role == "system":
            continue  # the first
        if role != expected:
            raise InputError(f"{path}: message {number} is the {role}'s, where the {expected}'s must follow")
        if role == "user":
            turns.append(Turn(content))
        else:
            turns[-1] = replace(turns[-1], answer=content)
        expected = "assistant" if role == "user" else "user"
    return system, turns


def _read_messages(path: Path) -> list[tuple[str, str]]:
    """Roles and contents. Raises InputError."""
    try:
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB: that is no saved conversation")
        if not path.is_file():
            raise InputError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        read = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON, so no saved conversation") from None
    return list(_checked(path, read.get("messages") if isinstance(read, dict) else read))


def _checked(path: Path, messages: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{path}: no saved conversation: {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise InputError(
                f"{path}: message {number} must have a role (system, user or assistant) and a content, which is text"
            )
        if role == "system" and number > 1:
            raise InputError(f"{path}: message {number} is the system's, which must come first")
        if role == "user" and not content:
            raise InputError(f"{path}: message {number} is empty")
        yield role, content
