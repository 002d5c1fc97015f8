"""The quality table of the KV cache: its tasks against what we did not write, its journal, its reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import log_softmax, open_golden
from small_models import Small, write_small
from test_cli import edge_here as edge

from edge.errors import InputError
from edge.lab.quality.material import Material, Setup
from edge.lab.quality.matrix import Cell, make_cells, open_cell, open_journal, run_matrix
from edge.lab.quality.perplexity import BETWEEN, SEGMENT, make_repeats, measure_repeats, stream_documents, token_losses
from edge.lab.quality.retrieval import count_right, digits_of, make_trials, split_reply
from edge.lab.quality.summary import make_rows
from edge.lab.report.kv import reasons_of
from edge.model.model import Model, open_model
from edge.run.starting.loading import load

TEXT = "".join(f"The {number}th stone lies beside the river, and no one has counted it. " for number in range(400))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer; its tokens are bytes."""
    return write_small(tmp_path_factory.mktemp("models") / "small.gguf", Small(context=4096))


@pytest.fixture(scope="module")
def setup(small: Path) -> Setup:
    return Setup(open_model(small), "reference", chunk=16)


# Perplexity and repeated segments


def ignore(_: int) -> None:
    pass


def test_losses_match_transformers() -> None:
    golden = open_golden("llama-gqa-tied")
    logprobs = log_softmax(golden.logits)
    with load(golden.model, backend="reference", kv_policy="full", max_kv_size=256, logits_rows=8) as session:
        losses = token_losses(session, golden.tokens)
        again = stream_documents(session, [golden.tokens] * 2, ignore)
    wanted = [-row[token] for row, token in zip(logprobs[:-1], golden.tokens[1:].tolist(), strict=True)]
    np.testing.assert_allclose(losses, wanted, atol=2e-3)
    assert again.nll == pytest.approx([losses.mean()] * 2)
    assert all(np.mean(blocks) == pytest.approx(losses.mean(), rel=0.05) for blocks in again.blocks)
    assert again.tokens == [losses.size] * 2


def test_repeat_says_segment_twice_with_other_tokens_around() -> None:
    repeats = make_repeats(np.arange(5000, dtype=np.int32), 3, seed=1, bos=[9999])
    assert len({tuple(each.tolist()) for each in repeats}) == 3
    for tokens in repeats:
        assert tokens[0] == 9999
        once, again = tokens[1 + SEGMENT : 1 + 2 * SEGMENT], tokens[-SEGMENT:]
        np.testing.assert_array_equal(once, again)
        assert tokens.size == 1 + SEGMENT + SEGMENT + BETWEEN + SEGMENT
        assert np.unique(tokens).size == tokens.size - SEGMENT  # nothing else comes twice
    with pytest.raises(InputError, match="need 2012 tokens of text, and there are 2011"):
        make_repeats(np.arange(2011, dtype=np.int32), 1)


# Retrieval


def test_both_occurrences_are_scored_where_they_are(setup: Setup) -> None:
    (tokens,) = make_repeats(setup.model.encode_prompt(TEXT, raw=True), 1)
    with open_cell(setup, Cell("streaming", max_kv_size=64), tokens.size - 1) as session:
        found = measure_repeats(session, [tokens], ignore)
        losses = token_losses(session, tokens)
    assert found.first == pytest.approx([losses[2 * SEGMENT - 1 - found.tokens : 2 * SEGMENT - 1].mean()])
    assert found.again == pytest.approx([losses[-found.tokens :].mean()])


def test_trials_hide_key_at_every_depth(smollm2: Model) -> None:
    text = smollm2.encode_prompt(TEXT, raw=True)
    trials = make_trials(smollm2, text, 4, 300, seed=3)
    assert [trial.depth for trial in trials] == [0.125, 0.375, 0.625, 0.875]
    assert len({trial.key for trial in trials}) == 4
    places = []
    for trial in trials:
        assert trial.tokens == 300
        assert "".join(digits_of(smollm2.tokenizer, token) for token in trial.reply.tolist()) == trial.key
        for context in (trial.context, trial.streamed):
            said = smollm2.tokenizer.decode(context)
            assert said.count(f"The pass key is {trial.key}. Remember it. {trial.key} is the pass key.") == 1
        places.append(said.index(trial.key) / len(said))
        assert smollm2.tokenizer.decode(trial.question).endswith("The pass key is")
    assert places == sorted(places)
    again = make_trials(smollm2, text, 4, 300, seed=3)
    assert all((one.context == other.context).all() for one, other in zip(trials, again, strict=True))
    with pytest.raises(InputError, match=r"--length 9000 needs 8\d+ tokens of text, and there are 100"):
        make_trials(smollm2, text[:100], 1, 9000)


