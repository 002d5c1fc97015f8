"""An opened model file, not loaded: its architecture, tokenizer and chat template, checked."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import MAX_STRING, GGUFFile, read_gguf
from edge.formats.onnx_folder import read_folder
from edge.model.chat.chat_template import OF_MODEL, ChatTemplate
from edge.model.chat.messages import parse_tools
from edge.model.chat.parts import Segment
from edge.model.chat.thinking import Think
from edge.model.names.catalog import find_model
from edge.model.parts.prompt import Looks, Prompt, joined
from edge.model.reader import read_spec
from edge.model.structure.spec import ModelSpec, check_generates
from edge.model.tensors import find_network
from edge.model.tokens.tokenizer import Tokenizer, TokenizerLike
from edge.sampling import SamplingParams, choose_sampling
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.model.adapters.prefix import Prefix, PrefixFile
    from edge.model.chat.media_parts import Medium, Sense
    from edge.model.parts.given import GivenRows
    from edge.model.structure.tail import Tail
    from edge.model.towers import Layout
    from edge.tools.formats import ToolFormat

_DEFAULT = Think()
_TEMPLATE = "tokenizer.chat_template"
PROMPTS, DEFAULT_PROMPT = "tokenizer.edge.prompts.", "tokenizer.edge.default_prompt"  # texts before texts to embed
_HASH = re.compile(r"[0-9a-f]{32,}")


def make_tokenizer(file: GGUFFile) -> TokenizerLike:
    """Create a file's tokenizer. Raises ModelFormatError, or UnsupportedError for a kind that edge does not know."""
    if file.metadata.get("tokenizer.ggml.model") == "bert":
        from edge.model.tokens.word_piece import WordPiece

        return WordPiece(file)
    if file.metadata.get("tokenizer.ggml.model") == "t5":
        from edge.model.tokens.unigram import Unigram

        return Unigram(file)
    return Tokenizer(file)


