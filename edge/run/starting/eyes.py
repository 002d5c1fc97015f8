"""Eyes for a model: its mmproj file is found, and the most rows of a picture follow from the budgets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends import engine_named
from edge.backends.base import Backend
from edge.devices.host import usable_cores
from edge.devices.memory import memory_limit, memory_use
from edge.devices.power import memory_root
from edge.errors import EdgeError, InputError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.media.picture import MOST_DECODED
from edge.model.model import Model
from edge.model.towers import PictureTower, open_tower
from edge.options import AUTO, NO_EYES, Options
from edge.run.seeing import Room, TowerEyes

if TYPE_CHECKING:
    from edge.run.budgets.meters import EnergyMeter

_ENGINES = ("cpu", "reference")  # that take rows in place of tokens
_SHARE = 8  # of the memory limit: for a picture's pixels, and of what is left beside the weights, for its encoding
_LEAST_PIXELS, _MOST_PIXELS = 16 << 20, 8 * MOST_DECODED  # bytes
_KEPT, _MOST_KEPT = 64, 64 << 20  # the share of the memory limit that rows of the last pictures take; bytes

_log = logging.getLogger("edge")


def find_mmproj(model: Model, options: Options) -> Path | None:
    """The file with the model's encoder of pictures: stated, or beside the model."""
    if options.mmproj is not None:
        return None if options.mmproj == NO_EYES else options.mmproj
    if model.path.is_dir():
        return None
    found = sorted(path for path in model.path.parent.glob("*.gguf") if "mmproj" in path.name.lower())
    return next((path for path in found if _fits(path, model)), None)


def _fits(path: Path, model: Model) -> bool:
    with suppress(EdgeError):
        return open_tower(read_gguf(path), model.spec).tensors is not None
    return False


def find_tower(model: Model, options: Options) -> PictureTower:
    """The model's encoder. Raises InputError if there is none, and the errors of `open_tower`."""
    path = find_mmproj(model, options)
    if path is None:
        raise InputError(
            f"{model.name} sees no pictures without an encoder: name its mmproj file by --mmproj, or put it beside the "
            "model"
        )
    if not path.is_file():
        raise InputError(f"--mmproj {path}: no such file")
    return open_tower(read_gguf(path), model.spec)


def open_eyes(
    model: Model, options: Options, *, eager: bool = False, meter: EnergyMeter | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TowerEyes:  # fmt: skip
    """The model's eyes, with as many rows of a picture as the options say or the budgets allow. eager: pictures are
    encoded before the text model is loaded. Raises the errors of `find_tower`, UnsupportedError, InputError for a
    number of rows that no picture can have."""
    tower, backend = find_tower(model, options), engine_of(options)
    threads, limit = options.threads or usable_cores(), memory_limit(memory_root()).bytes
    limit = options.memory or limit
    left = limit - memory_use().rss - (0 if eager else model.spec.weight_bytes)
    pixels = left // 2 if eager else limit // _SHARE  # the other half: for the encoder, while there is no text model
    room = Room(min(_MOST_PIXELS, max(_LEAST_PIXELS, pixels)), min(_MOST_KEPT, limit // _KEPT), limit)

    def eyes(tokens: int | None) -> TowerEyes:
        return TowerEyes(
            tower,
            backend,
            threads,
            room,
            tokens=tokens,
            eager=eager,
            frugal=options.memory is not None,
            meter=meter,
            tell=tell,
        )

    if options.image_tokens is not None:
        found = eyes(options.image_tokens)
        found.tower.layout(1, 1, options.image_tokens)  # refuses too few
        return found
    rows = (options.max_kv_size or model.spec.context) // 2
    sizes = [size for size in tower.sizes if size <= min(tower.default, rows)] or [tower.sizes[0]]
    fitting = (each for size in reversed(sizes) if (each := eyes(size)).wants <= (left if eager else left // 2))
    return next(fitting, None) or eyes(sizes[0])


def engine_of(options: Options) -> Backend:
    """The engine that encodes."""
    return engine_named(options.backend if options.backend in _ENGINES else _ENGINES[0])


def takes_rows(options: Options) -> bool:
    """Whether the text model's engine, if one is named, takes rows in place of tokens."""
    return options.backend in (AUTO, *_ENGINES)


def options_that_see(options: Options) -> Options:
    """The options with an engine that takes rows, unless they name one."""
    return replace(options, backend=_ENGINES[0]) if options.backend == AUTO else options


def with_eyes(model: Model, options: Options, meter: EnergyMeter | None = None) -> Model:
    """The model with its eyes if it has some: stated, or a file beside it that fits."""
    if model.template is None or find_mmproj(model, options) is None:
        return model
    if not takes_rows(options):
        if options.mmproj is not None:
            raise UnsupportedError(
                f"the {options.backend} engine takes no pictures: use --backend=cpu, or --mmproj off"
            )
        return model
    try:
        engine_of(options).check_supported(model.file, model.spec)
        return model.with_eyes(open_eyes(model, options, meter=meter))
    except EdgeError as error:
        if options.mmproj is not None:
            raise
        _log.info("the encoder beside %s is left out: %s", model.name, error)
        return model
