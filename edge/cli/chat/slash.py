"""Commands of `edge chat`, which begin with a slash: each is a function of the chat and its argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.cli.terminal.show import note
from edge.errors import InputError, several
from edge.flags import flags_of
from edge.formats.json_file import read_given
from edge.model.chat.messages import parse_tools
from edge.model.chat.thinking import Think
from edge.records import dataclass
from edge.sampling import WHOLE, SamplingParams

if TYPE_CHECKING:
    from edge.documents.documents import Documents
    from edge.media.picture import Image
    from edge.media.recording import Sound
    from edge.run.batching.scheduler import Pieces
    from edge.run.conversation import Conversation
    from edge.run.hooks import OnPrefill


@dataclass
class Settings:
    """Settings of answers, which `/set` changes. max_tokens: None is no limit."""

    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    think: Think = field(default_factory=Think)


@dataclass
class Chat:
    """talk: the conversation. on_prefill: shows the progress of a turn's prefill. on_thought: shows thoughts. switch:
    goes on with another model. left: the user asked to leave."""

    talk: Conversation
    settings: Settings
    on_prefill: OnPrefill
    on_thought: Callable[[str], None]
    switch: Callable[[str], None]
    left: bool = False
    results: list[str] = field(default_factory=list)  # of the first calls that wait for them
    files: list[str] = field(default_factory=list)  # texts that go before the next question
    media: list[Image | Sound] = field(default_factory=list)  # pictures and sounds that go before it
    documents: Documents | None = None  # whose passages go before each question

    def say(self, text: str) -> Pieces | None:
        """The answer to a turn after the files that were read, or to the results of calls, once all are there."""
        if not self.talk.calls:
            if not text.strip():
                return None
            files, self.files = self.files, []
            media, self.media = self.media, []
            return self.ask("\n\n".join([*(file.strip("\n") for file in files), text]), media)
        self.results.append(text)
        if len(self.results) < len(self.talk.calls):
            self.show_call()
            return None
        results, self.results = self.results, []
        return self.talk.give(results, **self._options())

    def ask(self, question: str, media: Sequence[Image | Sound] = ()) -> Pieces:
        images = [each for each in media if each.kind == "picture"]
        sounds = [each for each in media if each.kind == "sound"]
        return self.talk.say(question, images, sounds, **self._options(), documents=self.documents)

    def _options(self) -> dict[str, Any]:
        return {"on_prefill": self.on_prefill, "on_thought": self.on_thought, **vars(self.settings)}

    def show_call(self) -> None:
        """Show the next call whose result is missing."""
        if self.talk.calls:
            call = self.talk.calls[len(self.results)]
            note(f"{call.name} {call.arguments}\n(a call: type its result, or /undo)")


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Tools from a JSON file: a list as OpenAI's protocol has it. Raises InputError."""
    read = read_given(path.expanduser(), "list of tools")
    try:
        return parse_tools(read) or []
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_file(path: Path) -> str:
    """A file's text, which goes before the next question. Raises InputError."""
    from edge.cli.terminal.prompts import read_whole

    text = read_whole(path.expanduser())
    note(f"({path.name}: {len(text):,} characters, which go before the next question)")
    return text


def is_command(text: str) -> bool:
    """A slash and a word on a line of its own, or a known command with an argument of several lines."""
    return text.startswith("/") and not text.startswith("//") and ("\n" not in text or _name(text) in _COMMANDS)


def obey(chat: Chat, text: str) -> Pieces | None:
    """Execute a command; returns the pieces of an answer if it makes one. Raises InputError and other EdgeErrors."""
    name = _name(text)
    if name not in _COMMANDS:
        raise InputError(f"there is no command {name:.40}: /help lists them, // sends a text that begins with a slash")
    chat.results.clear()
    return _COMMANDS[name].run(chat, text[len(name) :].strip())


def warn_unpinned(talk: Conversation) -> None:
    """Warn if rows of the system prompt can be evicted."""
    session = talk.session
    rows, pinned = session.model.system_rows(talk.system), session.plan.sinks
    if talk.system and session.may_evict and rows > pinned:
        note(f"(the system prompt has {rows} rows, of which {pinned} are pinned: start with --keep {rows} to pin all)")


def _name(text: str) -> str:
    return (text.split(maxsplit=1) or [""])[0]


def _help(chat: Chat, argument: str) -> None:
    width = max(len(command.usage) for command in _COMMANDS.values())
    listed = dict.fromkeys(_COMMANDS.values())
    note("\n".join(f"{command.usage:{width}}  {command.about}" for command in listed))
    note('""" opens and ends a text of several lines, // sends a slash, Ctrl-C ends an answer')


