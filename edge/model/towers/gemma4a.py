"""Gemma 4's ears: the conformer of Universal Speech Models (arXiv:2303.01037). Two convolutions of three by three taps
make a row of each 40 ms; a layer has two halves of a feed-forward network around attention to the last 12 rows and a
convolution over the last five. Files may have bounds of all matrices.

NumPy computes all of it in float32, a matrix of the file at a time: so a conformer takes little memory, whatever its
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from edge.errors import ModelFormatError
from edge.formats.gguf import TensorInfo
from edge.media.mel import RATE
from edge.media.recording import Sound
from edge.model.structure.layers import Network
from edge.model.towers.mmproj import check_own
from edge.model.towers.spectrogram import sinusoids
from edge.model.towers.tower import Layout, SoundTower, Stage, Tile
from edge.records import dataclass
from edge.types import FloatArray

MELS = 128
CONTEXT, TAPS = 12, 5  # rows that attention sees, with a row's own; of the convolution in layers
CAP = 50.0  # of scores
_FRAME, _HOP, _SPECTRUM = 320, 160, 512  # samples: of a frame, between two, and with the zeros behind it
_FLOOR = 1e-3  # beside the magnitudes, whose logarithms are taken
_WINDOW = 30 * RATE  # samples of a sound: longer ones become several
_LEAST = _FRAME // 2 + 1  # samples that a frame needs
_AT_ONCE = 64  # rows that the convolutions make at a time
_EPS = 1e-6  # of all norms
_ENDS = ("input", "output")  # of matrices, which may have bounds
_SCALE = float(np.log1p(np.e) / np.log(2))  # of keys


@dataclass(frozen=True)
class Gemma4Ears(SoundTower):
    """A tile has the rows of 30 s at most, which are a sound of their own: the model knows no longer ones."""

    architectures = ("gemma4",)
    marker = "<|audio|>"

    @cached_property
    def network(self) -> Network:
        return Network(self.mmproj.hidden, 0, (), norm_eps=self.mmproj.eps)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """None: no engine runs these layers."""
        return ()

    def check(self) -> None:
        mels = self.mmproj.header.count("audio.num_mel_bins", "heads", default=MELS)
        if mels != MELS:
            raise ModelFormatError(f"{self.mmproj.file.path}: a conformer of {mels} mels instead of {MELS}")
        check_own(self.mmproj, self.tensors)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, hidden = self.mmproj, self.mmproj.hidden
        inner, channels = (self._channels(number) for number in (0, 1))
        found = {
            "a.conv1d.0.weight": (inner, 1, 3, 3), "a.conv1d.0.norm.weight": (inner,),
            "a.conv1d.1.weight": (channels, inner, 3, 3), "a.conv1d.1.norm.weight": (channels,),
            "a.input_projection.weight": (hidden, channels * MELS // 4),
            "a.pre_encode.out.weight": (self._out, hidden), "a.pre_encode.out.bias": (self._out,),
            "mm.a.input_projection.weight": (clip.projected, self._out),
        }  # fmt: skip
        clipped = {
            "attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden),
            "attn_out": (hidden, hidden), "conv_pw1": (2 * hidden, hidden), "conv_pw2": (hidden, hidden),
        }  # fmt: skip
        for half in ("", "_1"):
            clipped |= {f"ffn_up{half}": (clip.ffn, hidden), f"ffn_down{half}": (hidden, clip.ffn)}
        norms = ("ffn_norm", "ffn_post_norm", "attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv")
        plain = dict.fromkeys((*norms, "ffn_norm_1", "ffn_post_norm_1", "ln2"), (hidden,)) | {
            "per_dim_scale": (hidden // clip.heads,), "attn_k_rel": (hidden, hidden), "conv_dw": (hidden, TAPS),
        }  # fmt: skip
        for number in range(clip.layers):
            for name, shape in (clipped | plain).items():
                found[f"a.blk.{number}.{name}.weight"] = shape
            for name in clipped:
                found |= {f"[a.blk.{number}.{name}.{end}_{of}]": (1,) for end in _ENDS for of in ("min", "max")}
        return found

    def _channels(self, number: int) -> int:
        """Of a convolution. Raises ModelFormatError."""
        info = self.mmproj.file.tensors.get(name := f"a.conv1d.{number}.weight")
        if info is None or len(info.shape) != 4 or not 1 <= info.shape[3] <= 1 << 13:
            raise ModelFormatError(f"{self.mmproj.file.path}: has no {name} of a known shape")
        return info.shape[3]

    @property
    def _out(self) -> int:
        """Values of a row before the projector. Raises ModelFormatError."""
        info = self.mmproj.file.tensors.get("a.pre_encode.out.bias")
        if info is None:
            raise ModelFormatError(f"{self.mmproj.file.path}: has no a.pre_encode.out.bias")
        return info.shape[0]

    def layout(self, samples: int) -> Layout:
        counts = [_halved(_halved(_frames(each))) for each in _windows(samples)]
        parts: list[str | int] = ["<|audio>"]
        for count in counts:
            parts += [count, "<audio|><|audio>"]
        return Layout((*parts[:-1], "<audio|>"), tuple((1, each) for each in counts), 1, samples)

    def rows(self, medium: Any, layout: Layout) -> Iterator[FloatArray]:
        samples = np.empty(medium.samples, np.float32)
        medium.read(samples)
        start = 0
        for count in _windows(medium.samples):
            yield self._states(spectrogram(samples[start : start + count]))
            start += count

    def spectrogram(self, sound: Sound) -> FloatArray:
        """Of a sound of one window, float32 [mels, frames]."""
        samples = np.empty(sound.samples, np.float32)
        sound.read(samples)
        return np.asarray(spectrogram(samples).T)

    def heard(self, samples: int) -> int:
        """Frames of a sound."""
        return sum(map(_frames, _windows(samples)))

    def hearing(self, samples: int) -> int:
        frames, wide = _frames(min(samples, _WINDOW)), self._channels(0)
        inner = _AT_ONCE * (MELS // 4 * 9 * wide + 3 * MELS * wide)  # of the convolutions
        return 4 * (samples + frames * 3 * MELS + inner + frames // 4 * (3 * self.mmproj.ffn + 8 * self.mmproj.hidden))

    @property
    def ends(self) -> int:
        return max(info.nbytes + 4 * info.elements for info in self._own.values())

    @property
    def weight_bytes(self) -> int:
        return sum(info.nbytes for info in self._own.values())

    @property
    def _own(self) -> Mapping[str, TensorInfo]:
        tensors = self.mmproj.file.tensors
        return {name: tensors[name] for each in self.tensors if (name := each.strip("[]")) in tensors}

    @property
    def times(self) -> Mapping[str, float]:
        return {
            "a.blk.": 1, "a.pre_encode.out": 1, "a.input_projection": 1, "a.conv1d.0": MELS, "a.conv1d.1": MELS // 4,
        }  # fmt: skip

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        rows = self.mmproj.linear("a.pre_encode.out", states[-1])
        return self.mmproj.linear("mm.a.input_projection", _rms(rows))

    def _states(self, mel: FloatArray) -> FloatArray:
        rows = self.mmproj.linear("a.input_projection", self._convolved(mel))
        for number in range(self.mmproj.layers):
            rows = self._layer(f"a.blk.{number}.", rows)
        return rows

    def _convolved(self, mel: FloatArray) -> FloatArray:
        """From [frames, mels] to [frames / 4, mels / 4 · channels], some rows at a time."""
        clip, (frames, mels) = self.mmproj, mel.shape
        taps, norms = ([clip.weights(f"a.conv1d.{each}{of}.weight") for each in (0, 1)] for of in ("", ".norm"))
        between, count = _halved(frames), _halved(_halved(frames))
        around = np.zeros((2 * between + 1, mels, 1), np.float32)  # one frame of silence before the first
        around[1 : 1 + frames, :, 0] = mel
        found = np.empty((count, mels // 4 * len(taps[1])), np.float32)
        for start in range(0, count, _AT_ONCE):
            stop = min(start + _AT_ONCE, count)
            first, last = max(0, 2 * start - 1), min(between, 2 * stop)  # rows between the convolutions
            held = np.zeros((2 * (stop - start) + 1, mels // 2, len(taps[0])), np.float32)
            at = first - (2 * start - 1)
            held[at : at + last - first] = _convolution(around[2 * first : 2 * last + 1], taps[0], norms[0])
            found[start:stop] = _convolution(held, taps[1], norms[1]).reshape(stop - start, -1)
        return found

    def _layer(self, name: str, rows: FloatArray) -> FloatArray:
        clip, hidden, linear = self.mmproj, rows.shape[1], partial(self._bounded, name)

        def normed(of: str, rows: FloatArray) -> FloatArray:
            return np.asarray(_rms(rows) * clip.weights(f"{name}{of}.weight"))

        def half(rows: FloatArray, number: str) -> FloatArray:
            inner = _silu(linear(f"ffn_up{number}", normed(f"ffn_norm{number}", rows)))
            return np.asarray(
                rows + np.float32(0.5) * normed(f"ffn_post_norm{number}", linear(f"ffn_down{number}", inner))
            )

        rows = half(rows, "")
        rows = rows + normed("attn_post_norm", linear("attn_out", self._attended(name, normed("attn_pre_norm", rows))))
        value, gate = np.split(linear("conv_pw1", normed("conv_norm", rows)), 2, axis=1)
        before = np.concatenate([np.zeros((TAPS - 1, hidden), np.float32), value * _sigmoid(gate)])
        taps = clip.weights(f"{name}conv_dw.weight").reshape(hidden, TAPS)
        mixed = np.sum([before[each : each + len(rows)] * taps[:, each] for each in range(TAPS)], axis=0)
        rows = rows + linear("conv_pw2", _silu(normed("norm_conv", mixed)))
        return normed("ln2", half(rows, "_1"))

    def _attended(self, name: str, rows: FloatArray) -> FloatArray:
        """Attention to the last rows, whose distances add to the scores."""
        clip, shape = self.mmproj, (len(rows), self.mmproj.heads, rows.shape[1] // self.mmproj.heads)
        query, key, value = (self._bounded(name, f"attn_{each}", rows).reshape(shape) for each in "qkv")
        query *= np.float32(shape[2] ** -0.5 / np.log(2)) * clip.weights(f"{name}per_dim_scale.weight").reshape(-1)
        distances = sinusoids(CONTEXT, rows.shape[1])[::-1] @ clip.weights(f"{name}attn_k_rel.weight").T
        silence = np.zeros((CONTEXT - 1, *shape[1:]), np.float32)
        keys, values = (  # [n, heads, size, context], the row itself last
            np.lib.stride_tricks.sliding_window_view(np.concatenate([silence, each]), CONTEXT, axis=0)
            for each in (key * np.float32(_SCALE), value)
        )
        scores = np.einsum("nhd,nhdw->nhw", query, keys)
        scores += np.einsum("nhd,whd->nhw", query, distances.reshape(CONTEXT, *shape[1:]))
        scores = np.float32(CAP) * np.tanh(scores / np.float32(CAP))
        missing = np.arange(len(rows))[:, None] + np.arange(CONTEXT) < CONTEXT - 1
        scores = np.exp(np.where(missing[:, None], -np.inf, scores - scores.max(axis=2, keepdims=True)))
        shares = np.asarray(scores / scores.sum(axis=2, keepdims=True), np.float32)
        return np.asarray(np.einsum("nhw,nhdw->nhd", shares, values).reshape(rows.shape), np.float32)

    def _bounded(self, name: str, matrix: str, rows: FloatArray) -> FloatArray:
        """The product with a matrix, whose inputs and results keep within its bounds."""
        product = self.mmproj.linear(name + matrix, self._clip(f"{name}{matrix}.input", rows))
        return self._clip(f"{name}{matrix}.output", product)

    def _clip(self, name: str, rows: FloatArray) -> FloatArray:
        if f"{name}_min" not in self.mmproj.file.tensors:
            return rows
        lower, upper = (self.mmproj.weights(f"{name}_{each}").item() for each in ("min", "max"))
        return np.clip(rows, np.float32(lower), np.float32(upper))


def spectrogram(samples: FloatArray) -> FloatArray:
    """Magnitudes in bands of the mel scale, float32 [frames, MELS]: ln(x + 0.001) of frames of 20 ms every 10 ms, the
    first of which has 10 ms of silence before it."""
    count = _frames(samples.size)
    around = np.zeros(max(_FRAME + (count - 1) * _HOP, _FRAME // 2 + samples.size), np.float32)
    around[_FRAME // 2 : _FRAME // 2 + samples.size] = samples
    frames = np.lib.stride_tricks.sliding_window_view(around, _FRAME)[::_HOP][:count]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(np.float32)  # periodic
    found = np.empty((count, MELS), np.float32)
    for start in range(0, count, _AT_ONCE):
        spectra = np.abs(np.fft.rfft(frames[start : start + _AT_ONCE] * hann, _SPECTRUM))
        found[start : start + _AT_ONCE] = np.log(spectra @ _filters() + _FLOOR)
    return found


@cache
def _filters() -> FloatArray:
    """Triangles over the frequencies of a spectrum, [257, MELS], equally spaced on the mel scale of HTK."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    hertz = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)
    lower, middle, upper = hertz[:-2], hertz[1:-1], hertz[2:]
    frequencies = np.linspace(0, RATE / 2, _SPECTRUM // 2 + 1)[:, None]
    triangles = np.minimum((frequencies - lower) / (middle - lower), (upper - frequencies) / (upper - middle))
    return np.asarray(np.maximum(0.0, triangles))


def _windows(samples: int) -> list[int]:
    """Samples of each sound of 30 s at most; a rest that is too short for a frame is left out."""
    whole, rest = divmod(samples, _WINDOW)
    return [_WINDOW] * whole + ([rest] if rest >= _LEAST or not whole else [])


def _frames(samples: int) -> int:
    """Frames that end before the samples do."""
    return (max(samples, _LEAST) - _LEAST) // _HOP + 1


def _halved(count: int) -> int:
    """What a convolution of every other value leaves of a count."""
    return -(-count // 2)


def _convolution(x: FloatArray, taps: FloatArray, norm: FloatArray) -> FloatArray:
    """From [2n + 1, width, inputs] to [n, width / 2, outputs], by taps [outputs, inputs, 3, 3], a norm and a ramp."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1), (0, 0))), (3, 3), axis=(0, 1))
    windows = windows[::2, ::2][:, : x.shape[1] // 2]
    found = windows.reshape(-1, taps[0].size) @ taps.reshape(len(taps), -1).T
    found -= found.mean(axis=1, keepdims=True)
    found /= np.sqrt(np.mean(np.square(found), axis=1, keepdims=True) + np.float32(_EPS))
    return np.asarray(np.maximum(found * norm, 0).reshape(*windows.shape[:2], len(taps)))


def _rms(rows: FloatArray) -> FloatArray:
    return np.asarray(rows / np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True) + np.float32(_EPS)))


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))


def _silu(x: FloatArray) -> FloatArray:
    return x * _sigmoid(x)
