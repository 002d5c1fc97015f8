"""What a picture costs, by its size alone: rows, memory, time and joules of its encoder, before a pixel is read.

An encoder's products take 2 · parameters · patches operations, its attention 4 · layers · n² · width for each tile of n
patches. They run at the shares of the device's ceilings that the encoder's engine reaches with weights of these types
or, where the ceilings are unknown, as many a second as those of the text model's prompt.

`--image-tokens auto` is the largest of the family's sizes up to its default that fits the memory, leaves half of the
context to the text, and half of --time and --energy to the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.budget import format_bytes, format_joules
from edge.devices.profiles import HOST, find_profile
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError
from edge.lab.prediction.efficiency import efficiency_of, weight_shares
from edge.lab.prediction.errors import correction
from edge.lab.prediction.forecast import Forecast, forecast
from edge.lab.prediction.predict import Prediction
from edge.lab.prediction.roofline import counting_s
from edge.lab.prediction.work import Work, work_of
from edge.media.picture import Image, check_sides
from edge.model.model import Model
from edge.model.structure.rounding import in_q8_0
from edge.model.towers import Layout, PictureTower, Tower
from edge.options import Options
from edge.run.senses.sight import Encoder
from edge.run.starting.senses import encoder_of, engine_of, find_tower

_ROW = 4  # bytes of a value of a projected row
_SHARE = 2  # budgets of seconds and joules: a half for pictures and the prompt
_Pace = Callable[[Layout], float]
"""Seconds that a picture's encoding takes."""


@dataclass(frozen=True)
class Look:
    """A picture with one of the family's sizes. Bytes; seconds and joules are None where the pace is unknown."""

    most_tokens: int  # of --image-tokens
    tokens: int
    patches: int
    tiles: int
    encoder: int  # its peak: weights, scratch, states
    rows: int  # for the text model
    peak: int  # of the process: the larger of two phases
    flops: float
    seconds: float | None
    first_token_s: float | None  # with the prompt's text
    joules: float | None


