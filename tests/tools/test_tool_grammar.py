"""Grammars of calls: a random model at temperature 1 that must call writes calls, which the parser finds complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from small_models import Small, Special, write_small
from test_chat import CHATML
from tool_templates import GEMMA4, GPT_OSS, LFM2, LLAMA32, MISTRAL, QWEN3, QWEN35

from edge.errors import InputError
from edge.run.report import RunReport
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.tools.formats import find_format

pytest.importorskip("llguidance")

WORD = {"type": "string", "enum": ["a b", "it's", '"', "<é>"]}
MIXED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "word": WORD,
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"w": WORD, "n": {"type": "null"}}, "required": ["w"],
                  "additionalProperties": False},
        "either": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    },
    "required": ["number", "inner"],
    "additionalProperties": False,
}  # fmt: skip
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "mix", "parameters": MIXED}},
    {"type": "function", "function": {"name": "nothing", "parameters": NOTHING}},
]
SCHEMAS = {"mix": MIXED, "nothing": NOTHING}
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HI = [{"role": "user", "content": "Hi"}]
HERMES_MARKS = ("<tool_call>", "</tool_call>")
MODELS = {
    "hermes": Special(defined=HERMES_MARKS, template=QWEN3),
    "hermes, marks in text": Special(template=CHATML),
    "qwen-tags": Special(defined=HERMES_MARKS, template=QWEN35),
    "gemma4": Special(control=("<|tool_call>", "<tool_call|>", '<|"|>'), template=GEMMA4),
    "gemma4, marks in text": Special(template=GEMMA4),
    "lfm2": Special(control=("<|tool_call_start|>", "<|tool_call_end|>"), template=LFM2),
    "llama3": Special(control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), template=LLAMA32),
    "mistral": Special(control=("[TOOL_CALLS]", "[ARGS]"), template=MISTRAL),
    "harmony": Special(control=HARMONY, template=GPT_OSS),
}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value matches a schema, as far as those above go."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if schema["type"] == "object":
        known = schema["properties"]
        return {*schema.get("required", ())} <= value.keys() <= known.keys() and all(
            fits(each, known[key]) for key, each in value.items()
        )
    if schema["type"] == "array":
        return len(value) <= schema.get("maxItems", 99) and all(fits(each, schema["items"]) for each in value)
    kind: type = {"string": str, "integer": int, "boolean": bool, "null": type(None)}[schema["type"]]
    small = schema["type"] != "integer" or schema["minimum"] <= value <= schema["maximum"]
    return type(value) is kind and value in schema.get("enum", [value]) and small


@pytest.fixture(scope="module", params=MODELS)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A random model with the template and the marks of a family."""
    path = tmp_path_factory.mktemp("family") / f"{request.param}.gguf"
    write_small(path, Small(context=4096, vocab=280), special=MODELS[request.param])
    with load(path, backend="reference", max_kv_size=3000) as opened:
        yield opened


def answer(session: Session, seed: int, most: int = 1500, **options: Any) -> RunReport:
    """The report of an answer at temperature 1."""
    sampling = session.model.sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    think = {"think": "off"} if session.model.template.family else {}  # type: ignore[union-attr]
    prompt = session.model.chat_prompt(HI, **{**think, **options})
    text = "".join(session.stream(prompt, sampling=sampling, max_tokens=most, think=options.get("think")))
    assert text == session.report.text
    return session.report  # type: ignore[return-value]


def test_calls_that_are_forced_are_complete(session: Session) -> None:
    name = session.model.path.stem
    assert name.startswith(find_format(MODELS[name].template).name)
    several = name in ("hermes", "lfm2")
    for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "mix"}}]):
        report = answer(session, seed, tools=TOOLS, tool_choice=choice, parallel_tool_calls=several)
        assert (report.stop_reason, report.text) == ("tool_calls", "")
        assert report.tool_calls
        for call in report.tool_calls:
            assert fits(json.loads(call.arguments), SCHEMAS[call.name]), call.arguments
        if choice != "required":
            assert [call.name for call in report.tool_calls] == ["mix"]


