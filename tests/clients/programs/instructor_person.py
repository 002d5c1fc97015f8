"""instructor: an object of a class, by a JSON schema."""

import json
import sys
from typing import Annotated

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

url, model, question = sys.argv[1:]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a schema allows any number of other fields
    name: Annotated[str, Field(max_length=12, pattern="^[A-Za-z ]*$")]
    age: Annotated[int, Field(ge=0, le=120)]


client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
person = client.create(
    model=model, response_model=Person, messages=[{"role": "user", "content": question}], temperature=0, max_retries=0,
    max_tokens=100,
)  # fmt: skip
print(json.dumps(person.model_dump()))
