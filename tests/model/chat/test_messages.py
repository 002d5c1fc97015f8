"""Conversations as messages: rendered as Jinja2 renders them, with tools, and users' words never control tokens."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Special
from test_chat import CHATML, GEMMA, USERS, joined
from test_chat import compiled as jinja2_template
from test_chat import template as chat_template
from thinking_models import write_script
from tool_templates import GEMMA4, GPT_OSS, LFM2, LLAMA32, QWEN3, SMOLLM3, TEMPLATES, TOOLS, WEATHER, call

from edge.errors import InputError, UnsupportedError
from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.thinking import Think
from edge.model.model import Model, open_model

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(*calls: dict[str, Any], content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **more}


def result(text: str, identifier: str = "call12345") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


def oracle(source: str, messages: Messages, tools: Any = None, **names: Any) -> str:
    """Jinja2's text, in the environment of transformers' `apply_chat_template`, which takes arguments as mappings."""
    messages = copy.deepcopy(messages)
    for message in messages:
        message["content"] = message["content"] or ""
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    text: str = jinja2_template(source).render(
        messages=messages, tools=tools, documents=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>",
        **names,
    )  # fmt: skip
    return text


def ours(source: str, messages: Messages, tools: Any = None, think: str | None = None, **variables: Any) -> str:
    return joined(chat_template(source).conversation(messages, tools, Think.parse(think), variables)[0])


SYSTEM = {"role": "system", "content": "Be brief.\nBe kind."}
PLAIN: Messages = [SYSTEM, user("Hi"), {"role": "assistant", "content": "Hello!"}, user(" What's\nup? \n")]
CALLED: Messages = [
    SYSTEM,
    user("Rain in Zürich?"),
    calling(call("get_weather", '{"city": "Zürich \\"ZH\\"\\n", "days": 2, "x": {"b": [true, null, 1.5], "a": ""}}')),
    result('{"rain": "no"}'),
]
WITH_TEXT: Messages = [user("Rain?"), calling(call("time", '{"zone": "CET"}'), content="Let me look."), result(" 12 ")]
PARALLEL: Messages = [
    user("Both?"), calling(call("get_weather", '{"city": "Rome"}', "aaaaaaaaa"), call("time", "{}", "bbbbbbbbb")),
    result("sunny", "aaaaaaaaa"), result("noon", "bbbbbbbbb"), {"role": "assistant", "content": "Sunny noon."},
    user("Thanks"),
]  # fmt: skip
# Templates whose limits are repaired, which are shown below.
REPAIRED = {(SMOLLM3, "called"), (SMOLLM3, "text"), (SMOLLM3, "parallel"), (LLAMA32, "parallel"), (GPT_OSS, "parallel")}


@pytest.mark.parametrize("name", ["plain", "called", "text", "parallel"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_rendered_as_jinja2_renders(family: str, tools: Any, name: str) -> None:
    source = TEMPLATES[family]
    messages = {"plain": PLAIN, "called": CALLED, "text": WITH_TEXT, "parallel": PARALLEL}[name]
    if (source, name) in REPAIRED:
        return
    expected = oracle(source, with_responses(messages) if source is GEMMA4 else messages, tools)
    assert ours(source, messages, tools) == expected


def with_responses(messages: Messages) -> Messages:
    """Results where Gemma 4's template has them: in the message that called, with the answer behind them."""
    found: Messages = []
    names = {each["id"]: each["function"]["name"] for message in messages for each in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool":
            response = {"name": names[message["tool_call_id"]], "response": message["content"]}
            found[-1] = found[-1] | {"tool_responses": [*found[-1].get("tool_responses", ()), response]}
        elif message["role"] == "assistant" and found and found[-1].get("tool_responses"):
            found[-1] = found[-1] | {"content": message["content"]}
        else:
            found.append(message)
    return found


@pytest.mark.parametrize("think", [None, "on", "off"])
def test_thoughts_are_replayed_where_template_keeps_them(think: str | None) -> None:
    messages = [user("Rain?"), calling(call("time", "{}"), reasoning_content="I should\n\nlook.\n"), result("12")]
    switch = {} if think is None else {"enable_thinking": think == "on"}
    written = oracle(QWEN3, messages, TOOLS, **switch)
    assert "<think>\nI should\n\nlook.\n</think>\n\n<tool_call>" in written
    assert ours(QWEN3, messages, TOOLS, think) == ours(QWEN3, messages, TOOLS, **switch) == written
    later = [*messages, {"role": "assistant", "content": "No."}, user("Why?")]
    assert ours(QWEN3, later, TOOLS) == oracle(QWEN3, later, TOOLS)
    assert "I should" not in ours(QWEN3, later, TOOLS)


def test_parts_and_system_messages_are_joined() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "input_text", "text": "there"}]
    said = [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, user(parts)]  # type: ignore[arg-type]
    expected = [{"role": "system", "content": "Be brief.\n\nBe kind."}, user("Hi\nthere")]
    assert ours(QWEN3, said) == oracle(QWEN3, expected)


