"""langchain-openai: a chat, whole and streamed."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model, question = sys.argv[1:]
chat = ChatOpenAI(base_url=url, model=model, api_key="none", temperature=0, max_tokens=16)
streamed = "".join(str(chunk.content) for chunk in chat.stream(question))
print(json.dumps({"whole": chat.invoke(question).content, "streamed": streamed}))
