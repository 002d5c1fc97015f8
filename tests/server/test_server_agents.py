"""Requests of agents: answered by every template, with nothing dropped, and refused only for what the user asks now."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from serving import HELLO, client_of, error_of
from starlette.testclient import TestClient
from strict_templates import FAMILIES, source_of, template_of
from test_chat import joined
from thinking_models import SPECIALS

from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.parts import left_out
from edge.model.chat.thinking import Think
from edge.run.request import Request
from edge.server.http import parse_body
from edge.server.protocols import anthropic, chat, ollama, responses
from edge.server.protocols.bodies import ChatBody

# Requests of agents in the shapes that they have, with contents of our own: by name, a path and a body.

LOOK = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
        "additionalProperties": False}  # fmt: skip
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PICTURE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"The tool {name}", "parameters": LOOK}}


def _call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function",
            "function": {"name": name, "arguments": '{"place": "home"}'}}  # fmt: skip


def _said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX: dict[str, Any] = {
    "instructions": "You write code.", "stream": False, "store": False, "include": ["reasoning.encrypted_content"],
    "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "0190", "max_output_tokens": 2,
    "reasoning": {"effort": "xhigh", "summary": "auto"},
    "tools": [
        {"type": "function", "name": "shell", "description": "Run", "strict": False, "parameters": LOOK},
        {"type": "custom", "name": "apply_patch", "description": "Patch", "format": {"type": "grammar"}},
        {"type": "web_search"},
    ],
    "input": [
        _said("developer", "Sandbox: none."), _said("user", "<environment>here</environment>"), _said("user", "Look."),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}],
         "encrypted_content": None},
        _said("assistant", "I will.", "output_text"),
        {"type": "function_call", "name": "shell", "arguments": '{"place": "home"}', "call_id": "c1"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "patched"},
        {"type": "function_call", "name": "view_image", "arguments": '{"path": "a.png"}', "call_id": "c3"},
        {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_image", "image_url": PIXEL}]},
        {"type": "local_shell_call", "call_id": "c4", "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c4", "output": "a.png"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "pixels"}},
        {"type": "compaction", "encrypted_content": "gAAA"}, {"type": "additional_tools", "tools": []},
        _said("developer", "The sandbox changed."), {"type": "something_new", "id": "x"},
        _said("user", "Go on."),
    ],
}  # fmt: skip

CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 2, "stream": False, "thinking": {"type": "disabled"}, "output_config": {"effort": "max"},
    "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Read", "description": "Read", "input_schema": LOOK}, {"type": "web_search_20250305",
                                                                              "name": "web_search"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"},
                                     {"type": "text", "text": "Look at a.png."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I will."},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"place": "a.png"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": PICTURE}]},
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}]},
        {"role": "system", "content": "The date changed."},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"place": "b"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": [
                {"type": "tool_reference", "tool_name": "Write"},
                {"type": "search_result", "title": "B", "source": "b.md", "content": [{"type": "text", "text": "b"}]}]},
            {"type": "text", "text": "Go on."}]},
    ],
}  # fmt: skip

OPENCODE: dict[str, Any] = {
    "max_tokens": 2, "temperature": 0, "reasoning_effort": "medium", "stream": False, "tool_choice": "auto",
    "tools": [_function("read"), _function("bash")],
    "messages": [
        {"role": "system", "content": "You write code."}, {"role": "system", "content": "Home: /home."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [_call("read", 0)]},
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": [_call("bash", 0), _call("read", 1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
        {"role": "user", "content": "Go on."},
    ],
}  # fmt: skip

HOME_ASSISTANT: dict[str, Any] = {
    "stream": False, "think": False, "keep_alive": "-1s", "options": {"num_ctx": 8192, "num_predict": 2},
    "tools": [_function("HassTurnOn"), _function("GetLiveContext")],
    "messages": [
        {"role": "system", "content": "Current time is 10:00:00. Today's date is 2026-11-24.\nYou are a voice."},
        {"role": "user", "content": "Light, please.", "images": None},
        {"role": "assistant", "content": "", "thinking": "Which?", "tool_calls": [
            {"function": {"name": "GetLiveContext", "arguments": {}}},
            {"function": {"name": "HassTurnOn", "arguments": {"place": "kitchen"}}}]},
        {"role": "tool", "tool_name": "HassTurnOn", "content": '{"success": true}'},
        {"role": "tool", "tool_name": "GetLiveContext", "content": "kitchen: off"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "What is this?", "images": ["iVBORw0KGgo="]},
        {"role": "assistant", "content": "I cannot say."},
        {"role": "user", "content": "And the other one?"},
    ],
}  # fmt: skip

AGENTS = {
    "codex": ("/v1/responses", CODEX), "claude code": ("/v1/messages", CLAUDE_CODE),
    "opencode": ("/v1/chat/completions", OPENCODE), "home assistant": ("/api/chat", HOME_ASSISTANT),
}  # fmt: skip


LEFT_OUT = left_out("picture")
TRANSLATE: dict[str, tuple[type, Any]] = {
    "/v1/responses": (responses.ResponsesBody, responses.translate),
    "/v1/messages": (anthropic.MessagesBody, anthropic.translate),
    "/v1/chat/completions": (ChatBody, chat.translate),
    "/api/chat": (ollama.ApiChatBody, ollama.translate),
}

client = client_of()


def asked_of(path: str, body: dict[str, Any]) -> Request:
    kind, translate = TRANSLATE[path]
    [asked] = translate(parse_body(kind, copy.deepcopy(body)), {}, "")
    return asked


def rendered(template: ChatTemplate, path: str, body: dict[str, Any]) -> str:
    prompt = asked_of(path, body).prompt
    return joined(template.conversation(prompt.messages, prompt.tools or None, continues=prompt.continues)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_writes_requests_of_agents(family: str) -> None:
    template = template_of(family)
    for agent, (path, body) in AGENTS.items():
        assert ("Go on." if agent != "home assistant" else "And the other one?") in rendered(template, path, body)


SAID = {
    "codex": [
        "<|system|>You write code.\n\nSandbox: none.", "<|user|><environment>here</environment>", "<|user|>Look.",
        '<|assistant|>I will.<call c1 shell {"place": "home"}><call c2 apply_patch {"input": "*** Begin"}>',
        "<|user|><result>done</result>", "<|user|><result>patched</result>",
        '<|assistant|><call c3 view_image {"path": "a.png"}>', f"<|user|><result>{LEFT_OUT}</result>",
        '<|assistant|><call c4 local_shell {"type": "exec", "command": ["ls"]}>', "<|user|><result>a.png</result>",
        "<|assistant|>[web_search_call: pixels]", "<|system|>[compaction left out]",
        "<|system|>[additional_tools left out]", "<|system|>The sandbox changed.",
        "<|system|>[something_new left out]", "<|user|>Go on.", "<|assistant|>",
    ],
    "claude code": [
        "<|system|>You write code.", "<|user|><system-reminder>x</system-reminder>Look at a.png.",
        '<|assistant|>I will.<call toolu_1 Read {"place": "a.png"}>', f"<|user|><result>{LEFT_OUT}</result>",
        "<|user|>[document left out: this model reads text]", "<|system|>The date changed.",
        "<|assistant|>[server_tool_use left out: this model reads text]\n"
        '[web_search_tool_result left out: this model reads text]<call toolu_1_1 Read {"place": "b"}>',
        "<|user|><result>[tool: Write]\nB\nb.md\nb</result>", "<|user|>Go on.", "<|assistant|>",
    ],
    "opencode": [
        "<|system|>You write code.\n\nHome: /home.", "<|user|>Look.",
        '<|assistant|><call call_0 read {"place": "home"}>', "<|user|><result>a</result>",
        '<|assistant|><call call_0_1 bash {"place": "home"}><call call_1 read {"place": "home"}>',
        f"<|user|><result>{LEFT_OUT}</result>", "<|user|><result>b</result>", f"<|user|>{LEFT_OUT}", "<|user|>Go on.",
        "<|assistant|>",
    ],
    "home assistant": [
        "<|system|>You are a voice.\nCurrent time is 10:00:00. Today's date is 2026-11-24.", "<|user|>Light, please.",
        '<|assistant|><call call_1 GetLiveContext {}><call call_2 HassTurnOn {"place": "kitchen"}>',
        "<|user|><result>kitchen: off</result>", '<|user|><result>{"success": true}</result>', "<|assistant|>Done.",
        f"<|user|>{LEFT_OUT}\nWhat is this?", "<|assistant|>I cannot say.", "<|user|>And the other one?",
        "<|assistant|>",
    ],
}  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS)
def test_nontext_parts_become_a_line(agent: str) -> None:
    text = rendered(template_of("qwen3"), *AGENTS[agent])
    assert re.sub("<tools>.*</tools>\n", "", text) == "\n".join(SAID[agent])


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "unheard of")
MESSAGES = {"messages": HELLO, "max_tokens": 9}
HINTS: list[tuple[str, dict[str, Any], str]] = [
    *(("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": each}, each) for each in EFFORTS),
    *(("/v1/responses", {"input": "Hello", "reasoning": {"effort": each}}, each) for each in EFFORTS),
    *(("/api/chat", {"messages": HELLO, "think": each}, each) for each in EFFORTS),
    *(("/v1/messages", {**MESSAGES, "output_config": {"effort": each}}, each) for each in EFFORTS),
    ("/v1/messages", {**MESSAGES, "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max"),
    ("/v1/messages", {**MESSAGES, "thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none"),
    *((path, {**more, **hint}, "none")
      for path, more in [("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {"input": "Hello"}),
                         ("/api/chat", {"messages": HELLO}), ("/v1/messages", MESSAGES)]
      for hint in ({"think": False}, {"thinking": {"type": "disabled"}}, {"enable_thinking": False})),
    ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}, "none"),
]  # fmt: skip
# By family: the modes for EFFORTS. One that always thinks is closed by an empty thought; Ministral cannot be closed.
MODES = {
    "qwen": ("off", "off", "on", "on", "on", "on", "on", "default"),
    "always": ("off", "off", "on", "on", "on", "on", "on", "default"),
    "harmony": ("off", "low", "low", "medium", "high", "high", "high", "default"),
    "ministral": ("default", "default", "on", "on", "on", "on", "on", "default"),
    "plain": ("default",) * 8,
}


@pytest.mark.parametrize("family", MODES)
def test_hints_become_nearest_mode(family: str) -> None:
    plain = source_of(FAMILIES["qwen3"])
    special = SPECIALS.get(family)
    source = (special.template or "") if special else plain + "{# [/THINK] #}" * (family == "ministral")
    template, found = ChatTemplate(source), dict[str, Think]()
    for path, body, effort in HINTS:
        mode = template.nearest(asked_of(path, body).think)
        assert mode.mode == MODES[family][EFFORTS.index(effort)], (path, body)
        found[mode.mode] = mode
    for mode in found.values():
        template.conversation(HELLO, think=mode)


BEGUN = [*HELLO, {"role": "assistant", "content": "Once upon"}]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": BEGUN}),
    ("/v1/chat/completions", {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}),
    ("/v1/messages", {"messages": BEGUN, "max_tokens": 2}), ("/v1/responses", {"input": BEGUN}),
    ("/api/chat", {"messages": BEGUN}),
])  # fmt: skip
def test_answers_go_on_from_their_beginning(path: str, body: dict[str, Any]) -> None:
    for family in ("gemma2", "nemo", "qwen3"):
        text = rendered(template_of(family), path, body)
        assert text.endswith("<|user|>Hello\n<|assistant|>Once upon")
    anew = rendered(template_of("qwen3"), path, {**body, "continue_final_message": False})
    assert anew.endswith("Once upon\n<|assistant|>") == (path == "/v1/chat/completions")


@pytest.mark.parametrize(("family", "thoughts", "think", "end", "thinks"), [
    ("qwen", None, None, "assistant\nOnce", False),
    ("qwen", "Hm.", None, "assistant\n<think>Hm.\n</think>\n\nOnce", False),
    ("qwen", None, "off", "assistant\n<think>\n\n</think>\n\nOnce", False),
    ("always", None, None, "assistant\n<think>\n\n</think>\n\nOnce", False),
    ("always", "Hm.", None, "assistant\n<think>\nHm.\n</think>\n\nOnce", False),
    ("harmony", None, None, "<|start|>assistant<|channel|>final<|message|>Once", False),
    ("gemma4", None, None, "model\n<|channel>thought\n<channel|>Once", False),
])  # fmt: skip
def test_beginnings_stand_behind_thoughts(
    family: str, thoughts: str | None, think: str | None, end: str, thinks: bool
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once", "reasoning_content": thoughts}]
    segments, begins = ChatTemplate(SPECIALS[family].template or "").conversation(messages, think=Think.parse(think))
    assert joined(segments).endswith(end)
    assert begins is thinks
    assert not segments[-1].trusted


def test_allowed_tools_limit_calls(client: TestClient) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": place}} for name in ("one", "two")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "two"}}]}
    body = {"messages": HELLO, "tools": tools, "max_tokens": 200, "parallel_tool_calls": False}
    choices: list[dict[str, Any]] = [{"type": "allowed_tools", "allowed_tools": allowed}]
    found = client.post("/v1/chat/completions", json={**body, "tool_choice": choices[0]})
    assert found.status_code == 200, found.text
    [call] = found.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "two"
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    listed = [{"type": "function", **tool["function"]} for tool in tools]  # type: ignore[dict-item]
    sent = {"input": "Hello", "tools": listed, "tool_choice": flat, "parallel_tool_calls": False}
    found = client.post("/v1/responses", json={**sent, "max_output_tokens": 200})
    assert [item["name"] for item in found.json()["output"] if item["type"] == "function_call"] == ["two"]
    none = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert "allows none" in error_of(client.post("/v1/chat/completions", json={**body, "tool_choice": none}))["message"]
    odd = {"messages": HELLO, "max_tokens": 1, "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}
    assert client.post("/v1/chat/completions", json=odd).status_code == 200