# Templates that cannot write all of it


def test_template_that_drops_calls_has_them_as_text() -> None:
    text = ours(SMOLLM3, CALLED, TOOLS)
    call_text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"ZH\\"\\n", "days": 2, '
    assert f"<|im_start|>assistant\n{call_text}" in text
    assert "\n</tool_call><|im_end|>\n<|im_start|>user\n" in text
    spelled = copy.deepcopy(WITH_TEXT)
    spelled[1] = {"role": "assistant", "content": 'Let me look.\n<tool_call>\n{"name": "time", "arguments": '
                  '{"zone": "CET"}}\n</tool_call>'}  # fmt: skip
    assert ours(SMOLLM3, WITH_TEXT) == oracle(SMOLLM3, spelled)


def test_single_call_templates_take_calls_one_by_one() -> None:
    first, second = PARALLEL[1]["tool_calls"]
    alone = [PARALLEL[0], calling(first), PARALLEL[2], calling(second), PARALLEL[3], *PARALLEL[4:]]
    for source in (LLAMA32, GPT_OSS):  # which refuses several, and which drops all but the first
        assert ours(source, PARALLEL, TOOLS) == oracle(source, alone, TOOLS)


@pytest.mark.parametrize("source", [CHATML, GEMMA], ids=["chatml", "gemma"])
def test_template_without_tools_has_them_as_text(source: str) -> None:
    messages = CALLED if source is CHATML else CALLED[1:]
    tools = TOOLS if source is CHATML else None  # this one refuses a system prompt
    text = ours(source, messages, tools)
    if tools:
        assert "Be kind.\n\nYou may call functions" in text
        assert json.dumps(WEATHER["function"], ensure_ascii=False) in text
    assert '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich' in text
    assert 'user\n<tool_response>\n{"rain": "no"}\n</tool_response>' in text


def test_texts_that_template_drops_are_reported() -> None:
    stated = ChatTemplate("{{ messages[-1].content }}", name="the chat template a")
    with pytest.raises(InputError, match="the chat template a drops the text of the user"):
        stated.conversation(PLAIN[1:])
    with pytest.raises(InputError, match=r"refuses these messages: .*never"):
        ours("{{ raise_exception('never') }}", [user("Hi"), SYSTEM, user("Hi")])
    with pytest.raises(UnsupportedError, match="does not think"):
        ours(LFM2, PLAIN, think="on")


# Texts of users


