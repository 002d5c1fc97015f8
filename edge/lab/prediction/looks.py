"""What a picture costs, by its size alone: rows, memory, time and joules of its encoder, before a pixel is read.

An encoder's products take 2 · parameters · patches operations, its attention 4 · layers · n² · width for each tile of n
patches. They are assumed to run at the pace of the text model's prompt, in operations per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends import engine_named
from edge.budget import format_bytes, format_joules
from edge.errors import InputError
from edge.lab.prediction.predict import Prediction
from edge.lab.prediction.work import work_of
from edge.media.picture import Image, check_sides
from edge.model.model import Model
from edge.model.towers import Layout, PictureTower
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.sight import Encoder
from edge.run.starting.eyes import engine_of, find_tower

if TYPE_CHECKING:
    from edge.lab.prediction.predict import Guess

_ROW = 4  # bytes of a value of a projected row


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

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows."""
        heads = [f"a picture of {self.width} × {self.height}", "patches", "encoder", "peak", "encoded in",
                 "first token", "joules"]  # fmt: skip
        return heads, [
            [
                f"{look.tokens:,} tokens", f"{look.patches:,}", format_bytes(look.encoder), format_bytes(look.peak),
                _seconds(look.seconds), _seconds(look.first_token_s),
                "?" if look.joules is None else format_joules(look.joules),
            ]
            for look in self.sizes
        ]  # fmt: skip


def predict_looks(model: Model, options: Options, plan: Plan, prediction: Prediction, picture: str) -> Looks:
    """What a picture costs beside a plan. picture: a size such as 1280x720, or a file. Raises InputError, and the
    errors of `find_tower`."""
    width, height = size_of(picture)
    tower = find_tower(model, options)
    eyes = Encoder(tower, engine_of(options), plan.config.threads)
    wanted = options.image_tokens
    layouts = {layout.tokens: layout for most in ([wanted] if wanted else tower.sizes)
               for layout in [tower.layout(width, height, most)]}  # fmt: skip
    pace = _pace(model, plan, prediction.prefill_tok_s)
    found = [_look(tower, eyes, layout, model, plan, prediction, pace) for layout in layouts.values()]
    weights = sum(info.nbytes for info in tower.mmproj.file.tensors.values())
    return Looks(width, height, weights, tuple(found))


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


def _look(
    tower: PictureTower,
    eyes: Encoder,
    layout: Layout,
    model: Model,
    plan: Plan,
    prediction: Prediction,
    pace: float | None,
) -> Look:
    flops = sum(_flops(tower, rows * columns) for rows, columns in layout.tiles)
    need, rows = eyes.need(layout), _ROW * layout.tokens * model.spec.hidden
    pixels = 3 * layout.width * layout.height
    seconds = None if pace is None else flops / pace
    prefill = prediction.prefill_tok_s
    first = None
    if seconds is not None and prefill is not None:
        first = seconds + (layout.tokens + prediction.prompt) / prefill.value
    watts = prediction.watts
    return Look(
        layout.tokens, layout.tokens, layout.patches, len(layout.tiles), need, rows,
        max(plan.bytes.interpreter + need + pixels, plan.predicted_peak) + rows, flops, seconds, first,
        None if watts is None or first is None else watts.value * first,
    )  # fmt: skip


def _flops(tower: PictureTower, patches: int) -> float:
    """Operations of a tile."""
    parameters = sum(
        info.elements for stage in tower.stages for info in stage.file.tensors.values() if len(info.shape) > 1
    )
    network = tower.network
    return 2.0 * parameters * patches + 4.0 * len(network.layers) * patches**2 * network.hidden


def _pace(model: Model, plan: Plan, prefill: Guess | None) -> float | None:
    """Operations per second of the text model's prompt."""
    if prefill is None:
        return None
    footprint = engine_named(plan.backend).footprint(model.spec, plan.config)
    return work_of(model.spec, plan.config, footprint, 512, 0).flops / 512 * prefill.value


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g} s"