def test_digits_are_counted_place_by_place(smollm2: Model) -> None:
    _, reply = split_reply(smollm2.tokenizer, "It is", "12345")
    logits = np.zeros((reply.size - 1, smollm2.tokenizer.size), np.float32)

    def say(digits: str) -> int:
        logits[:] = 0
        for row, digit in enumerate(digits):
            logits[row, smollm2.tokenizer.encode(digit, start=False)[-1]] = 1
        return count_right(smollm2.tokenizer, logits, reply)

    assert [say(each) for each in ("12345", "12344", "21345", "99945", "00000", "abcde")] == [5, 4, 3, 2, 0, 0]


# Cells and the journal


def test_full_cache_comes_first_and_every_combination_once() -> None:
    cells = make_cells(["h2o", "full", "auto", "h2o"], ["f16", "int8"], [1000, 2000])
    assert cells[:2] == [Cell("full", "f16"), Cell("full", "int8")]
    assert len(cells) == 2 + 2 * (2 + 1)
    assert cells[2:5] == [Cell("h2o", "f16", 1000), Cell("h2o", "int8", 1000), Cell("auto", None, 1000)]
    with pytest.raises(InputError, match="unknown KV policy 'h3o'"):
        make_cells(["h3o"], [None], [1000])


def test_cells_keep_bytes_and_name_limits(setup: Setup) -> None:
    tokens = setup.model.encode_prompt(TEXT, raw=True)
    material = Material([tokens[:301], tokens[500:600]], trials=make_trials(setup.model, tokens, 2, 400))
    asked = 64 * 4 * setup.model.spec.kv_values_per_row
    cells = make_cells(["streaming", "h2o", "window"], ["f32", "int3"], [asked, 10])
    watched: list[tuple[int, int]] = []
    journal = open_journal(None, {})
    found = list(run_matrix(setup, cells, material, journal, lambda _, done, total: watched.append((done, total))))
    rows = make_rows(found)
    assert [row.cell for row in rows] == cells
    by_cell = {row.cell: row for row in rows}
    for policy in ("streaming", "window"):
        row = by_cell[Cell(policy, "f32", asked)]
        assert row.nbytes == asked
        assert row.rows == 64
        assert {"perplexity", "ratio", "known", "later", "streamed"} == set(row.figures)
        assert row.figures["perplexity"].over == 300 + 99
        assert row.figures["known"].over == 2
    assert rows[0].figures["ratio"].value == 1
    assert rows[0].rows == 400  # what the longest text needs
    missing = {row.cell: set(row.reasons.values()) for row in rows if not row.figures}
    assert set(missing) == set(cells) - {cells[0], *(Cell(each, "f32", asked) for each in ("streaming", "window"))}
    assert "int3" in str(missing[Cell("full", "int3")])
    assert "h2o" in str(missing[Cell("h2o", "f32", asked)])
    assert "--kv-memory 10 B is too small" in str(missing[Cell("window", "f32", 10)])
    assert sum("no KV dtype 'int3'" in line for line in reasons_of(rows)) == 1  # all in one line
    done, totals = zip(*watched, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def figures_of(journal: Path) -> list[Any]:
    """Without what time they took."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return [{**each, "figures": {**each["figures"], "seconds": 0}} for each in lines]


def test_interrupted_run_goes_on_where_it_was(small: Path, tmp_path: Path) -> None:
    text, out, again = (tmp_path / name for name in ("stones.txt", "small.html", "again.json"))
    text.write_text(TEXT, encoding="utf-8")
    flags = ["eval", "kv", str(small), "--text", str(text), "--backend", "reference", "--policies", "streaming,h2o"]
    flags += ["--max-kv-size", "48,64", "--tokens", "200", "--trials", "2", "--length", "400"]
    flags += ["--prefill-step-size", "16", "--tasks", "perplexity,retrieval"]
    done = edge(*flags, "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "| policy" in done.stdout
    journal = Path(f"{out}.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 2  # settings; full and streaming twice, two tasks each
    marked = json.loads(lines[1])
    marked["figures"]["seconds"] = 12345.0  # would be lost if it were measured again
    Path(f"{again}.jsonl").write_text("".join([lines[0], json.dumps(marked) + "\n", lines[2], lines[3][:-40]]))
    done = edge(*flags, "-o", str(again), "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert figures_of(Path(f"{again}.jsonl")) == figures_of(journal)
    assert json.loads(Path(f"{again}.jsonl").read_text().splitlines()[1])["figures"]["seconds"] == 12345.0
    assert json.loads(again.read_text())["rows"][0]["tok_s"] == pytest.approx(200 / 12345)
    assert json.loads(again.read_text()) == json.loads(done.stdout)


# Reports
