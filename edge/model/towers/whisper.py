"""Ears that are Whisper's encoder (arXiv:2212.04356) over windows of 30 s: Ultravox's, Qwen2-Audio's, Voxtral's.

The spectrogram is that of the whole sound, as their processors make it. A window that is not full costs less where the
family's encoder does not see the silence behind a sound: its rows are the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from edge.errors import ModelFormatError
from edge.media.mel import HOP
from edge.media.recording import Sound
from edge.model.cores import Dense
from edge.model.structure.layers import Network
from edge.model.towers.pixels import gelu_erf
from edge.model.towers.spectrogram import spectrogram
from edge.model.towers.tower import BIASED, Layout, SoundTower, Tile, layer
from edge.model.whisper.stem import Stem
from edge.records import dataclass
from edge.types import FloatArray

_BIASES = tuple(name for name in BIASED if name != "attn_k")
_AHEAD = 2  # frames behind a window's last that its convolutions see
EPS = 1e-6  # of the projectors' RMSNorm


@dataclass(frozen=True)
class Ears(SoundTower):
    """Windows of as many frames as the file has positions for."""

    @cached_property
    def network(self) -> Network:
        clip = self.mmproj
        dense = Dense(clip.ffn, "gelu_erf", gated=False, biases=BIASED)
        return Network(
            clip.hidden, 0, (layer(clip, dense, biases=_BIASES),) * clip.layers, norm="layer", norm_eps=clip.eps,
            encoder_norm=self._norm_last, output_norm_bias=self._norm_last,
        )  # fmt: skip

    @property
    def _norm_last(self) -> bool:
        """Whether the last norm directly follows the layers."""
        return True

    @property
    @abstractmethod
    def projector(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of its tensors."""

    @property
    @abstractmethod
    def texts(self) -> tuple[str, str]:
        """The special tokens before and after the rows."""

    @abstractmethod
    def window_rows(self, positions: int) -> int:
        """Rows of a window with `positions` states."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        hidden = self.mmproj.hidden
        return {
            "a.conv1d.1.weight": (hidden, self.mels, 3), "a.conv1d.1.bias": (hidden,),
            "a.conv1d.2.weight": (hidden, hidden, 3), "a.conv1d.2.bias": (hidden,),
            "a.position_embd.weight": (self.positions, hidden),
        } | dict(self.projector)  # fmt: skip

    @property
    def times(self) -> Mapping[str, float]:
        return {"a.conv1d.1": 2, "a.conv1d.2": 1}

    @property
    def mels(self) -> int:
        return self.mmproj.header.count("audio.num_mel_bins", "heads")

    @property
    def positions(self) -> int:
        """States of a whole window. Raises ModelFormatError."""
        info = self.mmproj.file.tensors.get("a.position_embd.weight")
        if info is None or len(info.shape) != 2 or not 4 <= info.shape[1] <= 1500:
            raise ModelFormatError(f"{self.mmproj.file.path}: a.position_embd.weight must have 4 to 1500 positions")
        return info.shape[1]

    @property
    def _stack(self) -> int:
        """States that become one row."""
        return self.mmproj.header.count("audio.projector.stack_factor", "heads", default=1)

    @property
    def marker(self) -> str:
        before, after = self.texts
        return f"{before}{self.placeholder}{after}"

    @property
    @abstractmethod
    def placeholder(self) -> str:
        """The text that stands for the rows in a template."""

    def heard(self, samples: int) -> int:
        """Frames of a sound, of which its rows are made."""
        return max(1, -(-samples // HOP))

    def layout(self, samples: int) -> Layout:
        frames, most = self.heard(samples), 2 * self.positions
        counts = [most] * (frames // most) + ([frames % most] if frames % most else [])
        positions = [(each + 1) // 2 for each in counts]
        before, after = self.texts
        parts: list[str | int] = [before, *map(self.window_rows, positions), after]
        return Layout(tuple(filter(None, parts)), tuple((1, each) for each in positions), 1, samples)

    def rows(self, medium: Any, layout: Layout) -> Iterator[FloatArray]:
        most, mel, stem = 2 * self.positions, self.spectrogram(medium), self._stem()
        for number, (_, positions) in enumerate(layout.tiles):
            first = number * most
            yield stem.rows(mel[:, first : first + min(most, 2 * positions + 1)])[:positions]

    def spectrogram(self, sound: Sound) -> FloatArray:
        """Of all that the rows are made of, float32 [mels, frames]."""
        return spectrogram(sound, self.mels, self._padded(sound.samples))

    def _padded(self, samples: int) -> int:
        """Samples with the silence behind them that the rows need."""
        whole = -(-samples // (2 * self.positions * HOP)) * 2 * self.positions * HOP
        return min(whole, (self.heard(samples) + _AHEAD) * HOP)

    def _stem(self) -> Stem:
        clip = self.mmproj
        names = ("a.conv1d.1", "a.conv1d.2")
        taps = (clip.weights(f"{name}.weight") for name in names)
        return Stem(
            tuple(np.ascontiguousarray(each.transpose(2, 1, 0).reshape(-1, clip.hidden)) for each in taps),
            tuple(clip.weights(f"{name}.bias").reshape(-1) for name in names), clip.weights("a.position_embd.weight"),
        )  # fmt: skip

    def hearing(self, samples: int) -> int:
        padded, frames, hidden = self._padded(samples), 2 * self.positions, self.mmproj.hidden
        return 4 * (padded + padded // HOP * self.mels + frames * (2 * self.mels + 5 * hidden))

    def _stacked(self, states: FloatArray) -> FloatArray:
        """Each `stack` states that follow each other as one row; missing ones are zeros."""
        stack = self._stack
        return np.pad(states, ((0, -len(states) % stack), (0, 0))).reshape(-1, stack * states.shape[1])

    def _normed(self, rows: FloatArray, name: str) -> FloatArray:
        squares = np.mean(np.square(rows), axis=1, keepdims=True)
        return np.asarray(rows / np.sqrt(squares + np.float32(EPS)) * self.mmproj.weights(name))


@dataclass(frozen=True)
class Ultravox(Ears):
    """Each eight states become one row, through RMSNorm, SwiGLU and RMSNorm again. The text model is its own file."""

    architectures = ("llama", "mistral3", "qwen2", "qwen3", "gemma3")
    texts, placeholder = ("", ""), "<|audio|>"

    @property
    def projector(self) -> Mapping[str, tuple[int, ...]]:
        clip, wide = self.mmproj, self._stack * self.mmproj.hidden
        info = clip.file.tensors.get("mm.a.mlp.1.weight")
        inner = info.shape[-1] // 2 * 2 if info else 0
        return {
            "mm.a.norm_pre.weight": (wide,), "mm.a.mlp.1.weight": (inner, wide),
            "mm.a.norm_mid.weight": (inner // 2,), "mm.a.mlp.2.weight": (clip.projected, inner // 2),
        }  # fmt: skip

    def window_rows(self, positions: int) -> int:
        return -(-positions // self._stack)

    def heard(self, samples: int) -> int:
        return max(2, super().heard(samples))

    def _padded(self, samples: int) -> int:
        return self.heard(samples) * HOP

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip = self.mmproj
        value, gate = np.split(
            clip.linear("mm.a.mlp.1", self._normed(self._stacked(states[-1]), "mm.a.norm_pre.weight")), 2, 1
        )
        return clip.linear(
            "mm.a.mlp.2", self._normed(value * gate * (np.float32(0.5) + np.tanh(gate / 2) / 2), "mm.a.norm_mid.weight")
        )


@dataclass(frozen=True)
class Qwen2Audio(Ears):
    """Means of two states, a norm and a matrix."""

    architectures = ("qwen2",)
    texts, placeholder = ("<|audio_bos|>", "<|audio_eos|>"), "<|AUDIO|>"

    @property
    def _norm_last(self) -> bool:
        return False

    @property
    def projector(self) -> Mapping[str, tuple[int, ...]]:
        clip = self.mmproj
        return {
            "a.post_ln.weight": (clip.hidden,), "a.post_ln.bias": (clip.hidden,),
            "mm.a.fc.weight": (clip.projected, clip.hidden), "mm.a.fc.bias": (clip.projected,),
        }  # fmt: skip

    def window_rows(self, positions: int) -> int:
        return positions // 2

    def heard(self, samples: int) -> int:
        return max(4, super().heard(samples))  # those of a row

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, count = self.mmproj, tile[1] // 2
        means = states[-1][: 2 * count].reshape(count, 2, clip.hidden).mean(axis=1)
        centred = means - means.mean(axis=1, keepdims=True)
        normed = centred / np.sqrt(np.mean(np.square(centred), axis=1, keepdims=True) + np.float32(clip.eps))
        return clip.linear("mm.a.fc", normed * clip.weights("a.post_ln.weight") + clip.weights("a.post_ln.bias"))


@dataclass(frozen=True)
class Voxtral(Ears):
    """Each four states become one row, through two matrices. Windows are always whole: the encoder hears the silence
    behind a sound."""

    architectures = ("llama", "mistral3")
    texts, placeholder = ("[BEGIN_AUDIO]", ""), "[AUDIO]"

    @property
    def projector(self) -> Mapping[str, tuple[int, ...]]:
        clip = self.mmproj
        return {
            "mm.a.mlp.1.weight": (clip.projected, self._stack * clip.hidden),
            "mm.a.mlp.2.weight": (clip.projected, clip.projected),
        }  # fmt: skip

    def window_rows(self, positions: int) -> int:
        return positions // self._stack

    def heard(self, samples: int) -> int:
        most = 2 * self.positions
        return -(-super().heard(samples) // most) * most

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip = self.mmproj
        return clip.linear("mm.a.mlp.2", gelu_erf(clip.linear("mm.a.mlp.1", self._stacked(states[-1]))))
