"""Drafts by a model's own layer for multi-token prediction: torch's logits, and the same answers as without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from drafters import always_drafting
from test_gguf_file import GGUF

import edge
from edge.backends import engine_named
from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import StatesEngine
from edge.backends.reference import ReferenceEngine
from edge.errors import BudgetError
from edge.model.model import open_model
from edge.model.reader import read_spec
from edge.model.structure.mtp import mtp_file
from edge.options import Options
from edge.plan.plan import Plan, make_plan
from edge.sampling import SamplingParams

MODEL = GOLDEN / "mtp.gguf"
# Of sentences that the model was not trained with (`golden/mtp.py`).
HELD_OUT = (
    "the old fox talks about the red house every summer. a young sailor waits behind the river before the rain. my",
    " sister looks for an empty garden without a word. a small",
    "the old fox talks about the red house every summer. our teacher thinks of the market in the morning. the",
)
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1, seed=4)


always = always_drafting(2)  # the layer was trained to draft one


@pytest.fixture(scope="session")
def at_random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with random matrices in that layer."""
    file, random = GGUF.read(MODEL), np.random.default_rng(3)
    for name, (shape, kind, data) in file.tensors.items():
        if str(name).startswith("blk.2.") and len(shape) == 2:
            values = random.standard_normal(shape[::-1]) / np.sqrt(shape[0])
            file.tensors[name] = shape, kind, values.astype(np.frombuffer(data, "<f2").dtype).tobytes()
    return file.write(tmp_path_factory.mktemp("mtp") / "random.gguf")


def answers(
    model: Path, sampling: SamplingParams = GREEDY, prompts: Sequence[Any] = HELD_OUT, **options: Any
) -> tuple[list[str], list[edge.RunReport], Plan]:
    """To a prompt, behind it, and to one that shares its beginning."""
    with edge.load(model, backend="cpu", threads=1, **{"max_kv_size": 300, **options}) as session:
        texts, reports = [], []
        for prompt, follow_up in zip(prompts, (False, True, False), strict=True):
            asked: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "sampling": sampling}
            texts.append(session.generate(prompt, raw=isinstance(prompt, str), follow_up=follow_up, **asked))
            reports.append(session.report)
        return texts, reports, session.plan


def drafted(reports: list[edge.RunReport]) -> tuple[int, int]:
    """Tokens that were drafted, and those that were right."""
    found = [each.drafted for each in reports if each.drafted]
    return sum(each.tokens for each in found), sum(each.accepted for each in found)


def test_logits_match_torch(engines: Callable[[Engine], Engine]) -> None:
    model, torch = open_model(MODEL), np.load(MODEL.with_suffix(".npz"))
    file, layer, tokens = mtp_file(model.file), model.spec.mtp, torch["tokens"]
    config = EngineConfig(64, 64, "f32", threads=1, logits_rows=64)
    oracle = engines(load_engine(model, "reference", "f32", capacity=64, chunk=64, logits_rows=64))
    np.testing.assert_allclose(oracle.forward_all(tokens)[-8:], torch["logits"], atol=1e-3)
    oracle.kv.truncate(0)
    states = cast(StatesEngine, oracle).hidden(tokens)
    engine = cast(ReferenceEngine, engines(engine_named("reference").load(file, layer, config)))

    def run(before: Any, ids: Any) -> Any:
        engine.kv.truncate(0)
        engine.give(before)
        return engine.forward_all(ids)

    np.testing.assert_allclose(run(states[:-1], tokens[1:])[-8:], torch["drafts"], atol=1e-3)
    engine.kv.truncate(0)
    engine.give(states[:-1])
    own = engine.hidden(tokens[1:])
    np.testing.assert_allclose(run(own[:-1], tokens[2:])[-8:], torch["chained"], atol=1e-3)


def test_drafts_change_no_token(always: None, at_random: Path) -> None:
    texts, reports, plan = answers(MODEL)
    assert plan.config.mtp
    assert texts == answers(MODEL, speculate="off")[0]
    tokens, right = drafted(reports)
    assert tokens > 100
    assert right > 0.6 * tokens
    wrong_texts, reports, _ = answers(at_random)
    assert wrong_texts == texts
    tokens, right = drafted(reports)
    assert right < 0.2 * tokens


def test_evictions_change_no_token(always: None) -> None:
    """Of the model's rows and of the layer's."""
    texts, reports, plan = answers(MODEL, max_kv_size=64)
    plain, without, _ = answers(MODEL, max_kv_size=64, speculate="off")
    assert texts == plain
    assert [each.kv for each in reports] == [each.kv for each in without]
    assert reports[-1].kv.evicted
    assert plan.draft.capacity == 64
    tokens, right = drafted(reports)
    assert right > 0.6 * tokens > 50


def test_plan_counts_mtp_or_drops_it() -> None:
    spec, cpu = open_model(MODEL).spec, engine_named("cpu")

    def planned(**options: Any) -> Plan:
        return make_plan(spec, cpu, Options(max_kv_size=200, **options), process=0)

    plan = planned()
    need = cpu.footprint(spec.mtp, plan.draft)
    assert need.weights + need.kv + need.scratch < plan.bytes.draft < 16 << 20
    assert need.weights < cpu.footprint(spec, plan.config).weights / 2  # without embedding and head
    least = plan.bytes.total - plan.bytes.snapshots + plan.bytes.reserve
    assert planned(memory=least).config.mtp
    short = planned(memory=least - 1)
    assert (short.config.mtp, short.draft, short.bytes.draft) == (False, None, 0)
    assert short.config.drafts == plan.config.drafts
    with pytest.raises(BudgetError):
        planned(memory=least - plan.bytes.draft - (4 << 20))


def test_unsuitable_options_drop_the_mtp_layer(tmp_path: Path) -> None:
    """Those with other drafts or none, and files whose layer is another."""
    spec = open_model(MODEL).spec
    for options in (
        {"speculate": "off"}, {"sequences": 2}, {"draft": GOLDEN / "llama-one-layer.gguf"}, {"kv_policy": "h2o"}
    ):  # fmt: skip
        assert not make_plan(spec, engine_named("cpu"), Options(max_kv_size=200, **options), process=0).config.mtp
    assert not make_plan(spec, engine_named("llamacpp"), Options(max_kv_size=200), process=0).config.mtp
    for name, shape in (
        ("blk.2.nextn.embed_tokens.weight", (64, 272)),  # it would not be the model's
        ("blk.2.nextn.eh_proj.weight", (64, 64)),
        ("blk.2.attn_k.weight", None),
    ):
        file = GGUF.read(MODEL)
        if shape is None:
            del file.tensors[name]
        else:
            file.tensors[name] = (shape, 0, bytes(4 * int(np.prod(shape))))
        assert read_spec(open_model(file.write(tmp_path / "m.gguf")).file).mtp is None
