"""Grammars in apps, of answers and of calls: the C runtime accepts what llguidance, jsonschema and `re` accept."""

from __future__ import annotations

import ctypes
import json
import random
import re
from copy import copy
from ctypes import byref, c_int32, c_size_t
from functools import lru_cache
from itertools import islice
from typing import Any

import jsonschema
import numpy as np
import pytest
from bundles import bundle_of, model_of, refused
from conftest import examples
from ctypes_bundle import ERRORS, _Error, open_bundle
from runtime_library import load_runtime
from test_runtime_tools import BODIES
from test_tool_grammar import MIXED, ROOTS, WORD

from edge.apps.enums import Finish, Form, Role
from edge.errors import EngineError, InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.grammar.matcher import Matcher
from edge.tools.formats import FORMATS, ToolFormat
from edge.tools.use import ToolUse
from edge.types import AnyArray

pytest.importorskip("llguidance")

MODEL = "llama-gqa-tied"
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}, "required": ["x"]}
SCHEMAS: tuple[Any, ...] = (
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2,4}-\\d+$"},
    {"type": "string", "pattern": "b[\"\\\\é]"},
    {"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 3},
    *({"type": "string", "format": each} for each in ("date-time", "ipv6", "uuid", "email", "hostname", "time")),
    {"enum": ["a", "ab", 1, None, True, {"k": [1, "\"é"]}]}, {"const": "x"},
    {"type": "integer"}, {"type": "number"}, {"type": ["boolean", "null"]},
    {"type": "integer", "minimum": -17, "maximum": 120}, {"type": "integer", "exclusiveMinimum": 98},
    {"type": "number", "minimum": 0.25, "exclusiveMaximum": 12.5}, {"type": "number", "maximum": -3.75},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "b"}], "items": False},
    POINT, {**POINT, "required": ["x", "z"]}, {"type": "object", "additionalProperties": POINT},
    {"type": "object", "properties": {"é": {"const": 1}, "eb": {"const": 2}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^[a-z]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {"oneOf": [{"type": "object", "properties": {"t": {"const": each}, each: {"type": "integer"}},
                "required": ["t", each]} for each in ("p", "q")]},
    {"$defs": {"n": {"maxLength": 2}},
     "allOf": [POINT, {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}]},
    {}, {"type": "object"},
)  # fmt: skip
FEW = {
    '{"properties": {"é": {"type": "null"}, "éb": {}}, "additionalProperties": {"const": 1}}': (
        ['{"é":null}', '{"ê":1}', '{"£":1}', '{"日":1}', '{"éa":1}', '{"é😀":1}', '{"b":1}'],
        ['{"é":1}', '{"ê":null}'],
    ),
    '{"enum": [1, 2], "exclusiveMinimum": 1}': (["2"], ["1"]),
    '{"enum": [1, 2, 3], "maximum": 3, "exclusiveMaximum": true}': (["1", "2"], ["3"]),
}
REGEXES = ("(yes|no)[.]", "a{2,4}b?", "[^a-y\n]é.", r"\d+(\.\d{2})?", "(?:ab|a)*c", r"x\u00e9[\x41-\x43\]-]", "^a|bc$")
NAMES = [f"property {each}" for each in range(40)]
DEEP = {each: {"type": "object", "required": NAMES, "properties": {key: {"$ref": f"#/$defs/{each}"} for key in NAMES}}
        for each in ("s", "t")}  # fmt: skip
REFUSED = {
    json.dumps({"oneOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/t"}], "$defs": DEEP}): "may hold at once",
    '{"enum": ["a"], "format": "date"}': "beside other keywords",
    '{"not": {}}': "cannot be enforced: not", '{"type": "array", "uniqueItems": true}': "uniqueItems",
    '{"type": "string", "format": "color"}': "format color", '{"type": "integer", "multipleOf": 3}': "multipleOf",
    '{"oneOf": [{"type": "integer"}, {"type": "number"}]}': "oneOf that may hold at once",
    '{"type": "string", "pattern": "(?=a)"}': "looks ahead", '{"type": "string", "pattern": "\\\\bx"}': "escape",
    '{"$ref": "http://example.com"}': "a reference outside of it, http://example.com",
    '{"type": "integer", "minimum": 3, "maximum": 2}': "matches no text", "false": "matches no text",
}  # fmt: skip
MALFORMED = {
    "{": "no JSON: a member without a name at byte 1", '{"type": "strin"}': "malformed: type",
    '{"enum": []}': "malformed: enum",
    "[1,]": "no JSON",
    '{"$ref": "#/$defs/a"}': "refers to what it lacks: #/$defs/a", '"x"': "neither an object nor true nor false",
    '{"type": "string", "maxLength": -1}': "malformed: maxLength", '{"a": "\\ud800"}': "unknown escape",
}  # fmt: skip


