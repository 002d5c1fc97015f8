"""openai: a chat, whole and streamed, with log-probabilities, several choices, models, completions, an error; objects
and calls of tools."""

import json
import sys
from operator import mul
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model, question = sys.argv[2:]
asked = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
whole = client.chat.completions.create(**asked)
chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
likely = list(client.chat.completions.create(**asked, stream=True, logprobs=True, top_logprobs=2))
likely = [each.choices[0].logprobs for each in likely if each.choices]
said = client.completions.create(model=model, prompt="One, two,", temperature=0, max_tokens=4, logprobs=1, stream=True)
said = [(each.choices[0].text, each.choices[0].logprobs) for each in said if each.choices]
several = client.chat.completions.create(**asked | {"temperature": 1, "seed": 7, "n": 2})
text = client.completions.create(model=model, prompt="One, two,", temperature=0, max_tokens=4)
vectors = client.embeddings.create(model=model, input=["A red wall.", "A crimson wall.", "Two and two is four."]).data
near, far = (sum(map(mul, vectors[0].embedding, each.embedding)) for each in vectors[1:])
try:
    client.chat.completions.create(**asked | {"model": "missing"})
    error = None
except openai.NotFoundError as found:
    error = found.code

# Structured output as an object of a class, whole and streamed


class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
    sure: bool


asked_for = {"model": model, "messages": [{"role": "user", "content": "Which colour is grass?"}], "temperature": 0}
parsed = client.chat.completions.parse(**asked_for, response_format=Answer).choices[0].message.parsed
with client.chat.completions.stream(**asked_for, response_format=Answer) as stream:
    parsed_in_pieces = stream.get_final_completion().choices[0].message.parsed
try:
    client.chat.completions.parse(**asked_for, response_format=Answer, max_tokens=3)
    cut = False
except openai.LengthFinishReasonError:
    cut = True

# A call of a tool that the request forces, whole and streamed, and the answer to its result

colours = {"type": "string", "enum": ["red", "green", "blue"]}
parameters = {
    "type": "object", "properties": {"colour": colours}, "required": ["colour"], "additionalProperties": False,
}  # fmt: skip
tool = {"type": "function", "function": {"name": "paint", "description": "Paint a wall.", "parameters": parameters}}
messages = [{"role": "user", "content": "Paint the wall red."}]
wanted = {"model": model, "tools": [tool], "temperature": 0, "max_tokens": 64}
forced = wanted | {"tool_choice": "required"}
called = client.chat.completions.create(messages=messages, **forced).choices[0]
calls, finish = {}, None
for chunk in client.chat.completions.create(messages=messages, **forced, stream=True):
    for choice in chunk.choices:
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            known = calls.setdefault(part.index, ["", ""])
            known[0] += part.function.name or ""
            known[1] += part.function.arguments or ""
made = called.message.tool_calls
messages += [
    called.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": made[0].id, "content": "done"},
]
after = client.chat.completions.create(messages=messages, **wanted, tool_choice="none").choices[0]

print(json.dumps({
    "whole": whole.choices[0].message.content, "finish": whole.choices[0].finish_reason,
    "streamed": "".join(pieces), "pieces": len(pieces), "finish_streamed": chunks[-2].choices[0].finish_reason,
    "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens, chunks[-1].choices],
    "choices": [each.index for each in several.choices], "models": [each.id for each in client.models.list()],
    "near": near, "far": far,
    "likely": ["".join(one.token for one in each.content) for each in likely if each],
    "tops": {len(one.top_logprobs) for each in likely if each for one in each.content} == {2},
    "said": [[text, each.tokens, each.text_offset, each.token_logprobs] for text, each in said if each],
    "completion": text.choices[0].text, "error": error, "joules": whole.usage.model_extra["edge"]["joules"],
    "object": {"parsed": parsed.model_dump(), "streamed": parsed_in_pieces.model_dump(), "cut": cut},
    "tools": {
        "finish": [called.finish_reason, finish], "streamed": [calls[index] for index in sorted(calls)],
        "whole": [[call.function.name, call.function.arguments] for call in made], "after": after.message.content,
    },
}))  # fmt: skip
