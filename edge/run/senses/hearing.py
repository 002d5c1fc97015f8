"""A model that hears, loaded: Whisper's encoder and decoder, each on an engine, and the little that lies around them.

A window of sound goes through two convolutions and the encoder; every layer of the decoder then has keys and values of
the window's states, which all of its tokens see. Decoding is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, cast

import numpy as np

from edge.backends.base import Backend, BatchedEngine, CrossEngine, EngineConfig, HiddenEngine
from edge.backends.counts import Footprint
from edge.backends.kv_cache import KVCache
from edge.backends.reference.weights import read_weight
from edge.devices.memory import release_free_memory
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.model import make_tokenizer
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.whisper import EARS, STEM, Whisper, ears_file, read_whisper, words_file
from edge.model.whisper.stem import Stem
from edge.run.decoding.lanes import Lanes
from edge.types import FloatArray, IntArray

CHUNK = 64  # most tokens of a prompt that run at once
_OPENING, _NEIGHBOURS = 8, 12  # tokens around those of a text; copies of a head's attention while it is smoothed
_LAST = 4  # of a prompt's tokens, whose logits `forward_all` computes at once


class _Ears(HiddenEngine, CrossEngine, Protocol):
    """The encoder's engine."""


class Listener:
    """A Whisper model, loaded. Encoder and decoder take turns in memory: each gives its own back while the other runs.

    `encode` makes a window of sound what `forward` continues a text about. All memory is allocated here, but for what a
    window's own computations take.
    """

    def __init__(
        self, file: GGUFFile, backend: Backend, *, threads: int, sequences: int = 1, kv_dtype: str = "",
        progress: Callable[[float], None] | None = None,
    ) -> None:  # fmt: skip
        """Load the model. kv_dtype: of rows; empty: the engine's first. Raises InputError for a model that does not
        hear, and the errors of `Backend.load`."""
        self.file, self.whisper, self.tokenizer = file, read_whisper(file), make_tokenizer(file)
        ears, words = _configs(self.whisper, backend, threads, sequences, kv_dtype)
        self._sequences = sequences
        parts = (lambda part: progress and progress(part / 2)), (lambda part: progress and progress(0.5 + part / 2))
        self._ears = cast(_Ears, backend.load(*_ears(file, self.whisper), ears, lambda part, _="": parts[0](part)))
        self._ears.rest()
        self._words = cast(
            CrossEngine, backend.load(words_file(file), self.whisper.spec, words, lambda part, _="": parts[1](part))
        )
        self._stem = _stem_of(file)
        self._heard = False  # whether there are rows of a window

    @staticmethod
    def need(file: GGUFFile, backend: Backend, *, threads: int, sequences: int = 1, kv_dtype: str = "") -> Footprint:
        """Bytes of all that is loaded, and of a window's computations; of engines that rest, only of the
        larger of the two networks, beside the rows of both. Raises the errors of loading that need no weights."""
        whisper = read_whisper(file)
        ears, words = _configs(whisper, backend, threads, sequences, kv_dtype)
        backend.check_supported(words_file(file), whisper.spec)
        one, other = backend.footprint(_ears(file, whisper)[1], ears), backend.footprint(whisper.spec, words)
        weights, scratch = one.weights + other.weights, one.scratch + other.scratch
        scratch += max(_window_bytes(whisper), _words_bytes(whisper))
        if backend.CAPABILITIES.rests:
            weights = max(one.weights, other.weights)
            hearing = one.weights + one.scratch + _window_bytes(whisper)
            scratch = max(hearing, other.weights + other.scratch + _words_bytes(whisper)) - weights
        return replace(
            one, weights=weights, kv=one.kv + other.kv, fixed_kv=one.fixed_kv + other.fixed_kv, scratch=scratch,
            runtime=max(one.runtime, other.runtime), gpu=one.gpu + other.gpu,
        )  # fmt: skip

    @staticmethod
    def first_run(file: GGUFFile, backend: Backend, *, threads: int, sequences: int = 1, kv_dtype: str = "") -> int:
        """Bytes that a first run needs besides `need`: see `Backend.first_run`. The encoder is compiled first, and the
        decoder while it is loaded."""
        whisper = read_whisper(file)
        ears, words = _configs(whisper, backend, threads, sequences, kv_dtype)
        one = backend.first_run(*_ears(file, whisper), ears)
        return max(one, backend.first_run(words_file(file), whisper.spec, words))

    @property
    def kv(self) -> KVCache:
        """The decoder's rows."""
        return self._words.kv

    def encode(self, mel: FloatArray) -> None:
        """Hear a window: its spectrogram, float32 [mels, frames], at most `Whisper.frames`; fewer cost less. Empties
        the decoder's cache. Raises InputError for another shape, or values that are not finite."""
        self._words.set_crossed(self.states(mel))
        self.kv.truncate(0)
        self._heard = True
        release_free_memory()  # of the spectrogram and the states

    def states(self, mel: FloatArray) -> FloatArray:
        """The encoder's states of a window, float32 [positions, hidden]; the rows of the one before are forgotten."""
        whisper, frames = self.whisper, mel.shape[-1]
        if mel.ndim != 2 or len(mel) != whisper.mels or not 0 < frames <= whisper.frames:
            raise InputError(f"a window is float32 [{whisper.mels}, 1 to {whisper.frames}], not {mel.shape}")
        if not np.isfinite(mel).all():
            raise InputError("the spectrogram has values that are not finite")
        if frames % 2:
            mel = np.concatenate([mel, mel[:, -1:]], axis=1)
        self._heard = False
        self._words.rest()
        rows = self._stem.rows(np.asarray(mel, np.float32))
        given = GivenRows(0, whisper.ears.hidden)
        ids = given.promise(b"window", len(rows), lambda: rows)
        states = self._ears.hidden(ids, Places.of_texts([len(rows)]), given)
        self._ears.rest()
        return states

    def forward(self, tokens: IntArray) -> FloatArray:
        """As `Engine.forward`, about the window."""
        self._check_window()
        return self._words.forward(tokens)

    def forward_all(self, tokens: IntArray) -> FloatArray:
        """As `Engine.forward_all`, about the window."""
        self._check_window()
        return self._words.forward_all(tokens)

    def lanes(self, count: int) -> Lanes | None:
        """So many texts behind the decoder's rows, to run side by side; None if there are fewer sequences."""
        return Lanes(cast(BatchedEngine, self._words), count, self.kv.length) if 1 < count <= self._sequences else None

    def align(self, tokens: IntArray) -> FloatArray:
        """The cross attention that each token pays in the heads of `Whisper.alignment`, in a pass of these tokens about
        the window: float32 [heads, n, positions]. Weights are read layer by layer; the cache stays as it is."""
        from edge.backends.reference.crossing import attention_across  # here: only word times need it

        self._check_window()
        heads: dict[int, list[int]] = {}
        for layer, head in self.whisper.alignment:
            heads.setdefault(2 * layer + 1, []).append(head)
        paid = attention_across(words_file(self.file), self.whisper.spec, tokens, self._words.crossed, heads)
        return np.stack([paid[2 * at + 1][heads[2 * at + 1].index(head)] for at, head in self.whisper.alignment])

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._ears.close()
        self._words.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_window(self) -> None:
        if not self._heard:
            raise InputError("nothing was heard yet: encode a window first")


