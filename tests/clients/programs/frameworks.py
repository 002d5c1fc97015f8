"""A chat with litellm, langchain-openai and pydantic-ai; a loop of openai-agents whose first turn must call a tool."""

import json
import sys
from typing import Literal

import agents
import litellm
import pydantic_ai
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model, question = sys.argv[1:]
asked = {
    "model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 16,
    "messages": [{"role": "user", "content": question}],
}  # fmt: skip
chain = ChatOpenAI(base_url=url, model=model, api_key="none", temperature=0, max_tokens=16)
provider = OpenAIProvider(base_url=url, api_key="none")
agent = pydantic_ai.Agent(
    OpenAIChatModel(model, provider=provider), model_settings={"temperature": 0, "max_tokens": 16}
)
texts = {
    "litellm": litellm.completion(**asked).choices[0].message.content,
    "litellm's stream": "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    ),
    "langchain": chain.invoke(question).content,
    "langchain's stream": "".join(str(chunk.content) for chunk in chain.stream(question)),
    "pydantic-ai": agent.run_sync(question).output,
}
painted = []


@agents.function_tool
def paint(colour: Literal["red", "green", "blue"]) -> str:
    """Paint a wall."""
    painted.append(colour)
    return "The wall is painted."


agents.set_tracing_disabled(True)
painter = agents.Agent(
    name="painter", tools=[paint],
    model=agents.OpenAIChatCompletionsModel(model, openai_client=AsyncOpenAI(base_url=url, api_key="none")),
    model_settings=agents.ModelSettings(temperature=0, max_tokens=48, tool_choice="required"),
)  # fmt: skip
try:
    answer = agents.Runner.run_sync(painter, "Paint the wall red.", max_turns=3).final_output
except agents.AgentsException as error:  # a small model may go on calling, or call something else
    answer = type(error).__name__
print(json.dumps({"texts": texts, "painted": painted, "answer": answer}))