def _quit(chat: Chat, argument: str) -> None:
    chat.left = True


def _reset(chat: Chat, argument: str) -> None:
    chat.talk.reset()
    chat.files.clear()
    chat.media.clear()
    note("(the conversation is forgotten" + (", the system prompt stays)" if chat.talk.system else ")"))


def _undo(chat: Chat, argument: str) -> None:
    question = chat.talk.undo()
    note(f"(taken back: {_short(question)}{_replayed(chat.talk)})")


def _retry(chat: Chat, argument: str) -> Pieces | None:
    sampling = chat.settings.sampling
    media: list[Image | Sound] = [*chat.talk.images, *chat.talk.sounds]
    question = chat.talk.undo()
    if sampling.temperature == 0 or sampling.seed is not None:
        why = "temp is 0" if sampling.temperature == 0 else "the seed is fixed"
        note(f"(the same question gets the same answer, since {why}: /set temp 0.7, /set seed random)")
    return chat.ask(question, media)


def _read(chat: Chat, argument: str) -> None:
    chat.files.append(read_file(Path(_file(argument))))


def _image(chat: Chat, argument: str) -> None:
    from edge.media.picture import Image  # here: few chats have pictures

    _show(chat, argument, Image, "sees no pictures")


def _audio(chat: Chat, argument: str) -> None:
    from edge.media.recording import Sound  # here: few chats have sounds

    _show(chat, argument, Sound, "hears nothing")


def _show(chat: Chat, argument: str, kind: type[Image] | type[Sound], lacks: str) -> None:
    """Put a picture or a sound before the next question."""
    model = chat.talk.session.model
    if (sense := model.senses.get(kind.kind)) is None:
        raise InputError(f"{model.name} {lacks}: start with --mmproj, or put its mmproj file beside it")
    medium = kind(_file(argument))
    tokens = sense.layout(medium).tokens
    sense.check(medium)  # here, where no question is lost
    chat.media.append(medium)
    note(f"({medium.name}: {medium.size}, before the next question: {several(tokens, 'token')})")


def _save(chat: Chat, argument: str) -> None:
    chat.talk.save(_file(argument))
    note(f"(saved: {_count(chat.talk)})")


def _load(chat: Chat, argument: str) -> None:
    chat.talk.load(_file(argument))
    note(f"(loaded: {_count(chat.talk)}{_replayed(chat.talk)})")
    warn_unpinned(chat.talk)


def _system(chat: Chat, argument: str) -> None:
    talk = chat.talk
    if argument:
        talk.system = _text(argument) or None
        warn_unpinned(talk)
    shown = "none but the template's own" if talk.system is None else _short(talk.system)
    note(f"(system prompt: {shown}{_replayed(talk)})")


def _tools(chat: Chat, argument: str) -> None:
    if argument:
        file = _file(argument)
        chat.talk.tools = read_tools(Path(file)) if file else []
    names = [tool["function"]["name"] for tool in chat.talk.tools]
    note(f"(tools: {', '.join(names) or 'none'})")


def _think(chat: Chat, argument: str) -> None:
    if argument:
        chosen = Think.parse(argument)
        template = chat.talk.session.model.template
        assert template is not None
        template.opening(chosen)  # refuses a choice that the model does not have
        chat.settings.think = chosen
    think = chat.settings.think
    note(f"(thinking: {think if think.chosen else 'as the template has it'})")


def _report(chat: Chat, argument: str) -> None:
    report = chat.talk.session.report
    from edge.lab.report.run import report_lines

    note("\n".join(report_lines(report)) if report else "nothing has been generated yet")


def _context(chat: Chat, argument: str) -> None:
    talk, session = chat.talk, chat.talk.session
    turns = sum(message["role"] == "user" for message in talk.messages)
    kv, plan, held = session.engine.kv, session.plan, turns and not talk.replays
    rows, evicted = (kv.length, session.mark().evicted) if held else (0, 0)  # others are of what was taken back
    lines = [
        f"{turns} turn{'' if turns == 1 else 's'}, {_count(talk)}{_replayed(talk)}",
        f"{rows:,} of {kv.capacity:,} KV rows are used; {evicted:,} were evicted ({plan.kv_policy})",
    ]
    if plan.sinks and session.may_evict:
        lines.append(f"{plan.sinks:,} rows are pinned: the system prompt, or those of --keep")
    note("\n".join(lines))


