"""A picture and a question with the packages of OpenAI, Anthropic and Ollama, and a picture in the result of a tool."""

from __future__ import annotations

import base64
import json
import sys

import anthropic
import ollama
import openai

url, model, question, path = sys.argv[1:]
with open(path, "rb") as file:
    data = base64.b64encode(file.read()).decode()
address = f"data:image/png;base64,{data}"
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

open_ai = openai.OpenAI(base_url=url, api_key="any-key", max_retries=0)
parts = [{"type": "image_url", "image_url": {"url": address, "detail": "low"}}, {"type": "text", "text": question}]
chat = open_ai.chat.completions.create(
    model=model, messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0
)
responses = open_ai.responses.create(
    model=model, max_output_tokens=4, temperature=0,
    input=[{"role": "user", "content": [
        {"type": "input_image", "image_url": address}, {"type": "input_text", "text": question}]}],
)  # fmt: skip

claude = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any-key", max_retries=0)
asked = {"model": model, "max_tokens": 4, "extra_body": {"temperature": 0}}
message = claude.messages.create(
    messages=[{"role": "user", "content": [image, {"type": "text", "text": question}]}], **asked
)


def counted(*content: object) -> int:
    """Tokens of a conversation in which a tool gave back this."""
    return claude.messages.count_tokens(model=model, messages=[
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [*content]}]},
    ]).input_tokens  # fmt: skip


llama = ollama.Client(host=url.removesuffix("/v1"))
said = llama.chat(
    model=model, messages=[{"role": "user", "content": question, "images": [path]}],
    options={"temperature": 0, "num_predict": 4},
)  # fmt: skip
try:
    broken = [{"type": "image_url", "image_url": {"url": address[:202]}}]
    open_ai.chat.completions.create(model=model, messages=[{"role": "user", "content": broken}])
    error = ""
except openai.BadRequestError as refused:
    error = refused.message
print(json.dumps({
    "texts": [chat.choices[0].message.content, responses.output_text, message.content[0].text, said.message.content],
    "tool": counted(image) - counted(), "vision": "vision" in llama.show(model).capabilities, "error": error,
}))  # fmt: skip
