"""Section EYES of model.edge and of eyes.edge: how pictures become rows (runtime/eyes/); and STEM, the matrices around
an encoder's layers.

model.edge has what a picture's tokens follow from, before it is encoded; eyes.edge has the rest, too. A family of
encoders is a function here, which puts it into numbers, texts and matrices, and one in runtime/eyes/layout.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from math import sqrt
from typing import Any

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections.chat import exported_think
from edge.apps.sections.encoder_file import EncoderFile, make_encoder
from edge.apps.sections.model_file import Section
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EdgeError, InputError, UnsupportedError
from edge.media.picture import Image
from edge.model.chat.parts import Segment
from edge.model.model import Model
from edge.model.towers import PictureTower, Tower
from edge.model.towers.gemma4 import Gemma4
from edge.model.towers.mmproj import Mmproj
from edge.model.towers.qwen import EPS, Qwen, Qwen3
from edge.model.towers.qwen25 import Qwen25
from edge.records import dataclass
from edge.run.senses.sight import TOGETHER
from edge.types import FloatArray

FAMILIES = ("tiles", "square", "lfm2", "qwen", "gemma4", "sound")  # rules of layouts, in the order of EYES_TILES …
SOUND = FAMILIES.index("sound")  # no picture: section SOUNDS has its layout
FILTERS = ("bilinear", "bicubic", "lanczos")  # in the order of enum pixel_filter
# Positions that are added to the rows of patches. of a grid: a row of a table for each patch. resized: the table is
# resized with antialias; stretched: read from its first row to its last; crossed: one table for columns, one for rows.
POSITIONS = ("none", "of a grid", "resized", "stretched", "crossed")
# first, after system, next: the template's text before a first picture; between two; after the last. start: before the
# rows of a picture in one piece, open: before its first tile. tile: before each tile's, where %d stand for its row and
# column; row: before a later row of tiles. whole: before the whole picture behind tiles; end: behind all.
TEXTS = ("first", "after system", "next", "between", "after", "start", "end", "tile", "row", "whole", "open")
# patch: of patches. base: see POSITIONS. shift, scale: of joined rows. And for each part of a row for the text model:
# the norm of joined rows, and one or two matrices with biases. Vectors are matrices of one row; missing ones have none.
MATRICES = ("patch", "base", "shift", "scale")
PART_MATRICES = ("norm", "norm bias", "one", "one bias", "two", "two bias")
PART = "eyes"
MOST_STAGES = 32
_ALIGNMENT = 64
_TOKENS = 280  # of a picture of any size, unless --image-tokens says more: twice as many take more than twice as long

# The config is followed by a MATRIX for each of MATRICES, and of PART_MATRICES for each part, and TEXTS, each with \0.
CONFIG = c_struct(
    family="<u4",
    # Pixels of a patch's and of a tile's side; patches of a tile's side; patches of the side of a row; tiles of the
    # longer side of a picture; values of a row's part, and of a state.
    **dict.fromkeys(("patch", "side", "grid", "join", "most", "projected", "hidden"), "<u4"),
    chats="<u4",  # bit i: the template takes a picture behind the i-th of its texts
    parts="<u4",  # of a row; those that are added behind the text model's first layers come last
    tokens="<u4",  # the most of a picture
    least="<u4",  # the fewest that the family allows to be the most
    filter="<u4",  # FILTER_BILINEAR …
    positions="<u4",  # POSITIONS_NONE …
    table="<u4",  # rows of a side of the table of positions
    window="<u4",  # cells of the side of a window, in which patches follow each other; 0: none
    # 1: components of positions are column and row; rows are means of patches; rows have positions by row and column;
    # rows of a picture see each other.
    **dict.fromkeys(("columns_first", "means", "cells", "whole"), "<u4"),
    norm="<u4",  # NORM_RMS or NORM_LAYER, of joined rows
    # Runs of layers: how many; the layer behind each; bit i: patches see their window; states become a part of rows.
    stages="<u4", stops=("<u4", (MOST_STAGES,)), windowed="<u4", kept="<u4",
    mean=("<f8", (3,)), std=("<f8", (3,)), eps="<f8",
    factor="<f8",  # of means
    least_pixels="<u8",  # of Qwen's
)  # fmt: skip
MATRIX = c_struct(at="<u8", rows="<u4", columns="<u4", half="<u4", reserved="<u4")  # at: within STEM. half: float16
STRUCTS = {"eyes_config": CONFIG, "stem_matrix": MATRIX}  # by their names in C


@dataclass(frozen=True)
class _Family:
    """What the C runtime does for an encoder."""

    numbers: dict[str, Any]  # fields of CONFIG
    matrices: dict[str, FloatArray]
    parts: list[dict[str, FloatArray]]  # matrices of each part of rows
    patches: int  # of the largest tile
    tiles: int = 1  # the most of a picture
    texts: dict[str, str] = field(default_factory=dict)


def plan_eyes(
    model: Model, tower: PictureTower, profile: DeviceProfile, threads: int, kv_dtype: str, isas: Sequence[str] | None,
    tokens: int | None = None,
) -> EncoderFile:  # fmt: skip
    """The encoder's file; nothing is compiled. tokens: the most of a picture. Raises UnsupportedError for an encoder
    that the C runtime lacks, InputError for too few tokens."""
    if tower.kind not in _FAMILIES:
        raise UnsupportedError(
            f"{tower.mmproj.file.path}: apps see with {', '.join(_FAMILIES)} so far, not with {tower.kind}: leave "
            "--mmproj out"
        )
    if tower.mmproj.projected != model.spec.hidden:
        raise InputError(f"{tower.mmproj.file.path} belongs to another model: choose its own")
    found = _FAMILIES[tower.kind](tower, tokens)
    own = [found.matrices.get(name) for name in MATRICES]
    stem, places = with_matrices(b"", [*own, *(part.get(name) for part in found.parts for name in PART_MATRICES)])
    picture = {"type": "image", "image": Image(np.zeros((1, 1, 3), np.uint8))}
    said, clip, network = said_around(model, tower, "picture", picture), tower.mmproj, model.spec.network
    if network is None or len(found.parts) > 1 + network.deepstack:
        raise UnsupportedError(f"{model.name} adds fewer parts of rows than {clip.file.path} has: choose its own")
    kept, windowed = (
        sum(1 << at for at, stage in enumerate(tower.stages) if getattr(stage, name)) for name in ("kept", "windowed")
    )
    stops = np.cumsum([stage.spec.layers for stage in tower.stages])
    if stops.size > MOST_STAGES:
        raise UnsupportedError(f"{clip.file.path} has {stops.size} stages, and apps run {MOST_STAGES}")
    texts = said | found.texts
    numbers: dict[str, Any] = {
        "patch": clip.patch, "projected": clip.projected, "hidden": clip.hidden, "parts": len(found.parts),
        "chats": sum(1 << at for at, name in enumerate(TEXTS[:3]) if name in said), "mean": clip.mean, "std": clip.std,
        "stages": stops.size, "stops": [*stops.tolist(), *[0] * (MOST_STAGES - stops.size)], "kept": kept,
        "windowed": windowed, "cells": network.components > 0,
    }  # fmt: skip
    section = filled(CONFIG, numbers | found.numbers) + places
    section += b"".join(texts.get(name, "").encode() + b"\0" for name in TEXTS)
    rows = found.patches * max(1, min(TOGETHER // found.patches, found.tiles))
    return make_encoder(
        PART, tower.whole, profile, rows, threads, kv_dtype, isas, {Section.EYES: section, Section.STEM: stem}
    )


def check_whole(section: bytes, chunk: int) -> None:
    """Raise InputError unless a pass of the text model has room for a picture whose rows see each other."""
    (config,) = np.frombuffer(section[: CONFIG.itemsize], CONFIG)
    if config["whole"] and config["tokens"] > chunk:
        raise InputError(
            f"a picture's {config['tokens']} tokens see each other, and run in one pass, which has at most {chunk}: "
            f"use --prefill-step-size {config['tokens']}"
        )


def with_matrices(stem: bytes, matrices: Sequence[FloatArray | None]) -> tuple[bytes, bytes]:
    """A section with these behind its content, in float16 where that is exact, and a MATRIX for each."""
    places = b""
    for values in matrices:
        if values is None:
            places += filled(MATRIX, {})
            continue
        stem += bytes(-len(stem) % _ALIGNMENT)
        half = values.astype("<f2")
        exact = bool((half == values).all())
        rows, columns = values.reshape(1 if values.ndim == 1 else len(values), -1).shape
        places += filled(MATRIX, {"at": len(stem), "rows": rows, "columns": columns, "half": exact})
        stem += (half if exact else values.astype("<f4")).tobytes()
    return stem, places


def said_around(model: Model, tower: Tower, kind: str, medium: dict[str, Any]) -> dict[str, str]:
    """The template's texts around media that stand before a user's text; empty if it takes none."""
    template, found = model.template, dict[str, str]()
    if template is None:
        return found
    asked = {"role": "user", "content": [medium, medium, {"type": "text", "text": "user"}]}
    earlier = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    conversations = {
        "first": [asked], "after system": [{"role": "system", "content": "system"}, asked], "next": [*earlier, asked],
    }  # fmt: skip
    around, think = set[tuple[str, str]](), exported_think(template)
    for name, messages in conversations.items():
        try:
            segments, _ = template.conversation(messages, think=think, markers={kind: tower.marker})
        except EdgeError:  # it takes no system prompt, or drops replies
            continue
        before, between, after = _around(segments)
        found[name] = before
        around.add((between, after))
    if found and len(around) == 1:
        found["between"], found["after"] = around.pop()
        return found
    return {}


def _around(segments: Sequence[Segment]) -> tuple[str, str, str]:
    """The template's texts before, between and behind two pictures, up to the user's text and from the text before."""
    at = [index for index, segment in enumerate(segments) if segment.medium is not None]
    told = [index for index, each in enumerate(segments) if not each.trusted and each.medium is None]
    begin = max((index for index in told if index < at[0]), default=-1) + 1
    end = min(index for index in told if index > at[-1])
    first, second = at
    parts = segments[begin:first], segments[first + 1 : second], segments[second + 1 : end]
    before, between, after = ("".join(str(each.text) for each in part) for part in parts)
    return before, between, after


def _around_rows(tower: PictureTower, tokens: int | None = None, side: int = 1) -> dict[str, str]:
    """Texts of a picture in one piece."""
    start, *_, end = tower.layout(side, side, tokens).parts
    return {"start": str(start), "end": str(end)}


def _divided(tower: PictureTower, texts: dict[str, str], width: int, tokens: int) -> dict[str, str]:
    """Texts of pictures in tiles, of which a square picture of this width has 2 × 2."""
    one, _, _two, _, below, *_, whole, _, _end = tower.layout(width, width, tokens).parts
    opened = texts["start"] if str(one).startswith(texts["start"]) else ""
    tile = str(one).removeprefix(opened).replace("1", "%d")
    before = str(below).removesuffix(tile % (2, 1))
    return {"open": opened, "tile": tile, "row": before, "whole": str(whole)}


def _fixed(tower: PictureTower) -> dict[str, FloatArray]:
    """The rows that are added to those of a square's patches, biases included."""
    clip = tower.mmproj
    return {
        "patch": _patches(clip), "base": tower.stem(np.zeros((clip.side, clip.side, 3), np.float32))
    }  # fmt: skip