class Model:
    """An opened model file, not loaded: its architecture, tokenizer and chat template, checked.

    tokenize: creates its tokenizer. template: what errors call its chat template. prefix: stands before every prompt
    (`Session` puts it there). senses: make rows of media in messages, by their kinds.
    """

    prefix: Prefix | None = None
    senses: Mapping[str, Sense] = MappingProxyType({})

    def __init__(
        self, file: GGUFFile, tokenize: Callable[[GGUFFile], TokenizerLike] = make_tokenizer,
        template: str = OF_MODEL,
    ) -> None:  # fmt: skip
        self.file, self.path = file, file.folder or file.path
        self.spec: ModelSpec = read_spec(file)
        self.tokenizer = tokenize(file)
        source = file.metadata.get(_TEMPLATE)
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        self.template = (
            ChatTemplate(
                source,
                "" if bos is None else self.tokenizer.text(bos),
                "" if eos is None else self.tokenizer.text(eos),
                template,
            )
            if isinstance(source, str)
            else None
        )

    def with_template(self, path: Path | None) -> Model:
        """This model with the chat template of a file; None: with its own. Raises InputError."""
        if path is None:
            return self
        source, tokenizer = read_template(path), self.tokenizer
        if source == self.file.metadata.get(_TEMPLATE):
            return self
        file = replace(self.file, metadata={**self.file.metadata, _TEMPLATE: source})
        return Model(file, lambda _: tokenizer, template=f"the chat template {path}")

    def with_prefix(self, file: PrefixFile | None) -> Model:
        """This model with a prefix before every prompt; None: as it is. Raises the errors of `PrefixFile.open`."""
        if file is None:
            return self
        found = copy(self)
        found.prefix = file.open(self.spec)
        return found

    def with_senses(self, senses: Mapping[str, Sense]) -> Model:
        """This model, perceiving with these."""
        found = copy(self)
        found.senses = senses
        return found

    @property
    def looks(self) -> Looks:
        """The media that its senses have encoded so far."""
        return sum((each.looks for each in self.senses.values()), Looks())

    @property
    def prefix_rows(self) -> int:
        """The number of rows of the prefix."""
        return self.prefix.ids.size if self.prefix else 0

    @property
    def name(self) -> str:
        """The display name: the file's name, or the model's where the file's name is a hash, as in the cache folder."""
        return self.spec.name if _HASH.fullmatch(self.path.stem) else self.path.name

    def prompt(
        self, text: str | Iterable[str], *, system: str | None = None, raw: bool = False, think: Think = _DEFAULT
    ) -> Prompt:
        """Create a conversation's first prompt, through the chat template unless `raw` is set or the model has none.
        Text in parts is read on demand.

        raw: control tokens in the text are recognized. think: the thinking mode. Raises InputError for an empty text
        (for text in parts, while the prompt is read), and UnsupportedError for a mode that the model lacks.
        """
        check_generates(self.spec)
        if text == "":
            raise InputError("the prompt is empty")
        if raw or self.template is None:
            if system is not None:
                raise _needs_template("a system prompt")
            return Prompt(self._with_bos(self._plain(text, think, special=raw)))
        segments = self.template.first_turn(_words(text), system, think)
        return Prompt(self._with_bos(self._encode_segments(segments)), self.template.begins_thinking(think))

    def prompt_of(self, *parts: str | IntArray | FloatArray) -> Prompt:
        """Create a prompt of parts, in their order, without the chat template: texts, in which control tokens are
        recognized, token ids, int [n], and rows in place of embeddings, float32 [n, hidden]. Raises InputError."""
        from edge.model.parts.given import GivenRows

        check_generates(self.spec)
        given, blocks = None, list[IntArray]()
        for number, part in enumerate(parts):
            if isinstance(part, str):
                blocks += self.tokenizer.encode_blocks(_some(part), special=True, start=number == 0)
            elif isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.ndim == 1:
                blocks.append(part.astype(np.int32))
            elif isinstance(part, np.ndarray):
                given = given or GivenRows.of(self.spec)
                blocks.append(given.add(cast(FloatArray, part)))
            else:
                raise InputError(f"a part of a prompt must be text, token ids or rows, not {part!r:.60}")
        return Prompt(self._with_bos(iter(blocks)), given=given)

    def system_rows(self, system: str | None = None, think: Think = _DEFAULT) -> int:
        """The number of tokens before the text of a conversation's first turn: the prefix, the system prompt (by
        default the template's own) and the opening of the turn. 0 without a template."""
        if self.template is None:
            return 0
        user = "user"
        opening = takewhile(lambda segment: segment.text is not user, self.template.first_turn(user, system, think))
        return self.prefix_rows + Prompt(self._with_bos(self._encode_segments(list(opening)))).first(None).size

    def sampling(self, **chosen: Any) -> SamplingParams:
        """Sampling parameters: the chosen fields. For a field that is None, the model file's recommendation."""
        return choose_sampling(self.file.metadata, **chosen)

    def follow_up(self, text: str | Iterable[str], think: Think = _DEFAULT, *, raw: bool = False) -> Prompt:
        """Create a prompt that continues a conversation after the assistant's reply. raw: continue the text without the
        chat template, and recognize control tokens. Raises InputError for an empty text."""
        if raw:
            check_generates(self.spec)
            return Prompt(self._plain(text, think, special=True, start=False))
        template = self._needed_template()
        segments = template.next_turn(_words(text), think)
        return Prompt(self._encode_segments(segments), template.begins_thinking(think))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: Think | str | bool | int | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> Prompt:
        """Create a prompt from a whole conversation, up to the beginning of the next answer. If the last message is the
        assistant's, the answer goes on from it, unless `continues` is False.

        messages, tools: as in OpenAI's protocol: roles system, developer, user, assistant (with `tool_calls` and
        `reasoning_content`) and tool (with `tool_call_id`); contents are text or lists of parts, and what is no text
        becomes a line, but in the last message of the user. tool_choice: "auto", "none", which leaves the tools out,
        "required", the name of a tool, or OpenAI's allowed_tools. The prompt tells its session which calls the answer
        may and must make. variables: template variables beyond those of `think`. A template without support for tools
        receives them as text.

        Raises InputError for messages that are malformed, or that the template refuses, and UnsupportedError without a
        chat template or for a mode of thinking that the model lacks.
        """
        from edge.tools.use import ToolUse, parse_allowed, parse_choice

        template, known = self._needed_template(), parse_tools(tools) or []
        choice, names = parse_allowed(tool_choice, [tool["function"]["name"] for tool in known])
        only, required, any_call = parse_choice(choice, names)
        known = known if any_call else []
        thought = Think.parse(think)
        segments, thinks = template.conversation(
            messages, known, thought, variables, continues=continues,
            markers={kind: sense.marker for kind, sense in self.senses.items()},
        )  # fmt: skip
        segments, given = self._shown(segments)
        callable = [tool for tool in known if tool["function"]["name"] in names]
        use = None
        if callable:
            use = ToolUse(
                self.tool_format, callable, only, required, parallel_tool_calls, thinks=thought.enabled is not False,
                limited=len(callable) < len(known),
            )  # fmt: skip
        ends = list[int]()
        blocks = self._with_bos(self._encode_segments(self._merged(segments), ends))
        prompt = Prompt(blocks, thinks, use, ends=ends, whole=True, given=given)
        prompt.looks = self.looks if any(each.eager for each in self.senses.values()) else None
        return prompt

    @property
    def tool_format(self) -> ToolFormat:
        """How this model writes calls of tools, by its chat template."""
        from edge.tools.formats import find_format

        source = self.file.metadata.get(_TEMPLATE)
        return find_format(source if isinstance(source, str) else None)

    def past(self, turns: Sequence[tuple[str, str]], *, system: str | None = None, think: Think = _DEFAULT) -> IntArray:
        """Token ids of earlier turns (user's text, answer), int32 [n], up to the end of the last answer. Each turn is
        written as the template writes it once another turn follows, without thoughts."""
        template, parts = self._needed_template(), list[IntArray]()
        for user, answer in turns:
            if parts:
                parts += self._encode_segments(template.next_turn(user, think, answered=True))
            else:
                parts += self._with_bos(self._encode_segments(template.first_turn(user, system, think, answered=True)))
            parts.append(self.tokenizer.encode(answer, start=False))
        return joined(parts)

    def openings(self, think: Think = _DEFAULT) -> tuple[IntArray, IntArray]:
        """Token ids between a user's text and the answer, int32 [n]: in the current turn, and in an earlier turn."""
        template, encode = self._needed_template(), self.tokenizer.encode
        return (
            encode(template.opening(think), special=True, start=False),
            encode(template.opening(think, answered=True), special=True, start=False),
        )

    def _needed_template(self) -> ChatTemplate:
        check_generates(self.spec)
        if self.template is None:
            raise UnsupportedError(f"{self.name} has no chat template: use --raw")
        return self.template

    def encode_prompt(
        self, text: str | Iterable[str], *, system: str | None = None, raw: bool = False, most: int | None = None
    ) -> IntArray:
        """Token ids of a first prompt, int32 [n]. most: the maximum count; reads only the text that these tokens
        need."""
        return self.prompt(text, system=system, raw=raw).first(most)

    @cached_property
    def tail(self) -> Tail:
        """The matrices behind the pooling of a text's states, read when they are first used."""
        from edge.model.structure.tail import Tail

        return Tail(self.file, find_network(self.spec))

    @cached_property
    def prompts(self) -> Mapping[str, str]:
        """Texts that stand before a text to embed, by name, such as query and document."""
        fields = self.file.metadata.items()
        return {key.removeprefix(PROMPTS): text for key, text in fields if key.startswith(PROMPTS)}

    def prompted(self, text: str, name: str | None) -> str:
        """The text behind the prompt of this name; None: behind the model's own, if it has one. Raises InputError."""
        if name is None:
            name = self.file.metadata.get(DEFAULT_PROMPT)
        elif name not in self.prompts:
            known = ", ".join(self.prompts) or "it has none"
            raise InputError(f"the model has no prompt {name!r:.60} ({known}): leave --prompt-name out")
        return text if name is None else self.prompts.get(name, "") + text

    @property
    def separators(self) -> int:
        """Tokens between two texts of a pair, as [SEP]: SentencePiece's encoders have two."""
        return 2 if self.file.metadata.get("tokenizer.ggml.model") == "t5" else 1

    @cached_property
    def answers_yes(self) -> bool:
        """Whether the model can be asked for yes or no, as Qwen3-Reranker is: it reads ChatML, and embeds no texts."""
        if self.spec.encoder or f"{self.spec.architecture}.pooling_type" in self.file.metadata:
            return False
        marks = {"<|im_start|>", "<|im_end|>"} <= self.tokenizer.special_tokens().keys()
        return marks and all(self.tokenizer.encode(each, start=False).size == 1 for each in ("yes", "no"))

    @property
    def text_end(self) -> int | None:
        """The token that ends a text to embed, such as [SEP]; None without one."""
        ends = self.spec.encoder or self.file.metadata.get("tokenizer.ggml.add_eos_token") is True
        return self.tokenizer.eos_id if ends else None

    def encode_text(self, text: str | Iterable[str], *, most: int | None = None, embedded: bool = False) -> IntArray:
        """Token ids of a text that is not a prompt, such as a text to measure, int32 [n]. No chat template is applied,
        and control tokens are plain text. An encoder's text begins with [CLS] and ends with [SEP]. most: the maximum
        count; reads only the text that these tokens need. embedded: the text is to embed, and a decoder's ends with
        EOS, too, if its file says so."""
        blocks = self._with_bos(self.tokenizer.encode_blocks(_some(text)))
        end = self.text_end if embedded or self.spec.encoder else None
        return Prompt(chain(blocks, [] if end is None else [np.array([end], np.int32)])).first(most)

    def _encode_segments(self, segments: Iterable[Segment], ends: list[int] | None = None) -> Iterator[IntArray]:
        """Token ids of the segments. ends: gets the number of tokens up to the end of each text of the conversation,
        without a BOS that the template does not write."""
        count = 0
        for index, segment in enumerate(segments):
            text, rows = segment.text, segment.ids
            encode = self.tokenizer.encode_blocks
            for block in encode(text, special=segment.trusted, start=index == 0) if rows is None else [rows]:
                count += block.size
                yield block
            if ends is not None and not segment.trusted:
                ends.append(count)

    def _shown(self, segments: list[Segment]) -> tuple[list[Segment], GivenRows | None]:
        """The segments with texts and ids of rows in place of media, and the rows. Raises InputError."""
        if not any(segment.medium for segment in segments):
            return segments, None
        from edge.model.parts.given import GivenRows

        found, given = list[Segment](), GivenRows.of(self.spec)
        for segment in segments:
            if (medium := segment.medium) is None:
                found.append(segment)
                continue
            sense = self.senses[medium.kind]
            layout, number = sense.layout(medium), 0
            if sense.eager:
                sense.look(medium, layout)
            sizes = self._sizes(layout.parts)
            for index, part in enumerate(layout.parts):
                if isinstance(part, str):
                    found.append(Segment(part, trusted=True))
                    continue
                name = sense.name(medium, layout) + number.to_bytes(4, "little")
                look = partial(_part, sense, medium, layout, number)
                ids = given.promise(
                    name, part, look, layout.grid, layout.whole, seen=True, before=sum(sizes[:index]),
                    behind=sum(sizes[index + 1 :]),
                )  # fmt: skip
                found.append(Segment("", trusted=False, ids=ids))
                number += 1
        return found, given

    def _sizes(self, parts: Sequence[str | int]) -> list[int]:
        """The number of tokens of each part of a picture; 0 of the texts around it."""
        inner = range(1, len(parts) - 1)
        return [
            part if isinstance(part, int)
            else self.tokenizer.encode(part, special=True, start=False).size if index in inner else 0
            for index, part in enumerate(parts)
        ]  # fmt: skip

    def _merged(self, segments: list[Segment]) -> Iterator[Segment]:
        """Join embedded texts with the template's text around them, except where that would put a control token into
        them."""
        for together, group in groupby(segments, lambda segment: segment.trusted or segment.embedded):
            run = list(group)
            if together and len(run) > 1 and self._is_plain(run):
                yield Segment("".join(str(segment.text) for segment in run), trusted=True)
            else:
                yield from run

    def _is_plain(self, run: list[Segment]) -> bool:
        """Whether every control token of the joined text lies within a trusted segment."""
        text, at, trusted = "".join(str(segment.text) for segment in run), 0, list[tuple[int, int]]()
        for segment in run:
            if segment.trusted:
                trusted.append((at, at + len(str(segment.text))))
            at += len(str(segment.text))
        found = self._marks.finditer(text) if self._marks else ()
        return all(any(start <= one.start() and one.end() <= end for start, end in trusted) for one in found)

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """A pattern of the tokens that user text is never encoded to; None if there are none."""
        encode, special = self.tokenizer.encode, self.tokenizer.special_tokens()
        marks = [
            text
            for text, (token, control) in special.items()
            if text and (control or encode(text, start=False).tolist() != [token])
        ]
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None

    def _plain(
        self, text: str | Iterable[str], think: Think, *, special: bool, start: bool = True
    ) -> Iterator[IntArray]:
        """Tokens of a text without the chat template. Raises UnsupportedError if a thinking mode was chosen."""
        if think.chosen:
            raise _needs_template("--think")
        return self.tokenizer.encode_blocks(_some(text), special=special, start=start)

    def _with_bos(self, blocks: Iterator[IntArray]) -> Iterator[IntArray]:
        """Prepend BOS if the model's prompts begin with it and this one does not."""
        bos, first = self.tokenizer.bos_id, next(blocks, np.zeros(0, np.int32))
        begins = self.tokenizer.add_bos or self.spec.encoder
        if begins and bos is not None and (first.size == 0 or first[0] != bos):
            yield np.array([bos], np.int32)
        yield first
        yield from blocks


