"""openai: a chat, whole and streamed, with log-probabilities, several choices, models, completions, an error."""

import json
import sys
from operator import mul

import openai

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
}))  # fmt: skip
