"""The C runtime's sampler and stop strings: the tokens and texts of their twins in edge/run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import examples
from ctypes_bundle import _Error as Error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runtime_library import load_runtime

from edge.apps.structs import OPTIONS
from edge.errors import EngineError
from edge.run.sampling.sampler import Sampler
from edge.run.sampling.stop_strings import StopStrings
from edge.sampling import SamplingParams
from edge.types import FloatArray

MOST, LONGEST = 16, 128


class Arena(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("used", ctypes.c_size_t))


class Sampling(ctypes.Structure):
    """SAMPLING_OPTIONS of constants.h, and the seed."""

    _fields_ = tuple(
        (each.name, {"int32": ctypes.c_uint32, "seed": ctypes.c_uint64}.get(each.kind, ctypes.c_double))
        for each in sorted(OPTIONS, key=lambda each: each.kind == "seed")
        if each.name in SamplingParams.__dataclass_fields__
    )


def library() -> ctypes.CDLL:
    lib = load_runtime("sampler.c", "dry.c", "random.c", "stops.c", "utf8.c", "error.c")
    for name in ("sampler_layout", "stops_layout"):
        getattr(lib, name).restype = ctypes.c_void_p
    for name in ("stops_feed", "stops_rest"):
        getattr(lib, name).restype = ctypes.c_size_t
    return lib


def lay_out(name: str, *numbers: ctypes.c_uint32) -> tuple[ctypes.c_void_p, Any]:
    """A part of a session in memory of its own, which is returned too."""
    arena = Arena()
    getattr(library(), name)(ctypes.byref(arena), *numbers)
    memory = (ctypes.c_uint8 * (arena.used + 64))()
    arena = Arena((ctypes.addressof(memory) + 63) // 64 * 64, 0)
    return ctypes.c_void_p(getattr(library(), name)(ctypes.byref(arena), *numbers)), memory


class CSampler:
    """Every 7th token breaks repetitions."""

    def __init__(self, params: SamplingParams, vocab: int, banned: Iterable[int] = (), more: Iterable[int] = ()):
        self.handle, self.memory = lay_out("sampler_layout", ctypes.c_uint32(vocab))
        self.lists = [np.array([*tokens], np.int32) for tokens in (banned, more)]
        names = [name for name, _ in Sampling._fields_]
        lists = [(ctypes.c_void_p(each.ctypes.data), each.size) for each in self.lists]
        sampling = Sampling(*(getattr(params, name) for name in names))
        self.breaks = BREAKS(lambda _, token: token % 7 == 0)
        library().sampler_read(self.handle, self.breaks, None)
        for at, (token, bias) in enumerate(params.logit_bias):
            library().sampler_bias(self.handle, at, token, ctypes.c_float(bias))
        library().sampler_start(self.handle, ctypes.byref(sampling), *lists[0], *lists[1])

    def __call__(self, logits: FloatArray) -> int:
        token: int = library().sampler_next(self.handle, ctypes.c_void_p(logits.ctypes.data))
        return token


def expected(sampler: Sampler, logits: FloatArray) -> int:
    try:
        return sampler(logits)
    except EngineError:
        return -1


BREAKS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)


def choices(*values: Any) -> Any:
    return st.sampled_from(values)


PARAMS = st.builds(
    SamplingParams, temperature=choices(0.0, 1e-300, 0.2, 0.7, 1.0, 1.5, 100.0),
    top_k=choices(0, 1, 2, 7, 40, 64, 1000, 2**31), top_p=st.one_of(choices(0.0, 0.95, 1.0), st.floats(0, 1)),
    min_p=st.one_of(choices(0.0, 0.05, 1.0), st.floats(0, 1)), repeat_penalty=choices(1.0, 1.1, 0.5, 0.01, 100.0),
    presence_penalty=choices(0.0, 0.0, 0.3, -2.0), frequency_penalty=choices(0.0, 0.0, 0.1, -1.5),
    dry_multiplier=choices(0.0, 0.0, 0.8, 50.0), dry_base=choices(1.75, 1.0, 100.0),
    dry_allowed_length=choices(1, 2, 5), dry_last_n=choices(0, 10, 1024), xtc_probability=choices(0.0, 0.0, 0.5, 1.0),
    xtc_threshold=choices(0.0, 0.1, 0.5, 0.6), logit_bias=choices((), (), ((0, -100.0),), ((0, 3.5), (1, -1e9))),
    seed=st.one_of(choices(0, 1, 2**32 - 1, 2**32, 2**64 - 1), st.integers(0, 2**64 - 1)),
)  # fmt: skip
VOCABS = st.one_of(st.integers(1, 12), st.integers(1, 1500))  # tokens of few repeat
KINDS = st.lists(choices("normal", "steep", "flat", "tied", "zeros", "cut", "odd"), min_size=1, max_size=4)


def random_logits(kind: str, vocab: int, chance: np.random.Generator) -> FloatArray:
    if kind == "tied":
        logits = chance.integers(-3, 3, vocab) / 2
    elif kind == "zeros":  # of both signs
        logits = np.copysign(0.0, chance.normal(size=vocab))
    else:
        logits = chance.normal(scale={"steep": 30, "flat": 1e-3}.get(kind, 3), size=vocab)
    if kind == "cut":
        logits[chance.random(vocab) < 0.9] = -math.inf
    if kind == "odd":
        logits[chance.integers(0, vocab, 2)] = chance.choice([math.nan, math.inf, -math.inf])
    return logits.astype(np.float32)


@settings(max_examples=examples(100), deadline=None)
@given(params=PARAMS, vocab=VOCABS, kinds=KINDS, seed=st.integers(0, 2**32), bans=st.integers(0, 2))
@example(SamplingParams(1.0, 0, 1.0, 0.0, xtc_probability=1.0, xtc_threshold=0.0, seed=0), 3, ["normal", "odd"], 46, 0)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_tokens_are_those_of_the_python_sampler(
    params: SamplingParams, vocab: int, kinds: list[str], seed: int, bans: int
) -> None:
    chance = np.random.default_rng(seed)
    banned, more = chance.integers(0, vocab, bans), chance.integers(0, vocab, bans // 2)
    if vocab < 2:
        params = replace(params, logit_bias=())
    python = Sampler(params, {*banned.tolist(), *more.tolist()}, piece=lambda token: b"" if token % 7 else b"a:b")
    c = CSampler(params, vocab, banned, more)
    for step in range(70 if params.penalizes or params.dry_multiplier else 12):  # more than a penalty remembers
        logits = random_logits(kinds[step % len(kinds)], vocab, chance)
        mine = logits.copy()
        token = expected(python, logits)
        assert c(mine) == token
        assert mine.tobytes() == logits.tobytes()
        if token < 0:
            break


@pytest.mark.parametrize("kind", ["normal", "steep", "flat"])
@pytest.mark.parametrize("cuts", [(5000, 1.0, 0.0), (0, 0.95, 0.0), (0, 0.95, 0.05)])
def test_tokens_of_a_large_vocabulary_are_those_of_python(cuts: tuple[int, float, float], kind: str) -> None:
    """Without top-k, the other cuts are made before all is sorted."""
    params, chance = SamplingParams(1.0, *cuts, 1.0, seed=3), np.random.default_rng(cuts[0])
    logits = random_logits(kind, 262_144, chance)
    assert CSampler(params, 262_144)(logits.copy()) == Sampler(params)(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_choose_the_token_of_python(temperature: float, number: float) -> None:
    for places in (0, 63, 64, slice(None)):
        logits = random_logits("normal", 256, np.random.default_rng(1))
        logits[places] = number
        params = SamplingParams(temperature, 5, seed=1)
        assert CSampler(params, 256)(logits.copy()) == expected(Sampler(params), logits)


def test_tokens_beyond_the_vocabulary_are_not_banned() -> None:
    logits = np.zeros(64, np.float32)
    assert CSampler(SamplingParams(seed=0), 64, banned=[0, -1, 64, 2**31 - 1])(logits) == 1


class CStops:
    def __init__(self, texts: Sequence[bytes]) -> None:
        self.handle, self.memory = lay_out("stops_layout")
        array = (ctypes.c_char_p * len(texts))(*texts)
        assert library().stops_set(self.handle, array, len(texts), ctypes.byref(Error())) == 0
        library().stops_start(self.handle)

    def feed(self, text: str) -> tuple[str, bool]:
        data, met = text.encode(), ctypes.c_bool()
        out = ctypes.create_string_buffer(len(data) + LONGEST)
        size = library().stops_feed(self.handle, data, ctypes.c_size_t(len(data)), out, ctypes.byref(met))
        return out.raw[:size].decode(), met.value

    def rest(self) -> str:
        out = ctypes.create_string_buffer(LONGEST)
        size = library().stops_rest(self.handle, out)
        return out.raw[:size].decode()


WORDS = st.text("abä\U0001f600", max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(texts=st.lists(WORDS, max_size=MOST), pieces=st.lists(WORDS, max_size=8))
def test_shown_text_is_that_of_the_python_twin(texts: list[str], pieces: list[str]) -> None:
    python, c = StopStrings(texts), CStops([text.encode() for text in texts])
    for piece in pieces:
        shown = python.feed(piece)
        assert c.feed(piece) == (shown, python.met)
        if python.met:
            break
    assert c.rest() == python.rest()


@pytest.mark.parametrize(("text", "found"), [(b"\xff", "\ufffd"), (b"a\xe2\x82", "a\ufffd"), (b"x" * 128, "x" * 128)])
def test_stop_strings_are_read_as_all_texts(text: bytes, found: str) -> None:
    assert CStops([text]).feed(f"before {found} after") == ("before ", True)


@pytest.mark.parametrize("texts", [[b"a"] * (MOST + 1), [b"x" * (LONGEST + 1)], [b"a", None]])
def test_invalid_stop_strings_are_refused(texts: list[bytes | None]) -> None:
    handle, memory = lay_out("stops_layout")
    array = (ctypes.c_char_p * len(texts))(*texts)
    assert library().stops_set(handle, array, len(texts), ctypes.byref(Error())) == -1
    del memory
