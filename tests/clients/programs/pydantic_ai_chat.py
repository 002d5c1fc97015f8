"""pydantic-ai: a chat."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model, question = sys.argv[1:]
provider = OpenAIProvider(base_url=url, api_key="none")
agent = Agent(OpenAIChatModel(model, provider=provider), model_settings={"temperature": 0, "max_tokens": 16})
print(json.dumps({"whole": agent.run_sync(question).output}))
