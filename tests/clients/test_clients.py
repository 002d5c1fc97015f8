"""Programs that other people wrote, unchanged, against `edge serve`: each says what the engine says in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from serving_process import serving

import edge
from edge.likelihood import negative_log_likelihoods
from edge.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS, EVALUATIONS = ROOT / "build" / "clients", ROOT / "build" / "evaluations"
MODEL, BUDGET = "smollm2-135m", "512MiB"
QUESTION = "Name three colours."
SEEING, EYES, SEEN = GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf", "What is in the picture?"
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*",
}  # fmt: skip

pytestmark = pytest.mark.slow
installed = pytest.mark.skipif(not (CLIENTS / "bin" / "llm").exists(), reason="no clients: make test installs them")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(MODEL, "--memory", BUDGET) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def answers() -> tuple[str, str]:
    """The answer to QUESTION in 16 tokens, and how "One, two," goes on, in 4."""
    greedy = SamplingParams(temperature=0)
    with edge.load(MODEL, max_kv_size=1024) as session:  # its budget would be that of the whole test process
        answer = session.generate(QUESTION, max_tokens=16, sampling=greedy)
        return answer, session.generate("One, two,", max_tokens=4, sampling=greedy, raw=True)


@pytest.fixture(scope="module")
def expected(answers: tuple[str, str]) -> str:
    return answers[0]


def run(*command: str | Path, **environment: str) -> str:
    settings = {**os.environ, **OFFLINE, **environment}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, env=settings, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(name: str, *arguments: str | Path, environment: Path = CLIENTS, **variables: str) -> Any:
    """What a program prints, in JSON."""
    said = run(environment / "bin" / "python", PROGRAMS / name, *arguments, **variables)
    return json.loads(said.splitlines()[-1])


# Runs programs one after the other, for imports of their packages take longer than what they do: results and errors.
ONE_BY_ONE = """
import contextlib, io, json, runpy, sys, traceback
results = []
for name, *sys.argv[1:] in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(name)
        results.append([json.loads(said.getvalue().splitlines()[-1]), None])
    except (Exception, SystemExit):
        results.append([None, traceback.format_exc()])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def official(url: str) -> Callable[[str], Any]:
    """What a program with the packages of OpenAI, Anthropic or Ollama prints, in JSON."""
    names = ("openai_chat", "anthropic_chat", "ollama_chat")
    words = [[str(PROGRAMS / f"{name}.py"), url, MODEL, QUESTION] for name in names]
    said = run(CLIENTS / "bin" / "python", "-c", ONE_BY_ONE, json.dumps(words))
    results = dict(zip(names, json.loads(said.splitlines()[-1]), strict=True))

    def result(name: str) -> Any:
        found, error = results[name]
        assert error is None, error
        return found

    return result


def write_picture(path: Path) -> Path:
    picture = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture.fromarray(np.arange(30 * 44 * 3, dtype=np.uint8).reshape(30, 44, 3)).save(path)
    return path


@installed
def test_package_of_openai_gets_the_answers_of_the_engine(
    official: Callable[[str], Any], answers: tuple[str, str]
) -> None:
    expected, completed = answers
    found = official("openai_chat")
    assert (found["whole"], found["streamed"]) == (expected, expected)
    assert found["finish"] == found["finish_streamed"] == "length"
    assert found["pieces"] >= 1  # those that wait for a client are joined
    assert found["usage"] == [16, 16, []]
    assert (found["choices"], found["models"], found["error"]) == ([0, 1], [MODEL], "model_not_found")
    assert found["completion"] == completed
    assert found["joules"] > 0
    assert 1 > found["near"] > found["far"]  # embeddings
    assert "".join(found["likely"]) == expected
    assert found["tops"]
    tokens, offsets, chances = ([one for each in found["said"] for one in each[at]] for at in (1, 2, 3))
    assert "".join(each[0] for each in found["said"]) == "".join(tokens) == completed
    assert offsets == [len("".join(tokens[:count])) for count in range(4)]
    assert all(chance < 0 for chance in chances)


@installed
def test_packages_send_pictures_that_are_seen(tmp_path: Path) -> None:
    file = write_picture(tmp_path / "a.png")
    with edge.load(SEEING, backend="reference", mmproj=EYES, threads=1) as session:
        greedy = SamplingParams(temperature=0)
        expected = session.generate(SEEN, images=[file], max_tokens=4, sampling=greedy)
    with serving(str(SEEING), "--mmproj", str(EYES), "--backend", "reference", "--threads", "1") as address:
        found = program("pictures.py", f"{address}/v1", SEEING.stem, SEEN, file)
    assert found["texts"] == [expected] * 4
    assert (found["tool"] > 20, found["vision"]) == (True, True)
    assert "damaged or cut off" in found["error"]


