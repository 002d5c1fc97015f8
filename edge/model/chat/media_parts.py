"""Pictures and sounds in messages: parts in the forms of several protocols, and a model's senses, which make rows of
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from edge.errors import InputError
from edge.media.picture import Image, decode_base64
from edge.media.recording import Sound
from edge.media.recording import decode_base64 as sound_base64
from edge.model.chat.parts import kind_of
from edge.model.parts.prompt import Looks
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.model.towers import Layout


SENT = "sent"
"""The name of a part that a client has sent, in a part of ours: it may not name a file of this machine."""

_FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "webm", "aac")  # of input_audio


Medium = Image | Sound


class Sense(Protocol):
    """What makes rows of pictures, or of sounds, for a text model: its eyes, its ears. eager: rows are made with the
    prompt, not when a pass needs them. reserve: bytes that this takes beside the text model."""

    eager: bool
    looks: Looks  # so far

    @property
    def reserve(self) -> int: ...

    @property
    def marker(self) -> str:
        """The text that the family's chat template has for such a medium."""

    def layout(self, medium: Any) -> Layout:
        """The texts and the numbers of rows in its place. Raises InputError."""

    def check(self, medium: Any) -> None:
        """Decode it once. Raises InputError for one that is damaged."""

    def name(self, medium: Any, layout: Layout) -> bytes:
        """Differs for other pixels, samples, sizes and encoders."""

    def look(self, medium: Any, layout: Layout) -> Sequence[FloatArray]:
        """The rows of each part of the layout that has some, float32 [n, width]."""


def medium_of(part: Mapping[str, Any], where: str, *, files: bool = True) -> Medium:
    """The picture of a part: {"type": "image", "image": what `Image` takes}, OpenAI's image_url and input_image with a
    data URL, or Anthropic's source; the sound of a part: {"type": "audio", "audio": what `Sound` takes}, or OpenAI's
    input_audio. files: whether it may name a file of this machine. Raises InputError."""
    sent = SENT in part
    part, read = part.get(SENT, part), _picture_of if kind_of(part) != "sound" else _sound_of
    try:
        return read(part, files and not sent)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _sound_of(part: Mapping[str, Any], files: bool) -> Sound:
    found = part.get("input_audio", part.get("audio", part.get("audio_url")))
    if isinstance(found, Mapping):
        kind = found.get("format")
        if kind is not None and kind not in _FORMATS:
            raise InputError(f"its format must be one of {', '.join(_FORMATS)}, not {kind!r:.40}")
        data, found = found.get("data"), found.get("url")
        if isinstance(data, str) and data[:5].lower() != "data:":
            return Sound(sound_base64(data))
        found = found if data is None else data
    if isinstance(found, str) and found[:8].lower().startswith(("http://", "https://")):
        raise InputError("addresses of sounds are not fetched: send the sound itself, as input_audio")
    if found is None or (isinstance(found, str) and not found):
        raise InputError("it has no sound: send input_audio with data in base64 and a format, wav or mp3")
    if isinstance(found, str) and not (files and "audio" in part) and found[:5].lower() != "data:":
        raise InputError(f"{found[:40]!r} is no data URL: send input_audio, or data:audio/wav;base64,…")
    return Sound.of(found)


def _picture_of(part: Mapping[str, Any], files: bool) -> Image:
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return Image(decode_base64(source["data"]))
        return _from_text(source.get("url") or source.get("file_id"), files=False)
    found = part.get("image", part.get("image_url"))
    if isinstance(found, Mapping):
        found = found.get("url")
    if isinstance(found, str) or not files:
        return _from_text(found, files=files and "image" in part)
    return Image.of(found)


def sent_text(part: Mapping[str, Any]) -> str:
    """The text of a part in which a client sends a picture or a sound; empty without one."""
    source, found = part.get("source"), part.get("image_url", part.get("image"))
    if kind_of(part) == "sound":
        found = part.get("input_audio", part.get("audio", part.get("audio_url")))
        found = {"url": found.get("data", found.get("url"))} if isinstance(found, Mapping) else found
    if isinstance(source, Mapping):
        found = source.get("data") if source.get("type") == "base64" else None  # others are read as text
    elif isinstance(found, Mapping):
        found = found.get("url")
    return found if isinstance(found, str) else ""


def _from_text(text: object, *, files: bool) -> Image:
    """A picture of a data URL, or of a path."""
    if not isinstance(text, str) or not text:
        raise InputError("it has no picture: send a data URL, data:image/png;base64,…")
    if text[:8].lower().startswith(("http://", "https://")):
        raise InputError("addresses of pictures are not fetched: send the picture itself as a data URL")
    if not files and text[:5].lower() != "data:":
        raise InputError(f"{text[:40]!r} is no data URL: send data:image/png;base64,…")
    return Image.of(text)
