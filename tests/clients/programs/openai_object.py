"""openai: structured output as an object of a class, whole and streamed."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model, question = sys.argv[1:]


class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
    sure: bool


client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
asked = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
parsed = client.chat.completions.parse(**asked, response_format=Answer).choices[0].message.parsed
with client.chat.completions.stream(**asked, response_format=Answer) as stream:
    streamed = stream.get_final_completion().choices[0].message.parsed
try:
    client.chat.completions.parse(**asked, response_format=Answer, max_tokens=3)
    cut = False
except openai.LengthFinishReasonError:
    cut = True
print(json.dumps({"parsed": parsed.model_dump(), "streamed": streamed.model_dump(), "cut": cut}))
