"""Models that think: their templates, the marks around thoughts, and the budget after which they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeMeter, examples, open_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import CHATML, joined
from test_chat import compiled as jinja2_template
from thinking_models import ALWAYS, GEMMA4, HARMONY, QWEN, SPECIALS, write_chain, write_script

from edge.errors import BudgetError, InputError, ModelFormatError, UnsupportedError
from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.thinking import FAMILIES, Think, find_family
from edge.model.model import Model, open_model
from edge.run.sampling.thoughts import Splitter
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.sampling import SamplingParams

QWENS_WAY = ["Ċ", "<think>", *"abcdefghij", "</think>", "ĊĊ", *"XYZ", "<|im_end|>"]
MODES: dict[str, dict[str, Any]] = {
    "default": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False},
    "low": {"reasoning_effort": "low"},
}  # fmt: skip


def rendered(source: str, *turns: tuple[str, str], **names: Any) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    names = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "", **names}
    return str(jinja2_template(source).render(messages=messages, tools=None, documents=None, **names))


@lru_cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "")


# Templates


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [QWEN, GEMMA4, HARMONY], ids=["qwen", "gemma4", "harmony"])
def test_choices_are_rendered_as_jinja2_renders_them(source: str, mode: str) -> None:
    ours, think, names = template(source), Think.parse(None if mode == "default" else mode), MODES[mode]
    if mode == "low" and source is not HARMONY:
        with pytest.raises(UnsupportedError, match="knows no efforts"):
            ours.first_turn("hi", think=think)
        return
    expected = rendered(source, ("user", "hi"), **names)
    if source is HARMONY and mode == "off":  # it has no switch: the answer's channel is opened
        expected += "<|channel|>final<|message|>"
    assert joined(ours.first_turn("hi", think=think)) == expected
    whole = rendered(source, ("user", "x"), ("assistant", "REPLY"), ("user", "hi"), **names).partition("REPLY")[2]
    assert joined(ours.next_turn("hi", think)) == whole + expected[len(rendered(source, ("user", "hi"), **names)) :]
    past = joined(ours.first_turn("hi", think=think, answered=True)) + "REPLY"
    assert rendered(source, ("user", "hi"), ("assistant", "REPLY"), ("user", "x"), **names).startswith(past)


def test_empty_thought_where_template_has_no_switch() -> None:
    off = Think(enabled=False)
    assert template(ALWAYS).opening(off).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    unmarked = CHATML.replace("{% for message", "{% if '</think>' in messages[-1].content %}{% endif %}{% for message")
    assert template(unmarked).opening(off).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    asking = "[SYSTEM_PROMPT]Think: [THINK]thoughts[/THINK][/SYSTEM_PROMPT][INST]{{ messages[-1].content }}[/INST]"
    assert template(asking).begins_thinking() is False
    with pytest.raises(UnsupportedError, match="--think off: neither the model's chat template nor the model's family"):
        template(asking).first_turn("hi", think=off)


def test_unthinking_model_refuses_think() -> None:
    for think in ("on", "off", "256", "5J", "low"):
        with pytest.raises(UnsupportedError, match=r"--think: this model does not think") as caught:
            template(CHATML).first_turn("hi", think=Think.parse(think))
        assert "\n" not in str(caught.value)
    assert template(CHATML).first_turn("hi", think=Think())


def test_generation_tags_are_ignored() -> None:
    """`generation` is a tag of transformers' own, which Jinja2 knows only with its extension."""
    marked = CHATML.replace("{{'<|im_start|>'", "{%- generation -%}{{'<|im_start|>'").replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}", 1
    )
    assert "{% endgeneration %}" in marked
    assert joined(template(marked).first_turn("hi")) == rendered(CHATML, ("user", "hi"))
    with pytest.raises(ModelFormatError):
        template("{% generation %}{{ messages[-1].content }}").first_turn("hi")


def test_families_are_found_by_closing_marks() -> None:
    assert [find_family(source) for source in (QWEN, GEMMA4, HARMONY, "[THINK]…[/THINK]")] == list(FAMILIES)
    assert find_family(CHATML) is None
    assert not template(QWEN).keeps_thoughts
    keeping = QWEN.replace("'<|im_start|>assistant\\n' + content", "'<|im_start|>assistant\\n' + "
                           "message.reasoning_content + content")  # fmt: skip
    assert template(keeping).keeps_thoughts
    family = FAMILIES[0]
    assert family.early_end("qwen3").startswith("\n\nConsidering the limited time by the user")
    assert family.early_end("qwen35moe").endswith("directly now.\n</think>\n\n")
    assert family.early_end("llama") == "\n</think>\n\n"