def _model(chat: Chat, argument: str) -> None:
    if argument:
        chat.switch(argument)
    session = chat.talk.session
    note(f"(model: {session.model.name}, {session.spec.label}{_replayed(chat.talk)})")


def _set(chat: Chat, argument: str) -> None:
    settings = chat.settings
    name, _, value = argument.partition(" ")
    name, value = name.lstrip("-").replace("_", "-"), value.strip()
    if name in _NUMBERS:
        field, parse = _NUMBERS[name]
        change: dict[str, Any] = {field: _number(name, value, parse)}
        settings.sampling = replace(settings.sampling, **change)
    elif name in ("n", "max-tokens"):
        from edge.run.arguments import check_limit

        settings.max_tokens = check_limit(int(_number(name, value, int) or 0))
    elif name == "stop":
        stop = _text(value)
        settings.stop = (stop,) if stop else ()
    elif name:
        raise InputError(f"/set knows no {name:.40}: choose {', '.join(_NUMBERS)}, max-tokens, stop")
    sampling = settings.sampling
    shown = [f"{name} {getattr(sampling, field)}" for name, (field, _) in _NUMBERS.items() if name != "seed"]
    shown.append(f"seed {'random' if sampling.seed is None else sampling.seed}")
    shown.append(f"max-tokens {settings.max_tokens or -1}")
    shown.append(f"stop {json.dumps(settings.stop[0], ensure_ascii=False) if settings.stop else 'none'}")
    note(f"({', '.join(shown)})")


_NUMBERS = {
    flag.name[2:]: (field, int if field in WHOLE else float)
    for field, flag in flags_of(SamplingParams).items()
    if field != "logit_bias"
}


def _number(name: str, value: str, parse: type[int] | type[float]) -> float | None:
    if name == "seed" and value == "random":
        return None
    try:
        return parse(value)
    except ValueError:
        wanted = "a whole number" if parse is int else "a number"
        raise InputError(f"/set {name} takes {wanted}, not {value[:40]!r}") from None


def _text(value: str) -> str:
    """The text without quotes around it, in which JSON's escapes are read: "\\n" is a line break. Other quotes stay."""
    if _is_quoted(value):
        try:
            return str(json.loads(value, strict=False))  # line breaks may be there as they are
        except ValueError:
            pass  # "a" or "b"
    return value


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] == '"'


def _file(argument: str) -> str:
    if not argument:
        raise InputError("name a file: /read letter.txt, /image a.jpg, /audio a.wav, /save talk.json, /load talk.json")
    return argument[1:-1] if _is_quoted(argument) else argument


def _count(talk: Conversation) -> str:
    count = len(talk.messages)
    return f"{count} message{'' if count == 1 else 's'}"


def _replayed(talk: Conversation) -> str:
    return "; the next turn runs the conversation again" if talk.replays else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


@dataclass(frozen=True)
class _Command:
    usage: str
    about: str
    run: Callable[[Chat, str], Pieces | None]


_QUIT = _Command("/quit, /bye, /exit", "leave, like Ctrl-D", _quit)
_COMMANDS = {
    "/help": _Command("/help", "this list", _help),
    "/retry": _Command("/retry", "answer the last question anew", _retry),
    "/undo": _Command("/undo", "take the last question and its answer back", _undo),
    "/reset": _Command("/reset", "forget the conversation", _reset),
    "/system": _Command("/system [TEXT]", 'show or change the system prompt; "" takes it away', _system),
    "/tools": _Command("/tools [FILE]", 'show or change the tools that may be called; "" takes them away', _tools),
    "/set": _Command("/set [OPTION VALUE]", f"{', '.join(_NUMBERS)}, max-tokens, stop", _set),
    "/think": _Command("/think [on|off|N|NJ]", "whether, or for how many tokens or joules, the model thinks", _think),
    "/read": _Command("/read FILE", "put a file's text before the next question", _read),
    "/audio": _Command("/audio FILE", "put a sound before the next question, for models that hear", _audio),
    "/image": _Command("/image FILE", "put a picture before the next question, for models that see", _image),
    "/save": _Command("/save FILE", "write the conversation as JSON", _save),
    "/load": _Command("/load FILE", "go on with a saved conversation", _load),
    "/model": _Command("/model [MODEL]", "show the model, or go on with another one", _model),
    "/context": _Command("/context", "what the cache holds of the conversation, and what was evicted", _context),
    "/report": _Command("/report", "what the last answer cost", _report),
    "/quit": _QUIT,
    "/bye": _QUIT,
    "/exit": _QUIT,
}
