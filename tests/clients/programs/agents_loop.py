"""openai-agents: a loop of an agent with a tool, which the first turn must call."""

import json
import sys
from typing import Literal

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, model, question = sys.argv[1:]
set_tracing_disabled(True)
painted = []


@function_tool
def paint(colour: Literal["red", "green", "blue"]) -> str:
    """Paint a wall."""
    painted.append(colour)
    return "The wall is painted."


agent = Agent(
    name="painter", tools=[paint],
    model=OpenAIChatCompletionsModel(model, openai_client=AsyncOpenAI(base_url=url, api_key="none")),
    model_settings=ModelSettings(temperature=0, max_tokens=48, tool_choice="required"),
)  # fmt: skip
try:
    answer = Runner.run_sync(agent, question, max_turns=3).final_output
except AgentsException as error:  # a small model may go on calling, or call something else
    answer = type(error).__name__
print(json.dumps({"painted": painted, "answer": answer}))
