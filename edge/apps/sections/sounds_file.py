"""Section SOUNDS of model.edge and of sounds.edge: how sounds of prompts become rows (runtime/ears/sounds.c), by
encoders that are Whisper's with a projector. The texts around the rows are section EYES's, as those of pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections.encoder_file import EncoderFile, make_encoder
from edge.apps.sections.eyes_file import CONFIG, MATRIX, SOUND, TEXTS, said_around, with_matrices
from edge.apps.sections.hearing import stem_of
from edge.apps.sections.model_file import Section
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import UnsupportedError
from edge.media.mel import HOP
from edge.media.recording import Sound
from edge.model.model import Model
from edge.model.towers import SoundTower
from edge.model.towers.mmproj import Mmproj
from edge.model.towers.whisper import EPS, Ears
from edge.records import dataclass
from edge.types import FloatArray

KINDS = ("ULTRAVOX", "QWEN2", "VOXTRAL")  # of projectors
# norm: of joined states; middle: between the two matrices; missing ones have no rows.
MATRICES = ("norm", "norm bias", "one", "one bias", "middle", "two")
PART = "sounds"

# positions: states of a window. stack: states of a row. inner: rows of the first matrix. least: frames of a sound.
# whole: windows are. eps: of norms. A MATRIX for each of MATRICES follows, in STEM.
SOUNDS = c_struct(
    **dict.fromkeys(("kind", "mels", "positions", "stack", "inner", "hidden", "projected", "least", "whole"), "<u4"),
    reserved="<u4", eps="<f8",
)  # fmt: skip
STRUCTS = {"sounds_config": SOUNDS}  # by their names in C


@dataclass(frozen=True)
class _Projector:
    kind: str
    stack: int
    eps: float
    matrices: dict[str, FloatArray]


def plan_sounds(
    model: Model, tower: SoundTower, profile: DeviceProfile, threads: int, kv_dtype: str, isas: Sequence[str] | None
) -> EncoderFile:
    """The encoder's file; nothing is compiled. Raises UnsupportedError for an encoder that the C runtime lacks."""
    clip = tower.mmproj
    if tower.kind not in _PROJECTORS or not isinstance(tower, Ears):
        raise UnsupportedError(
            f"{clip.file.path}: apps hear with {', '.join(_PROJECTORS)}, not with {tower.kind}: leave --mmproj out"
        )
    found, positions = _PROJECTORS[tower.kind](clip), tower.positions
    stem, places = with_matrices(_stem(tower), [found.matrices.get(name) for name in MATRICES])
    numbers = {
        "kind": KINDS.index(found.kind), "mels": tower.mels, "positions": positions, "stack": found.stack,
        "inner": len(found.matrices["one"]), "hidden": clip.hidden, "projected": clip.projected,
        "least": tower.heard(1) if found.kind != "VOXTRAL" else 1, "whole": found.kind == "VOXTRAL", "eps": found.eps,
    }  # fmt: skip
    return make_encoder(
        PART, tower.whole, profile, positions, threads, kv_dtype, isas,
        {Section.EYES: _texts(model, tower), Section.SOUNDS: filled(SOUNDS, numbers) + places, Section.STEM: stem},
    )  # fmt: skip


def sound_row_bytes(section: bytes) -> int:
    """Bytes that each row of a sound takes beside the encoder: the row, and the samples and the spectrogram of which it
    is made. section: SOUNDS."""
    figures = np.frombuffer(section, SOUNDS, 1)[0]
    return 4 * int(2 * figures["stack"] * (HOP + figures["mels"]) + figures["projected"])


def _texts(model: Model, tower: Ears) -> bytes:
    """Section EYES: nothing but the texts around a sound's rows."""
    clip, sound = tower.mmproj, Sound(np.zeros(1, np.float32))
    said = said_around(model, tower, "sound", {"type": "audio", "audio": sound})
    before, after = tower.texts
    texts = said | {"start": before, "end": after}
    numbers: dict[str, Any] = {
        "family": SOUND, "patch": 1, "join": 1, "most": 1, "tokens": 1, "least": 1, "parts": 1, "stages": 1, "kept": 1,
        "projected": clip.projected, "hidden": clip.hidden, "std": (1.0,) * 3, "stops": [clip.layers, *[0] * 31],
        "chats": sum(1 << at for at, name in enumerate(TEXTS[:3]) if name in said),
    }  # fmt: skip
    nothing = filled(MATRIX, {}) * 10  # of MATRICES and PART_MATRICES there
    return filled(CONFIG, numbers) + nothing + b"".join(texts.get(name, "").encode() + b"\0" for name in TEXTS)


def _stem(tower: Ears) -> bytes:
    clip = tower.mmproj
    names = ("a.conv1d.1", "a.conv1d.2")
    tables = [
        values for name in names
        for values in (clip.weights(f"{name}.weight").transpose(0, 2, 1), clip.weights(f"{name}.bias").reshape(-1))
    ]  # fmt: skip
    return stem_of(tower.mels, clip.hidden, tower.positions, [*tables, clip.weights("a.position_embd.weight")])


def _ultravox(clip: Mmproj) -> _Projector:
    stack = clip.header.count("audio.projector.stack_factor", "heads", default=1)
    names = {"norm": "norm_pre", "one": "mlp.1", "middle": "norm_mid", "two": "mlp.2"}
    return _Projector(
        "ULTRAVOX", stack, EPS, {ours: clip.weights(f"mm.a.{name}.weight") for ours, name in names.items()}
    )


def _qwen2(clip: Mmproj) -> _Projector:
    names = {
        "norm": "a.post_ln.weight",
        "norm bias": "a.post_ln.bias",
        "one": "mm.a.fc.weight",
        "one bias": "mm.a.fc.bias",
    }
    return _Projector("QWEN2", 2, clip.eps, {ours: clip.weights(name) for ours, name in names.items()})


def _voxtral(clip: Mmproj) -> _Projector:
    stack = clip.header.count("audio.projector.stack_factor", "heads", default=1)
    return _Projector(
        "VOXTRAL", stack, 0.0, {ours: clip.weights(f"mm.a.mlp.{at}.weight") for at, ours in ((1, "one"), (2, "two"))}
    )


_PROJECTORS: dict[str, Callable[[Mmproj], _Projector]] = {"ultravox": _ultravox, "qwen2a": _qwen2, "voxtral": _voxtral}
