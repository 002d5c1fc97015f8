"""An exported bundle from Python: its C library (runtime/edge.h) through ctypes, for tests and benchmarks."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.apps.enums import Finish, Form, Role, Status, Trim
from edge.apps.structs import EMBEDDING, HEARING, MODEL_INFO, OPTIONS, READINGS, SEGMENT, USAGE, members
from edge.errors import BudgetError, BusyError, EdgeError, EngineError, InputError, ModelFormatError, UnsupportedError
from edge.types import AnyArray, FloatArray

LIBRARY, MODEL = "libedge.so", "model.edge"


ERRORS: dict[int, type[EdgeError]] = {
    Status.BAD_ARGUMENT: InputError, Status.BAD_FILE: ModelFormatError, Status.UNSUPPORTED: UnsupportedError,
    Status.NO_MEMORY: BudgetError, Status.BUSY: BusyError, Status.FULL: InputError, Status.FAILED: EngineError,
}  # fmt: skip


class _Struct(ctypes.Structure):
    """Begins with its size."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        super().__init__(sizeof(type(self)), *values, **fields)


class _Error(_Struct):
    _fields_ = [("size", c_uint32), ("code", c_int32), ("message", c_char * 248)]


class _Source(_Struct):
    _fields_ = [("size", c_uint32), ("path", c_char_p), ("fd", c_int32), ("offset", c_uint64), ("length", c_uint64)]


_TYPES = {
    "uint32": c_uint32, "int32": c_int32, "uint64": c_uint64, "int64": c_int64, "double": c_double, "pointer": c_char_p,
}  # fmt: skip


def _struct(schema: Any, **pointers: Any) -> Any:
    """A struct of the schema. pointers: types of its members that are arrays."""
    fields = [(name, pointers.get(name, _TYPES[kind])) for name, kind in members(schema)]
    return type("Schema", (_Struct,), {"_fields_": fields})


_Info, _Readings, _Usage, _Embedding, _Hearing = map(_struct, (MODEL_INFO, READINGS, USAGE, EMBEDDING, HEARING))
_Options = _struct(OPTIONS, stop=ctypes.POINTER(c_char_p))
_Segment = _struct(SEGMENT, tokens=ctypes.POINTER(c_int32))


class _Picture(_Struct):
    _fields_ = [
        ("size", c_uint32), ("pixels", c_void_p), ("width", c_uint32), ("height", c_uint32), ("stride", c_uint32),
        ("channels", c_uint32), ("tokens", c_uint32),
    ]  # fmt: skip


class _Piece(_Struct):
    _fields_ = [
        ("size", c_uint32), ("token", c_int32), ("finish", c_int32), ("length", c_uint32), ("text", c_char * 256),
        ("done", c_uint32), ("asked", c_uint32),
    ]  # fmt: skip


class _ToolCall(_Struct):
    _fields_ = [("size", c_uint32), ("id", c_char_p), ("name", c_char_p), ("arguments", c_char_p)]


class _Stream(_Struct):
    _fields_ = [
        ("size", c_uint32), ("fd", c_int32), ("buffer", c_void_p), ("capacity", c_uint64), ("length", c_uint64),
    ]  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """token: None where no new one was generated. prompt: its tokens that have run, and all of them."""

    token: int | None
    text: str
    finish: Finish
    prompt: tuple[int, int] = (0, 0)


class Bundle:
    """A model of a bundle. A context manager; `close` raises BusyError while sessions are open."""

    def __init__(self, folder: str | Path, library: str | Path | None = None) -> None:
        """library: another one than the bundle's, such as one with sanitizers."""
        self.library = _load(Path(library or Path(folder) / LIBRARY))
        self._folder = Path(folder)
        self._model = c_void_p()
        path = os.fsencode(Path(folder) / MODEL)
        _check(self.library.edge_open, byref(_Source(path, -1)), byref(self._model))

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._model:
            _check(self.library.edge_close, self._model)
            self._model = c_void_p()

    def info(self) -> dict[str, Any]:
        found = _Info()
        _check(self.library.edge_info, self._model, byref(found))
        return _fields(found)

    @property
    def dimensions(self) -> int:
        return int(self.library.edge_dimensions(self._model))

    def image_tokens(self, width: int, height: int, most: int = 0) -> int:
        """Tokens of a picture of this size."""
        return _check(self.library.edge_image_tokens, self._model, width, height, most)

    def sound_tokens(self, count: int, rate: int = 16000) -> int:
        return _check(self.library.edge_sound_tokens, self._model, c_uint64(count), rate)

    def session(self, **options: Any) -> BundleSession:
        """options: fields of edge_options; `stop` as texts."""
        return BundleSession(self.library, self._model, options, self.dimensions, self._folder)


