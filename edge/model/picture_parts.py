"""Pictures in messages: parts in the forms of several protocols, and the eyes of a model, which make rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from edge.errors import InputError
from edge.media.picture import Image, decode_base64
from edge.model.prompt import Looks
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.model.towers import Layout


SENT = "sent"
"""The name of a part that a client has sent, in a part of ours: it may not name a file of this machine."""


class Eyes(Protocol):
    """What makes rows of pictures for a text model. eager: rows are made with the prompt, not when a pass needs them.
    reserve: bytes that looking at a picture takes beside the text model."""

    eager: bool
    looks: Looks  # so far

    @property
    def reserve(self) -> int: ...

    @property
    def marker(self) -> str:
        """The text that the family's chat template has for a picture."""

    def layout(self, picture: Image) -> Layout:
        """The texts and the numbers of rows in place of a picture. Raises InputError."""

    def name(self, picture: Image, layout: Layout) -> bytes:
        """Differs for other pixels, sizes and encoders."""

    def look(self, picture: Image, layout: Layout) -> Sequence[FloatArray]:
        """The rows of each part of the layout that has some, float32 [n, width]."""


def picture_of(part: Mapping[str, Any], where: str, *, files: bool = True) -> Image:
    """The picture of a part: {"type": "image", "image": what `Image` takes}, OpenAI's image_url and input_image with a
    data URL, or Anthropic's source. files: whether it may name a file of this machine. Raises InputError."""
    try:
        return _picture_of(part[SENT], files=False) if SENT in part else _picture_of(part, files)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


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
    """The text of a part in which a client sends a picture; empty without one."""
    source, found = part.get("source"), part.get("image_url", part.get("image"))
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