class Harness:
    """The grammars of the C runtime, with the vocabulary of a golden model."""

    def __init__(self) -> None:
        names = ("rules", "json", "numbers", "regexp", "schema", "schema_base", "schema_scalars", "schema_members",
                 "automaton", "mask", "call_rules", "call_parts", "call_fields", "call_forms", "call_literals",
                 "call_values", "tool_list")  # fmt: skip
        sources = [f"{each}.c" for each in (*names, "grammar_harness", "vocabulary", "utf8", "error")]
        self.library = load_runtime(*sources)
        self.library.harness_match.restype = c_size_t
        self.tokenizer = model_of(MODEL).tokenizer
        self.pieces = [self.tokenizer.piece(each) for each in range(self.tokenizer.size)]
        self._kept = (
            b"".join(self.pieces), np.cumsum([0, *map(len, self.pieces)]).astype(np.uint32),
            np.array(sorted(self.tokenizer.end_ids), np.int32),
        )  # fmt: skip
        data, starts, ends = self._kept
        self.library.harness_open(
            data, starts.ctypes.data_as(ctypes.c_void_p), len(self.pieces), ends.ctypes.data_as(ctypes.c_void_p),
            len(ends),
        )  # fmt: skip

    def set(self, text: str, is_regex: bool = False) -> None:
        error, data = _Error(), text.encode()
        if status := c_int32(self.library.harness_set(int(is_regex), data, c_size_t(len(data)), byref(error))).value:
            raise ERRORS.get(status, EngineError)(error.message.decode())

    def matched(self, text: bytes) -> int:
        """How many bytes may begin an answer."""
        return int(self.library.harness_match(text, c_size_t(len(text))))

    def accepts(self, text: str | bytes) -> bool:
        data = text.encode() if isinstance(text, str) else text
        return self.matched(data) == len(data) and bool(self.library.harness_accepts())

    def draw(self, chance: random.Random, most: int = 60) -> bytes | None:
        """A text that is accepted, byte by byte; None if none came within so many bytes."""
        text, room = b"", (ctypes.c_uint8 * 256)()
        self.matched(text)
        for _ in range(most):
            ended, follows = self.library.harness_accepts(), self.library.harness_next(room)
            if ended and (not follows or chance.random() < 0.4):
                return text
            likely = [each for each in room[:follows] if each < 0x80 or chance.random() < 0.3]
            text += bytes([chance.choice(likely or room[:follows])])
            self.library.harness_follow(text[-1])
        return text if self.accepts(text) else None

    def mask(self) -> AnyArray:
        logits = np.zeros(len(self.pieces), np.float32)
        assert self.library.harness_logits(logits.ctypes.data_as(ctypes.c_void_p))
        return logits == 0


@lru_cache
def harness() -> Harness:
    return Harness()


@lru_cache(1)
def compiled(grammar: Grammar) -> Matcher:
    return Matcher(grammar, harness().tokenizer)


def matcher_of(grammar: Grammar) -> Matcher:
    """A matcher at the beginning of an answer. A grammar is compiled once for all its texts."""
    matcher = copy(compiled(grammar))
    matcher._matcher = matcher._matcher.deep_copy()
    return matcher


def judge(grammar: Grammar, text: bytes) -> bool:
    """Whether llguidance accepts a text, token by token."""
    matcher = matcher_of(grammar)
    for token in harness().tokenizer.encode(text.decode(), start=False).tolist():
        logits = np.zeros(harness().tokenizer.size, np.float32)
        matcher.mask(logits)
        if logits[token] != 0:
            return False
        matcher.accept(token)
    return matcher.complete


def is_alike(c: Harness, grammar: Grammar, text: bytes) -> bool:
    """Whether C accepts a text if llguidance does, which has fewer escapes."""
    accepted = c.accepts(text)
    return accepted == judge(grammar, text) or (accepted and re.search(rb"\\[/u]", text) is not None)