@dataclass(frozen=True)
class Looks:
    """What one picture costs, for each size that the budget may choose among."""

    width: int
    height: int
    weights: int  # bytes of the encoder, while it encodes
    sizes: tuple[Look, ...]
    by: str  # what its time is estimated by; empty: unknown
    elsewhere: str  # why the CPU encodes, and not the text model's engine; empty: this does
    auto: int  # the most tokens of a picture
    auto_by: str  # what sets them

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows."""
        heads = [f"a picture of {self.width} × {self.height}", "patches", "encoder", "peak", "encoded in",
                 "first token", "joules"]  # fmt: skip
        return heads, [
            [
                f"{look.tokens:,} tokens", f"{look.patches:,}", format_bytes(look.encoder), format_bytes(look.peak),
                seconds_text(look.seconds), seconds_text(look.first_token_s),
                "?" if look.joules is None else format_joules(look.joules),
            ]
            for look in self.sizes
        ]  # fmt: skip


def predict_looks(found: Forecast, options: Options, device: str, picture: str) -> Looks:
    """What a picture costs beside a plan. picture: a size such as 1280x720, or a file. Raises InputError, and the
    errors of `find_tower`."""
    width, height = size_of(picture)
    tower, profile = find_tower(found.model, options), find_profile(device)
    eyes = encoder_of(tower, options, found.plan.config.threads)
    pace, by = pace_of(tower, found, options, profile)
    wanted = options.image_tokens
    layouts = {layout.tokens: layout for most in ([wanted] if wanted else tower.sizes)
               for layout in [tower.layout(width, height, most)]}  # fmt: skip
    sizes = [_look(tower, eyes, layout, found, pace) for layout in layouts.values()]
    weights = sum(info.nbytes for info in tower.mmproj.file.tensors.values())
    auto, why = _auto(tower, found, options, [(width, height)], pace, eyes)
    return Looks(width, height, weights, tuple(sizes), by, engine_of(options, tower)[1], auto, why)


def auto_tokens(model: Model, options: Options, pictures: Sequence[Image], prompt: int) -> int | None:
    """The most tokens of each picture, so that all of them leave half of --time and --energy to the answer; None where
    these limit nothing. prompt: tokens of the text, about."""
    if options.image_tokens is not None or (options.time is None and options.energy is None):
        return None
    found = forecast(model, options, prompt=max(1, prompt))
    tower = find_tower(model, options)
    eyes = encoder_of(tower, options, found.plan.config.threads)
    pace, _ = pace_of(tower, found, options, find_profile(HOST))
    most, why = _auto(tower, found, options, [(each.width, each.height) for each in pictures], pace, eyes)
    return most if why.startswith("--") else None


def _auto(
    tower: PictureTower, found: Forecast, options: Options, pictures: Sequence[tuple[int, int]], pace: _Pace | None,
    eyes: Encoder,
) -> tuple[int, str]:  # fmt: skip
    """The most tokens of each picture, and what sets them."""
    if options.image_tokens is not None:
        return options.image_tokens, "--image-tokens"
    rows = (options.max_kv_size or found.model.spec.context) // 2
    sizes, by = [size for size in tower.sizes if size <= tower.default], "the family's own default"
    for size in reversed(sizes):
        looks = [_look(tower, eyes, tower.layout(*each, size), found, pace) for each in pictures]
        seconds, joules = _first_token(looks, found.prediction)
        if size > rows:
            why = f"the context, of {2 * rows:,} tokens"
        elif max(each.peak for each in looks) > found.plan.limit:
            why = f"the memory, {format_bytes(found.plan.limit)}"
        elif options.time is not None and seconds is not None and seconds > options.time / _SHARE:
            why = f"--time {options.time:g}s"
        elif options.energy is not None and joules is not None and joules > options.energy / _SHARE:
            why = f"--energy {format_joules(options.energy)}"
        else:
            return size, by
        by = why
    return tower.fewest(rows), by


def _first_token(looks: Sequence[Look], prediction: Prediction) -> tuple[float | None, float | None]:
    """Seconds and joules up to the first token; None where the pace is unknown."""
    prefill, watts = prediction.prefill_tok_s, prediction.watts
    times = [look.seconds for look in looks if look.seconds is not None]
    if prefill is None or len(times) < len(looks):
        return None, None
    seconds = sum(times) + (sum(look.tokens for look in looks) + prediction.prompt) / prefill.value
    return seconds, None if watts is None else watts.value * seconds


def size_of(picture: str) -> tuple[int, int]:
    """Width and height: stated, or those of a file. Raises InputError."""
    width, cross, height = picture.lower().partition("x")
    if cross and width.isdigit() and height.isdigit() and max(len(width), len(height)) < 7:
        check_sides(f"--image {picture}", int(width), int(height))
        return int(width), int(height)
    if not Path(picture).exists():
        raise InputError(f"--image {picture}: a size in pixels, such as 1280x720, or a file")
    found = Image(picture)
    return found.width, found.height


def _look(tower: PictureTower, eyes: Encoder, layout: Layout, found: Forecast, pace: _Pace | None) -> Look:
    need, rows, plan = eyes.need(layout), _ROW * layout.tokens * found.model.spec.hidden, found.plan
    pixels = 3 * layout.width * layout.height
    look = Look(
        layout.tokens, layout.tokens, layout.patches, len(layout.tiles), need, rows,
        max(plan.bytes.interpreter + need + pixels, plan.predicted_peak) + rows, sum(work_of_tower(tower, layout)),
        None if pace is None else pace(layout), None, None,
    )  # fmt: skip
    seconds, joules = _first_token([look], found.prediction)
    return replace(look, first_token_s=seconds, joules=joules)


def work_of_tower(tower: Tower, layout: Layout) -> tuple[float, float, float]:
    """Operations of a picture or a sound: of the layers' matrices, of their attention, of stem and projector."""
    layers = {info.offset: info for stage in tower.stages for info in stage.file.tensors.values()}
    parameters = sum(info.elements for info in layers.values() if len(info.shape) > 1)
    others, patches, times = tower.mmproj.file.tensors.items(), layout.patches, tower.times
    stem = patches * sum(
        info.elements * count
        for name, info in others if len(info.shape) > 1 for begin, count in times.items() if name.startswith(begin)
    )  # fmt: skip
    projector = sum(info.elements * layout.tokens for name, info in others if name[:3] == "mm." and len(info.shape) > 1)
    network = tower.network
    attention = sum((rows * columns) ** 2 for rows, columns in layout.tiles) * len(network.layers) * network.hidden
    return 2.0 * parameters * patches, 4.0 * attention, 2.0 * (stem + projector)


def pace_of(tower: Tower, found: Forecast, options: Options, device: DeviceProfile) -> tuple[_Pace | None, str]:
    """The pace of a tower, and what it is estimated by."""
    (engine, _), threads, plan = engine_of(options, tower), found.plan.config.threads, found.plan
    flops, int8 = device.flops(threads), device.int8_ops(threads)
    prefill = found.prediction.prefill_tok_s
    if flops is not None and not engine.CAPABILITIES.gpu:
        reach, dtype = efficiency_of(engine.NAME, device.isa), engine.CAPABILITIES.kv_dtypes[0]
        off = None if device.name == HOST else correction(engine.NAME, device.arch, "prompt", npu=False)
        factor = off.factor if off else 1.0
        if not tower.stages:
            return lambda layout: sum(work_of_tower(tower, layout)) / flops / factor, f"{device.name}'s arithmetic"
        first = tower.stages[0]  # whose matrices have the types of all
        spec = in_q8_0(first.file, first.spec) if engine.CAPABILITIES.rounds and dtype != "f32" else tower.spec
        shares = weight_shares(spec, engine.NAME, EngineConfig(1, 1, dtype, threads))

        def by_ceilings(layout: Layout) -> float:
            layers, attention, ends = work_of_tower(tower, layout)
            seconds = counting_s(Work(0, 0, layers + attention, attention), reach, shares, dtype, flops, int8)
            return (seconds + ends / flops) / factor

        return by_ceilings, f"{device.name}'s arithmetic and the types of its weights"
    if prefill is None:
        return None, ""
    footprint = engine_named(plan.backend).footprint(found.model.spec, plan.config)
    rate = work_of(found.model.spec, plan.config, footprint, 512, 0).flops / 512 * prefill.value
    return lambda layout: sum(work_of_tower(tower, layout)) / rate, "the pace of the prompt"


def seconds_text(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g} s"
