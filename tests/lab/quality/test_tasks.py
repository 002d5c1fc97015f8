"""`edge eval tasks`: lm-eval's figures on edge's engines are those of llama.cpp's logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from test_cli import edge_here as run_edge
from test_clients import EVALUATIONS, OFFLINE, PROGRAMS

import edge
from edge.lab.quality.tasks import SHIPPED, _scores
from edge.likelihood import negative_log_likelihoods
from edge.model.names.catalog import find_model

MODEL, QUESTIONS = "smollm2-135m", 12
TINY = str(GOLDEN / "llama-gqa-tied.gguf")
TINILY = ("--backend", "reference", "--threads", "1")


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def evaluated(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    (packages,) = (EVALUATIONS / "lib").glob("python3*/site-packages")
    command = [sys.executable, PROGRAMS / "eval_tasks.py", packages, "eval", "tasks", *arguments]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, env={**os.environ, **OFFLINE}
    )


def figures(*arguments: str | Path) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    done = evaluated(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {(each["task"], each["metric"]): each for each in found["scores"]}, found


def test_shipped_tasks_are_whole() -> None:
    choices, facts, series = map(documents, ("choices", "facts", "series"))
    assert min(map(len, (choices, facts, series))) >= 30
    for each in choices:
        assert len({*each["choices"]}) == 4
        assert 0 <= each["answer"] < 4
    assert {each["answer"] for each in choices} == {0, 1, 2, 3}
    for found, key in ((choices, "question"), (facts, "text"), (series, "series")):
        assert len({each[key] for each in found}) == len(found)
        assert all(value == value.strip() for each in found for value in each.values() if isinstance(value, str))


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval() -> None:
    done = run_edge("eval", "tasks", TINY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "edge: lm-eval is not installed: pip install 'edge-runtime[eval]'\n"
    with pytest.raises(edge.MissingExtraError):
        edge.eval_tasks(None)  # type: ignore[arg-type]


@pytest.mark.evaluations
@pytest.mark.parametrize(
    ("name", "near"), [(MODEL, 0.05), (TINY, 1e-3)]
)  # kernels differ in how they round activations
def test_shipped_tasks_score_as_llama_cpp_does(name: str, near: float) -> None:
    """Log-likelihoods by llama-cpp-python's own tokens and logits; accuracies of the same argmax."""
    from llama_cpp import Llama

    scores, found = figures(name, "--limit", str(QUESTIONS), "--backend", "llamacpp")
    model = Llama(str(find_model(name)), n_ctx=256, logits_all=True, verbose=False)

    def run(text: str, context: str) -> tuple[float, bool]:
        tokens, first = model.tokenize(text.encode()), len(model.tokenize(context.encode()))
        model.reset()
        model.eval(tokens)
        logits, targets = np.array(model.scores[first - 1 : len(tokens) - 1]), np.array(tokens[first:])
        return -float(negative_log_likelihoods(logits, targets).sum()), bool((logits.argmax(axis=1) == targets).all())

    def answer(text: str) -> str:
        tokens = model.tokenize(text.encode())
        prompt = len(tokens)
        while len(tokens) < prompt + 8 and tokens[-1] != model.token_eos():
            model.reset()
            model.eval(tokens)
            tokens.append(int(model.scores[len(tokens) - 1].argmax()))
        return model.detokenize(tokens[prompt:]).decode(errors="replace").replace("\n", ",").split(",")[0].strip()

    right, normed = [], []
    for each in documents("choices")[:QUESTIONS]:
        context = f"Question: {each['question']}\nAnswer:"
        likely = np.array([run(f"{context} {choice}", context)[0] for choice in each["choices"]])
        right.append(likely.argmax() == each["answer"])
        normed.append((likely / [len(choice) for choice in each["choices"]]).argmax() == each["answer"])
    facts = [run(f"{each['text']} {each['end']}", each["text"]) for each in documents("facts")[:QUESTIONS]]
    series = documents("series")[:QUESTIONS]
    exact = [answer(each["series"]) == each["next"] for each in series]

    expected = {
        ("edge_choices", "acc"): right, ("edge_choices", "acc_norm"): normed,
        ("edge_facts", "acc"): [greedy for _, greedy in facts], ("edge_series", "exact_match"): exact,
    }  # fmt: skip
    for key, values in expected.items():
        assert scores[key]["value"] == pytest.approx(np.mean(values)), key
        assert scores[key]["stderr"] == pytest.approx(np.std(values, ddof=1) / np.sqrt(QUESTIONS)), key
        assert scores[key]["questions"] == QUESTIONS
    perplexity = scores["edge_facts", "perplexity"]
    assert np.log(perplexity["value"]) == pytest.approx(-np.mean([likely for likely, _ in facts]), rel=near)
    assert perplexity["stderr"] > 0
    assert not perplexity["higher_is_better"]
    assert (found["shortened"], found["settings"]["backend"]) == (0, "llamacpp")


