"""openai: a chat, whole and streamed, several choices, models, completions, an error."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model, question = sys.argv[2:]
asked = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
whole = client.chat.completions.create(**asked)
chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
several = client.chat.completions.create(**asked | {"temperature": 1, "seed": 7, "n": 2})
text = client.completions.create(model=model, prompt="One, two,", temperature=0, max_tokens=4)
try:
    client.chat.completions.create(**asked | {"model": "missing"})
    error = None
except openai.NotFoundError as found:
    error = found.code
print(json.dumps({
    "whole": whole.choices[0].message.content, "finish": whole.choices[0].finish_reason,
    "streamed": "".join(pieces), "pieces": len(pieces), "finish_streamed": chunks[-2].choices[0].finish_reason,
    "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens, chunks[-1].choices],
    "choices": [each.index for each in several.choices], "models": [each.id for each in client.models.list()],
    "completion": text.choices[0].text, "error": error, "joules": whole.usage.model_extra["edge"]["joules"],
}))  # fmt: skip