def _patches(clip: Mmproj) -> FloatArray:
    return clip.weights("v.patch_embd.weight").reshape(clip.hidden, -1)


def _linear(clip: Mmproj, name: str, which: str) -> dict[str, FloatArray]:
    """A matrix and its bias if there is one."""
    found = {which: clip.weights(f"{name}.weight")}
    if f"{name}.bias" in clip.file.tensors:
        found[f"{which} bias"] = clip.weights(f"{name}.bias")
    return found


def _idefics3(tower: PictureTower, tokens: int | None) -> _Family:
    """Of square tiles, whose `join` × `join` neighbours become one row."""
    clip, most, each = tower.mmproj, len(tower.sizes), tower.sizes[0]
    grid, texts = clip.side // clip.patch, _around_rows(tower, each)
    if most > 1:
        texts |= _divided(tower, texts, 2 * clip.side, tower.sizes[1])
    numbers = {
        "family": 0, "side": clip.side, "grid": grid, "join": round(grid / sqrt(each)), "most": most,
        "tokens": tower.check_most(tokens, each), "least": each, "filter": 2, "positions": 1,
    }  # fmt: skip
    parts = [{"one": clip.weights("mm.model.fc.weight")}]
    return _Family(numbers, _fixed(tower), parts, grid**2, most**2 + 1, texts)