def _part(sense: Sense, medium: Medium, layout: Layout, number: int) -> FloatArray:
    """The rows of a medium's part of this number."""
    return sense.look(medium, layout)[number]


def _needs_template(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what} needs a chat template, and this prompt goes without one")


def _some(text: str | Iterable[str]) -> Iterator[str]:
    """The parts of a text. Raises InputError at the end if it was empty."""
    empty = True
    for part in [text] if isinstance(text, str) else text:
        empty = empty and not part
        yield part
    if empty:
        raise InputError("the prompt is empty")


def _words(text: str | Iterable[str]) -> Iterator[str]:
    """As `_some`, of a turn of a conversation, which says nothing by blanks alone."""
    blank = True
    for part in _some(text):
        blank = blank and not part.strip()
        yield part
    if blank:
        raise InputError("the prompt has blanks alone: write a question, or --raw continues them as text")


def open_model(model: str | Path, tokenize: Callable[[GGUFFile], TokenizerLike] = make_tokenizer) -> Model:
    """Open MODEL and check it: a GGUF path, a folder or an installed name.

    tokenize: creates its tokenizer; runs use `edge.run.starting.opening.open_model`, which also knows llama.cpp's.
    Raises InputError, ModelFormatError, UnsupportedError.
    """
    with _uncollected():
        path = find_model(model)
        return Model(read_folder(path) if path.is_dir() else read_gguf(path), tokenize)


def read_template(path: Path) -> str:
    """The text of a chat template's file. Raises InputError."""
    try:
        if path.stat().st_size > MAX_STRING:
            raise InputError(f"--chat-template {path} has more than {MAX_STRING} bytes: name a Jinja template")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"--chat-template {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"--chat-template {path} is not UTF-8: name a Jinja template") from None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection, which would scan a vocabulary's hundred thousand objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