def _ears(file: GGUFFile, whisper: Whisper) -> tuple[GGUFFile, ModelSpec]:
    """The encoder without the table of its positions, which the stem adds: all its rows are given."""
    found, spec = ears_file(file), whisper.ears
    tensors = {name: info for name, info in found.tensors.items() if name != "token_embd.weight"}
    assert spec.network
    return replace(found, tensors=tensors), replace(spec, vocab=0, network=replace(spec.network, vocab=0))


def _stem_of(file: GGUFFile) -> Stem:
    taps = tuple(np.ascontiguousarray(read_weight(file, f"{EARS}{name}.weight").T) for name in STEM)
    biases = tuple(read_weight(file, f"{EARS}{name}.bias") for name in STEM)
    return Stem(taps, biases, read_weight(file, f"{EARS}position_embd.weight"))


def _configs(
    whisper: Whisper, backend: Backend, threads: int, sequences: int, kv_dtype: str
) -> tuple[EngineConfig, EngineConfig]:
    """Of the encoder and the decoder."""
    kind = kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
    ears = EngineConfig(whisper.positions, whisper.positions, kind, threads)
    words = EngineConfig(
        whisper.context, CHUNK, kind, threads, logits_rows=_LAST, sequences=sequences, crossed=whisper.positions
    )
    return ears, words


def _window_bytes(whisper: Whisper) -> int:
    """Of the convolutions, whose inputs, products and results exist at once, and of the states."""
    hidden = whisper.spec.hidden
    stem = 4 * whisper.frames * (2 * whisper.mels + 5 * hidden) + 4 * hidden * (3 * whisper.mels + 3 * hidden)
    return stem + 4 * whisper.positions * hidden * 6


def _words_bytes(whisper: Whisper) -> int:
    """Of the times of words, while no window is encoded: attention of the heads that are kept, and either of one layer,
    as scores and twice as their softmax, or of one head with its neighbours; two layers' keys and values, one's
    weights."""
    hidden, paid = whisper.spec.hidden, 4 * (whisper.context // 2 + _OPENING) * whisper.positions
    attention = paid * (len(whisper.alignment) + max(3 * whisper.spec.heads, _NEIGHBOURS))
    return attention + 4 * whisper.positions * hidden * 6 + 2 * 4 * 4 * hidden**2
