"""A head in two stages in the C runtime: the largest logits are those of the whole head, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundles import pair_of
from conftest import exhaustive
from small_models import Small, write_small
from test_runtime_pass import Case, build_harness, host_isa, run_harness, write_model

from edge.backends.tvm.packing import layout
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

pytestmark = pytest.mark.slow

VOCAB, PROMPT = 2107, 9  # more than one band of tiles, and a last tile with rows that are no tokens
SMALL = Small(vocab=VOCAB, types={"": "Q4_0", "token_embd": "Q8_0"})
CASE = Case("small", threads=3)
WANTED = (7, exhaustive(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(write_small(tmp_path_factory.mktemp("head") / "model.gguf", SMALL))


def runs_of(steps: int) -> list[IntArray]:
    """A prompt, and single tokens behind it."""
    random = np.random.default_rng(3)
    return [random.integers(3, VOCAB, size).astype(np.int32) for size in (PROMPT, *[1] * steps)]


def check(found: FloatArray, whole: FloatArray, wanted: int) -> None:
    found, whole = found.reshape(-1, VOCAB), whole.reshape(-1, VOCAB)
    there = np.isfinite(found)
    np.testing.assert_array_equal(found[there].view(np.uint32), whole[there].view(np.uint32))
    assert there[0].all()  # the prompt's
    assert there[1:].mean() < 0.5
    for own, all_there, logits in zip(found[1:], there[1:], whole[1:], strict=True):
        least = np.sort(logits)[-wanted]
        assert all_there[logits >= least].all()
        assert own.argmax() == logits.argmax()


@pytest.mark.parametrize("wanted", WANTED)
def test_largest_logits_are_those_of_the_whole_head(tmp_path: Path, model: Model, wanted: int) -> None:
    isa, runs = host_isa(), runs_of(40)
    write_model(tmp_path / "model.edge", model, CASE, isa, CASE.threads + 1)
    program = build_harness(tmp_path, model, CASE, isa)
    whole, found = (run_harness(tmp_path, program, CASE, isa, runs, restart=20, enough=n) for n in (0, wanted))
    check(found, whole, wanted)


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads of any size in two stages: SmolLM2's is faster to export than Gemma's."""
    monkeypatch.setattr(layout, "_LEAST_SHARE", 0)
    layout.make_layout.cache_clear()
    yield
    layout.make_layout.cache_clear()


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize(
    ("name", "count"), [("small", 40), exhaustive("smollm2-135m", 40), exhaustive("gemma3-270m", 1000)]
)
def test_answers_are_those_of_python(model: Model, name: str, count: int) -> None:
    """Greedy, and drawn from few; and with a penalty that needs the whole head, but is too small to change a logit."""
    with pair_of(
        str(model.file.path) if name == "small" else name, max_kv_size=512 if name == "small" else 2048, threads=2
    ) as pair:
        for sampling in ({"temperature": 0}, {"temperature": 1, "top_k": 8, "seed": 3}):
            answers = []
            for penalty in (0, 1e-30):
                pair.forget()
                options = sampling | {"frequency_penalty": penalty, "max_tokens": count, "ignore_eos": 1}
                answers.append(pair.ask("Write a story about a fox.", raw=True, **options)[0])
            assert answers[0] == answers[1]
            assert len(answers[0]) == count
