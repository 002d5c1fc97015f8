"""Chats with Ollama's package, whole and streamed, its lists of models, loading, embeddings, and errors."""

from __future__ import annotations

import json
import sys

import ollama

url, model, question = sys.argv[1:]
client = ollama.Client(host=url.removesuffix("/v1"))
options = {"temperature": 0, "num_predict": 16}
asked = {"model": model, "messages": [{"role": "user", "content": question}], "options": options}
whole = client.chat(**asked)
streamed = "".join(each.message.content for each in client.chat(**asked, stream=True))
client.generate(model=model, keep_alive=0)
gone = len(client.ps().models)
loaded = client.generate(model=model).done_reason
[listed], [running] = client.list().models, client.ps().models
embedded = client.embed(model=model, input=[question, "Stones"])
errors = []
for ask in (lambda: client.show("nothing"), lambda: client.delete(model), lambda: client.copy(model, "other")):
    try:
        ask()
    except ollama.ResponseError as error:
        errors.append([error.status_code, error.error])
print(json.dumps({
    "whole": whole.message.content, "streamed": streamed, "counts": [whole.prompt_eval_count, whole.eval_count],
    "generated": client.generate(model=model, prompt=question, options=options).response,
    "loaded": [gone, loaded, running.model, running.size > 0], "listed": [listed.model, len(listed.digest)],
    "pulled": client.pull(model).status, "show": client.show(model).capabilities,
    "embedded": [len(embedded.embeddings), len(client.embeddings(model=model, prompt="a").embedding)],
    "errors": errors,
}))  # fmt: skip
