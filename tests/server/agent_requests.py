"""Requests of agents in the shapes that they have, with contents of our own: by name, a path and a body."""

from __future__ import annotations

from typing import Any

LOOK = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
        "additionalProperties": False}  # fmt: skip
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PICTURE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"The tool {name}", "parameters": LOOK}}


def _call(name: str, number: int | str | None, **more: Any) -> dict[str, Any]:
    return {"id": number if number is None else f"call_{number}", "type": "function",
            "function": {"name": name, "arguments": '{"place": "home"}'}, **more}  # fmt: skip


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

CONTINUE: dict[str, Any] = {
    "max_tokens": 2, "stream": False, "enable_thinking": False, "thinking": {"type": "disabled"},
    "reasoning_effort": "minimal", "parallel_tool_calls": False, "tools": [_function("read_file")],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "read_file"}}]}},
    "messages": [
        {"role": "system", "content": "You write code."}, {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": None, "type": "function", "function": {"name": "read_file", "arguments": None}}]},
        {"role": "tool", "tool_call_id": "", "content": "x"},
        {"role": "user", "content": "<context>\nfile\n</context>"}, {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Go on."},
    ],
}  # fmt: skip

AGENTS = {
    "codex": ("/v1/responses", CODEX), "claude code": ("/v1/messages", CLAUDE_CODE),
    "opencode": ("/v1/chat/completions", OPENCODE), "home assistant": ("/api/chat", HOME_ASSISTANT),
    "continue": ("/v1/chat/completions", CONTINUE),
}  # fmt: skip
