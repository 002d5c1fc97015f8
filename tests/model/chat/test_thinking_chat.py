"""Conversations with models that think: what stays of thoughts in the cache, in files and on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_chat_terminal import chatting
from test_cli import edge, edge_json
from test_thinking import QWENS_WAY, SCRIPTS, rendered
from thinking_models import QWEN, SPECIALS, write_chain, write_script

from edge.lab.inspection import inspect_model
from edge.model.model import Model, open_model
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(tmp_path_factory.mktemp("qwen") / "qwen.gguf", SPECIALS["qwen"], QWENS_WAY)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("thinkers")
    paths = {name: write_script(folder / f"{name}.gguf", SPECIALS[name], 8, [2]) for name in ("gemma4", "harmony")}
    return {name: open_model(path) for name, path in paths.items()}


def ids_of(model: Model, *turns: tuple[str, str], **names: Any) -> list[int]:
    """The ids of a conversation as Jinja2 renders the whole of it."""
    source = model.file.metadata["tokenizer.chat_template"]
    text = rendered(source, *turns, **names).replace("<s>", "<|im_start|>")  # its BOS
    return [int(token) for token in model.tokenizer.encode(text, special=True)]


def rows_of(session: Session) -> list[int]:
    """The tokens of all rows in the cache, which a session with a prompt cache records."""
    assert len(session._sequence.rows.fed) == session.engine.kv.length
    return list(session._sequence.rows.fed)


def said(talk: Conversation, text: str, **options: Any) -> str:
    return "".join(talk.say(text, **{"max_tokens": 40, **options}))


@pytest.fixture
def talk(qwen: Path) -> Iterator[Conversation]:
    options = {"max_kv_size": 256, "threads": 1, "prompt_cache": PromptCache(memory="16MiB")}
    with load(qwen, backend="reference", **options) as opened:
        yield Conversation(opened)


def test_earlier_thoughts_leave_cache(talk: Conversation) -> None:
    """Its rows are those of the conversation as Jinja2 renders it for the next turn."""
    model, session = talk.session.model, talk.session
    assert said(talk, "one") == "XYZ"
    one = session.engine.kv.length
    assert said(talk, "two") == "XYZ"
    thought = model.tokenizer.encode("<think>abcdefghij</think>\n\n", special=True).tolist()
    answer = thought + model.tokenizer.encode("XYZ").tolist()
    asked = ids_of(model, ("user", "one"), ("assistant", "XYZ"), ("user", "two"))
    assert rows_of(session) == asked + answer
    assert session.report.tokens.prompt == len(asked) - (one - len(answer))  # the first question did not run again
    assert talk.messages[1] == {"role": "assistant", "content": "XYZ"}
    for think in ("off", 4, None):
        said(talk, "three", think=think)
        talk.undo()
    assert said(talk, "four", think=4) == "XYZ"
    turns = [("user", "one"), ("assistant", "XYZ"), ("user", "two"), ("assistant", "XYZ"), ("user", "four")]
    text = rendered(QWEN, *turns)
    cut = model.tokenizer.encode(f"{text}<think>abc\n</think>\n\n", special=True).tolist()
    assert rows_of(session) == cut + answer[-3:]


def test_conversation_from_its_text_has_same_rows(talk: Conversation, tmp_path: Path) -> None:
    for text in ("one", "two"):
        said(talk, text)
    talk.save(tmp_path / "talk.json")
    assert "abc" not in (tmp_path / "talk.json").read_text(encoding="utf-8")
    said(talk, "three")
    rows = rows_of(talk.session)
    talk.load(tmp_path / "talk.json")
    said(talk, "three")
    assert rows_of(talk.session) == rows
    assert talk.undo() == "three"
    said(talk, "four")
    assert rows_of(talk.session)[: len(rows) - 40] == rows[: len(rows) - 40]


def test_choice_that_changes_beginning_runs_conversation_again(models: dict[str, Model], tmp_path: Path) -> None:
    letter = int(models["gemma4"].tokenizer.encode("x")[0])
    model = open_model(write_script(tmp_path / "x.gguf", SPECIALS["gemma4"], 1, [letter] * 400))
    with load(
        model, backend="reference", max_kv_size=400, threads=1, prompt_cache=PromptCache(memory="16MiB")
    ) as session:
        talk = Conversation(session)
        for text, think in (("one", None), ("two", None), ("three", "on"), ("four", "on")):
            assert said(talk, text, think=think, max_tokens=3) == "xxx"
            assert not talk.replays
        turns = [(each["role"], each["content"]) for each in talk.messages]
        asked = ids_of(model, *turns[:-1], enable_thinking=True)
        assert rows_of(session)[: len(asked)] == asked


def test_harmony_turns_open_the_final_channel(models: dict[str, Model], tmp_path: Path) -> None:
    """The rows of a turn whose thoughts were dropped open the final channel, as the template does."""
    model = models["harmony"]
    ids = model.tokenizer.encode(SCRIPTS["harmony"][1], special=True).tolist()
    start = model.prompt("one").first(None).size
    path = write_script(tmp_path / "harmony.gguf", SPECIALS["harmony"], start, ids)
    with load(
        path, backend="reference", max_kv_size=400, threads=1, prompt_cache=PromptCache(memory="16MiB")
    ) as session:
        talk = Conversation(session)
        assert said(talk, "one", max_tokens=60) == "answer"
        said(talk, "two", max_tokens=1)
        asked = ids_of(session.model, ("user", "one"), ("assistant", "answer"), ("user", "two"))
        assert rows_of(session)[: len(asked)] == asked


FEW = ("--max-kv-size", "128", "--backend", "reference")


def test_run_prints_answer_alone(qwen: Path) -> None:
    assert [inspect_model(each).thinks for each in (qwen, "smollm2-135m")] == [True, False]
    done = edge("run", str(qwen), "hi", "--think", "5", *FEW)
    assert (done.returncode, done.stdout) == (0, "XYZ\n")
    assert "8 tokens" in done.stderr
    assert "5 of them thoughts, then cut" in done.stderr
    assert "abcd" not in done.stderr  # no terminal
    done = edge("run", str(qwen), "hi", "-n", "5", *FEW)
    assert (done.returncode, done.stdout) == (0, "\n")
    assert "no answer: -n allows more tokens, --think fewer of thoughts" in done.stderr
    report = edge_json("run", str(qwen), "hi", "--json", *FEW, EDGE_THINK="3")
    assert report["text"] == "XYZ"
    assert report["thoughts"] | {"seconds": 0, "joules": 0} == {
        "text": "ab", "tokens": 3, "seconds": 0, "joules": 0, "cut": True, "added": 3,
    }  # fmt: skip


def test_thoughts_are_dimmed_at_terminal(qwen: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with chatting("--max-kv-size", "256", model=str(qwen)) as screen:
        screen.type("one\n")
        thought = screen.expect("XYZ")
        assert "\x1b[2mabcdefghij\x1b[22m\r\n\r\n" in thought
        screen.expect("› ")
        screen.type("/think\n/think low\n/think 3\n")
        screen.expect("(thinking: as the template has it)")
        screen.expect("edge: --think low: the model's chat template knows no efforts")
        screen.expect("(thinking: 3 tokens)")
        screen.type("two\n")
        assert "\x1b[2mab\x1b[22m" in screen.expect("XYZ")
        screen.expect("(the thoughts were cut after 3 tokens: /think allows more)")
        screen.type(f"/think off\nthree\n/save {saved}\n")
        assert "\x1b[2m" not in screen.expect("(saved: 6 messages)")
        screen.type("/quit\n")
        assert screen.status() == 0
    assert "ab" not in saved.read_text(encoding="utf-8")
