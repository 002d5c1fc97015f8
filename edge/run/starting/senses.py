"""Eyes and ears for a model: its mmproj file is found, and the most rows of a picture follow from the budgets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.backends import engine_named, engines_with
from edge.backends.base import Backend
from edge.devices.host import usable_cores
from edge.devices.memory import memory_limit, memory_use
from edge.devices.power import memory_root
from edge.errors import EdgeError, InputError, UnsupportedError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.media.picture import MOST_DECODED
from edge.model.chat.media_parts import Sense
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.model.towers import AUDIO, VISION, PictureTower, SoundTower, Tower, open_ears, open_tower, senses_of
from edge.options import AUTO, NO_EYES, Options
from edge.run.senses.seeing import Room, TowerEars, TowerEyes
from edge.run.senses.sight import Encoder

if TYPE_CHECKING:
    from edge.run.budgets.meters import EnergyMeter

_ENGINES = ("cpu", "reference", "onnx", "gpu")  # that encode
_SHARE = 8  # of the memory limit: for a picture's pixels, and of what is left beside the weights, for its encoding
_LEAST_PIXELS, _MOST_PIXELS = 16 << 20, 8 * MOST_DECODED  # bytes
_KEPT, _MOST_KEPT = 64, 64 << 20  # the share of the memory limit that rows of the last pictures take; bytes

_log = logging.getLogger("edge")


def find_mmproj(model: Model, options: Options, sense: str = VISION) -> Path | None:
    """The file with the model's encoder of pictures or sounds: stated, or beside the model."""
    if options.mmproj is not None:
        return None if options.mmproj == NO_EYES else options.mmproj
    if model.path.is_dir():
        return None
    return next((path for path in _beside(model) if _why_not(path, model, sense) is None), None)


def _beside(model: Model) -> list[Path]:
    return sorted(path for path in model.path.parent.glob("*.gguf") if "mmproj" in path.name.lower())


def _why_not(path: Path, model: Model, sense: str) -> EdgeError | None:
    """Why an encoder cannot be the model's; None if it can."""
    try:
        _OPEN[sense](read_gguf(path), model.spec)
    except EdgeError as error:
        return error
    return None


_OPEN: dict[str, Callable[[GGUFFile, ModelSpec], Tower]] = {VISION: open_tower, AUDIO: open_ears}


def senses_found(model: Model, options: Options) -> list[str]:
    """The senses for which the model has an encoder: VISION, AUDIO. All that is stated counts, damaged or not."""
    path = options.mmproj
    if path is not None and path != NO_EYES and path.is_file():
        with suppress(EdgeError):
            return senses_of(read_gguf(path)) or [VISION]
    return [sense for sense in (VISION, AUDIO) if find_mmproj(model, options, sense) is not None]


def find_tower(model: Model, options: Options) -> PictureTower:
    """The model's encoder of pictures. Raises InputError if there is none, and the errors of `open_tower`."""
    return open_tower(_read(model, options, VISION, "sees no pictures"), model.spec)


def find_ears(model: Model, options: Options) -> SoundTower:
    """As `find_tower`, of sounds."""
    return open_ears(_read(model, options, AUDIO, "hears nothing"), model.spec)


def _read(model: Model, options: Options, sense: str, lacks: str) -> GGUFFile:
    path = find_mmproj(model, options, sense)
    if path is None:
        beside = [] if options.mmproj or model.path.is_dir() else _beside(model)
        why = f" ({_why_not(beside[0], model, sense)})" if beside else ", or put it beside the model"
        raise InputError(f"{model.name} {lacks} without an encoder: name its mmproj file by --mmproj{why}")
    if not path.is_file():
        raise InputError(f"--mmproj {path}: no such file")
    others = [] if options.mmproj else [each for each in _beside(model) if _why_not(each, model, sense) is None]
    if len(others) > 1:
        _log.warning(
            "%s and %s fit %s: --mmproj chooses, else the first", *(each.name for each in others[:2]), model.name
        )
    return read_gguf(path)