FLAG = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]}
LIST = {"type": "object", "properties": {"n": {"$ref": "#/$defs/small"}}, "required": ["n"]}
DEFS = {"flag": FLAG, "list": LIST, "small": {"type": "integer", "minimum": 0, "maximum": 9}}
NEXT = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
NODE = {"type": "object", "properties": {"v": {"type": "boolean"}, "next": NEXT}, "required": ["v"]}
ROOTS: dict[str, dict[str, Any]] = {
    "$ref": {"$ref": "#/$defs/list", "$defs": DEFS},
    "allOf": {"allOf": [{"$ref": "#/$defs/flag"}, {"$ref": "#/$defs/list"}], "$defs": DEFS},
    "anyOf": {"anyOf": [{"$ref": "#/$defs/flag"}, {"$ref": "#/$defs/list"}], "$defs": DEFS},
    "recursive": NODE,
}


def test_schemas_whose_root_is_no_plain_object(session: Session) -> None:
    """As pydantic writes them, for models that refer to each other or to themselves."""
    jsonschema = pytest.importorskip("jsonschema")
    for seed, (root, schema) in enumerate(ROOTS.items()):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        (call,) = answer(session, seed, tools=[tool], tool_choice="f").tool_calls
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schema)
        assert arguments.keys() <= {"$ref": {"n"}, "recursive": {"v", "next"}}.get(root, {"flag", "n"})


TEXTS = {"text": {"type": "string"}, "list": {"type": "array", "items": {"type": "string"}}, "n": {"type": "number"}}
NOTE = {"type": "object", "properties": TEXTS, "required": ["text", "list"]}


def test_forced_call_is_complete_within_its_limit(session: Session) -> None:
    """A text without end is closed when the tokens left are just enough; the stop reason says so."""
    tool = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
    for seed, most in enumerate([120, 230]):
        report = answer(session, seed, most, tools=[tool], tool_choice="required")
        assert (report.text, report.incomplete) == ("", None)
        assert report.stop_reason in ("length", "tool_calls")
        assert report.tokens.generated <= most
        assert report.tool_calls
        for call in report.tool_calls:
            assert {"text", "list"} <= json.loads(call.arguments).keys() <= TEXTS.keys()


def test_strict_tools_leave_text_free(session: Session) -> None:
    """Any text may be the answer, and may end anywhere outside a call."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    report = answer(session, 3, 60, tools=strict)
    assert report.text or report.tool_calls or report.incomplete
    for call in report.tool_calls:
        assert fits(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("session", ["harmony"], indirect=True)
@pytest.mark.parametrize("think", [4, "30"])
def test_forced_call_behind_thought_with_header(session: Session, think: Any) -> None:
    """gpt-oss's thought is free until its budget is used up; the next header names a function."""
    report = answer(session, 5, tools=TOOLS, tool_choice="mix", think=think)
    assert (report.stop_reason, report.text) == ("tool_calls", "")
    assert [call.name for call in report.tool_calls] == ["mix"]
    assert fits(json.loads(report.tool_calls[0].arguments), MIXED)


@pytest.mark.parametrize("choice", ["nobody", {"type": "function"}, 5, {"function": {"name": 5}}])
@pytest.mark.parametrize("session", ["hermes"], indirect=True)
def test_invalid_tool_choices_are_refused(session: Session, choice: Any) -> None:
    with pytest.raises(InputError, match="tool_choice must be auto, none, required, or the name of a tool"):
        session.generate("Hi", tools=TOOLS, tool_choice=choice)
    with pytest.raises(InputError, match="beams goes without tools"):
        session.generate("Hi", tools=TOOLS, beams=2, max_tokens=4)
    with pytest.raises(InputError, match="there are none"):
        session.generate(messages=HI, tool_choice="required")
