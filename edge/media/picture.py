"""Pictures: files, bytes and arrays as RGB pixels, upright, within stated limits.

Only the readers of a few formats are used, chosen by a file's first bytes, so that no other code of Pillow sees a
hostile file. Sizes are checked by the header, before pixels are decoded.

Transparent pixels are composed on white, as browsers show them, and as transformers' Idefics3 and Qwen's own programs
do; others' `convert("RGB")` shows the colour below, usually black, in which black text on nothing is lost.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from contextlib import contextmanager
from copy import copy
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from edge.budget import format_bytes
from edge.devices.regular import check_file
from edge.errors import InputError, MissingExtraError
from edge.types import AnyArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.ImageFile import ImageFile

Pixels = NDArray[np.uint8]

MOST_PIXELS = 256_000_000  # of a JPEG file, which is decoded at a part of its size; phones have up to 200 million
MOST_DECODED = 64_000_000  # pixels that are decoded
MOST_FILE = 256 << 20  # bytes
_REDUCED = 16_000_000  # beyond these, a JPEG file is decoded at 1/2, 1/4 or 1/8: families scale pictures to less
_MOST_RATIO = 200  # of the sides, as Qwen's processors have it
_EACH = 8  # bytes of a pixel of a JPEG file while it is decoded: Pillow's, and ours
_DECODING, _WITH_ALPHA, _WEBP = 5, 6, 13  # bytes of a pixel besides ours, measured; WebP's reader has two canvases
_COEFFICIENTS = 6  # bytes a pixel that a progressive JPEG file's decoder keeps
_STRIP = 128  # rows that are converted at a time
_ORIENTATION = 0x0112  # of EXIF
_JPEGS = ("JPEG", "MPO")
_BLANKS = dict.fromkeys(map(ord, " \t\r\n"))
_DATA_URL = re.compile(r"data:(?:image(?:/[\w.+-]+)?)?(?:;[\w.+=-]+)*;base64,", re.IGNORECASE)


class Image:
    """A picture for a model that sees: a path, the bytes of a file (JPEG, PNG, WebP, GIF, BMP), or an array, uint8
    [height, width] (grey), [height, width, 3] (RGB) or [height, width, 4] (RGBA).

    width, height: in pixels, upright. A JPEG file of more than 16 million pixels is decoded at 1/2, 1/4 or 1/8 of
    its sides. Pixels are decoded when they are read, and not kept. Raises InputError for what is no picture or
    too large, by its header alone; MissingExtraError without Pillow, which arrays do without.
    """

    kind: Literal["picture"] = "picture"

    def __init__(self, source: str | Path | bytes | AnyArray) -> None:
        self._array: Pixels | None = None
        self._source: Path | bytes = b""
        self.name = "the picture"
        self._orientation = 1
        self.decoding = 0  # bytes that decoding takes besides the pixels, about
        self._most = _REDUCED
        self._smaller: tuple[int, Image] | None = None  # as `within` made it
        if isinstance(source, np.ndarray):
            self._array = _checked_array(source)
            self.height, self.width = int(self._array.shape[0]), int(self._array.shape[1])
            check_sides(self.name, self.width, self.height)
            self._hash = hashlib.sha256(self._array.data).digest()  # contiguous
            return
        if isinstance(source, bytes | bytearray | memoryview):
            self._source = bytes(source)
        elif isinstance(source, str | Path) and str(source):
            self._source, self.name = Path(source).expanduser(), str(source)
        else:
            raise InputError(f"a picture must be a path, bytes of a file, or an array, not {source!r:.60}")
        self._measure()
        self._hash = _hash_of(self._source)

    def _measure(self) -> None:
        """Read the size, upright, from the header."""
        with self._open() as file:
            whole = file.size
            self.width, self.height = _reduced(file, self._most)
            self._orientation = _orientation_of(file)
            alpha = "A" in file.mode or "transparency" in file.info
            each = _WEBP if file.format == "WEBP" else _WITH_ALPHA if alpha else _DECODING
            self.decoding = each * self.width * self.height
            if file.info.get("progressive"):
                self.decoding += _COEFFICIENTS * whole[0] * whole[1]
        if self._orientation > 4:
            self.width, self.height = self.height, self.width

    @classmethod
    def of(cls, source: object) -> Image:
        """The picture of a message's part: an Image, what Image takes, or a data URL. Raises InputError."""
        if isinstance(source, Image):
            return source
        if isinstance(source, str) and source[:5].lower() == "data:":
            return cls(data_of(source))
        return cls(cast(Any, source))

    def within(self, nbytes: int) -> Image:
        """This picture; a JPEG file, at a smaller part of its size if its pixels take more while they are decoded.
        Raises InputError for a picture that takes more all the same."""
        if self._array is not None or self.nbytes + self.decoding <= nbytes:
            return self
        if self._smaller is None or self._smaller[0] != nbytes:
            found = copy(self)
            found._most = max(1, nbytes // _EACH)
            found._measure()
            self._smaller = nbytes, found
        found = self._smaller[1]
        if found.nbytes + found.decoding > nbytes:
            raise InputError(
                f"{self.name} takes {format_bytes(found.nbytes + found.decoding)} while it is decoded, and there is "
                f"room for {format_bytes(nbytes)}: make it smaller, save it as JPEG, or use a larger --memory"
            )
        return found

    @property
    def size(self) -> str:
        """For people."""
        return f"{self.width} × {self.height} pixels"

    @property
    def nbytes(self) -> int:
        """Bytes of its pixels."""
        return 3 * int(self.width) * int(self.height)

    @property
    def pixels(self) -> Pixels:
        """The pixels, uint8 [height, width, 3]. Raises InputError for a file that is damaged, or has changed."""
        return self._array if self._array is not None else self._decoded()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file, or of an array's pixels, and of the size: nothing is decoded for it."""
        return hashlib.sha256(self._hash + repr((self.height, self.width)).encode()).digest()

    @property
    def url(self) -> str:
        """A data URL with the whole file; of an array, with a PNG file."""
        if self._array is not None:
            from PIL import Image as Writer  # here: arrays do without Pillow

            stream = BytesIO()
            Writer.fromarray(self._array).save(stream, "PNG")
            data = stream.getvalue()
        else:
            self._check_unchanged()
            with _stream(self._source) as file:
                data = file.read()
        return f"data:image;base64,{base64.b64encode(data).decode()}"

    def _check_unchanged(self) -> None:
        """Raise InputError for a file with other contents than were shown: they would pass for these."""
        if isinstance(self._source, Path) and _hash_of(self._source) != self._hash:
            raise InputError(f"{self.name} has changed since it was shown: show it again as a new picture")

    def _decoded(self) -> Pixels:
        """The pixels, upright, converted in strips: a whole copy would take as much memory again."""
        self._check_unchanged()
        with self._open() as file:
            width, height = _reduced(file, self._most)
            file.load()
            upright = np.empty((self.height, self.width, 3), np.uint8)
            stored = _as_stored(upright, self._orientation)  # a view, as the file has its rows
            for top in range(0, height, _STRIP):
                part = file.crop((0, top, width, min(height, top + _STRIP)))
                stored[top : top + _STRIP] = _rgb(part)
        return upright

    @contextmanager
    def _open(self) -> Iterator[ImageFile]:
        """The file with its header checked, in Pillow. Its errors are of many types."""
        if isinstance(self._source, Path):
            check_file(self._source)
        _check_installed()
        try:
            with _stream(self._source) as stream:
                head = stream.read(32)
                reader = _reader_of(head, self.name)
                if head[:4] == b"RIFF":  # its reader allocates by the header
                    width, height = _webp_size(head)
                    check_sides(self.name, width, height)
                stream.seek(0)
                with reader(stream) as file:
                    width, height = file.size
                    check_sides(self.name, width, height, MOST_PIXELS if file.format in _JPEGS else MOST_DECODED)
                    yield file
        except (InputError, MissingExtraError, MemoryError):
            raise
        except FileNotFoundError:
            raise InputError(f"{self.name}: no such file") from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # the system's, not Pillow's
                raise InputError(f"{self.name}: cannot be read ({error.strerror})") from None
            why = str(error).strip().partition("\n")[0][:120] or type(error).__name__
            raise InputError(
                f"{self.name} cannot be read as a picture ({why}): the file is damaged or cut off"
            ) from None


def data_of(url: str) -> bytes:
    """The bytes of a data URL in base64. Raises InputError."""
    head = _DATA_URL.match(url)
    if head is None:
        raise InputError(f"a picture's data URL begins with data:image/png;base64, and the like, not {url[:40]!r}")
    return decode_base64(url[head.end() :])


def decode_base64(text: str) -> bytes:
    """Raises InputError."""
    try:
        return base64.b64decode(text.translate(_BLANKS), validate=True)  # not split(): each part takes an object
    except (binascii.Error, ValueError):
        raise InputError("the picture's data is not base64") from None


def _check_installed() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise MissingExtraError("Pillow, which reads pictures,", "images") from None


@contextmanager
def _stream(source: Path | bytes) -> Iterator[IO[bytes]]:
    if isinstance(source, bytes):
        yield BytesIO(source)
        return
    check_file(source)
    if (size := source.stat().st_size) > MOST_FILE:
        raise InputError(f"{source} has {size >> 20} MiB, and a picture {MOST_FILE >> 20} at most")
    with open(source, "rb") as stream:
        yield stream


def _reader_of(head: bytes, name: str) -> Callable[[IO[bytes]], ImageFile]:
    """The reader of a format, by the first bytes. Raises InputError for others."""
    if head.startswith(b"\xff\xd8\xff"):
        from PIL.JpegImagePlugin import JpegImageFile

        return JpegImageFile
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        from PIL.PngImagePlugin import PngImageFile

        return PngImageFile
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        from PIL.WebPImagePlugin import WebPImageFile

        return WebPImageFile
    if head[:6] in (b"GIF87a", b"GIF89a"):
        from PIL.GifImagePlugin import GifImageFile

        return GifImageFile
    if head.startswith(b"BM"):
        from PIL.BmpImagePlugin import BmpImageFile

        return BmpImageFile
    if not head:
        raise InputError(f"{name} is empty")
    known = {b"ftyphei": "HEIC", b"ftypmif": "HEIC", b"ftypavi": "AVIF", b"ftypmp4": "video", b"%PDF": "PDF"}
    what = next((f"{kind}, " for mark, kind in known.items() if mark in head[:16]), "")
    raise InputError(f"{name} is {what}no JPEG, PNG, WebP, GIF or BMP: convert it to one of them first")


def _webp_size(head: bytes) -> tuple[int, int]:
    """Width and height in a WebP file's first 32 bytes; (1, 1), which its reader refuses, if they are not there."""
    kind, bits = head[12:16], int.from_bytes(head[24:30], "little")
    if kind == b"VP8X":
        return (bits & 0xFFFFFF) + 1, (bits >> 24) + 1
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return max(1, bits >> 16 & 0x3FFF), max(1, bits >> 32 & 0x3FFF)
    return 1, 1


def check_sides(name: str, width: int, height: int, most: int = MOST_DECODED) -> None:
    """Raise InputError for sizes beyond the limits."""
    size = f"{name} has {width} × {height} pixels"
    if min(width, height) < 1:
        raise InputError(f"{size}: it is empty")
    if width * height > most:
        raise InputError(f"{size}, and {most // 1_000_000} million are the most: make it smaller")
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise InputError(f"{size}: one side is more than {_MOST_RATIO} times the other, so that nothing can be seen")


def _checked_array(array: AnyArray) -> Pixels:
    """RGB pixels of an array. Raises InputError."""
    shape = array.shape
    if array.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))):
        raise InputError(
            f"a picture as an array must be uint8 [height, width, 3], not {array.dtype} {list(shape)}: scale floats by "
            "255, and check them for NaN"
        )
    if len(shape) == 3 and shape[2] == 4:
        return _on_white(array)
    channels = array[..., None] if len(shape) == 2 else array
    return np.array(np.broadcast_to(channels, (*shape[:2], 3)), np.uint8)  # a copy: the caller may change its own