class BundleSession:
    """A session of a bundle's model. A context manager."""

    def __init__(
        self, library: ctypes.CDLL, model: c_void_p, options: dict[str, Any], dimensions: int, folder: Path
    ) -> None:
        self._library, self._session, self._dimensions, self._folder = library, c_void_p(), dimensions, folder
        _check(library.edge_begin, model, byref(_options(options)), byref(self._session))

    @property
    def handle(self) -> c_void_p:
        return self._session

    def __enter__(self) -> BundleSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._library.edge_end(self._session)
        self._session = c_void_p()

    def set(self, **options: Any) -> None:
        self._call("edge_set", byref(_options(options)))

    def constrain(self, form: Form, text: str | bytes = b"") -> None:
        data = text.encode() if isinstance(text, str) else text
        self._call("edge_constrain", int(form), data, c_size_t(len(data)))

    def bias(self, biases: dict[int, float]) -> None:
        data = np.array([*biases.items()], [("token", "i4"), ("bias", "f4")]).tobytes()
        self._call("edge_bias", data, c_size_t(len(biases)))

    def tools(self, tools: Sequence[Any] | None) -> None:
        """State tools, in the form of OpenAI's protocol; None: none."""
        data = None if tools is None else json.dumps(tools).encode()
        self._call("edge_tools", data, c_size_t(len(data or b"")))

    def choose(self, choice: str = "auto", *, parallel: bool = True) -> None:
        self._call("edge_choose", choice.encode(), int(parallel))

    def calls(self) -> list[tuple[str, str, str]]:
        """Identifier, name and arguments of each call of the last answer."""
        found = []
        for index in range(self._call("edge_calls", 0, None)):
            call = _ToolCall()
            self._call("edge_calls", index, byref(call))
            found.append((call.id.decode(), call.name.decode(), call.arguments.decode()))
        return found

    def read(self, **readings: float) -> None:
        self._call("edge_read", byref(_Readings(**{each.name: each.unset for each in READINGS} | readings)))

    def append(self, role: Role, text: str | bytes | Sequence[int]) -> None:
        if isinstance(text, str | bytes):
            data = text.encode() if isinstance(text, str) else text
            self._call("edge_append", int(role), data, c_size_t(len(data)))
        else:
            self._call("edge_append", int(role), (c_int32 * len(text))(*text), c_size_t(len(text)))

    def image(self, picture: AnyArray, eyes: str | Path = "", **fields: int | None) -> None:
        """Show a picture, uint8 [height, width, 3 or 4], whose rows may lie apart. fields: others of edge_picture."""
        height, width, channels = picture.shape
        shown = _Picture(picture.ctypes.data, width, height, picture.strides[0], channels)
        for name, value in fields.items():
            setattr(shown, name, value)
        place = _Source(os.fsencode(eyes or self._folder / "eyes.edge"), -1)
        self._call("edge_image", byref(place), byref(shown))

    def sound(self, samples: AnyArray, rate: int = 16000, sounds: str | Path = "") -> None:
        """Play a sound, float32 [n]."""
        place = _Source(os.fsencode(sounds or self._folder / "sounds.edge"), -1)
        self._call("edge_sound", byref(place), c_void_p(samples.ctypes.data), c_size_t(samples.size), rate)

    def next(self) -> Piece:
        piece = _Piece()
        self._call("edge_next", byref(piece))
        text = ctypes.string_at(ctypes.addressof(piece) + _Piece.text.offset, piece.length).decode()
        return Piece(None if piece.token < 0 else piece.token, text, Finish(piece.finish), (piece.done, piece.asked))

    def pieces(self) -> Iterator[Piece]:
        """Pieces of the answer, up to its end."""
        while True:
            piece = self.next()
            yield piece
            if piece.finish:
                return

    def answer(self, text: str | Sequence[int], role: Role = Role.USER) -> tuple[list[int], str, Finish]:
        """Append, and the whole answer: tokens, text, and why it ended."""
        self.append(role, text)
        pieces = list(self.pieces())
        tokens = [piece.token for piece in pieces if piece.token is not None]
        return tokens, "".join(piece.text for piece in pieces), pieces[-1].finish

    def cancel(self) -> None:
        """From any thread."""
        self._library.edge_cancel(self._session)

    def rewind(self, turns: int | None = None) -> None:
        """None: all."""
        self._call("edge_rewind", 0xFFFFFFFF if turns is None else turns)

    def save(self) -> bytes:
        stream = _Stream(-1)
        self._call("edge_save", byref(stream))
        data = ctypes.create_string_buffer(stream.length)
        stream = _Stream(-1, ctypes.addressof(data), len(data))
        self._call("edge_save", byref(stream))
        return data.raw[: stream.length]

    def load(self, state: bytes) -> None:
        data = ctypes.create_string_buffer(state, len(state))
        self._call("edge_load", byref(_Stream(-1, ctypes.addressof(data), len(data))))

    def load_from(self, fd: int) -> None:
        self._call("edge_load", byref(_Stream(fd)))

    def set_adapter(self, adapter: bytes | None, scale: float = 1.0) -> None:
        data = ctypes.create_string_buffer(adapter, len(adapter)) if adapter is not None else None
        stream = byref(_Stream(-1, ctypes.addressof(data), len(data))) if data is not None else None
        self._call("edge_set_adapter", stream, c_double(scale))

    def set_adapter_from(self, fd: int, scale: float = 1.0) -> None:
        self._call("edge_set_adapter", byref(_Stream(fd)), c_double(scale))

    def trim(self, level: Trim) -> None:
        self._call("edge_trim", int(level))

    def use(self) -> dict[str, Any]:
        found = _Usage()
        self._call("edge_use", byref(found))
        return _fields(found)

    def thread_ids(self, most: int = 64) -> list[int]:
        """The calling thread's first."""
        room = (c_int32 * most)()
        return room[: min(most, self._call("edge_thread_ids", room, c_size_t(most)))]

    def tokenize(self, text: str | bytes, special: bool = False) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        room = (c_int32 * (len(data) + 8))()
        count = self._call("edge_tokenize", data, c_size_t(len(data)), int(special), room, c_size_t(len(room)))
        return room[:count]

    def embed(self, texts: Sequence[str | bytes], **options: Any) -> FloatArray:
        """The vectors of texts, float32 [texts, dimensions]. options: fields of edge_embedding."""
        given = [text.encode() if isinstance(text, str) else text for text in texts]
        lengths = (c_size_t * len(given))(*map(len, given))
        if isinstance(options.get("prompt"), str):
            options["prompt"] = options["prompt"].encode()
        vectors = np.zeros((len(given), options.get("dimensions") or self._dimensions), np.float32)
        self._call(
            "edge_embed", (c_char_p * len(given))(*given), lengths, c_size_t(len(given)),
            byref(_Embedding(**options)), c_void_p(vectors.ctypes.data), c_size_t(vectors.size),
        )  # fmt: skip
        return vectors

    def listen(self, ears: Path | None = None, **options: Any) -> None:
        """options: fields of edge_hearing."""
        given = {each.name: each.unset for each in HEARING} | options
        given = {name: value.encode() if isinstance(value, str) else value for name, value in given.items()}
        given |= {each.name: None for each in HEARING if each.kind == "text" and not given[each.name]}
        source = _Source(os.fsencode(ears or (self._folder / "ears.edge")), -1)
        self._call("edge_listen", byref(source), byref(_Hearing(**given)))

    def hear(self, samples: FloatArray) -> tuple[int, dict[str, Any]]:
        """The number of samples that were taken, and the segment."""
        found = _Segment()
        samples = np.ascontiguousarray(samples, np.float32)
        taken = self._call("edge_hear", c_void_p(samples.ctypes.data), c_size_t(samples.size), byref(found))
        fields = {name: getattr(found, name) for name, kind in members(SEGMENT)[1:]}
        fields |= {name: (fields[name] or b"").decode() for name in ("text", "language", "words")}
        return taken, fields | {"tokens": tuple(found.tokens[: found.tokens_count])}

    def transcribe(self, samples: FloatArray, *, piece: int = 1 << 20, **options: Any) -> Iterator[dict[str, Any]]:
        """The segments of a sound that comes in pieces; the last one has no text, and says why the transcript ended."""
        self.listen(**options)
        at = 0
        while True:
            taken, found = self.hear(samples[at : at + piece])
            at += taken
            if found["text"] or found["finish"]:
                yield found
            if found["finish"]:
                return

    def _call(self, name: str, *arguments: Any) -> int:
        return _check(getattr(self._library, name), self._session, *arguments)


