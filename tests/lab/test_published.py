"""Published speeds: predictions are corrected by them, and judged by those of devices that were left out."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from edge.devices.profiles import comes_with_edge, find_profile, profile_names
from edge.errors import BudgetError, UnsupportedError
from edge.lab.prediction.errors import correction, corrections, worded
from edge.lab.prediction.forecast import look_ahead
from edge.lab.prediction.published import comparisons, published
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options


def test_prediction_constants_follow_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    made: Any = import_module("published")
    try:
        assert made.corrections([*comparisons(npu=False), *comparisons(npu=True)]) == corrections()
        assert made.FILE.read_text(encoding="utf-8") == made.to_toml(corrections())
    finally:
        del sys.modules["published"]


def test_every_figure_has_its_source() -> None:
    known = known_models().keys() | {each.name for each in published().models}
    for each in published().speeds:
        assert each.source.startswith("https://")
        assert comes_with_edge(each.device)
        assert each.model in known
        assert each.decode or each.prefill


@pytest.mark.parametrize("name", profile_names()[1:])
def test_predicted_speeds_have_errors_or_say_unknown(name: str, tmp_path: Path) -> None:
    profile, file = find_profile(name), outline_model(known_models()["smollm2:135m"], "Q4_0", tmp_path / "outline.gguf")
    spec = read_spec(file)
    for provider in (None, "qnn"):
        if provider and profile.npu_named(provider) is None:
            continue
        options = Options.parse(memory="400MiB", max_kv_size=512, provider=provider)
        try:
            seen = look_ahead(file, spec, profile, options, outline=True)
        except (BudgetError, UnsupportedError):
            continue
        for what, guesses in (
            ("decode", [each.tok_s for each in seen.prediction.decode]),
            ("prompt", [each for each in (seen.prediction.prefill_tok_s, seen.prediction.ttft_s) if each]),
        ):
            fit = correction(seen.plan.backend, profile.arch, what, npu=provider is not None)  # type: ignore[arg-type]
            fit = None if profile.is_apple else fit  # of which no speeds were found
            for guess in guesses:
                assert guess.error == (fit and fit.error)
                assert guess.known == worded(fit and fit.error) != ""
