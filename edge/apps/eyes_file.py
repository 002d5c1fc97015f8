"""Section EYES of model.edge and of eyes.edge: how pictures become rows (runtime/eyes/eyes.c); and STEM, the matrices
around an encoder's layers.

model.edge has what a picture's tokens follow from, before it is encoded; eyes.edge has the rest, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.chat import exported_think
from edge.apps.encoder_file import EncoderFile, make_encoder
from edge.apps.model_file import Section
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EdgeError, UnsupportedError
from edge.media.picture import Image
from edge.model.messages import Segment
from edge.model.model import Model
from edge.model.towers import PictureTower
from edge.records import dataclass
from edge.run.sight import TOGETHER
from edge.types import FloatArray

FAMILIES = ("idefics3",)  # in the order of EYES_IDEFICS3 …
FILTERS = ("bilinear", "bicubic", "lanczos")  # in the order of enum pixel_filter
# first, after system, next: the template's text before a first picture; between two; after the last. start, end: around
# a whole picture's rows. tile: before a tile's, where %d stand for its row and column; row: before a later row of
# tiles. whole: before the whole picture behind tiles.
TEXTS = ("first", "after system", "next", "between", "after", "start", "end", "tile", "row", "whole")
MATRICES = ("patch", "base", "projector")  # of patches; what is added to each patch's row; of joined rows
PART = "eyes"
_ALIGNMENT = 64

# The config is followed by a MATRIX for each of MATRICES, and TEXTS, each with \0. chats: bit i: the template takes a
# picture behind the i-th of its texts.
CONFIG = c_struct(
    **dict.fromkeys(("family", "patch", "side", "grid", "join", "most", "projected", "chats"), "<u4"),
    **dict.fromkeys(("hidden", "reserved"), "<u4"),
    mean=("<f8", (3,)), std=("<f8", (3,)),
)  # fmt: skip
MATRIX = c_struct(at="<u8", rows="<u4", columns="<u4", half="<u4", reserved="<u4")  # at: within STEM. half: float16
STRUCTS = {"eyes_config": CONFIG, "stem_matrix": MATRIX}  # by their names in C


@dataclass(frozen=True)
class _Family:
    """What the C runtime does for a family of encoders."""

    numbers: dict[str, int]  # fields of CONFIG
    texts: dict[str, str]
    matrices: dict[str, FloatArray]


def plan_eyes(
    model: Model, tower: PictureTower, profile: DeviceProfile, threads: int, kv_dtype: str, isas: Sequence[str] | None
) -> EncoderFile:
    """The encoder's file; nothing is compiled. Raises UnsupportedError for an encoder that the C runtime lacks."""
    if tower.kind not in FAMILIES:
        raise UnsupportedError(
            f"{tower.mmproj.file.path}: apps see with {', '.join(FAMILIES)} so far, not with {tower.kind}: leave "
            "--mmproj out"
        )
    found = _FAMILIES[tower.kind](tower)
    stem, places = b"", b""
    for name in MATRICES:
        values = found.matrices[name]
        stem += bytes(-len(stem) % _ALIGNMENT)
        half = values.astype("<f2")
        exact = bool((half == values).all())
        rows, columns = values.shape
        places += filled(MATRIX, {"at": len(stem), "rows": rows, "columns": columns, "half": exact})
        stem += (half if exact else values.astype("<f4")).tobytes()
    said, clip = _said(model, tower), tower.mmproj
    texts = said | found.texts
    numbers = found.numbers | {
        "family": FAMILIES.index(tower.kind), "patch": clip.patch, "side": clip.side, "hidden": clip.hidden,
        "projected": clip.projected, "chats": sum(1 << at for at, name in enumerate(TEXTS[:3]) if name in said),
    }  # fmt: skip
    section = filled(CONFIG, numbers | {"mean": clip.mean, "std": clip.std}) + places
    section += b"".join(texts.get(name, "").encode() + b"\0" for name in TEXTS)
    each = numbers["grid"] ** 2
    rows = each * max(1, min(TOGETHER // each, numbers["most"] ** 2 + 1))
    own = {Section.EYES: section, Section.STEM: stem}
    return make_encoder(PART, tower.stages[0], profile, rows, threads, kv_dtype, isas, own)


def _said(model: Model, tower: PictureTower) -> dict[str, str]:
    """The template's texts around pictures that stand before a user's text; empty if it takes none."""
    template, found = model.template, dict[str, str]()
    if template is None:
        return found
    picture = {"type": "image", "image": Image(np.zeros((1, 1, 3), np.uint8))}
    asked = {"role": "user", "content": [picture, picture, {"type": "text", "text": "user"}]}
    earlier = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    conversations = {
        "first": [asked], "after system": [{"role": "system", "content": "system"}, asked], "next": [*earlier, asked],
    }  # fmt: skip
    around, think = set[tuple[str, str]](), exported_think(template)
    for name, messages in conversations.items():
        try:
            segments, _ = template.conversation(messages, think=think, markers={"picture": tower.marker})
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


def _idefics3(tower: PictureTower) -> _Family:
    """Of square tiles, whose `join` × `join` neighbours become one row."""
    clip, most = tower.mmproj, len(tower.sizes)
    grid = clip.side // clip.patch
    start, _, end = tower.layout(1, 1, tower.sizes[0]).parts
    texts = {"start": str(start), "end": str(end)}
    if most > 1:
        one, _, _two, _, below, *_, whole, _, _end = tower.layout(2 * clip.side, 2 * clip.side, tower.sizes[1]).parts
        tile = str(one).replace("1", "%d")
        before, last = str(below).removesuffix(tile % (2, 1)), str(whole).removesuffix(str(start))
        texts |= {"tile": tile, "row": before, "whole": last}
    matrices = {
        "patch": clip.weights("v.patch_embd.weight").reshape(clip.hidden, -1),
        "base": tower.stem(np.zeros((clip.side, clip.side, 3), np.float32)),
        "projector": clip.weights("mm.model.fc.weight"),
    }
    return _Family({"grid": grid, "join": grid // isqrt(tower.sizes[0]), "most": most}, texts, matrices)


_FAMILIES: dict[str, Callable[[PictureTower], _Family]] = {"idefics3": _idefics3}
