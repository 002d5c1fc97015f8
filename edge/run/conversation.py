"""A conversation: its text, turn by turn, and the rows of a session's KV cache that hold it.

The model answers from the rows; people save, undo and repeat the text. Where the two differ (after evictions, with
another system prompt, with a conversation from a file), the next turn runs the conversation from its text.

Templates drop the thoughts of earlier turns, and so does the cache: before the next turn, it drops the rows after the
last question, and the answer runs again without its thoughts. Where the cache cannot be rewound, as after evictions,
the thoughts stay.

With tools, each turn renders the whole conversation by the template, and the session reuses the rows of the common
prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import InputError, UnsupportedError
from edge.formats.json_file import read_given
from edge.model.chat.messages import parse_messages, parse_tools
from edge.model.chat.parts import has_media, kind_of, text_of_parts
from edge.model.chat.thinking import Think
from edge.model.parts.prompt import Prompt
from edge.model.structure.spec import check_generates
from edge.run.arguments import check_media, check_text
from edge.run.batching.scheduler import Pieces
from edge.run.report import RunReport, ToolCall
from edge.run.request import DEFAULT_MAX_TOKENS, Heard, Picture, user_message
from edge.run.sequences.snapshots import Mark, changed_opening
from edge.run.session import Session
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.media.picture import Image
    from edge.media.recording import Sound
    from edge.model.chat.media_parts import Medium
    from edge.run.grounding import Grounded


@dataclass(frozen=True)
class Turn:
    """A question and its answer. before: the session's position when the turn began; None once the cache no longer
    holds it. opened: the position where the answer began, if thoughts follow that the template drops later. steps:
    messages between question and answer: tool calls and their results. calls: the answer's, still without results.
    media: pictures and sounds before the question."""

    user: str
    answer: str = ""
    before: Mark | None = None
    opened: Mark | None = None
    steps: tuple[dict[str, Any], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    media: tuple[Medium, ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = [user_message(self.user, self.media), *self.steps]
        return [
            *said,
            _calling(self.answer, self.calls) if self.calls else {"role": "assistant", "content": self.answer},
        ]


@dataclass(frozen=True)
class Summary:
    """What stands for the first turns of a conversation. before, after: their tokens, and its own."""

    turns: int
    text: str
    before: int
    after: int
    joules: float


_KEPT_TURNS, _SUMMARY_TOKENS = 2, 160
_BEFORE = "What was said before, in short:"
_SUMMARIZE = (
    "Summarize our conversation up to here in at most 100 words. Keep names, numbers, decisions and open questions, "
    "and write only the summary."
)


class Conversation:
    """Turns with a session, which nothing else may use while the conversation lasts.

        talk = Conversation(session, system="Be brief.")
        for piece in talk.say("Why is the sky blue?"):
            print(piece, end="")

    tools: as for `Session.stream`, for the turns to come. `calls` has the last answer's tool calls; `give` continues
    with their results. Raises UnsupportedError if the model has no chat template.
    """

    def __init__(self, session: Session, *, system: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if not hasattr(session, "model"):
            raise InputError(f"session must be edge.Session, not {session!r:.60}")
        check_text("system", system)
        check_generates(session.spec)
        if session.model.template is None:
            raise UnsupportedError(f"{session.model.name} has no chat template: use --raw")
        self.session, self.tools = session, parse_tools(tools) or []
        self.evicted = 0  # rows that the last turn made the policy evict
        self._system = system
        self._turns: list[Turn] = []
        self.summary: Summary | None = None  # that stands for the first turns
        self._held = True  # whether the cache holds all turns, except evicted rows
        self._lora = session.lora  # the adapters that computed its rows
        self._think = Think()  # the last turn's choice

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the common form: [{"role": "user", "content": …}, …]."""
        return self._said(self._turns)

    def _said(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        said = [] if self._system is None else [{"role": "system", "content": self._system}]
        said += [message for turn in turns for message in turn.messages()]
        if said and said[-1] == {"role": "assistant", "content": ""}:
            said.pop()  # a question that waits for its answer
        return said

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the last answer that wait for their results."""
        return self._turns[-1].calls if self._turns else ()

    @property
    def _whole(self) -> bool:
        """Whether each turn renders the whole conversation by the template."""
        return bool(self.tools) or any(turn.steps or turn.calls or turn.media for turn in self._turns)

    @property
    def replays(self) -> bool:
        """Whether the next turn runs the whole conversation again, since the cache does not hold it."""
        return bool(self._turns) and not self._whole and not (self._held and self._lora is self.session.lora)

    @property
    def system(self) -> str | None:
        """The system prompt. After a change, the next turn runs the conversation again, under the new one."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        check_text("system", text)
        if text != self._system:
            self._system, self._held = text, False

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures of the last question."""
        return tuple(each for each in self._media if each.kind == "picture")

    @property
    def sounds(self) -> tuple[Sound, ...]:
        """The sounds of the last question."""
        return tuple(each for each in self._media if each.kind == "sound")

    @property
    def _media(self) -> tuple[Any, ...]:
        return self._turns[-1].media if self._turns else ()

    def say(
        self, text: str, images: Sequence[Picture] = (), sounds: Sequence[Heard] = (), **options: Any
    ) -> Pieces:  # fmt: skip
        """Yield the pieces of the answer to one turn; options are those of `Session.stream`. images,
        sounds: before the text, for models that see or hear.

        The turn is part of the conversation once it has begun to run, whatever ends it: an interrupted answer stays,
        as far as it was generated. A question that is interrupted before its first token is taken back, as is one that
        raises InputError, such as for a picture whose file turns out to be damaged. Thoughts are no part of the
        conversation.
        """
        if not isinstance(text, str):
            raise InputError(f"the prompt must be text, not {text!r:.60}")
        if self.calls:
            raise InputError(f"{self.calls[0].name} was called, and has no result yet: give it, or take the turn back")
        media = tuple(check_media(images, sounds))
        if self._whole or media:
            yield from self._answer(len(self._turns), Turn(text, media=media), **options)
            return
        found = self._grounded(text, options)
        asked = text if found is None else found.text
        session, fresh = self.session, not self._turns
        think = Think.parse(options.get("think"))
        before, prompt = Mark(), asked  # type: Mark, str | Prompt
        self._choose(think)
        if self.replays:
            past = self._encoded()
            before = Mark(rows=session.model.prefix_rows + past.size)
            follow_up = session.model.follow_up(asked, think)
            prompt = Prompt([past, follow_up.first(None)], follow_up.thinks)
        elif not fresh:
            self._drop_thoughts()
            before = session.mark()

        def keep(answer: str, report: RunReport) -> None:
            if _unanswered(answer, report):
                self._held = not self.replays and session.rewind(before)
                return
            if self.replays:
                self._turns = [replace(turn, before=None) for turn in self._turns]
            self._turns.append(Turn(text, answer, before, self._opened(report, before)))
            self._held, self._lora, self.evicted = True, session.lora, report.kv.evicted - before.evicted

        follows = not fresh and not self.replays
        yield from self._told(session.stream(prompt, system=self._instructions, follow_up=follows, **options), keep)

    def _grounded(self, question: str, options: dict[str, Any]) -> Grounded | None:
        """The question behind passages, where the options have documents; they then have what was found."""
        documents = options.get("documents")
        if documents is None:
            return None
        from edge.run.grounding import Grounded, ground  # here: few conversations have documents

        if isinstance(documents, Grounded):
            raise InputError("a conversation's documents must be edge.Documents")
        held = self.session.engine.kv.length if self._turns else 0
        limit = options.get("max_tokens", DEFAULT_MAX_TOKENS)
        options["documents"] = found = ground(documents, self.session.reader, question, self._instructions, limit, held)
        return found

    def give(self, results: Sequence[str], **options: Any) -> Pieces:
        """Continue with the results of the last answer's `calls`, in their order; like `say`. Raises InputError."""
        calls, session = self.calls, self.session
        if not calls or len(results) != len(calls):
            raise InputError(f"{len(calls)} calls wait for results, and {len(results)} were given")
        report = session.report
        own = report is not None and report.tool_calls == calls and report.thoughts
        steps = _steps(self._turns[-1], results, own.text if own else None)
        yield from self._answer(len(self._turns) - 1, steps, **options)

    def _answer(self, number: int, turn: Turn, **options: Any) -> Pieces:
        """Answer turn `number`, rendering the whole conversation by the template."""

        def keep(answer: str, report: RunReport) -> None:
            if _unanswered(answer, report):
                return
            self._turns[number:] = [replace(turn, answer=answer, calls=report.tool_calls)]
            self._held, self.evicted = False, report.kv.evicted

        system = self._instructions
        messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            *(message for each in [*self._turns[self._first : number], turn] for message in each.messages()),
        ]
        if messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()  # a question that waits for its answer
        yield from self._told(self.session.stream(messages=messages, tools=self.tools, **options), keep)

    def _told(self, pieces: Pieces, keep: Callable[[str, RunReport], None]) -> Pieces:
        """Pass on the pieces of an answer; then keep the answer if it ran, however it ended."""
        last_report, answer, refused = self.session.report, list[str](), False
        try:
            for piece in pieces:
                answer.append(piece)
                yield piece
        except InputError:
            refused = True
            raise
        finally:
            pieces.close()
            report = self.session.report
            if report is not None and report is not last_report:  # it ran
                if refused:
                    self._held = False
                else:
                    keep("".join(answer), report)

    def undo(self) -> str:
        """Remove the last turn, its question and its answer; returns the question. Raises InputError if there is
        none."""
        if not self._turns:
            raise InputError("there is no turn to take back")
        turn = self._turns.pop()
        if len(self._turns) <= self._first:
            self.summary, self._held = None, False
        self._held = self._held and turn.before is not None and self.session.rewind(turn.before)
        return turn.user

    def retry(self, **options: Any) -> Pieces:
        """Another answer to the last question. Raises InputError if there is none."""
        images, sounds = self.images, self.sounds
        return self.say(self.undo(), images, sounds, **options)

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.session.reset()
        self._turns, self.summary, self._held = [], None, True

    def moved(self, session: Session) -> Conversation:
        """The same conversation with another session, whose next turn runs its text."""
        other = Conversation(session, system=self._system, tools=self.tools)
        other._turns = [replace(turn, before=None, opened=None) for turn in self._turns]
        other.summary, other._held = self.summary, not other._turns
        return other

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON: {"messages": […]}. Replaces a saved conversation, but no other file.

        Raises InputError.
        """
        from edge.devices.output import check_file, new_file

        path = Path(path).expanduser()
        if path.is_file() and path.stat().st_size:
            try:
                saved_turns(path)
            except InputError:
                raise InputError(f"{path} exists and holds no conversation: choose another file") from None
        check_file(path, force=True)
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1, default=_url)
        with new_file(path) as temporary:
            temporary.write_bytes(f"{text}\n".encode("utf-8", "replace"))

    def load(self, path: str | Path) -> None:
        """Replace this conversation by one from a file. It runs with the next turn.

        The file: JSON as `save` writes it, or the list of messages alone. An optional system message comes first, then
        the user's and the assistant's alternate, with results after tool calls. Raises InputError, and changes
        nothing, for anything else.
        """
        system, turns = saved_turns(Path(path).expanduser())
        self.reset()
        self._system, self._turns, self._held = system, turns, False

    def _choose(self, think: Think) -> None:
        """Have the conversation run again if the template begins it differently for this choice than for the last."""
        template = self.session.model.template
        assert template is not None
        if self._turns and template.beginning(self._system, think) != template.beginning(self._system, self._think):
            self._held = False
        self._think = think

    def _encoded(self) -> IntArray:
        """Token ids of the conversation so far."""
        turns = [(turn.user, turn.answer) for turn in self._turns[self._first :]]
        return self.session.model.past(turns, system=self._instructions, think=self._think)

    @property
    def _first(self) -> int:
        """The number of turns that a summary stands for."""
        return self.summary.turns if self.summary else 0

    @property
    def _instructions(self) -> str | None:
        """The system prompt as the model has it, with the summary."""
        parts = [self._system, f"{_BEFORE} {self.summary.text}" if self.summary else None]
        return "\n\n".join(filter(None, parts)) or self._system

    def summarize(self, *, at: float = 0.5) -> Summary | None:
        """Have the model summarize all turns but the last two, while nobody waits, if the KV rows are filled to this
        part: the next turn runs behind the summary, and no row needs to be evicted. `messages` has all turns as before.

        Returns the summary, or None, which changes nothing: there was no need, a policy that never evicts has no room
        for it, or `session.interrupt` ended it. Raises InputError for a part that is none.
        """
        if not isinstance(at, int | float) or not 0 <= at <= 1:
            raise InputError(f"the part of the rows must be from 0 to 1, not {at!r:.40}")
        session, model, count = self.session, self.session.model, len(self._turns) - _KEPT_TURNS
        kv, turns = session.engine.kv, self._turns[self._first : max(0, count)]
        filled = kv.length >= at * kv.capacity and self._held and not self._whole
        if not turns or not filled or (mark := session.mark()).evicted:
            return None
        before = model.past([(turn.user, turn.answer) for turn in turns]).size
        before += self.summary.after if self.summary else 0  # which the new one also replaces
        most = min(_SUMMARY_TOKENS, before - 1)  # of tokens, so that the summary is shorter
        needed = mark.left.size + model.follow_up(_SUMMARIZE, self._off()).first(None).size + most
        if most < 1 or (needed > kv.free and not session.may_evict):
            return None
        with session.fork(1) as fork:  # afterwards the conversation is what it was
            stream = fork[0].stream(_SUMMARIZE, max_tokens=most, think=self._off())
            try:
                text = "".join(stream).strip()
            except InterruptedError:  # before its first pass
                return None
        report = stream.report
        if report is None or report.stop_reason not in ("eos", "length") or not text:
            return None
        self.summary = Summary(count, text, before, report.tokens.generated, report.energy.joules)
        self._held = False
        return self.summary

    def _off(self) -> Think:
        """No thoughts, where the template can do without."""
        template = self.session.model.template
        return Think() if template is None else template.nearest(Think.parse(False))

    def _opened(self, report: RunReport, before: Mark) -> Mark | None:
        """The end of the last answer's opening, as far as the template also writes it for an earlier turn; None if no
        thoughts followed, or if the template keeps them."""
        changed = changed_opening(self.session.model, self._think)
        if report.thoughts is None or report.tokens.cut or changed is None:
            return None
        count, instead = changed
        first = before.rows if self._held else 0
        return Mark(first + report.tokens.prompt - count, before.evicted, instead)

    def _drop_thoughts(self) -> None:
        """Drop the last answer's rows, and queue the answer without its thoughts to run again."""
        turn = self._turns[-1]
        if turn.opened is not None:
            answer = self.session.model.tokenizer.encode(turn.answer, start=False)
            self.session.rewind(replace(turn.opened, left=np.concatenate([turn.opened.left, answer])))
            self._turns[-1] = replace(turn, opened=None)