def drawn_by_llguidance(grammar: Grammar, chance: random.Random) -> bytes | None:
    matcher, text = matcher_of(grammar), b""
    for _ in range(80):
        if matcher.complete and (matcher.ended or chance.random() < 0.4):
            return text
        logits = np.zeros(harness().tokenizer.size, np.float32)
        matcher.mask(logits)
        allowed = [int(each) for each in np.flatnonzero(logits == 0) if harness().pieces[each]]
        if not allowed:
            return text if matcher.complete else None
        token = chance.choice(allowed)
        matcher.accept(token)
        text += harness().pieces[token]
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda each: json.dumps(each)[:60])
def test_schemas_accept_what_llguidance_and_jsonschema_accept(schema: Any) -> None:
    c, chance, grammar = harness(), random.Random(json.dumps(schema)), Grammar(json_schema=json.dumps(schema))
    c.set(json.dumps(schema))
    for _ in range(6):
        if (text := c.draw(chance)) is not None:
            try:
                value = json.loads(text.decode())
            except UnicodeDecodeError:
                raise AssertionError(text) from None
            jsonschema.validate(value, schema)
            assert judge(grammar, text) or b"\\u" in text or "format" in schema, text  # of which it has fewer
        if (text := drawn_by_llguidance(grammar, chance)) is not None:
            assert c.accepts(text), text
            for at in range(len(text)):
                changed = text[:at] + bytes([chance.choice(b'0"a,}]')]) + text[at + 1 :]
                if c.accepts(changed):
                    jsonschema.validate(json.loads(changed), schema)


@pytest.mark.parametrize("pattern", REGEXES)
def test_regular_expressions_accept_what_re_accepts(pattern: str) -> None:
    c, chance = harness(), random.Random(pattern)
    c.set(pattern, is_regex=True)
    found = {text for _ in range(30) if (text := c.draw(chance)) is not None}
    assert found
    for text in found:
        decoded = text.decode()
        for each in (decoded, decoded[1:], decoded + "a", decoded.replace("a", "b", 1)):
            assert c.accepts(each) == bool(re.fullmatch(pattern, each, re.ASCII)), each


@pytest.mark.parametrize("schema", FEW)
def test_constants_match_what_stands_beside_them(schema: str) -> None:
    harness().set(schema)
    for each in (0, 1):
        assert all(harness().accepts(text) != each for text in FEW[schema][each])


@pytest.mark.parametrize("pattern", ["a(", "a**", "[z-a]", 40 * "(" + 20 * "a", 59 * "a" + "é("])
def test_malformed_expressions_are_named(pattern: str) -> None:
    refused(InputError, "the regular expression is malformed: ", harness().set, pattern, is_regex=True)


@pytest.mark.parametrize(("schema", "said"), (REFUSED | MALFORMED).items())
def test_unenforceable_schemas_are_refused_by_name(schema: str, said: str) -> None:
    with pytest.raises(UnsupportedError if schema in REFUSED else InputError, match=re.escape(said)) as caught:
        harness().set(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [SCHEMAS[0], SCHEMAS[2], SCHEMAS[21], {}], ids=str)
def test_masks_are_those_of_single_tokens(schema: Any) -> None:
    """Whatever is known of plain characters, and of states that recur."""
    c, chance = harness(), random.Random(7)
    c.set(json.dumps(schema))
    text = b""
    for _ in range(40):
        mask, room = c.mask(), range(len(c.pieces))
        expected = [bool(piece) and c.matched(text + piece) == len(text + piece) for piece in c.pieces]
        for end in c.tokenizer.end_ids:
            expected[end] = c.accepts(text)
        assert mask.tolist() == expected, text
        allowed = [each for each in room if mask[each] and c.pieces[each]]
        if not allowed:
            break
        token = chance.choice(allowed)
        assert c.library.harness_accept(token)
        text += c.pieces[token]


def test_long_ways_to_the_end_are_found() -> None:
    """Whatever the model would write, an answer of 20 properties is closed in time."""
    c, names = harness(), NAMES[:20]
    c.set(json.dumps({"type": "object", "properties": {key: {"type": "string"} for key in names}, "required": names}))
    single = {piece: token for token, piece in enumerate(c.pieces) if len(piece) == 1}
    text, left = b"", 700
    while not c.library.harness_ended():
        wanted = single[b"z"] if c.mask()[single[b"z"]] else int(np.flatnonzero(c.mask())[0])
        token = c.library.harness_within(wanted, left)
        assert c.library.harness_accept(token)
        text, left = text + c.pieces[token], left - 1
    assert left >= 0
    assert list(json.loads(text)) == names