def open_ears_of(
    model: Model, options: Options, *, eager: bool = False, meter: EnergyMeter | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TowerEars:  # fmt: skip
    """The model's ears. eager: sounds are encoded before the text model is loaded. Raises the errors of `find_ears`,
    UnsupportedError."""
    tower, (room, _) = find_ears(model, options), _room(model, options, eager=eager)
    _check_engine(model, options)
    return TowerEars(tower, _encoder(tower, options), room, eager=eager, meter=meter, tell=tell)


_KINDS = {VISION: "picture", AUDIO: "sound"}


def open_senses(model: Model, options: Options, kinds: Collection[str], **more: Any) -> dict[str, Sense]:
    """The model's senses for these kinds of media. more: of `open_eyes`. Raises its errors, and those of
    `open_ears_of`."""
    opened: dict[str, Callable[..., Sense]] = {"picture": open_eyes, "sound": open_ears_of}
    return {kind: opened[kind](model, options, **more) for kind in sorted(kinds)}


def _encoder(tower: Tower, options: Options) -> Encoder:
    found = encoder_of(tower, options, options.threads or usable_cores())
    found.frugal = options.memory is not None
    return found


def _room(model: Model, options: Options, *, eager: bool) -> tuple[Room, int]:
    """The room for media, and the bytes that are left beside the text model."""
    limit = options.memory or memory_limit(memory_root()).bytes
    left = limit - memory_use().rss - (0 if eager else model.spec.weight_bytes)
    pixels = left // 2 if eager else limit // _SHARE  # the other half: for the encoder, while there is no text model
    return Room(min(_MOST_PIXELS, max(_LEAST_PIXELS, pixels)), min(_MOST_KEPT, limit // _KEPT), limit), left


def open_eyes(model: Model, options: Options, **more: Any) -> Sense:
    """The model's eyes: those of `_tower_eyes` or, with llama.cpp's engine, of its mtmd. more: of `_tower_eyes`.
    Raises its errors, and those of `find_tower`."""
    try:
        tower = find_tower(model, options)
    except UnsupportedError as error:
        if options.mmproj is None or VISION not in senses_found(model, options):
            raise
        if options.backend != "llamacpp":
            raise UnsupportedError(f"{error}: --backend=llamacpp may, by its mtmd") from None
        return _mtmd_eyes(model, options, options.mmproj, error, **more)
    return _tower_eyes(model, options, tower, **more)


def _mtmd_eyes(model: Model, options: Options, mmproj: Path, error: UnsupportedError, **more: Any) -> Sense:
    from edge.backends.llamacpp.eyes import why_not
    from edge.run.senses.mtmd import MtmdEyes

    why = why_not()
    if options.memory is not None:
        why = "what llama.cpp's mtmd takes is not known before it looks: leave --memory out"
    if why is not None:
        raise UnsupportedError(f"{error}; {why}")
    room, _ = _room(model, options, eager=more.get("eager", False))
    return MtmdEyes(model, mmproj, room, options.threads or usable_cores(), options.image_tokens, **more)


def _tower_eyes(
    model: Model, options: Options, tower: PictureTower, *, eager: bool = False, meter: EnergyMeter | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TowerEyes:  # fmt: skip
    """Eyes by an encoder that edge runs, with as many rows of a picture as the options say or the budgets allow. eager:
    pictures are encoded before the text model is loaded. Raises UnsupportedError, InputError for a number of rows that
    no picture can have."""
    room, left = _room(model, options, eager=eager)
    _check_engine(model, options, whole=tower.layout(1, 1).whole)
    make = partial(
        TowerEyes, tower, _encoder(tower, options), room, eager=eager, meter=meter, tell=tell
    )  # fmt: skip

    def eyes(tokens: int | None) -> TowerEyes:
        return make(tokens=tokens)

    if options.image_tokens is not None:
        found = eyes(options.image_tokens)
        found.tower.layout(1, 1, options.image_tokens)  # refuses too few
        return found
    rows = (options.max_kv_size or model.spec.context) // 2
    sizes = [size for size in tower.sizes if size <= min(tower.default, rows)] or [tower.fewest(rows)]
    fitting = (each for size in reversed(sizes) if (each := eyes(size)).wants <= (left if eager else left // 2))
    return next(fitting, None) or eyes(sizes[0])


def engine_of(options: Options, tower: Tower) -> tuple[Backend, str]:
    """The engine that encodes: the text model's, if it runs this encoder; otherwise the CPU's, and why."""
    cpu = engine_named(_ENGINES[0])
    if options.backend == AUTO:
        return cpu, ""
    engine = engine_named(options.backend)
    why = _encodes_elsewhere(engine, options, tower)
    return (cpu, why) if why else (engine, "")


def _encodes_elsewhere(engine: Backend, options: Options, tower: Tower) -> str:
    """Why an engine that was named does not encode; empty if it does."""
    if options.backend not in _ENGINES:
        return f"the {engine.NAME} engine has no encoders"
    try:
        for stage in tower.stages:
            engine.check_supported(stage.file, stage.spec)
        why = engine.encodes_elsewhere() or ""
    except UnsupportedError as error:
        return str(error).split(": use")[0]
    return why or ("--gpu-memory counts the text model alone" if options.gpu_memory is not None else "")


def encoder_of(tower: Tower, options: Options, threads: int) -> Encoder:
    """The tower on that engine. Raises UnsupportedError."""
    return Encoder(tower, engine_of(options, tower)[0], threads, provider=options.provider or "cpu")


def _check_engine(model: Model, options: Options, *, whole: bool = False) -> None:
    """Raise UnsupportedError for an engine that runs no such rows. whole: they see all of each other."""
    engine = engine_named(options_that_see(options, model).backend)
    if (reason := engine.sees(model.spec, whole=whole, provider=options.provider)) is not None:
        other = "the model's GGUF file" if model.file.folder else "--backend=cpu"
        raise UnsupportedError(f"the {engine.NAME} engine {reason}: use {other}, or --mmproj off")


def options_that_see(options: Options, model: Model) -> Options:
    """The options with an engine that takes rows, and the model's form, unless they name one."""
    if options.backend != AUTO:
        return options
    return replace(options, backend=engines_with("folders")[0] if model.file.folder else _ENGINES[0])


def with_senses(model: Model, options: Options, meter: EnergyMeter | None = None) -> Model:
    """The model with its eyes and ears if it has some: stated, or in a file beside it that fits."""
    found = senses_found(model, options)
    if model.template is None or not found:
        return model
    stated = options.mmproj is not None or options.image_tokens is not None
    senses = dict[str, Sense]()
    for sense in found:
        try:
            engine_named(options_that_see(options, model).backend).check_supported(model.file, model.spec)
            senses |= open_senses(model, options, [_KINDS[sense]], meter=meter)
        except EdgeError as error:
            if stated:
                raise
            _log.info("the encoder beside %s is left out: %s", model.name, error)
    return model.with_senses(senses)