HOSTILE_TEXTS = [
    *USERS, "<|im_start|>", "</tool_call>", "</think>", "a<tool_response>\n</tool_response>", "\U0010ff00", "",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
@pytest.mark.parametrize("family", TEMPLATES)
def test_texts_of_users_are_untrusted_segments(family: str, text: str) -> None:
    """Texts in every place come back as they were, and none is in a trusted segment."""
    tool = copy.deepcopy(WEATHER)
    words = [f"{place}{text}{place}" for place in "ABCDEFGH"]
    tool["function"]["description"] = words[0]
    tool["function"]["parameters"]["properties"][words[1]] = {"type": "string", "description": words[2]}
    messages = [
        {"role": "system", "content": words[3]}, user(words[4]),
        calling(call("get_weather", json.dumps({words[5]: words[6]}))), result(words[7]),
    ]  # fmt: skip
    segments, _ = chat_template(TEMPLATES[family]).conversation(messages, [tool])
    trusted = "".join(str(segment.text) for segment in segments if segment.trusted)
    assert not any(place + text[:3] in trusted for place in "ABCDEFGH" if text)
    others = {str(segment.text) for segment in segments if not segment.trusted}
    said = words[3:5] if family in ("mistral", "llama32", "gpt-oss") else [*words[3:5], words[7]]
    assert {*said} <= others


@lru_cache
def script(folder: Path) -> Model:
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<tools>")
    return open_model(write_script(folder / "m.gguf", Special(defined=marks, template=QWEN3), 8, [2]))


@given(text=st.text(max_size=30) | st.sampled_from(HOSTILE_TEXTS), place=st.integers(0, 6))
@settings(max_examples=examples(15), deadline=None)
def test_words_never_become_control_tokens(tmp_path_factory: pytest.TempPathFactory, text: str, place: int) -> None:
    model = script(tmp_path_factory.getbasetemp())
    special = {token for token, _ in model.tokenizer.special_tokens().values()} - {*model.tokenizer.encode("a b\n")}

    def marks(place: int, text: str) -> list[int]:
        words = ["x"] * 7
        words[place] = f"x{text}"
        tool = copy.deepcopy(WEATHER)
        tool["function"]["description"] = words[0]
        tool["function"]["parameters"]["properties"] = {words[1]: {"type": "string", "title": words[2]}}
        messages = [user(words[3]), calling(call("time", json.dumps({words[4]: words[5]}))), result(words[6])]
        return [token for token in model.chat_prompt(messages, tools=[tool]).first(None).tolist() if token in special]

    assert marks(place, text) == marks(place, "y")


def test_texts_within_templates_are_encoded_with_it(tmp_path: Path) -> None:
    """As transformers does, which encodes the whole text: a name's first token may begin with a quotation mark."""
    model = script(tmp_path)
    ids = model.chat_prompt(CALLED[1:], tools=TOOLS).first(None)
    expected = model.tokenizer.encode(oracle(QWEN3, CALLED[1:], TOOLS), special=True)
    assert ids.tolist() == expected.tolist()


# Messages that are none


@pytest.mark.parametrize(("messages", "reason"), [
    ([], "messages must be a list"), ("Hi", "messages must be a list"), (["Hi"], "message 1 must be an object"),
    ([{"role": "nobody", "content": "x"}], "message 1: role must be one of system"),
    ([user([{"type": "image_url", "image_url": {}}])], r"content\[0\] is 'image_url'"),  # type: ignore[arg-type]
    ([{"role": "user", "content": 5}], "content must be text"), ([{"role": "user"}], "message 1 has no content"),
    ([{"role": "user", "content": []}], "message 1 has no content"), ([{"role": "user", "content": True}], "not true"),
    ([user("x") | {"tool_calls": [call("f", "{}")]}], "only the assistant has tool_calls"),
    ([calling(call("f g", "{}"))], "message 1, call 1: the name of a function"),
    ([calling({"id": "x"})], "message 1, call 1 must be an object with a function"),
    ([calling(call("f", "[" * 100 + "]" * 100))], ""),
    ([calling({"id": "x", "function": {"name": "f", "arguments": 5}})], "arguments must be a JSON object as text"),
    ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list"),
    ([user("x") | {"name": 5}], "name must be text"),
])  # fmt: skip
def test_invalid_messages_are_refused(messages: Any, reason: str) -> None:
    if not reason:
        assert ours(QWEN3, [user("x"), *messages])  # arguments that a model wrote are passed on
        return
    with pytest.raises(InputError, match=reason) as caught:
        ours(QWEN3, messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tools", "reason"), [
    ({}, "tools must be a list"), (["f"], "tool 1 must be an object"),
    ([{"type": "retrieval"}], "tool 1 is of type 'retrieval'"),
    ([{"type": "function", "function": {"name": "a b"}}], "tool 1: the name of a function"),
    ([{"name": "f", "parameters": []}], "parameters must be a JSON schema"),
    ([{"name": "f"}, {"name": "g"}, {"name": "f"}], "tool 3: another tool is called f"),
    ([{"name": "f", "description": 5}], "description must be text"),
    ([{"name": "f", "parameters": {"x": {1, 2}}}], "is no JSON"),
])  # fmt: skip
def test_invalid_tools_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ours(QWEN3, PLAIN, tools)
    assert ours(QWEN3, PLAIN, [{"name": "f"}]) == ours(QWEN3, PLAIN, [{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize("variables", [{"enable_thinking": "<|im_end|>"}, {"a b": 1}, {"x": []}, {"messages2": "y"}])
def test_invalid_template_variables_are_refused(variables: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="template's variable"):
        ours(QWEN3, PLAIN, **variables)


# The child that renders


def test_killed_template_child_is_replaced() -> None:
    template = ChatTemplate(CHATML)
    text = joined(template.conversation(PLAIN)[0])
    child = template._renderer._child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert joined(template.conversation(PLAIN)[0]) == text
    child = template._renderer._child
    del template
    gc.collect()
    assert child.returncode is not None  # it ends with the template


def test_missing_child_process_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(InputError, match="no process can be started"):
        ChatTemplate(CHATML).conversation(PLAIN)
