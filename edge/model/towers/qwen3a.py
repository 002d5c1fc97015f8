"""Qwen3-ASR's ears (arXiv:2601.21337): each second of spectrogram becomes 13 rows by three convolutions of three times
three taps, and the layers see eight seconds at once.
"""

from __future__ import annotations

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
from edge.model.towers.spectrogram import sinusoids, spectrogram
from edge.model.towers.tower import BIASED, Layout, SoundTower, Tile, layer
from edge.model.whisper.stem import gelu
from edge.records import dataclass
from edge.types import FloatArray

FRAMES, CHUNKS = 100, 8  # of a chunk, each with convolutions and positions of its own; chunks that see each other
_LEAST = 8000  # samples: shorter sounds are followed by silence
_CONVOLUTIONS = ("a.conv2d.1", "a.conv2d.2", "a.conv2d.3")


def halved(count: int) -> int:
    """What three convolutions of every other value leave of a count."""
    for _ in _CONVOLUTIONS:
        count = -(-count // 2)
    return count


ROWS = halved(FRAMES)


@dataclass(frozen=True)
class Qwen3Asr(SoundTower):
    """A tile has the rows that see each other. Text models are Qwen3's, in llama.cpp's files as Qwen3-VL's."""

    architectures = ("qwen3", "qwen3vl")
    marker = "<|audio_start|><|audio_pad|><|audio_end|>"

    @cached_property
    def network(self) -> Network:
        clip = self.mmproj
        dense = Dense(clip.ffn, "gelu_erf", gated=False, biases=BIASED)
        return Network(
            clip.hidden, 0, (layer(clip, dense),) * clip.layers, norm="layer", norm_eps=clip.eps, encoder_norm=True,
            output_norm_bias=True,
        )  # fmt: skip

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, wide = self.mmproj, self._channels
        shapes = dict[str, tuple[int, ...]]()
        for name, inputs in zip(_CONVOLUTIONS, (1, wide, wide), strict=True):
            shapes |= {f"{name}.weight": (wide, inputs, 3, 3), f"{name}.bias": (wide,)}
        positions = clip.file.tensors.get("a.position_embd.weight")
        if positions:  # llama.cpp's files have those of Whisper's window, which are the same
            shapes["a.position_embd.weight"] = (max(ROWS, positions.shape[-1]), clip.hidden)
        return shapes | {
            "a.conv_out.weight": (clip.hidden, wide * halved(self._mels)),
            "mm.a.mlp.1.weight": (clip.hidden, clip.hidden), "mm.a.mlp.1.bias": (clip.hidden,),
            "mm.a.mlp.2.weight": (clip.projected, clip.hidden), "mm.a.mlp.2.bias": (clip.projected,),
        }  # fmt: skip

    @property
    def times(self) -> Mapping[str, float]:
        found, height, width = {"a.conv_out": 1.0}, self._mels, FRAMES
        for name in _CONVOLUTIONS:
            height, width = -(-height // 2), -(-width // 2)
            found[name] = height * width / ROWS
        return found

    @property
    def _mels(self) -> int:
        return self.mmproj.header.count("audio.num_mel_bins", "heads")

    @property
    def _channels(self) -> int:
        """Of the convolutions. Raises ModelFormatError."""
        info = self.mmproj.file.tensors.get("a.conv2d.1.weight")
        if info is None or len(info.shape) != 4 or not 1 <= info.shape[3] <= 1 << 13:
            raise ModelFormatError(f"{self.mmproj.file.path}: has no a.conv2d.1.weight of a known shape")
        return info.shape[3]

    def heard(self, samples: int) -> int:
        """Frames of a sound, of which its rows are made."""
        return max(samples, _LEAST) // HOP

    def layout(self, samples: int) -> Layout:
        whole, rest = divmod(self.heard(samples), FRAMES)
        rows = whole * ROWS + halved(rest)
        most = CHUNKS * ROWS
        tiles = [most] * (rows // most) + ([rows % most] if rows % most else [])
        before, after = self.marker.split("<|audio_pad|>")
        return Layout((before, *tiles, after), tuple((1, each) for each in tiles), 1, samples)

    def rows(self, medium: Any, layout: Layout) -> Iterator[FloatArray]:
        mel, number = self.spectrogram(medium), 0
        taps = [self._taps(name) for name in _CONVOLUTIONS]
        out, positions = self.mmproj.weights("a.conv_out.weight"), sinusoids(ROWS, self.mmproj.hidden)
        for _, count in layout.tiles:
            found = list[FloatArray]()
            for _ in range(-(-count // ROWS)):
                chunk = np.zeros((self._mels, FRAMES, 1), np.float32)
                part = mel[:, FRAMES * number : FRAMES * (number + 1)]
                chunk[:, : part.shape[1], 0] = part
                for weights, bias in taps:
                    chunk = _convolved(chunk, weights, bias)
                found.append(chunk.transpose(1, 2, 0).reshape(ROWS, -1) @ out.T + positions)
                number += 1
            yield np.concatenate(found)[:count]

    def spectrogram(self, sound: Sound) -> FloatArray:
        """Of all that the rows are made of, float32 [mels, frames]."""
        return spectrogram(sound, self._mels, max(sound.samples, _LEAST))

    def _taps(self, name: str) -> tuple[FloatArray, FloatArray]:
        weights = self.mmproj.weights(f"{name}.weight").reshape(self._channels, -1)
        return np.ascontiguousarray(weights.T), self.mmproj.weights(f"{name}.bias").reshape(-1)

    def hearing(self, samples: int) -> int:
        frames, wide = self.heard(samples), self._channels
        second = (self._mels // 4 + 1) * (FRAMES // 4 + 1)  # values of a channel that the second convolution makes
        return 4 * (max(samples, _LEAST) + frames * self._mels + second * wide * (9 + 4) + 9 * wide * (2 * wide + 1))

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip = self.mmproj
        return clip.linear("mm.a.mlp.2", gelu_erf(clip.linear("mm.a.mlp.1", states[-1])))


def _convolved(x: FloatArray, taps: FloatArray, bias: FloatArray) -> FloatArray:
    """From [height, width, inputs] to about half of both and [outputs], by taps [inputs · 9, outputs], with GELU."""
    around = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), axis=(0, 1))[::2, ::2]
    height, width = windows.shape[:2]
    found: FloatArray = windows.reshape(height * width, -1) @ taps
    found += bias
    gelu(found)
    return found.reshape(height, width, -1)
