"""Grammars of calls, in llguidance's variant of Lark: what an answer must match so that the parser finds the calls.

Arguments match the JSON schema of their function. Blanks are those of `json.dumps`, as in chat templates, so that the
prompt of a conversation's next turn repeats the generated tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edge.json_schema import closed, is_text, resolve, standalone, variants
from edge.tools.formats import ToolFormat

_MOST_CALLS = 8  # in one answer: a model that writes nothing but calls would never end it
_ANY_TEXT = r"/(?s:.*)/"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    tokens: Mapping[str, int],
    name: str | None = None,
    required: bool = True,
    parallel: bool = True,
    thinks: bool = True,
) -> str:
    """The grammar of an answer that calls tools.

    tokens: special tokens of the vocabulary, by their text. name: the only function that may be called. required: the
    answer consists of calls; otherwise it may be text, or text and calls after it. parallel: several calls may follow
    each other. thinks: thoughts may come first, where the grammar includes them (`ToolFormat.begins`).
    """
    functions = [tool.get("function", tool) for tool in tools]
    functions = [each for each in functions if name in (None, each["name"])]
    writer = _Writer(form, tokens)
    if form.body == "header":
        writer.parts(functions, required=required, thinks=thinks)
        return writer.text
    calls = writer.calls(functions, parallel)
    if required:
        writer.rule("start", calls)
    elif form.opening in tokens:
        writer.rule("start", f"text [{calls}]")
        writer.rule("text", _ANY_TEXT)
    elif form.opening:
        mark = re.escape(form.opening).replace("/", r"\/")
        writer.rule("start", f"TEXT | before {writer.calls_behind_mark}")
        writer.rule("TEXT", f"{_ANY_TEXT} & ~/(?s:.*{mark}.*)/")
        writer.rule("before[lazy]", f"/(?s:.*){mark}/")
    else:
        writer.rule("start", f"TEXT | {calls}")
        writer.rule("TEXT", r"/([^{\[](?s:.*))?/")
    return writer.text


class _Writer:
    """The rules of a grammar, and names for them."""

    def __init__(self, form: ToolFormat, tokens: Mapping[str, int]) -> None:
        self._form, self._tokens = form, tokens
        self._rules: list[str] = []
        self._places: dict[tuple[int, str], str] = {}  # rules of references, by the schema within which they lead
        self.calls_behind_mark = ""

    @property
    def text(self) -> str:
        """The grammar, whose `start` comes first."""
        return "\n".join(reversed(self._rules)) + "\n"

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def _new(self, body: str) -> str:
        return self.rule(f"r{len(self._rules)}", body)

    def _mark(self, mark: str) -> str:
        return f"<[{self._tokens[mark]}]>" if mark in self._tokens else _literal(mark)

    def parts(self, functions: Sequence[Mapping[str, Any]], *, required: bool, thinks: bool) -> None:
        """The rules of an answer whose parts have headers: a thought, then a call or a text."""
        start, channel, message, end = (self._mark(f"<|{each}|>") for each in ("start", "channel", "message", "end"))
        behind = f'" " {self._mark("<|constrain|>")}? "json" {message}'
        calls = []
        for each in functions:
            to = _literal(f"{self._form.opening}{each['name']}")
            header = f'({to} {channel} "commentary" | {channel} "commentary" {to})'
            calls.append(f"{header} {behind} {self._json(_parameters(each))}")
        last = " | ".join(self._new(each) for each in calls)
        if not required:
            last += " | " + self._new(f'{channel} "final" {message} {self._new(_ANY_TEXT)}')
        thought = ""
        if thinks:
            inner = f"{self._new(_ANY_TEXT)} {end}" if "<|end|>" in self._tokens else self._new_lazy("<|end|>")
            thought = f'[{channel} "analysis" {message} {inner} {start} "assistant"] '
        self.rule("start", f"{thought}({last})")

    def calls(self, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        """The rule of one call or several."""
        form = self._form
        call = self._new(" | ".join(self._call(each["name"], _parameters(each)) for each in functions))
        blank = _literal("\n") if form.body in ("json", "tags") and form.closing else ""
        opening, closing = (self._mark(mark) if mark else "" for mark in (form.opening, form.closing))
        between = _literal(form.between) if form.between else ""
        if form.joined:
            more = f"({_literal(', ')} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else ""
            listed = f"{_literal('[')} {call} {more} {_literal(']')} {closing}"
            self.calls_behind_mark = listed
            return self._new(f"{opening} {listed}")
        behind = f"{blank} {call} {blank} {closing}"
        one = self._new(f"{opening} {behind}")
        more = f"({between} {one}){{0,{_MOST_CALLS - 1}}}" if parallel and form.opening else ""
        self.calls_behind_mark = f"{behind} {more}"
        return self._new(f"{one} {more}")

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        body = self._form.body
        if body == "json":
            before = f'{{"name": {json.dumps(name)}, {json.dumps(self._form.arguments)}: '
            return self._new(f"{_literal(before)} {self._json(schema)} {_literal('}')}")
        if body == "named":
            return self._new(f"{_literal(name)} {self._mark('[ARGS]')} {self._json(schema)}")
        rules = [self._fields(name, *each, schema) for each in variants(schema, schema)]
        return self._new(" | ".join(rules))

    def _fields(self, name: str, fields: Mapping[str, Any], required: Sequence[str], root: Any) -> str:
        """A call with these arguments in a form other than JSON. root: where references of their schemas lead."""
        body = self._form.body
        if body == "tags":
            tags = [self._tag(key, each, root) + ("" if key in required else "?") for key, each in fields.items()]
            return self._new(f"{_literal(f'<function={name}>' + chr(10))} {' '.join(tags)} {_literal('</function>')}")
        if body == "python":
            written = {key: f"{_literal(f'{key}=')} {self._python(each, root)}" for key, each in fields.items()}
            parts = [(self._new(each), key in required) for key, each in written.items()]
            return self._new(f"{_literal(f'{name}(')} {self._series(parts, ', ')} {_literal(')')}")
        return self._new(f"{_literal(f'call:{name}')} {self._object(fields, required, root, quoted=False)}")

    def _json(self, schema: Any) -> str:
        found = closed(schema) if isinstance(schema, Mapping) else {}
        return self._new(f"%json {json.dumps({**found, 'x-guidance': _COMPACT})}")

    def _tag(self, key: str, schema: Any, root: Any) -> str:
        opening, closing = f"<parameter={key}>\n", "\n</parameter>\n"
        if isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" in schema:
            value = "(" + " | ".join(_literal(f"{each}{closing}") for each in schema["enum"]) + ")"
        elif is_text(schema):
            value = self._new_lazy(closing)
        else:
            value = f"{self._json(standalone(schema, root))} {_literal(closing)}"
        return self._new(f"{_literal(opening)} {value}")

    def _new_lazy(self, end: str) -> str:
        """A rule for any text up to the first `end`."""
        name = f"r{len(self._rules)}"
        pattern = re.escape(end).replace("/", r"\/").replace("\\\n", r"\n")
        self.rule(f"{name}[lazy]", f"/(?s:.*){pattern}/")
        return name

    def _python(self, schema: Any, root: Any) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "boolean" and "enum" not in schema and "const" not in schema:
            return f"({_literal('True')} | {_literal('False')})"
        if kind == "null":
            return _literal("None")
        return self._json(standalone(schema, root))

    # `call:NAME{key:value}`, whose values are JSON except for quotation marks

    def _object(self, fields: Mapping[str, Any], required: Sequence[str], root: Any, *, quoted: bool) -> str:
        parts = []
        for key in sorted(fields, key=str.lower):
            written = f"{self._mark(self._form.quote)} {_literal(key)} {self._mark(self._form.quote)}"
            before = f"{written if quoted else _literal(key)} {_literal(':')}"
            parts.append((self._new(f"{before} {self._value(fields[key], root)}"), key in required))
        return f"{_literal('{')} {self._series(parts, ',')} {_literal('}')}"

    def _value(self, schema: Any, root: Any) -> str:
        if not isinstance(schema, Mapping):
            schema = {}
        if isinstance(reference := schema.get("$ref"), str):
            place = id(root), reference
            if place not in self._places:  # first its name: the schema may refer to itself
                name = self._places[place] = f"ref{len(self._places)}"
                self.rule(name, self._value(resolve(reference, root), root))
            return self._places[place]
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices:
            return "(" + " | ".join(self._constant(each) for each in choices) + ")"
        kinds = schema.get("type") or [each for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
        if isinstance(kinds, list) and kinds:
            kinds = [each if isinstance(each, Mapping) else {**schema, "type": each} for each in kinds]
            return "(" + " | ".join(self._value(each, root) for each in kinds) + ")"
        if kinds == "object" or "properties" in schema or "allOf" in schema:
            return self._new(" | ".join(self._object(*each, root, quoted=False) for each in variants(schema, root)))
        if kinds == "string" or not kinds:
            quote = self._mark(self._form.quote)
            if self._form.quote in self._tokens:
                return self._new(f"{quote} {self.rule(f'r{len(self._rules)}', _ANY_TEXT)} {quote}")
            return self._new(f"{quote} {self._new_lazy(self._form.quote)}")
        if kinds == "array":
            item = self._new(self._value(schema.get("items", {}), root))
            return self._new(f"{_literal('[')} [{item} ({_literal(',')} {item})*] {_literal(']')}")
        return self._json(standalone(schema, root))

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            quote = self._mark(self._form.quote)
            return f"{quote} {_literal(value)} {quote}" if value else f"{quote} {quote}"
        return _literal(json.dumps(value))

    def _series(self, parts: Sequence[tuple[str, bool]], between: str) -> str:
        """A rule for parts in their order, with separators: all required parts, and any of the others."""
        first = more = self._new('""')
        for part, required in reversed(parts):
            follows = more
            more = self._new(f"{_literal(between)} {part} {follows}" + ("" if required else f" | {follows}"))
            first = self._new(f"{part} {follows}" + ("" if required else f" | {first}"))
        return first


def _literal(text: str) -> str:
    return json.dumps(text)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an object, which has none unless the schema speaks of them."""
    stated = function.get("parameters")
    found = dict(stated) if isinstance(stated, Mapping) else {}
    if not found.keys() & {
        "properties",
        "additionalProperties",
        "patternProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
    }:
        found["properties"] = {}
    return {**found, "type": "object"}