def _on_white(rgba: AnyArray) -> Pixels:
    """RGBA composed on white, rounded to the nearest."""
    alpha = rgba[..., 3:].astype(np.uint16)
    mixed = rgba[..., :3] * alpha + 255 * (255 - alpha)  # at most 65,025
    return np.asarray((mixed + 127) // 255, np.uint8)


def _hash_of(source: Path | bytes) -> bytes:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with _stream(source) as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.digest()


def _reduced(file: ImageFile, most: int) -> tuple[int, int]:
    """Have a JPEG file of more than `most` pixels decoded at a part of its size. Returns width and height as they will
    be decoded."""
    width, height = file.size
    if file.format in _JPEGS and width * height > most:
        halves = next(n for n in (1, 2, 3) if n == 3 or (width * height) >> 2 * n <= most)
        file.draft(None, (width >> halves, height >> halves))
    return file.size


def _orientation_of(file: ImageFile) -> int:
    """EXIF's orientation, from 1 to 8; 1 for one that cannot be read."""
    if file.format == "PNG" and not {"exif", "Raw profile type exif"} & file.info.keys():
        return 1  # Pillow would decode the whole file in search of it
    try:
        found = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # a damaged block beside a good picture
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _as_stored(upright: Pixels, orientation: int) -> Pixels:
    """A view of the upright pixels with the rows and columns that the file has."""
    view = upright
    if orientation > 4:
        view = view.transpose(1, 0, 2)
    rows, columns = {
        1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1),
    }[orientation]  # fmt: skip
    return view[::rows, ::columns]


def _rgb(part: Any) -> Pixels:
    """A strip of a file's pixels in RGB."""
    if part.mode.startswith(("I", "F")):  # 16 bit, which Pillow's own conversion cuts off at 255
        grey = np.clip(np.asarray(part, np.float64) / 257 + 0.5, 0, 255).astype(np.uint8)
        return np.broadcast_to(grey[..., None], (*grey.shape, 3))
    if part.mode in ("RGBA", "LA", "PA") or "transparency" in part.info:
        return _on_white(np.asarray(part.convert("RGBA")))
    return np.asarray(part.convert("RGB"))
