"""Arguments, figures and files of the wrong kind: one line, at once, and nothing on stderr."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from hf_folders import complaint
from small_models import Small, write_small

import edge
from edge.backends.base import Engine
from edge.devices.profiles.file import read_profile
from edge.errors import EngineError, InputError, speaking
from edge.model.model import open_model
from edge.run.sampling.sampler import greedy
from edge.sampling import SamplingParams

MODEL = GOLDEN / "llama-llama3.gguf"


@pytest.fixture(scope="module")
def session() -> Iterator[edge.Session]:
    with edge.load(MODEL, backend="reference", max_kv_size=64) as session:
        yield session


def test_arguments_of_wrong_type_are_refused_in_a_line(session: edge.Session) -> None:
    for options in (
        *({"prompt": each} for each in (None, 5, 2.5, b"text", {"a": 1}, object(), [1, 2], ["a", None])),
        *({"prompt": each} for each in ([], (), iter(()), ["", ""], np.zeros(3), np.zeros((1, 3), np.int32))),
        *({"max_tokens": each} for each in (2.5, "3", 0, -2, True, float("nan"), [1], 10**20)),
        *({"stop": each} for each in (5, [5], b"x", [None], "", ["a", ""])),
        *({"time_limit": each} for each in ("20s", -1, float("nan"), 10**400)),
        *({"energy_limit": each} for each in ("20J", [1])), *({"sampling": each} for each in (0.5, {"temperature": 1})),
        *({name: 5} for name in ("system", "on_prefill", "on_thought", "on_logprob", "on_call")),
    ):  # fmt: skip
        said = complaint(lambda options=options: session.generate(**{"prompt": "hi", "raw": True, **options}))
        assert said
        assert "\n" not in said
        assert len(said) < 200


def test_without_limit_answer_ends_by_itself() -> None:
    """-1 means so on the command line, too."""
    with edge.load(MODEL, backend="reference", max_kv_size=64, kv_policy="full") as full:
        for limit in (-1, np.int64(-1), None):
            full.generate("hi", raw=True, max_tokens=limit, stop=None, ignore_eos=True)  # type: ignore[arg-type]
            assert full.report.stop_reason == "capacity"


CALLS: list[tuple[Callable[[edge.Session], object], str, str]] = [
    (lambda _: edge.load(MODEL, memory="1MiB", backend="reference"),
     'the smallest that fits is memory="', "the smallest that fits is --memory "),
    (lambda _: edge.load(MODEL, provider="cpu", backend="cpu"),
     'provider is for the onnx engine, not for cpu: use backend="onnx"',
     "--provider is for the onnx engine, not for cpu: use --backend onnx"),
    (lambda _: edge.load(MODEL, max_kv_size=200, keep=100),
     "keep=100 needs at least 208 KV rows: raise max_kv_size=200 or lower keep",
     "--keep 100 needs at least 208 KV rows: raise --max-kv-size 200 or lower --keep"),
    (lambda full: full.generate(np.arange(1, 200, dtype=np.int32), max_tokens=1),
     'but kv_policy="full" has 64 free KV rows: raise max_kv_size or use kv_policy="streaming"',
     "but --kv-policy full has 64 free KV rows: raise --max-kv-size or use --kv-policy streaming"),
    (lambda _: SamplingParams(temperature=-1), "temperature must be from 0 to 100", "--temp must be from 0 to 100"),
    (lambda _: edge.forecast(MODEL, max_kv_size=64, contexts=[65]),
     "contexts=65 is more than the 64 rows of the cache: see max_kv_size",
     "--at 65 is more than the 64 rows of the cache: see --max-kv-size"),
    (lambda _: edge.forecast(MODEL, device="generic-x86"),
     'say memory, such as memory="4GiB"', "say --memory, such as --memory 4GiB"),
]  # fmt: skip


def test_errors_speak_their_callers_language() -> None:
    with edge.load(MODEL, backend="reference", max_kv_size=64, kv_policy="full") as full:
        for call, keywords, flags in CALLS:
            with speaking("keywords"):
                said = complaint(lambda call=call: call(full))
            with speaking("flags"):
                shown = complaint(lambda call=call: call(full))
            assert keywords in said
            assert "--" not in said
            assert flags in shown


def test_server_errors_name_request_fields_and_flags() -> None:
    with speaking("requests"):
        error = InputError("use --think=low, or start with --kv-policy=full")
    assert str(error) == 'use think="low", or start with --kv-policy full'


def test_invalid_options_of_load_are_refused() -> None:
    def refused(**options: Any) -> str:
        return complaint(lambda: edge.load(MODEL, **{"backend": "reference", **options}))

    numbers = ("max_kv_size", "threads", "prefill_step_size", "expected_tokens", "logits_rows", "sinks", "keep")
    for option, value in product(numbers, ("64", 2.5, [64], True, 10**400, {}, "")):
        assert refused(**{option: value})
    texts = ("kv_policy", "kv_dtype", "backend", "provider", "speculate", "draft")
    for option, value in product(texts, (2.5, [64], True, {}, object(), b"x")):
        assert refused(**{option: value})
    for option in ("kv_policy", "sinks", "prompt_cache_size", "backend", "speculate", "sequences", "logits_rows"):
        assert "must not be None" in refused(**{option: None})
        assert "must not be None" in complaint(lambda option=option: edge.Options(**{option: None}))
    assert refused(on_load=5) == "on_load must be a function, not 5"


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_weights_that_are_no_numbers_are_one_error(
    value: float, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    def edit(weights: dict[str, Any]) -> None:
        weights["blk.0.ffn_up"][:] = value

    model = open_model(write_small(tmp_path / "model.gguf", Small(), edit))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = engines(load_engine(model, "reference", "f32"))
        with pytest.raises(EngineError, match="NaN logits"):
            greedy(engine.forward(np.arange(9, dtype=np.int32)))


def test_pipes_and_devices_are_no_models_or_profiles(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "not a file" in complaint(lambda path=path: open_model(path))
        assert "no regular file" in complaint(lambda path=path: read_profile(path))