@installed
def test_package_of_anthropic_gets_the_answers_of_the_engine(official: Callable[[str], Any], expected: str) -> None:
    found = official("anthropic_chat")
    assert (found["whole"], found["streamed"]) == (expected, expected)
    assert found["reasons"] == ["max_tokens", "max_tokens"]
    assert found["usage"] == [found["counted"], 16]
    assert (found["models"], found["named"], found["request"]) == ([MODEL], MODEL, True)
    assert found["calls"][0][:2] == found["calls"][1][:2]
    assert {each[2] for each in found["calls"]} == {"toolu_"}
    assert found["stopped"] == ["stop_sequence", True]
    wrong = ["BadRequestError", "invalid_request_error", True]
    assert found["errors"] == [["NotFoundError", "not_found_error", True], wrong, wrong]


@installed
def test_package_of_ollama_gets_the_answers_of_the_engine(official: Callable[[str], Any], expected: str) -> None:
    found = official("ollama_chat")
    assert (found["whole"], found["streamed"], found["generated"]) == (expected, expected, expected)
    assert found["counts"][1] == 16
    assert found["loaded"] == [0, "load", MODEL, True]
    assert found["listed"] == [MODEL, len("sha256:") + 64]
    assert (found["pulled"], found["show"]) == ("success", ["completion", "tools"])
    assert found["embedded"] == [2, 576]
    assert [each[0] for each in found["errors"]] == [404, 400, 400]
    assert all("\n" not in each[1] and each[1][0] != "{" for each in found["errors"])


@pytest.mark.exhaustive
@installed
def test_frameworks_get_the_answers_of_the_engine(url: str, expected: str) -> None:
    found = program("frameworks.py", url, MODEL, QUESTION)
    assert set(found["texts"].values()) == {expected}
    assert found["painted"][0] in ("red", "green", "blue")
    assert found["answer"]


@pytest.mark.exhaustive
@installed
def test_command_llm_prints_the_answer_of_the_engine(url: str, expected: str, tmp_path: Path) -> None:
    model = {"model_id": "here", "model_name": MODEL, "api_base": url}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML, too
    options = ["-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "16", QUESTION]
    for more in ([], ["--no-stream"]):
        said = run(CLIENTS / "bin" / "llm", *options, *more, LLM_USER_PATH=str(tmp_path))
        assert said.removesuffix("\n") == expected


@pytest.mark.skipif(
    not (CLIENTS / "node_modules" / "openai").exists() or not shutil.which("node"),
    reason="no npm package openai: make test installs it",
)
def test_package_of_openai_for_javascript_gets_the_answers_of_the_engine(url: str, expected: str) -> None:
    said = run("node", PROGRAMS / "openai_chat.mjs", CLIENTS / "node_modules", url, MODEL, QUESTION)
    assert json.loads(said) == {"whole": expected, "streamed": expected}


@pytest.mark.evaluations
def test_lm_eval_scores_as_engine_does(tmp_path: Path) -> None:
    """A task's scores by completions with echo are those of the model's logits in this process."""
    documents = [
        {"question": f"The colour of {thing} is", "choices": ["red", "green", "blue", "a"], "answer": number % 3}
        for number, thing in enumerate(("blood", "grass", "the sky"))
    ]
    path, tiny = tmp_path / "colours.json", GOLDEN / "llama-gqa-tied.gguf"
    path.write_text("\n".join(map(json.dumps, documents)))
    options = {"backend": "reference", "max_kv_size": 256, "threads": 1}
    flags = ["--backend", "reference", "--max-kv-size", "256", "--threads", "1"]
    with serving(str(tiny), *flags) as address:
        arguments = (f"{address}/v1", tiny.stem, path)
        found = program("lm_eval_scores.py", *arguments, environment=EVALUATIONS, HF_HOME=str(tmp_path))
    scores = []
    with edge.load(tiny, **options) as session:
        encode = session.model.tokenizer.encode
        for document in documents:
            question = encode(str(document["question"]))
            for choice in document["choices"]:
                tokens = encode(f"{document['question']} {choice}")
                session.engine.kv.truncate(0)
                logits = session.engine.forward_all(tokens)
                scores.append(-negative_log_likelihoods(logits[question.size - 1 : -1], tokens[question.size :]).sum())
    ours = np.array(scores).reshape(len(documents), -1)
    np.testing.assert_allclose(found["scores"], ours, rtol=1e-6)
    assert found["accuracy"] == np.mean(ours.argmax(axis=1) == [each["answer"] for each in documents])


@installed
def test_package_of_openai_parses_answers_by_a_schema(official: Callable[[str], Any]) -> None:
    found = official("openai_chat")["object"]
    assert found["parsed"] == found["streamed"]
    assert found["cut"]


@installed
def test_package_of_openai_calls_tools(official: Callable[[str], Any]) -> None:
    found = official("openai_chat")["tools"]
    assert found["finish"] == ["tool_calls", "tool_calls"]
    assert found["whole"] == found["streamed"]
    name, arguments = found["whole"][0]
    assert name == "paint"
    assert json.loads(arguments)["colour"] in ("red", "green", "blue")
    assert found["after"] is not None


@pytest.mark.evaluations
def test_instructor_gets_a_person(url: str) -> None:
    found = program("instructor_person.py", url, MODEL, "Ada Lovelace died at 36.", environment=EVALUATIONS)
    assert found.keys() == {"name", "age"}
