"""Chat templates with tools, in the manner of well-known families: their wire forms, with fewer words around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# As templates/NAME.jinja has them.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
# JSON in tags; consecutive results in one turn of the user; thoughts stay since the last question.
QWEN3 = TEMPLATES["qwen3"]
# As Qwen3.5's and Qwen3-Coder's: a tag for each parameter. The prompt opens the thoughts.
QWEN35 = TEMPLATES["qwen35"]
# Sorted arguments, strings between marks of their own, results in the turn that called.
GEMMA4 = TEMPLATES["gemma4"]
LFM2 = TEMPLATES["lfm2"]  # Python calls in a list
LLAMA32 = TEMPLATES["llama32"]  # one call at a time, in JSON that nothing marks; tools in the first question
SMOLLM3 = TEMPLATES["smollm3"]  # Hermes' form; tools as Python writes them; earlier calls are dropped
MISTRAL = TEMPLATES["mistral"]  # the name and the arguments behind marks
# The harmony format: functions as types, one call a message, whose recipient stands behind the role.
GPT_OSS = TEMPLATES["gpt-oss"]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a city, in "°C".\nNow.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer", "default": 1},
                "Units": {"type": "string", "enum": ["metric", "imperial"]},
            },
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "The time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
    },
}
TOOLS = [WEATHER, TIME]


def call(name: str, arguments: str, identifier: str = "call12345") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