def open_bundle(folder: str | Path, library: str | Path | None = None) -> Bundle:
    """Open what `edge export` wrote for this machine. Raises the errors of edge.errors."""
    return Bundle(folder, library)


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path.absolute()))
    except OSError as error:
        raise ModelFormatError(f"{path} is not a library for this machine: {error}") from None
    for name in ("edge_end", "edge_cancel"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [c_void_p]
    library.edge_dimensions.restype = c_uint32
    for name in ("tokenize", "calls", "thread_ids", "image_tokens", "sound_tokens"):
        getattr(library, f"edge_{name}").restype = c_int64
    return library


def _check(function: Any, *arguments: Any) -> int:
    error = _Error()
    status = int(function(*arguments, byref(error)))
    if status < 0:
        raise ERRORS.get(status, EngineError)(error.message.decode())
    return status


def _options(chosen: dict[str, Any]) -> Any:
    options = _Options(**{each.name: each.unset for each in OPTIONS if each.unset})
    chosen = dict(chosen)
    if "seed" in chosen:
        chosen["seeded"] = 1
    if stops := [stop.encode() if isinstance(stop, str) else stop for stop in chosen.pop("stop", ())]:
        options.stop, options.stop_count = (c_char_p * len(stops))(*stops), len(stops)
    for name in ("isa", "cache", "npu"):
        if isinstance(chosen.get(name), str):
            chosen[name] = chosen[name].encode()
    for name, value in chosen.items():
        if name not in {field[0] for field in _Options._fields_}:
            raise InputError(f"edge_options has no field {name!r}")
        setattr(options, name, value)
    return options


def _fields(struct: ctypes.Structure) -> dict[str, Any]:
    found = {str(field[0]): getattr(struct, field[0]) for field in struct._fields_}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}
