"""Shapes of answers, after the published descriptions of OpenAI's, Anthropic's and Ollama's APIs (November 2026): the
fields that these require, and their types.

A shape is a type, None, a set of constants, a list with the shape of its elements, an object with the shapes of its
fields, or a tuple of alternatives. `?` behind a name: the field may be missing. Other fields are allowed.
"""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)


def differences(value: Any, shape: Any, where: str = "") -> list[str]:
    """What differs between a value and a shape, a line each."""
    if isinstance(shape, tuple):
        found = [differences(value, each, where) for each in shape]
        return [] if not all(found) else min(found, key=len)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where} is {value!r:.40}, not an object"]
        lines = []
        for name, inner in shape.items():
            field = name.removesuffix("?")
            if field in value:
                lines += differences(value[field], inner, f"{where}.{field}")
            elif field == name:
                lines.append(f"{where}.{field} is missing")
        return lines
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where} is {value!r:.40}, not a list"]
        return [line for n, each in enumerate(value) for line in differences(each, shape[0], f"{where}[{n}]")]
    if isinstance(shape, set):
        fits = isinstance(value, str) and value in shape
    elif shape is None:
        fits = value is None
    else:
        fits = isinstance(value, shape) and not (isinstance(value, bool) and shape in (int, float))
    return [] if fits else [f"{where} is {value!r:.40}, not {shape}"]


# OpenAI: chats, completions, embeddings and models
USAGE = {
    "prompt_tokens": int, "completion_tokens": int, "total_tokens": int,
    "prompt_tokens_details?": {"cached_tokens": int}, "completion_tokens_details?": {"reasoning_tokens": int},
}  # fmt: skip
_CHANCE = {"token": str, "logprob": NUMBER, "bytes": ([int], None)}
_CHANCES = ({"content": ([{**_CHANCE, "top_logprobs": [_CHANCE]}], None), "refusal": (list, None)}, None)
_CALL = {"id": str, "type": {"function"}, "function": {"name": str, "arguments": str}}
_FINISH = {"stop", "length", "tool_calls"}
CHAT = {
    "id": str, "object": {"chat.completion"}, "created": int, "model": str, "usage": USAGE,
    "choices": [{
        "index": int, "finish_reason": _FINISH, "logprobs": _CHANCES,
        "message": {"role": {"assistant"}, "content": (str, None), "refusal": (str, None), "tool_calls?": [_CALL]},
    }],
}  # fmt: skip
_CALL_DELTA = {"index": int, "id?": str, "type?": {"function"}, "function?": {"name?": str, "arguments?": str}}
CHAT_CHUNK = {
    "id": str, "object": {"chat.completion.chunk"}, "created": int, "model": str, "usage?": (USAGE, None),
    "choices": [{
        "index": int, "finish_reason": (_FINISH, None), "logprobs?": _CHANCES,
        "delta": {"role?": {"assistant"}, "content?": (str, None), "tool_calls?": [_CALL_DELTA]},
    }],
}  # fmt: skip
COMPLETION = {
    "id": str, "object": {"text_completion"}, "created": int, "model": str, "usage?": USAGE,
    "choices": [{
        "index": int, "text": str, "finish_reason": ({"stop", "length"}, None), "logprobs": ({
            "tokens": [str], "token_logprobs": [(*NUMBER, None)], "text_offset": [int], "top_logprobs": [(dict, None)],
        }, None),
    }],
}  # fmt: skip
EMBEDDINGS = {
    "object": {"list"}, "model": str, "usage": {"prompt_tokens": int, "total_tokens": int},
    "data": [{"object": {"embedding"}, "index": int, "embedding": [float]}],
}  # fmt: skip
RERANK = {
    "object": {"list"}, "model": str, "usage": {"prompt_tokens": int, "total_tokens": int},
    "results": [{"index": int, "relevance_score": float, "document": {"text": str}}],
}  # fmt: skip
MODELS = {"object": {"list"}, "data": [{"id": str, "object": {"model"}, "created": int, "owned_by": str}]}
ERROR = {"error": {"message": str, "type": str, "param": (str, None), "code": (str, None)}}