def _unanswered(answer: str, report: RunReport) -> bool:
    """Whether the question was interrupted before its first token, also in an outline before the answer."""
    return report.stop_reason == "interrupted" and not (answer if report.branched else report.tokens.generated)


def saved_turns(path: Path) -> tuple[str | None, list[Turn]]:
    """The system prompt and the turns of a saved conversation. Raises InputError."""
    messages = _read_messages(path)
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns, results, expected = list[Turn](), list[str](), "user"
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role == "system":
            continue  # the first
        if role != expected:
            raise InputError(f"{path}: message {number} is the {role}'s, where the {expected}'s must follow")
        if role == "user":
            turns.append(Turn(content, media=message["media"]))
            expected = "assistant"
        elif role == "assistant":
            turns[-1], results = replace(turns[-1], answer=content, calls=message["calls"]), []
            expected = "tool" if message["calls"] else "user"
        else:
            results.append(content)
            if len(results) == len(turns[-1].calls):
                turns[-1], results, expected = _steps(turns[-1], results), [], "assistant"
    if results:
        raise InputError(f"{path}: the last calls have results but for {len(turns[-1].calls) - len(results)} of them")
    return system, turns


def _steps(turn: Turn, results: Sequence[str], thoughts: str | None = None) -> Turn:
    """The turn with its calls and their results as steps, and its answer open."""
    called = _calling(turn.answer, turn.calls) | ({"reasoning_content": thoughts} if thoughts else {})
    found = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(turn.calls, results, strict=True)
    ]
    return replace(turn, answer="", calls=(), before=None, opened=None, steps=(*turn.steps, called, *found))


