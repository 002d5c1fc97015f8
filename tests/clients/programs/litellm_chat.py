"""litellm: a chat, whole and streamed."""

import json
import sys

import litellm

url, model, question = sys.argv[1:]
asked = {
    "model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 16,
    "messages": [{"role": "user", "content": question}],
}  # fmt: skip
whole = litellm.completion(**asked)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
print(json.dumps({"whole": whole.choices[0].message.content, "streamed": streamed}))