def test_metrics_of_numpy_count_too() -> None:
    results = {"t": {"alias": "t", "acc,none": np.float32(0.5), "acc_stderr,none": "N/A", "hits,none": np.int64(3)}}
    found = {"results": results, "n-samples": {"t": {"effective": 6}}, "group_subtasks": {}, "higher_is_better": {}}
    scores = [(each.metric, each.value, each.stderr) for each in _scores(found)]
    assert scores == [("acc", 0.5, None), ("hits", 3, None)]


@pytest.mark.evaluations
def test_folder_of_tasks(tmp_path: Path) -> None:
    """Whole texts, in windows where the cache is smaller; examples before questions; requests that do not fit."""
    text, questions = "The sky is blue, and the grass is green. " * 6, tmp_path / "questions.jsonl"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    questions.write_text("\n".join(json.dumps({"q": f"{n} and {n}", "a": f"{2 * n}"}) for n in range(1, 7)))
    task = 'task: {0}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "{1}"}}}}\ntest_split: test\n'
    (tmp_path / "text.yaml").write_text(
        task.format("whole_text", tmp_path / "text.jsonl") + 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{text}}"\nmetric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n'
    )
    (tmp_path / "sums.yaml").write_text(
        task.format("sums", questions) + 'output_type: loglikelihood\ndoc_to_text: "{{q}} is"\n'
        'doc_to_target: " {{a}}"\nmetric_list: [{metric: acc}, {metric: perplexity}]\n'
    )
    with edge.load(TINY, backend="reference", threads=1) as session:
        tokenizer = session.tokenizer
        prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        tokens = np.array([prefix, *tokenizer.encode(text)], np.int32)
        windows = [tokens[start : start + 33] for start in range(0, tokens.size - 1, 32)]
        whole = -sum(each.logprob for each in session.score(tokens))
        cut = 0.0
        for each in windows:  # of 32 predictions; the last one reads tokens before those that it predicts
            read = tokens[tokens.size - 33 :] if each is windows[-1] else each
            cut -= sum(found.logprob for found in session.score(read)[33 - each.size :])
        assert tokens.size > 66
        assert cut != pytest.approx(whole, rel=1e-4)

    arguments = (TINY, *TINILY, "--include", tmp_path)
    for more, nll in (((), whole), (("--max-kv-size", "32"), cut)):
        scores, _ = figures(*arguments, "--tasks", "whole_text", *more)
        bits = nll / np.log(2) / len(text.encode())
        assert scores["whole_text", "bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-4)
    scores, found = figures(*arguments, "--tasks", "sums", "--num-fewshot", "2", "--max-kv-size", "24")
    assert scores["sums", "acc"]["questions"] == 6
    assert found["shots"]["sums"] == 2
    assert found["shortened"] == 6
    shown = evaluated(*arguments, "--tasks", "sums", "--num-fewshot", "2", "--max-kv-size", "24")
    assert "6 requests lost their beginning" in shown.stderr
    assert "| sums | acc        |" in shown.stdout
    assert shown.stdout.endswith("all measured\n")
    questions.unlink()
    done = evaluated(*arguments, "--tasks", "sums")
    assert done.returncode == 2
    assert done.stderr.startswith("edge: sums cannot be read: FileNotFoundError")
    assert done.stderr.count("\n") == 1
