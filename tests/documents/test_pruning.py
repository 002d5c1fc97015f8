"""Sentences that leave the text before a question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

import edge as package
from edge.cli.pruning import pruned_line
from edge.documents.indexing import index
from edge.documents.pruning import bm25, parse_prune, prune_texts
from edge.errors import InputError

TINY = str(GOLDEN / "llama-gqa-tied.gguf")
ENCODER = str(GOLDEN / "encoders" / "bert.gguf")
TEXT = """The sky is blue. Light is scattered by air. Cats sleep a lot. Dogs bark at them.

    # mount /dev/sda1

Ada keeps birds in Rome. The number is 42. Fish swim in the sea."""


def count(text: str) -> int:
    return len(text.split())


def test_sentences_leave_in_the_order_of_their_relevance() -> None:
    [kept], pruned = prune_texts([TEXT], "Why is the sky blue by day?", 0.5, count)
    assert kept.split("\n")[0].startswith("The sky is blue. Light is scattered by air.")
    assert "# mount /dev/sda1" in kept  # code stays
    assert (pruned.before, pruned.after, pruned.by) == (count(TEXT), count(kept), "BM25")
    assert pruned.after <= 0.5 * pruned.before + 8
    places = [TEXT.index(each) for each in pruned.left]
    assert places == sorted(places)
    assert not any(each in kept for each in pruned.left)
    [kept], pruned = prune_texts([TEXT], "Does Ada know 42?", 0.1, count)  # a name and a number of the question
    assert [each for each in ("Ada", "42", "mount", "sky", "Fish") if each in kept] == ["Ada", "42", "mount", "sky"]
    [kept], pruned = prune_texts([TEXT], "Why?", 1.0, count)
    assert (kept, pruned.left) == (TEXT, ())


def test_the_best_sentence_stays_always() -> None:
    boat = "The boat is red. Its captain is called Olaf. The repair was made in May. The repair cost 300 euros."
    best = "The repair cost 300 euros."
    for keep, expected in ((0.1, best), (0.55, f"The repair was made in May. {best}")):
        [kept], pruned = prune_texts([boat], "What did the repair cost?", keep, count)
        assert (kept, pruned.after) == (expected, count(expected))
    assert pruned_line(pruned) == "(--prune: 20 tokens became 11: 2 sentences were taken out)"
    [kept], _ = prune_texts(["Cats sleep. Dogs bark."], "What did the repair cost?", 0.1, count)
    assert kept == "Cats sleep."  # none is better than the other


def test_scores_of_another_ranker_decide() -> None:
    def score(said: Any) -> list[float]:
        return [float("Fish" in each) for each in said]

    [one, two], pruned = prune_texts(["Fish swim. Cats sleep.", "Dogs bark."], "What?", 0.4, count, score, "model")
    assert (one, two, pruned.left, pruned.by) == ("Fish swim.", "", ("Cats sleep.", "Dogs bark."), "model")


@given(st.text(alphabet="abC .!\n`#12", max_size=120), st.floats(0.1, 1))
def test_kept_and_removed_sentences_make_the_text(text: str, keep: float) -> None:
    [kept], pruned = prune_texts([text], "ab 1?", keep, count)
    assert sorted("".join(kept.split()) + "".join("".join(pruned.left).split())) == sorted("".join(text.split()))


def test_bm25_is_that_of_the_formula() -> None:
    """A word in one of two documents of 3 and 1 words: idf ln(1 + 1.5 / 1.5) = ln 2, mean length 2."""
    expected = np.log(2) * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 3 / 2))
    np.testing.assert_allclose(bm25(["deep blue sky", "cats"], "sky"), [expected, 0])


def test_prune_shortens_passages_and_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_session: Any
) -> None:
    monkeypatch.setenv("EDGE_INDEXES", str(tmp_path / "indexes"))
    (tmp_path / "text.txt").write_text(TEXT)
    index("own", tmp_path / "text.txt", encoder=ENCODER, backend="reference")
    session = open_session(max_kv_size=400)
    with package.Documents("own", by="words", prune=0.5) as documents:
        session.generate("Why is the sky blue?", documents=documents, max_tokens=4)
        assert session.report.pruned.left
        assert not any(each in session.report.sources[0].text for each in session.report.pruned.left)
    with package.Documents("own", by="words", prune="auto") as documents:
        session.generate("Why is the sky blue?", documents=documents, max_tokens=4)
        assert session.report.pruned.left == ()  # there is room
        small = open_session(max_kv_size=225)
        small.generate("Why is the sky blue?", documents=documents, max_tokens=4)
        assert small.report.pruned.left
        assert small.report.kv.evicted == 0
    with package.Documents("own", by="words", prune=0.5, reranker=ENCODER, backend="reference") as documents:
        session.generate("Why is the sky blue?", documents=documents, max_tokens=4)
        assert session.report.pruned.by == "bert.gguf and BM25"
    options = ("--backend", "reference", "-n", "2", "--max-kv-size", "400")
    asked = ("run", TINY, "-f", str(tmp_path / "text.txt"), "-p", "Why is the sky blue?", *options)
    whole, short = edge_json(*asked, "--json"), edge_json(*asked, "--json", "--prune", "0.5")
    assert short["tokens"]["prompt"] < 0.75 * whole["tokens"]["prompt"]
    assert "Cats sleep a lot." in short["pruned"]["left"]
    assert whole["pruned"] is None
    done = edge("ask", "own", "Why is the sky blue?", "--by", "words", "-m", TINY, "--prune", "0.5", *options)
    assert "sentences were taken out)" in done.stderr
    assert json.loads(edge("run", TINY, "-p", "x", "--prune", "1", "--json", *options, stdin="A text.").stdout)
    for wrong, message in ((("0",), "--prune must be auto or a part from 0.1 to 1"), (("half",), "not 'half'")):
        refused = edge(*asked, "--prune", *wrong)
        assert (refused.returncode, refused.stderr.count("\n"), message in refused.stderr) == (2, 1, True)
    refused = edge("run", TINY, "-p", "x", "--prune", "0.5", *options)
    assert "--prune shortens a text before a question" in refused.stderr
    with pytest.raises(InputError, match="must be auto or a part"):
        parse_prune(True)
