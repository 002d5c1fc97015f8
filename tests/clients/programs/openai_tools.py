"""openai: a call of a tool that the request forces, whole and streamed, and the answer to its result."""

import json
import sys

import openai

url, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
colours = {"type": "string", "enum": ["red", "green", "blue"]}
parameters = {
    "type": "object", "properties": {"colour": colours}, "required": ["colour"], "additionalProperties": False,
}  # fmt: skip
tool = {"type": "function", "function": {"name": "paint", "description": "Paint a wall.", "parameters": parameters}}
messages = [{"role": "user", "content": question}]
asked = {"model": model, "tools": [tool], "temperature": 0, "max_tokens": 64}
forced = asked | {"tool_choice": "required"}
whole = client.chat.completions.create(messages=messages, **forced).choices[0]
calls, finish = {}, None
for chunk in client.chat.completions.create(messages=messages, **forced, stream=True):
    for choice in chunk.choices:
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            known = calls.setdefault(part.index, ["", ""])
            known[0] += part.function.name or ""
            known[1] += part.function.arguments or ""
made = whole.message.tool_calls
messages += [
    whole.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": made[0].id, "content": "done"},
]
after = client.chat.completions.create(messages=messages, **asked, tool_choice="none").choices[0]
print(json.dumps({
    "finish": [whole.finish_reason, finish], "whole": [[call.function.name, call.function.arguments] for call in made],
    "streamed": [calls[index] for index in sorted(calls)], "after": after.message.content,
}))  # fmt: skip
