"""Grammars of calls in apps: the C runtime accepts the answers that edge.tools.lark's grammars accept."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t
from typing import Any

import pytest
from conftest import exhaustive
from ctypes_bundle import ERRORS, _Error
from test_constrain import drawn_by_llguidance, harness, judge
from test_runtime_tools import BODIES
from test_tool_grammar import MIXED, ROOTS, WORD

from edge.errors import EngineError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.tools.formats import FORMATS, ToolFormat
from edge.tools.use import ToolUse

pytest.importorskip("llguidance")

NOTE = {"type": "object", "required": ["text", "any"], "properties": {
    "text": {"type": "string"}, "any": {}, "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "kind": {"type": ["boolean", "null"]}, "Word": WORD, "yes": {"type": "boolean"}}}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": each, "parameters": schema}}
    for each, schema in {"mix": MIXED, "note": NOTE, "none": None, "all": {}}.items()
]
CHOICES: dict[str, Any] = {
    "required": {"required": True}, "one": {"only": "note"}, "auto": {},
    "single": {"required": True, "parallel": False},
}  # fmt: skip


def set_calls(
    form: ToolFormat, tools: Any, *, only: str | None = None, required: bool = False, parallel: bool = True
) -> None:
    texts = [form.opening, form.closing, form.quote, form.arguments, form.between]
    kept, error, data = [each.encode() for each in texts], _Error(), json.dumps(tools).encode()
    status = c_int32(
        harness().library.harness_calls(
            data, c_size_t(len(data)), BODIES.index(form.body), form.joined, (ctypes.c_char_p * 5)(*kept),
            only.encode() if only else None, int(required or only is not None), int(parallel and only is None),
            byref(error),
        )
    ).value  # fmt: skip
    if status:
        raise ERRORS.get(status, EngineError)(error.message.decode())


def lark(form: ToolFormat, tools: Any, **choice: Any) -> Grammar:
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in tools]
    text = ToolUse(form, strict, **choice).grammar({})
    assert text is not None
    return Grammar(lark=text)


def check_alike(form: ToolFormat, tools: Any, seed: int, **choice: Any) -> None:
    c, chance, grammar = harness(), random.Random(f"{form.name} {choice} {seed}"), lark(form, tools, **choice)
    set_calls(form, tools, **choice)
    texts = [text for _ in range(2) for text in (c.draw(chance, 400), drawn_by_llguidance(grammar, chance)) if text]
    assert texts or choice.get("required") or choice.get("only")
    for text in texts:
        try:
            text.decode()
        except UnicodeDecodeError:
            raise AssertionError(text) from None
        assert judge(grammar, text) or b"\\" in text, text  # it has fewer escapes
        assert c.accepts(text), text
        for _ in range(4):
            at = chance.randrange(len(text))
            other = text[:at] + bytes([chance.choice(b'0"a,}]<> \n')]) + text[at + 1 :]
            try:
                other.decode()
            except UnicodeDecodeError:
                continue
            assert c.accepts(other) == judge(grammar, other), other


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_answers_are_those_of_python(form: ToolFormat, choice: str) -> None:
    check_alike(form, TOOLS, 0, **CHOICES[choice])


BY_BODY = tuple({form.body: form for form in FORMATS}.values())  # one form of each


@pytest.mark.parametrize("forms", [BY_BODY, exhaustive(FORMATS)], ids=["by body", "all"])
@pytest.mark.parametrize("root", ROOTS)
def test_arguments_with_references_are_those_of_python(root: str, forms: Sequence[ToolFormat]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": ROOTS[root]}}]
    for form in forms:
        check_alike(form, tools, 0, required=True)


@pytest.mark.parametrize("seed", [exhaustive(each) for each in range(6)])
def test_more_answers_are_those_of_python(seed: int) -> None:
    for form in FORMATS:
        for choice in CHOICES.values():
            check_alike(form, TOOLS, seed + 1, **choice)


def test_schemas_of_endless_objects_are_refused() -> None:
    form = next(form for form in FORMATS if form.body == "call")
    endless = {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}, {"$ref": "#"}]}}}
    for schema in (endless, {"type": "object", "properties": {"child": {"allOf": [{"$ref": "#"}]}}}):
        with pytest.raises(UnsupportedError, match="objects in more than 32 others"):
            set_calls(form, [{"type": "function", "function": {"name": "f", "parameters": schema}}], required=True)
