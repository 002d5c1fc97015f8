"""Published speeds beside their predictions, as a test by figures to which predictions were not fitted.

Predictions here are not corrected by `edge.lab.prediction.errors`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

from edge.backends import engine_named
from edge.devices.memory import MemoryLimit
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.lab.prediction.predict import Wanted, predict
from edge.model.names.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan
from edge.records import dataclass
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONTEXT, _ROWS = 128, 1024  # of runs on a CPU


@dataclass(frozen=True)
class Published:
    """A row of published.toml, which explains the fields."""

    device: str
    model: str
    type: str
    engine: str
    compared: list[str]
    source: str
    decode: int | float | None = None
    prefill: int | float | None = None
    prompt: int = 512
    threads: int | None = None
    npu: bool = False
    rows: int = _ROWS
    chunk: int | None = None


@dataclass(frozen=True)
class _Shape:
    """A model that edge's own table lacks."""

    name: str
    architecture: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    untied: bool

    @property
    def known(self) -> KnownModel:
        figures = {
            "block_count": self.layers, "embedding_length": self.width, "feed_forward_length": self.ffn,
            "attention.head_count": self.heads, "attention.head_count_kv": self.kv_heads, "vocab_size": self.vocab,
            "context_length": 32768,
        }  # fmt: skip
        return KnownModel(self.name, "", "", 0, "", self.architecture, figures, untied=self.untied)


@dataclass(frozen=True)
class _Table:
    speeds: list[Published]
    models: list[_Shape]


class Comparison(NamedTuple):
    """A published speed beside its prediction, tok/s."""

    run: Published
    backend: str
    what: Literal["decode", "prompt"]
    predicted: float
    published: float

    @property
    def ratio(self) -> float:
        return self.published / self.predicted


@cache
def published() -> _Table:
    """All figures."""
    return parse(_Table, tomllib.loads(files(__package__).joinpath("published.toml").read_text(encoding="utf-8")))


def comparisons(*, npu: bool) -> Iterator[Comparison]:
    """The figures of NPUs, or of CPUs, each with its prediction."""
    models = known_models() | {each.name: each.known for each in published().models}
    for run in published().speeds:
        if run.npu != npu:
            continue
        with work_folder() as folder:
            spec = read_spec(outline_model(models[run.model], run.type, folder / "outline.gguf"))
        profile = find_profile(run.device)
        options = Options.parse(
            max_kv_size=run.rows, prefill_step_size=run.chunk, kv_dtype="f16", provider="qnn" if npu else None
        )
        limit, threads = MemoryLimit(1 << 36, run.device), None if npu else run.threads or profile.threads
        context = run.rows if npu else _CONTEXT
        for name in run.compared:
            plan = make_plan(spec, engine_named(name), options, elsewhere=limit, threads=threads)
            found = predict(spec, plan, profile, Wanted(run.prompt, (context,)), corrected=False)
            if run.decode is not None:
                yield Comparison(run, name, "decode", found.decode[0].tok_s.value, run.decode)
            if run.prefill is not None and found.prefill_tok_s is not None:
                yield Comparison(run, name, "prompt", found.prefill_tok_s.value, run.prefill)