def _gemma3(tower: PictureTower, tokens: int | None) -> _Family:
    """A square, of whose neighbours the means are normalised."""
    clip, (rows,) = tower.mmproj, tower.sizes
    grid = clip.side // clip.patch
    join = round(grid / sqrt(rows))
    if grid % join:
        raise UnsupportedError(f"{clip.file.path}: {grid} patches of a side are not whole groups of {join}")
    numbers = {
        "family": 1, "side": clip.side, "grid": grid, "join": join, "most": 1, "tokens": tower.check_most(tokens, rows),
        "least": rows, "filter": 0, "positions": 1, "means": 1, "whole": 1, "norm": 1, "eps": clip.eps, "factor": 1.0,
    }  # fmt: skip
    one = np.ascontiguousarray(clip.weights("mm.input_projection.weight").T)
    parts = [{"norm": clip.weights("mm.soft_emb_norm.weight"), "one": one}]
    return _Family(numbers, _fixed(tower), parts, grid**2, 1, _around_rows(tower))


def _lfm2(tower: PictureTower, tokens: int | None) -> _Family:
    """A picture of any shape, or square tiles with the whole behind them; a table of positions is resized."""
    clip, (least, *_) = tower.mmproj, tower.sizes
    most, grid = tower.check_most(tokens, least), clip.side // clip.patch
    of_tile = tower.layout(8192, 4096, tower.sizes[-1]).tiles[0][0]
    join = clip.header.count("vision.projector.scale_factor", "heads", default=2)
    texts = _around_rows(tower, None, 512)
    numbers = {
        "family": 2, "side": of_tile * clip.patch, "grid": of_tile, "join": join, "most": 10, "tokens": most,
        "least": least, "filter": 0, "positions": 2, "table": grid, "norm": 2, "eps": 1e-5,
    }  # fmt: skip
    base = clip.weights("v.position_embd.weight") + clip.weights("v.patch_embd.bias")  # whose shares are 1 together
    part = _linear(clip, "mm.1", "one") | _linear(clip, "mm.2", "two")
    if "mm.input_norm.weight" in clip.file.tensors:
        part |= {"norm": clip.weights("mm.input_norm.weight"), "norm bias": clip.weights("mm.input_norm.bias")}
    patches = max(of_tile**2, min(most, 256) * join**2)
    texts |= _divided(tower, texts, 2048, 4 * (of_tile // join) ** 2 + 256)
    return _Family(numbers, {"patch": _patches(clip), "base": base}, [part], patches, 11, texts)


def _qwen(tower: PictureTower, tokens: int | None) -> _Family:
    """A picture of any shape, whose rows have positions of several components."""
    assert isinstance(tower, Qwen)
    clip, merge = tower.mmproj, tower.merge
    most = tower.check_most(tokens, 1)
    most = min(most, _TOKENS if tokens is None else most)
    numbers: dict[str, Any] = {
        "family": 3, "join": merge, "most": 1, "tokens": most, "least": 1, "filter": 1,
        "least_pixels": tower.pixels[0],
    }  # fmt: skip
    both = clip.weights("v.patch_embd.weight") + clip.weights("v.patch_embd.weight.1")
    matrices = {"patch": both.reshape(clip.hidden, -1)}
    parts = [_linear(clip, "mm.0", "one") | _linear(clip, "mm.2", "two")]
    if isinstance(tower, Qwen3):
        matrices["base"] = clip.weights("v.position_embd.weight") + clip.weights("v.patch_embd.bias")
        numbers |= {"positions": 3, "table": clip.side // clip.patch, "norm": 2, "eps": EPS}
        for number in tower.deep:
            name = f"v.deepstack.{number}"
            norm = {"norm": clip.weights(f"{name}.norm.weight"), "norm bias": clip.weights(f"{name}.norm.bias")}
            parts.append(norm | _linear(clip, f"{name}.fc1", "one") | _linear(clip, f"{name}.fc2", "two"))
    else:
        assert isinstance(tower, Qwen25)
        numbers |= {"window": tower.window}
    return _Family(numbers, matrices, parts, most * merge**2, 1, _around_rows(tower, None, 64))


def _gemma4(tower: PictureTower, tokens: int | None) -> _Family:
    """A picture of any shape that fills a budget of rows."""
    assert isinstance(tower, Gemma4)
    clip, most = tower.mmproj, tower.check_most(tokens, tower.sizes[0])
    budget, tables = max(size for size in tower.sizes if size <= most), clip.weights("v.position_embd.weight")
    numbers = {
        "family": 4, "join": 3, "most": 1, "tokens": budget, "least": tower.sizes[0], "filter": 1, "positions": 4,
        "table": tables.shape[1], "columns_first": 1, "means": 1, "norm": 1, "eps": clip.eps,
        "factor": sqrt(clip.hidden), "mean": (0.5,) * 3, "std": (0.5,) * 3, "whole": tower.whole_rows,
    }  # fmt: skip
    matrices = {"patch": _patches(clip), "base": tables.reshape(-1, clip.hidden)}
    if "v.std_bias" in clip.file.tensors:
        matrices |= {"shift": clip.weights("v.std_bias"), "scale": clip.weights("v.std_scale")}
    part = {"norm": np.ones(clip.hidden, np.float32), "one": clip.weights("mm.input_projection.weight")}
    return _Family(numbers, matrices, [part], 9 * budget, 1, _around_rows(tower))


_FAMILIES: dict[str, Callable[[PictureTower, int | None], _Family]] = {
    "idefics3": _idefics3, "gemma3": _gemma3, "lfm2": _lfm2, "qwen2.5vl_merger": _qwen, "qwen3vl_merger": _qwen,
    "gemma4v": _gemma4,
}  # fmt: skip
