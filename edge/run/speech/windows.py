"""A sound in windows of 30 s, from anywhere in the last of them: samples before the window are dropped."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from edge.media.mel import FRAMES, HOP, RATE, WINDOW, log_mel, mel_power
from edge.media.sound import SoundStream
from edge.run.speech.voice import voices
from edge.types import FloatArray

FRAME_S = HOP / RATE
_AROUND = WINDOW // 2  # samples that the first and the last frame need beside theirs
PART = RATE // 2  # samples that are read at once
_LATE = 0.25  # of the time that a part lasts: whoever waits longer for it is listening to someone who speaks now
PAUSE = 60  # frames without voice after which a window of live speech ends


class Windows:
    """Windows of a sound, in frames of 10 ms from its beginning."""

    def __init__(
        self, sound: SoundStream, mels: int, frames: int = FRAMES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """mels, frames: of the model's windows."""
        self._sound, self._mels, self._frames, self._clock = sound, mels, frames, clock
        self._held: FloatArray = np.empty(0, np.float32)
        self._start = 0  # the place of the first of them in the sound
        self._ended = False
        self.waited = 0.0  # seconds, for a sound that is still made
        self.live = False  # whether the sound arrives while it is made

    def open(self, seek: int) -> int:
        """Read what a window from frame `seek` takes; of live speech, up to a pause. Returns its number of frames with
        sound, 0 at the end."""
        self._drop(seek * HOP - _AROUND)
        needed = (seek + self._frames) * HOP + _AROUND
        parts, size = [self._held], self._held.size
        while not self._ended and self._start + size < needed:
            if self.live:
                self._held = np.concatenate(parts)
                parts = [self._held]
                if self._pauses(seek):
                    break
            started = self._clock()
            try:
                part = self._sound.read(PART)
            finally:
                took = self._clock() - started
                self.live = took > _LATE * PART / RATE
                self.waited += took if self.live else 0.0
            self._ended = part.size < PART
            parts.append(part)
            size += part.size
        self._held = np.concatenate(parts)
        there = (self._start + self._held.size) // HOP - seek
        return max(0, min(self._frames, there))

    def go_on(self, end: int) -> bool:
        """Whether there is sound from frame `end` on, that of a window which `open` has read."""
        return (self._start + self._held.size) // HOP > end

    def skip(self, seek: int) -> int:
        """Read and drop what lies before a frame. Returns the frame, or the end of the sound before it."""
        while not self._ended and self._start + self._held.size < seek * HOP:
            self._drop(self._start + self._held.size - _AROUND)
            part = self._sound.read(min(RATE, seek * HOP - self._start - self._held.size))
            self._ended = not part.size
            self._held = np.concatenate([self._held, part])
        return min(seek, (self._start + self._held.size) // HOP)

    def samples(self, seek: int, frames: int) -> FloatArray:
        """The samples of these frames."""
        first = seek * HOP - self._start
        return self._held[first : first + frames * HOP]

    def mel(self, seek: int, frames: int) -> FloatArray:
        """The model's input, float32 [mels, frames]. Frames behind the last are zeros, as openai-whisper has it: not
        the spectrogram of silence."""
        first, last = seek * HOP - _AROUND, (seek + frames - 1) * HOP + _AROUND
        start = first - self._start
        part = self._held[max(0, start) : last - self._start]
        if start < 0:  # the beginning is reflected
            part = np.concatenate([part[-start:0:-1], part])
        part = np.pad(part, (0, last - first - part.size))
        found = np.zeros((self._mels, self._frames), np.float32)
        found[:, :frames] = log_mel(mel_power(part, self._mels))
        return found

    def _pauses(self, seek: int) -> bool:
        there = (self._start + self._held.size) // HOP - seek
        heard = voices(self.samples(seek, there)) if there > PAUSE else []
        return bool(heard) and heard[-1][1] <= there - PAUSE

    def _drop(self, until: int) -> None:
        """Let samples go that lie before this one."""
        count = min(max(0, until - self._start), self._held.size)
        self._held, self._start = self._held[count:], self._start + count