def _calling(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The message of an answer that calls tools."""
    listed = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": text or None, "tool_calls": listed}


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Roles, contents and calls. Raises InputError."""
    read = read_given(path, "saved conversation")
    return list(_checked(path, read.get("messages") if isinstance(read, dict) else read))


def _checked(path: Path, messages: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{path}: no saved conversation: {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    for number, message in enumerate(messages, 1):
        found = message if isinstance(message, dict) else {}
        role, content, listed = (found.get(name) for name in ("role", "content", "tool_calls"))
        media: tuple[Medium, ...] = ()
        if role == "user" and content is not None and has_media(content):
            from edge.model.chat.media_parts import medium_of

            where = f"{path}: message {number}"
            media = tuple(medium_of(part, where, files=False) for part in content if kind_of(part))
            content = text_of_parts([part for part in content if not kind_of(part)], where)
        if role not in ("system", "user", "assistant", "tool") or not (isinstance(content, str) or listed):
            raise InputError(
                f"{path}: message {number} must have a role (system, user, assistant or tool) and a content, which is "
                "text"
            )
        if role == "system" and number > 1:
            raise InputError(f"{path}: message {number} is the system's, which must come first")
        if role == "user" and not content:
            raise InputError(f"{path}: message {number} is empty")
        try:
            [parsed] = parse_messages([{"role": role, "content": content, "tool_calls": listed}])
        except InputError as error:
            raise InputError(f"{path}: {error}".replace("message 1", f"message {number}")) from None
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in parsed.calls)
        yield {"role": role, "content": content or "", "calls": calls, "media": media}


def _url(medium: Any) -> str:
    """A picture or a sound in a saved conversation."""
    return str(medium.url)
