"""Which KV setting `edge eval kv` says to choose: never one that noise may have put first."""

from __future__ import annotations

import pytest
from kv_rows import make_row, make_table, missing

from edge.lab.quality.choice import Choice, choices, title
from edge.lab.quality.matrix import Cell, Measured
from edge.lab.quality.perplexity import Streamed
from edge.lab.quality.retrieval import Retrieved
from edge.lab.quality.summary import Row, make_rows, to_json

FULL = make_row("full", 1.0, size=None, noise=1e-3, found=20)


def choose(*rows: Row) -> Choice:
    (found,) = choices([FULL, *rows])
    return found


def test_clear_winner_and_speed() -> None:
    found = choose(make_row("streaming", 1.063), make_row("h2o", 1.048), make_row("tova", 1.07))
    assert title(found.row) == "h2o int8"
    assert found.sentence == (
        "At 12 MiB of KV cache, h2o int8 loses least: perplexity +4.8% ± 0.2% against the full cache. "
        "With streaming int8: perplexity +6.3% ± 0.2%."
    )
    slow, fast = make_row("h2o", 1.048, tok_s=1000.0), make_row("streaming", 1.063, tok_s=1600.0)
    assert choose(slow, fast).sentence.endswith(
        "Keep streaming int8 if speed matters more: perplexity +6.3% ± 0.2%, 1.6 × as fast in this run."
    )
    assert choose(make_row("h2o", 1.05)).sentence == (
        "At 12 MiB of KV cache, only h2o int8 was measured: perplexity +5.0% ± 0.2% against the full cache."
    )


@pytest.mark.parametrize(
    ("rows", "pick", "says"),
    [
        pytest.param(  # the same but for noise
            [make_row("h2o", 1.050), make_row("streaming", 1.052), make_row("window", 1.8)],
            "streaming",
            "h2o int8 and streaming int8 lose least, within noise of each other: perplexity +5.0% ± 0.2% to +5.2%",
            id="streaming is as good",
        ),
        pytest.param(
            [make_row("h2o", 1.050, tok_s=900.0), make_row("tova", 1.052, tok_s=1100.0), make_row("streaming", 1.2)],
            "tova",
            "Take tova int8, in this run the fastest of them.",
            id="the faster of two",
        ),
        pytest.param(
            [make_row("h2o", 1.052, found=19), make_row("tova", 1.050, found=2), make_row("window", 1.8, found=0)],
            "h2o",
            "Of these, h2o int8 finds most of what was read: 95% of digits",
            id="digits decide",
        ),
        pytest.param(
            [make_row("h2o", 1.01, blocks=1), make_row("tova", 1.9, blocks=1)],
            "h2o",
            "noise hides which of 2 settings loses least",
            id="one block tells nothing",
        ),
    ],
)
def test_chosen_policies_and_dtypes(rows: list[Row], pick: str, says: str) -> None:
    found = choose(*rows)
    assert says in found.sentence
    assert found.row.cell.policy == pick


def test_every_size_has_its_choice() -> None:
    found = choices(make_table())
    assert [each.size for each in found] == ["6.0 MiB", "11 MiB"]
    by_rows = choices([FULL, make_row("h2o", 1.05, rows=512), make_row("streaming", 1.2, rows=512)])
    assert by_rows[0].sentence.startswith("At 512 rows, h2o int8 loses least")
    assert choices([]) == choices([FULL]) == choices([FULL, missing("h2o", 1 << 20)]) == []


def test_samples_match_figures_and_not_in_json() -> None:
    streamed = Streamed([128], [2.5], [[2.0, 3.0]], 1.0)
    rows = make_rows([
        Measured(Cell("full"), "perplexity", figures=streamed),
        Measured(Cell("full"), "retrieval", figures=Retrieved([5, 5], [0.1, 0.9], [5, 4], [5, 4], [5, 3])),
    ])  # fmt: skip
    assert rows[0].samples == {"ratio": [2.0, 3.0], "streamed": [1.0, 0.6]}
    assert "samples" not in to_json(rows, {}, complete=True)["rows"][0]
