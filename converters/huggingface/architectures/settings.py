"""Settings of a `config.json` and the header's fields for them, as a table that is read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field


@dataclass(frozen=True)
class Count:
    """A number of values. theirs: the key of config.json; empty: only the default counts. default: where it is absent,
    a number or a function of the other settings; None: it must be there."""

    theirs: str
    ours: tuple[str, ...]  # fields of the header
    kind: str  # of `LIMITS`
    default: int | Callable[[Config], int] | None = None
    written: bool = True  # into a config.json

    def of(self, config: Config) -> int:
        default = self.default(config) if callable(self.default) else self.default
        return config.count(self.theirs, self.kind, default)

    def field(self, config: Config) -> np.generic:
        value: np.generic = np.uint32(self.of(config))
        return value

    def described(self, header: Header) -> int | None:
        return None if header.value(self.ours[0]) is None else header.count(self.ours[0], self.kind)


@dataclass(frozen=True)
class Number:
    """A number above 0."""

    theirs: str
    ours: tuple[str, ...]
    default: float | None = None
    written: bool = True

    def of(self, config: Config) -> float:
        return config.positive(self.theirs, self.default)

    def field(self, config: Config) -> np.generic:
        value: np.generic = np.float32(self.of(config))
        return value

    def described(self, header: Header) -> float | None:
        return None if header.value(self.ours[0]) is None else short(header.positive(self.ours[0], 1.0, below=1e12))


@dataclass(frozen=True)
class Fixed:
    """A setting for which GGUF has no field: models must have this value. others: values with the same meaning."""

    theirs: str
    value: Any
    others: tuple[Any, ...] = ()
    written: bool = False


Setting = Count | Number | Fixed


def header_fields(settings: Iterable[Setting], config: Config) -> dict[str, Field]:
    """Fields without the architecture's prefix. Raises ModelFormatError, UnsupportedError."""
    fields: dict[str, Field] = {}
    for setting in settings:
        if isinstance(setting, Fixed):
            config.must_be(setting.theirs, setting.value, *setting.others)
        else:
            fields |= dict.fromkeys(setting.ours, setting.field(config))
    return fields


def described(settings: Iterable[Setting], header: Header, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json. known: those known already. Raises UnsupportedError if the header lacks one."""
    said = dict(known)
    for setting in settings:
        if not setting.written or setting.theirs in known:
            continue
        if isinstance(setting, Fixed):
            said[setting.theirs] = setting.value
            continue
        value = setting.described(header)
        if value is None and setting.default is None:
            raise UnsupportedError(f"{header.file.path}: {header.architecture}.{setting.ours[0]} is missing")
        said[setting.theirs] = setting.of(Config(header.file.path, said)) if value is None else value
    return said


def changed(settings: Iterable[Setting], **defaults: float) -> tuple[Setting, ...]:
    """The settings with other defaults, by their keys in config.json."""

    def one(setting: Setting) -> Setting:
        default = defaults.get(setting.theirs)
        if isinstance(setting, Count) and default is not None:
            return replace(setting, default=int(default))
        return replace(setting, default=default) if isinstance(setting, Number) and default is not None else setting

    return tuple(map(one, settings))


def short(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