# The choice


def test_think_values_are_parsed_or_refused() -> None:
    on, off = Think(enabled=True), Think(enabled=False)
    for text, choice in (
        (None, Think()), ("on", on), (True, on), ("off", off), (False, off), ("0", off),
        ("256", Think(enabled=True, tokens=256)), (256, Think(enabled=True, tokens=256)),
        ("5J", Think(enabled=True, joules=5.0)), ("500mJ", Think(enabled=True, joules=0.5)),
        ("low", Think(effort="low")),
    ):  # fmt: skip
        assert Think.parse(text) == Think.parse(choice) == choice
    for text in ("yes", "-5", "5 tokens", "5W", "0J", "1.5", "1e3", "9" * 30, "J", "on off", "\x1b"):
        with pytest.raises(InputError) as caught:
            Think.parse(text)
        assert str(caught.value).isprintable()


# Marks in a stream of tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("thinkers")
    return {
        name: open_model(write_script(folder / f"{name}.gguf", special, 8, [2])) for name, special in SPECIALS.items()
    }


SPLITS = {
    "qwen": ("<think>\n", "deep", "\n</think>\n\n", "answer <b>"),
    "gemma4": ("<|channel>thought\n", "deep", "\n<channel|>", "answer thought\n"),
    "harmony": (
        "<|channel|>analysis<|message|>", "deep", "<|end|><|start|>assistant<|channel|>final<|message|>",
        "answer analysis",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
@given(thought=st.text(max_size=20), answer=st.text(max_size=20))
@settings(max_examples=examples(20))
def test_thoughts_are_split_from_answer(models: dict[str, Model], name: str, thought: str, answer: str) -> None:
    tokenizer, (opening, deep, closing, said) = models[name].tokenizer, SPLITS[name]
    encode = tokenizer.encode
    thought, answer = deep + thought, said + answer
    ids = [*encode(opening, special=True), *encode(thought), *encode(closing, special=True), *encode(answer)]
    splitter = Splitter(tokenizer, models[name].template and models[name].template.family, name == "harmony")
    pieces = [piece for token in ids for piece in splitter.feed(int(token))] + splitter.rest()
    plain = tokenizer.decode(encode(thought)), tokenizer.decode(encode(answer))
    assert "".join(text for thinks, text in pieces if thinks).rstrip() == plain[0].rstrip()
    assert "".join(text for thinks, text in pieces if not thinks) == plain[1]
    assert not splitter.thinking


def test_marks_that_vocabulary_lacks_are_found_in_text() -> None:
    model = open_golden("llama-gqa-tied").model
    splitter = Splitter(model.tokenizer, FAMILIES[0], False)
    tokens = model.tokenizer.encode("a<thin<think>b</thinker></think>\n\nc</think")
    pieces = [piece for token in tokens for piece in splitter.feed(int(token))] + splitter.rest()
    assert "".join(text for thinks, text in pieces if thinks) == "b</thinker>"
    assert "".join(text for thinks, text in pieces if not thinks) == "a<thinc</think"


# Generation


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(tmp_path_factory.mktemp("qwen") / "qwen.gguf", SPECIALS["qwen"], QWENS_WAY)


@pytest.fixture(scope="module")
def session(qwen: Path) -> Iterator[Session]:
    meter = FakeMeter(per_pass=1.0)  # real counters may stand still for so short an answer
    with load(qwen, backend="reference", max_kv_size=128, threads=1, meter=meter) as opened:
        yield opened


def ask(session: Session, text: str = "hi", **options: Any) -> tuple[str, str]:
    """The answer, and the thoughts as they were told."""
    told: list[str] = []
    answer = session.generate(text, on_thought=told.append, **{"max_tokens": 40, **options})
    return answer, "".join(told)


def test_stream_has_answer_alone(session: Session) -> None:
    assert ask(session) == ask(session, think="on") == ("XYZ", "abcdefghij")
    report = session.report
    thoughts = report.thoughts
    assert (report.text, thoughts.text, report.stop_reason) == ("XYZ", "abcdefghij", "eos")
    assert (report.tokens.generated, thoughts.tokens, thoughts.cut) == (16, 12, False)
    assert 0 < thoughts.seconds < report.timings.total_s
    assert 0 < thoughts.joules < report.energy.joules
    assert json.loads(json.dumps(report.to_dict()))["thoughts"]["text"] == "abcdefghij"
    assert ask(session, think="off") == ("XYZ", "")
    assert session.report.thoughts is None
    assert ask(session, keep_text=False) == ("XYZ", "abcdefghij")
    thoughts = session.report.thoughts
    assert (session.report.text, thoughts.text, thoughts.tokens) == (None, None, 12)
    assert ask(session, vote=3, sampling=SamplingParams(temperature=0.01)) == ("XYZ", "abcdefghij")


def test_token_budget_cuts_thoughts(session: Session) -> None:
    for most in (1, 2, 5, 11):
        # <think> is a token, too
        assert ask(session, think=most) == ("XYZ", "abcdefghij"[: most - 1] + "\n" * (most > 1))
        thoughts, tokens = session.report.thoughts, session.report.tokens
        assert (thoughts.tokens, thoughts.cut, thoughts.added) == (most, True, 3)
        assert session.report.kv.rows == tokens.prompt + tokens.generated + 3
    assert ask(session, think=13) == ("XYZ", "abcdefghij")
    assert not session.report.thoughts.cut


def test_raw_prompts_and_token_ids_have_no_thoughts(session: Session) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ask(session, text, raw=True) == ("<think>abcdefghij</think>\n\nXYZ", "")
    for options in ({"raw": True}, {}):
        prompt: Any = text if options else session.model.encode_prompt(text, raw=True)
        with pytest.raises(UnsupportedError, match="--think needs a chat template"):
            session.generate(prompt, think=5, **options)
    with pytest.raises(InputError, match="--think 'maybe' is not understood"):
        session.generate("hi", think="maybe")


def test_joule_budget_cuts_thoughts(qwen: Path) -> None:
    with load(qwen, backend="reference", max_kv_size=128, threads=1, meter=FakeMeter(per_pass=1.0)) as session:
        assert ask(session, think="4J") == ("XYZ", "abcd\n")
        thoughts = session.report.thoughts
        assert (thoughts.joules, thoughts.cut) == (4.0, True)
        assert session.report.energy.joules == 10.0  # two of the prompt, and one for the tokens that end the thoughts
        assert ask(session, think="100J") == ("XYZ", "abcdefghij")
        with pytest.raises(BudgetError, match=r"stopped after \d+ tokens of thoughts: no answer \(--think N limits"):
            ask(session, energy_limit=8.0)  # the budget of the run holds as before
        assert session.report.stop_reason == "energy"
        assert ask(session, think=3, energy_limit=8.0)[0].startswith("X")


def test_endless_thoughts_end(tmp_path: Path) -> None:
    """A model that would begin to think again after each end."""
    chain = ["Ċ", "<think>", *"abc", "a"]
    path = write_chain(tmp_path / "endless.gguf", SPECIALS["qwen"], chain, ["ĊĊ", "<think>"])
    with load(path, backend="reference", max_kv_size=128, threads=1) as session:
        ask(session, think=5, max_tokens=30)
        thoughts = session.report.thoughts
        assert (thoughts.tokens, thoughts.cut, session.report.tokens.generated) == (5, True, 30)


SCRIPTS = {
    "gemma4": ("on", "<|channel>thought\ndeep\n<channel|>answer<turn|>", "deep", "answer"),
    "harmony": (
        None, "<|channel|>analysis<|message|>deep<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>",
        "deep", "answer",
    ),
    "always": (None, "deep\n</think>\n\nanswer<|im_end|>", "deep", "answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_family_splits_its_thoughts(models: dict[str, Model], name: str, tmp_path: Path) -> None:
    think, script, deep, said = SCRIPTS[name]
    ids = models[name].tokenizer.encode(script, special=True).tolist()
    start = models[name].prompt("hi", think=Think.parse(think)).first(None).size
    path = write_script(tmp_path / f"{name}.gguf", SPECIALS[name], start, ids)
    with load(path, backend="reference", max_kv_size=256, threads=1) as session:
        answer, told = ask(session, think=think, max_tokens=len(ids))
        assert (answer, told.rstrip()) == (said, deep)
        assert session.report.stop_reason == "eos"
        assert session.report.tokens.generated == len(ids) - 1