def test_answers_match_within_their_limit() -> None:
    schema = {**POINT, "properties": {**POINT["properties"], "name": {"type": "string"}}, "required": ["x", "name"]}  # type: ignore[dict-item]
    with open_bundle(bundle_of(MODEL, max_kv_size=128, threads=2)) as bundle, bundle.session() as session:
        before = session.use()["scratch"]
        session.constrain(Form.JSON_SCHEMA, json.dumps(schema))
        assert session.use()["scratch"] > before
        for most, temperature in ((20, 0), (50, 2.0), (90, 3.0), (0, 4.0)):
            session.rewind()
            session.set(max_tokens=most, temperature=temperature, seed=most, ignore_eos=0)
            tokens, text, finish = session.answer("A point", Role.RAW)
            assert finish in (Finish.EOS, Finish.LENGTH)
            assert not most or len(tokens) <= most
            jsonschema.validate(json.loads(text), schema)
        session.constrain(Form.REGEX, "(yes|no)[.]")
        session.rewind()
        assert session.answer("Is it?", Role.RAW)[1:] in (("yes.", Finish.EOS), ("no.", Finish.EOS))
        session.constrain(Form.REGEX, "^$")
        session.rewind()
        session.set(temperature=0.7, ignore_eos=1)  # bans all that the form allows
        assert session.answer("Is it?", Role.RAW)[1:] == ("", Finish.EOS)
        refused(InputError, "malformed", session.constrain, Form.REGEX, "a(")
        session.rewind()
        session.set(max_tokens=3, temperature=0)
        free = session.answer("Is it?", Role.RAW)
        session.constrain(Form.FREE)
        session.rewind()
        assert (session.answer("Is it?", Role.RAW), session.use()["scratch"]) == (free, before)
        for form, text, said in ((9, "a", "9 is not an edge_form"), (Form.REGEX, "", "the grammar is empty")):
            refused(InputError, said, session.constrain, form, text)
        session.append(Role.RAW, "a")
        session.next()
        refused(InputError, "an answer is being written", session.constrain, Form.REGEX, "a")


def test_damaged_grammars_raise_one_error() -> None:
    chance, c, changes = random.Random(5), harness(), b'{}[]",:\\^$()*+?|0aut-.#/'
    texts = [each.encode() for each in (*map(json.dumps, SCHEMAS), *REGEXES, *REFUSED)]
    for _ in range(examples(500)):
        text = bytearray(chance.choice(texts))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text) + 1)
            text[at : at + chance.randint(0, 3)] = bytes(chance.choices(changes, k=chance.randint(0, 3)))
        error = _Error()
        status = c.library.harness_set(chance.randint(0, 1), bytes(text), c_size_t(len(text)), byref(error))
        assert not status or error.message
        if not status:
            c.draw(chance, 20)


# Calls of tools

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


def check_alike(form: ToolFormat, tools: Any, **choice: Any) -> None:
    c, chance, grammar = harness(), random.Random(f"{form.name} {choice}"), lark(form, tools, **choice)
    set_calls(form, tools, **choice)
    draws = (text for _ in range(8) for text in (c.draw(chance, 400), drawn_by_llguidance(grammar, chance)) if text)
    texts = list(islice(draws, 4))  # some are too long
    assert texts or choice.get("required") or choice.get("only")
    for text in texts:
        try:
            text.decode()
        except UnicodeDecodeError:
            raise AssertionError(text) from None
        assert c.accepts(text), text
        assert is_alike(c, grammar, text), text
        for _ in range(4):
            at = chance.randrange(len(text))
            other = text[:at] + bytes([chance.choice(b'0"a,}]<> \n')]) + text[at + 1 :]
            try:
                other.decode()
            except UnicodeDecodeError:
                continue
            assert is_alike(c, grammar, other), other


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_are_those_that_python_allows(form: ToolFormat, choice: str) -> None:
    check_alike(form, TOOLS, **CHOICES[choice])


BY_BODY = tuple({form.body: form for form in FORMATS}.values())  # one form of each


@pytest.mark.parametrize("root", ROOTS)
def test_arguments_with_references_are_those_of_python(root: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": ROOTS[root]}}]
    for form in BY_BODY:
        check_alike(form, tools, required=True)


def test_schemas_of_endless_objects_are_refused() -> None:
    form = next(form for form in FORMATS if form.body == "call")
    endless = {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}, {"$ref": "#"}]}}}
    for schema in (endless, {"type": "object", "properties": {"child": {"allOf": [{"$ref": "#"}]}}}):
        with pytest.raises(UnsupportedError, match="objects in more than 32 others"):
            set_calls(form, [{"type": "function", "function": {"name": "f", "parameters": schema}}], required=True)
