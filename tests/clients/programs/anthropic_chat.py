"""Messages with Anthropic's package, whole and streamed, its list of models, a call of a tool, and errors."""

from __future__ import annotations

import json
import sys

import anthropic

url, model, question = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any-key", max_retries=0)
asked = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 16,
         "extra_body": {"temperature": 0}}  # fmt: skip
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    pieces = list(stream.text_stream)
    streamed = stream.get_final_message()
tool = {
    "name": "paint", "description": "Paints a wall",
    "input_schema": {
        "type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
        "additionalProperties": False,
    },
}  # fmt: skip
called = {**asked, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "tool", "name": "paint"}}
use = client.messages.create(**called).content[-1]
with client.messages.stream(**called) as stream:
    streamed_use = stream.get_final_message().content[-1]
text = whole.content[0].text
stopped = client.messages.create(**asked, stop_sequences=[text[3:6]])
errors = []
for wrong in ({"model": "nothing"}, {"max_tokens": 0}, {"extra_body": {"temperature": 3}}):
    try:
        client.messages.create(**{**asked, **wrong})
    except anthropic.APIStatusError as error:
        errors.append([type(error).__name__, error.body["error"]["type"], bool(error.request_id)])
print(json.dumps({
    "whole": text, "streamed": "".join(pieces), "reasons": [whole.stop_reason, streamed.stop_reason],
    "usage": [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens],
    "counted": client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens,
    "models": [each.id for each in client.models.list()], "named": client.models.retrieve(model).display_name,
    "calls": [[each.name, each.input["colour"], each.id[:6]] for each in (use, streamed_use)],
    "stopped": [stopped.stop_reason, stopped.stop_sequence == text[3:6]], "errors": errors,
    "request": bool(whole._request_id),
}))  # fmt: skip