# OpenAI: responses
_STATUS = {"in_progress", "completed", "incomplete"}
_TEXT_PART = {"type": {"output_text"}, "text": str, "annotations": list, "logprobs": list}
_THOUGHT_PART = {"type": {"reasoning_text"}, "text": str}
_ITEM = (
    {"type": {"message"}, "id": str, "role": {"assistant"}, "status": _STATUS, "content": [_TEXT_PART]},
    {"type": {"reasoning"}, "id": str, "status?": _STATUS, "summary": list, "content?": [_THOUGHT_PART]},
    {"type": {"function_call"}, "id": str, "call_id": str, "name": str, "arguments": str, "status": _STATUS},
)
RESPONSE = {
    "id": str, "object": {"response"}, "created_at": NUMBER, "model": str, "output": [_ITEM],
    "status": {*_STATUS, "failed"}, "error": ({"code": str, "message": str}, None),
    "incomplete_details": ({"reason": {"max_output_tokens", "content_filter"}}, None), "instructions": (str, None),
    "metadata": (dict, None), "parallel_tool_calls": bool, "temperature": (*NUMBER, None), "top_p": (*NUMBER, None),
    "tool_choice": ({"none", "auto", "required"}, dict), "truncation": {"auto", "disabled"},
    "tools": [{"type": str, "name": str, "parameters": (dict, None), "strict": (bool, None)}],
    "text": {"format": {"type": str}}, "max_output_tokens": (int, None), "previous_response_id": (str, None),
    "reasoning": (dict, None), "usage": ({
        "input_tokens": int, "output_tokens": int, "total_tokens": int,
        "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int},
        "output_tokens_details": {"reasoning_tokens": int},
    }, None),
}  # fmt: skip
_PLACE = {"item_id": str, "output_index": int}
_PART = {**_PLACE, "content_index": int, "part": (_TEXT_PART, _THOUGHT_PART)}
_NAMED = {
    **{name: {"response": RESPONSE} for name in ("created", "in_progress", "completed", "incomplete", "failed")},
    **{f"output_item.{name}": {"output_index": int, "item": _ITEM} for name in ("added", "done")},
    **{f"content_part.{name}": _PART for name in ("added", "done")},
    "output_text.delta": {**_PLACE, "content_index": int, "delta": str, "logprobs": list},
    "output_text.done": {**_PLACE, "content_index": int, "text": str, "logprobs": list},
    "reasoning_text.delta": {**_PLACE, "content_index": int, "delta": str},
    "reasoning_text.done": {**_PLACE, "content_index": int, "text": str},
    "function_call_arguments.delta": {**_PLACE, "delta": str},
    "function_call_arguments.done": {**_PLACE, "arguments": str},
}  # fmt: skip
RESPONSE_EVENT = tuple(
    {"type": {f"response.{name}"}, "sequence_number": int, **fields} for name, fields in _NAMED.items()
)

# Anthropic
_BLOCK = (
    {"type": {"text"}, "text": str, "citations": (list, None)},
    {"type": {"thinking"}, "thinking": str, "signature": str},
    {"type": {"tool_use"}, "id": str, "name": str, "input": dict},
)
_COUNTS = {
    "input_tokens": int, "output_tokens": int, "cache_creation_input_tokens": (int, None),
    "cache_read_input_tokens": (int, None), "server_tool_use": (dict, None),
}  # fmt: skip
_END = {
    "stop_reason": ({"end_turn", "max_tokens", "stop_sequence", "tool_use"}, None), "stop_sequence": (str, None),
    "container": (dict, None),
}  # fmt: skip
MESSAGE = {
    "id": str, "type": {"message"}, "role": {"assistant"}, "model": str, "content": [_BLOCK], **_END,
    "usage": {**_COUNTS, "cache_creation": (dict, None), "service_tier": (str, None)},
}  # fmt: skip
MESSAGE_EVENT = (
    {"type": {"message_start"}, "message": MESSAGE},
    {"type": {"content_block_start"}, "index": int, "content_block": _BLOCK},
    {"type": {"content_block_delta"}, "index": int, "delta": (
        {"type": {"text_delta"}, "text": str}, {"type": {"thinking_delta"}, "thinking": str},
        {"type": {"input_json_delta"}, "partial_json": str},
    )},
    {"type": {"content_block_stop"}, "index": int},
    {"type": {"message_delta"}, "delta": _END, "usage": _COUNTS},
    {"type": {"message_stop", "ping"}},
)  # fmt: skip
ANTHROPIC_MODELS = {
    "has_more": bool, "first_id": (str, None), "last_id": (str, None), "data": [{
        "type": {"model"}, "id": str, "display_name": str, "created_at": str, "max_input_tokens": (int, None),
        "max_tokens": (int, None), "capabilities": (dict, None), "lifecycle": {"active"},
    }],
}  # fmt: skip
ANTHROPIC_ERROR = {"type": {"error"}, "error": {"type": str, "message": str}, "request_id": (str, None)}

# Ollama
_LINE = {"model": str, "created_at": str, "done": bool, "done_reason?": {"stop", "length", "load", "unload"}}
_FIGURES = (
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
)  # fmt: skip
_OLLAMA_CALL = {"function": {"name": str, "arguments": dict}}
API_CHAT_LINE = {
    **_LINE,
    "message": {"role": {"assistant"}, "content": str, "thinking?": str, "tool_calls?": [_OLLAMA_CALL]},
}
API_CHAT = {**API_CHAT_LINE, **dict.fromkeys(_FIGURES, int)}
API_GENERATE_LINE = {**_LINE, "response": str, "thinking?": str}
API_GENERATE = {**API_GENERATE_LINE, **dict.fromkeys(_FIGURES, int)}
_DETAILS = {
    "parent_model": str, "format": str, "family": str, "families": [str], "parameter_size": str,
    "quantization_level": str,
}  # fmt: skip
_MODEL = {"name": str, "model": str, "size": int, "digest": str, "details": _DETAILS}
API_TAGS = {"models": [{**_MODEL, "modified_at": str}]}
API_PS = {"models": [{**_MODEL, "expires_at": str, "size_vram": int, "context_length": int}]}
API_SHOW = {
    "template": str, "model_info": dict, "capabilities": [{"completion", "tools", "thinking", "embedding"}],
    "details": _DETAILS, "modified_at": str,
}  # fmt: skip
API_EMBED = {
    "model": str, "embeddings": [[float]], "total_duration": int, "load_duration": int, "prompt_eval_count": int,
}  # fmt: skip
API_ERROR = {"error": str}
