"""Contents of messages in parts: their text, and a line in place of what a model that reads text cannot read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge.errors import InputError
from edge.records import dataclass
from edge.types import IntArray
from edge.values import brief

if TYPE_CHECKING:
    from edge.media.picture import Image
    from edge.media.recording import Sound

_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # of earlier answers, within their contents
_INPUTS = {
    "image_url": "picture", "input_image": "picture", "image": "picture", "computer_screenshot": "picture",
    "input_audio": "sound", "audio": "sound", "audio_url": "sound",
    "video_url": "video", "input_video": "video", "video": "video",
    "document": "document", "input_file": "document", "file": "document", "container_upload": "document",
}  # fmt: skip


MEDIA = {"picture": "image", "sound": "audio"}  # kinds that models may have senses for; the type of their parts


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. `trusted` text is the template's own: its special tokens are recognized. embedded: untrusted
    text within the template's, such as the name of a tool, which is encoded together with it. medium: a picture or a
    sound, which stands here in place of a text. ids: of rows, int32 [n], likewise."""

    text: str | Iterable[str]
    trusted: bool
    embedded: bool = False
    medium: Image | Sound | None = None
    ids: IntArray | None = None

    @property
    def kind(self) -> str:
        return self.medium.kind if self.medium else ""


Text = str | tuple[Segment, ...]


def left_out(what: str) -> str:
    """The line in place of something that is no text."""
    return f"[{what} left out: this model reads text]"


def kind_of(part: object) -> str | None:
    """The kind of medium that a part of a content is, or should be, a key of MEDIA; None for others."""
    found = _INPUTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    return found if found in MEDIA else None


def has_media(content: object, kinds: Collection[str] = tuple(MEDIA)) -> bool:
    """Whether a content has a medium of these kinds among its parts."""
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return False
    return any(kind_of(each) in kinds for each in content)


def text_of_parts(content: Any, where: str, joint: str = "", *, strict: bool = False) -> str:
    """The text of a message's content, which is text, or a list of parts. joint: between parts; lines in place of
    others stand alone.

    strict: the user expects an answer to all of it. Raises InputError for what is malformed and, if `strict`, for parts
    that a model cannot read.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InputError(f"{where} must be text or a list of parts, not {brief(content)}")
    found, before = "", False
    for number, part in enumerate(content):
        text, alone = _text_of(part, f"{where}[{number}]", strict)
        if text:
            found += ("\n" if alone or before else joint) * bool(found) + text
            before = alone
    return found


def _text_of(part: Any, where: str, strict: bool) -> tuple[str, bool]:
    """The text of a part, and whether it stands on lines of its own."""
    if isinstance(part, str):
        return part, False
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InputError(f"{where} must be text or an object with a type, not {type(part).__name__}")
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str) and kind not in _THOUGHTS:
            return part[name], kind not in _TEXTS and kind != "refusal"
    if kind in _TEXTS:
        raise InputError(f"{where} is {kind!r}, and has no text")
    if kind in _THOUGHTS:
        return "", False
    if kind == "tool_reference":
        return f"[tool: {str(part.get('tool_name'))[:128]}]", True
    title = "\n".join(part[name] for name in ("title", "source") if isinstance(part.get(name), str))
    inner = _inner(part, where, strict)
    if inner:
        return f"{title}\n{inner}" if title else inner, True
    if strict:
        sense = {"picture": "eyes", "sound": "ears"}.get(kind_of(part) or "")
        unless = f"these models read text only unless --mmproj gives them {sense}"
        other = "models read text, pictures (image_url) and sounds (input_audio)"
        raise InputError(f"{where} is {kind[:40]!r}: {unless if sense else other}")
    name = _INPUTS.get(kind, kind[:40])
    return left_out(f"{name} {title[:200]!r}" if title and "\n" not in title else name), True


def _inner(part: Mapping[str, Any], where: str, strict: bool) -> str:
    """The text within a document, a search result, or another part with contents."""
    source, content = part.get("source"), part.get("content")
    if isinstance(source, Mapping):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        content = source.get("content") if source.get("type") == "content" else content
    if isinstance(content, str):
        return content
    return text_of_parts(content, f"{where}.content", "\n", strict=strict) if isinstance(content, list) else ""


def newest(roles: Sequence[str]) -> int:
    """The number of the message that the user waits to see answered; -1 if that is none of the user's own, since a
    program may put what a tool found into a message of the user behind the tool's result."""
    last = len(roles) - 1
    return last if roles and roles[-1] == "user" and (last == 0 or roles[-2] != "tool") else -1
