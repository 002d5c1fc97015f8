"""Answers with a grammar: they match it, as other programs judge, or say that they were cut."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, run_child
from test_cli import edge_here as edge_command
from thinking_models import SPECIALS, write_chain

import edge
from edge.errors import IncompleteError, InputError, MissingExtraError
from edge.grammar.grammar import Grammar
from edge.grammar.matcher import Matcher
from edge.model.model import Model, open_model
from edge.run.hooks import Hooks
from edge.run.request import Request
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray

pytest.importorskip("llguidance")
pytestmark = pytest.mark.wing("structured output")

WORD = {"type": "string", "maxLength": 8}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": WORD, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MANY = {"type": "array", "items": {"type": "string", "enum": [f"w{i * 7919 % 100_003}" for i in range(300)]}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "choice": {"enum": ["red", "green", 3, None]},
    "union": {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": 9}, WORD]},
    "tree": {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/leaf"}},
                           "required": ["v"], "additionalProperties": False},
                  "leaf": {"type": "array", "items": {"type": "null"}, "maxItems": 3}},
        "$ref": "#/$defs/node",
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Model:
    """A random model, whose tokens are mostly single bytes."""
    return open_model(GOLDEN / "llama-one-layer.gguf")


@pytest.fixture(scope="module")
def session(tiny: Model) -> Iterator[Session]:
    with load(tiny, backend="reference", max_kv_size=500) as session:
        yield session


def answer(session: Session, grammar: Grammar, seed: int = 0, **options: Any) -> str:
    sampling = session.model.sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    return session.generate("Hi", grammar=grammar, sampling=sampling, **{"max_tokens": 400, **options})


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_valid_by_its_schema(session: Session, name: str) -> None:
    """A random model at temperature 1 writes noise but for its grammar."""
    jsonschema = pytest.importorskip("jsonschema")
    for seed in range(4):
        text = answer(session, Grammar(json_schema=SCHEMAS[name]), seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        assert session.report.incomplete is None
        assert session.report.stop_reason in ("stop", "eos")


def test_mask_equals_the_regex(tiny: Model) -> None:
    """By a regex over all pieces, token by token; `allows` says the same, where it says anything."""
    matcher, tokenizer = Matcher(Grammar(regex="[a-z]{6}(, end)?"), tiny.tokenizer), tiny.tokenizer
    pieces = [tokenizer.piece(token).decode(errors="replace") for token in range(tokenizer.size)]
    for left in range(6, 0, -1):
        assert matcher.forced() == []
        logits = np.linspace(-1, 1, tokenizer.size, dtype=np.float32)
        may = np.array([re.fullmatch(f"[a-z]{{1,{left}}}", piece) is not None for piece in pieces])
        if left == 1:
            may |= [re.fullmatch("[a-z](,|, |, e|, en|, end)", piece) is not None for piece in pieces]
        want = np.where(may, logits, -np.inf)
        matcher.mask(logits)
        assert logits.tolist() == want.tolist()
        assert [matcher.allows(token) for token in range(tokenizer.size)] == may.tolist()
        matcher.accept(pieces.index("z"))
    assert not matcher.allows(tokenizer.eos_id)  # which only a mask tells
    logits = np.zeros(tokenizer.size, np.float32)
    matcher.mask(logits)
    assert logits[tokenizer.eos_id] == 0


def test_forced_text_takes_no_passes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text without an alternative runs together, in the tokens in which the tokenizer writes it."""
    text, passes, forward = "The answer, in a word, is ", list[list[int]](), session.engine.forward

    def record(tokens: Any) -> FloatArray:
        passes.append(tokens.tolist())
        return forward(tokens)

    monkeypatch.setattr(session.engine, "forward", record)
    got = session.generate("Hi", grammar=Grammar(lark=f'start: "{text}" /[xy]/ " in the end"'))
    assert re.fullmatch(f"{text}[xy] in the end", got)
    tokens = session.report.tokens
    prompt = session.model.encode_prompt("Hi")
    ran = [token for each in passes for token in each]
    written = session.tokenizer.encode(text.rstrip(), start=False).tolist()
    assert ran[: prompt.size + len(written)] == [*prompt.tolist(), *written]
    assert (tokens.forced >= len(written), session.report.timings.decode_tok_s) == (True, None)
    steps = passes[1:] if len(passes[0]) == prompt.size else passes[prompt.size // session.plan.config.chunk :]
    assert len(steps) < tokens.generated / 2


def test_turn_ends_only_where_grammar_does(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always wants to end its turn gives the shortest answer."""
    forward, end = session.engine.forward, session.tokenizer.eos_id

    def eager(tokens: Any) -> FloatArray:
        logits = forward(tokens)
        logits[end] = 100
        return logits

    monkeypatch.setattr(session.engine, "forward", eager)
    assert re.fullmatch("[a-z]{3,}", session.generate("Hi", grammar=Grammar(regex="[a-z]{3,9}")))
    assert (session.report.stop_reason, session.report.incomplete) == ("eos", None)


def test_grammar_leaves_thoughts_free(tmp_path: Path) -> None:
    """A model that opens its thoughts itself, and then wants to say XYZ."""
    chain = ["Ċ", "<think>", *"abcdefghij", "</think>", "ĊĊ", *"XYZ", "<|im_end|>"]
    grammar = Grammar(regex="[W-Z]{2}[0-9]")
    model = open_model(write_chain(tmp_path / "thinker.gguf", SPECIALS["qwen"], chain))
    with load(model, backend="reference", max_kv_size=128) as session:
        assert session.generate("hi", max_tokens=40) == "XYZ"
        for think, thoughts in ((None, "abcdefghij"), (True, "abcdefghij"), (4, "abc"), (False, None)):
            text = session.generate("hi", think=think, grammar=grammar, max_tokens=80)
            assert re.fullmatch("[W-Z]{2}[0-9]", text)
            assert text.startswith("XY") or thoughts != "abcdefghij"
            assert session.report.thoughts is None if thoughts is None else session.report.thoughts
            if session.report.thoughts is not None:
                assert session.report.thoughts.text == thoughts
        with pytest.raises(IncompleteError):
            session.generate("hi", grammar=grammar, max_tokens=2)


def test_batched_generations_have_own_grammars() -> None:
    """In a batch, whose passes have a token of each, answers are those of a session."""
    model = open_model(GOLDEN / "llama-gqa-tied.gguf")
    regexes = ("[a-z]{9}", "(one|two) and then some[0-9]", None)
    with load(model, sequences=5, max_kv_size=128, threads=2) as session, session.batch() as batch:
        ends: list[list[Any]] = [[] for _ in regexes]
        requests = [
            Request("Hi", 24, grammar=None if regex is None else Grammar(regex=regex), ignore_eos=regex is None)
            for regex in regexes
        ]
        for request, end in zip(requests, ends, strict=True):
            batch.start(request, Hooks(end=end.append))
        while batch.step():
            pass
        answers = [end.text for (end,) in ends]
        assert all(re.fullmatch(regex or ".*", text, re.DOTALL) for regex, text in zip(regexes, answers, strict=True))
    with load(model, max_kv_size=128, threads=2) as session:
        for request, text in zip(requests, answers, strict=True):
            options = {"max_tokens": 24, "grammar": request.grammar, "ignore_eos": request.ignore_eos}
            assert session.generate("Hi", **options) == text


def test_grammars_that_are_none_are_refused() -> None:
    patterns = [{"pattern": f"^.*a.{{{i}}}b"} for i in range(40)]
    twice = {"$ref": "#/a", "a": {"allOf": [{"$ref": "#/b"}] * 2}, "b": patterns}
    for fields, words in (
        ({}, "none of them"), ({"regex": "a", "lark": "start: /a/"}, "regex and lark"),
        ({"json_schema": "{"}, "not JSON"), ({"json_schema": "[1]"}, "must be a JSON object"),
        ({"json_schema": {"a": {1}}}, "not JSON"), ({"regex": 3}, "must be text"), ({"lark": " "}, "empty"),
        ({"lark": "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(40))}, "40 patterns at once"),
        ({"json_schema": {"allOf": patterns}}, "40 patterns at once"), ({"json_schema": twice}, "patterns at once"),
        ({"regex": "a" * (1 << 20 | 1)}, "at most"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            Grammar(**fields)


@pytest.mark.parametrize(("grammar", "words"), [
    (Grammar(json_schema={"type": "objekt"}), "objekt"),
    (Grammar(json_schema={"type": "string", "format": "phone"}), "Unknown format"),
    (Grammar(json_schema={"$ref": "http://example.com/a"}), "example.com"),
    (Grammar(json_schema={"type": "string", "pattern": "(a|b"}), r"used: '\(a\|b', character 1: unclosed group$"),
    (Grammar(regex="(a|"), r"used: '\(a\|', character 1: unclosed group$"),
    (Grammar(lark="start: foo"), r'used: line 1, column 8: unknown name: "foo"$'),
    (Grammar(json_schema={f"p{i}": 0 for i in range(9)} | {"not": {"type": "null"}}), "Unimplemented"),
    (Grammar(json_schema={"type": "object", "properties": {f"p{i}": MANY for i in range(200)}}), "large"),
    (Grammar(json_schema={"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b"} for i in range(9)]}), "empty"),
])  # fmt: skip
def test_invalid_grammar_raises_one_line(session: Session, grammar: Grammar, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        edge.check_grammar(grammar, session.model)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"must be edge\.Grammar"):
        session.generate("Hi", grammar={"type": "object"})


def test_grammar_tables_take_the_planned_memory() -> None:
    taken, planned = run_child(_TABLES, "smollm2-135m").output
    assert 0.4 * planned < taken <= planned


_TABLES = """
import json, sys
import edge
from edge.devices.memory import memory_use, release_free_memory
from edge.grammar.matcher import tables_bytes
model = edge.open_model(sys.argv[1])
release_free_memory()
before, planned = memory_use().rss, tables_bytes(model.tokenizer)
edge.check_grammar(edge.Grammar(regex="a"), model)
print(json.dumps([memory_use().peak - before, planned]))
"""


def test_without_package_extra_is_named(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"\[grammar\]"):
        edge.check_grammar(Grammar(regex="a"), open_model(GOLDEN / "llama-one-layer.gguf"))


def test_grammar_on_command_line(tmp_path: Path) -> None:
    schema, model = tmp_path / "schema.json", str(GOLDEN / "llama-one-layer.gguf")
    schema.write_text(json.dumps(PERSON), encoding="utf-8-sig")  # as editors of Windows write it
    command = ("run", model, "Hi", "-q", "--backend", "reference", "--temp", "1", "--seed", "3")
    done = edge_command(*command, "--json-schema", str(schema))
    assert (done.returncode, set(json.loads(done.stdout))) == (0, {"name", "age", "tags"})
    for options, code, words in (
        (("--json-schema", str(schema), "-n", "4"), 4, "--max-tokens"),
        (("--grammar", str(tmp_path / "none.lark")), 2, "none.lark: cannot be read"),
        (("--regex", "a", "--json-schema", str(schema)), 2, "state --json-schema, --grammar or --regex"),
    ):
        done = edge_command(*command, *options)
        assert (done.returncode, words in done.stderr) == (code, True)


def allowed_by(grammar: Grammar, model: Model, text: str) -> bool:
    """Whether masks let an answer be this text, and end."""
    matcher, tokenizer = Matcher(grammar, model.tokenizer), model.tokenizer
    for token in [*tokenizer.encode(text, start=False).tolist(), tokenizer.eos_id]:
        logits = np.zeros(tokenizer.size, np.float32)
        matcher.mask(logits)
        if logits[token] < 0:
            return False
        if token != tokenizer.eos_id:
            assert matcher.allows(token) or not matcher._free
            matcher.accept(token)
    return True


NUMBERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {  # a schema, and numbers that it allows, or not
    "integer": ({"type": "integer"}, ["0", "-9007199254740991", "1" * 16], ["1" * 17, "-" + "1" * 17]),
    "number": (
        {"type": "number"}, ["0." + "1" * 17, "6.02e23", "1E-99", "-1.5"], ["0." + "1" * 18, "1e100", "2" * 17]
    ),
    "any": ({}, ["1" * 16, "[1,22]", f'"{"1" * 40}"'], ["1" * 17, "[" + "1" * 17 + "]", '{"a":1e999}']),
    "large": ({"type": "integer", "minimum": 10**17, "maximum": 10**17 + 9}, ["1" + "0" * 17], ["1" * 16]),
    "digits of a string": ({"type": "string", "pattern": "^[0-9]{20}$"}, [f'"{"7" * 20}"'], ['"7"']),
}  # fmt: skip


def test_digits_and_keys_are_bounded(tiny: Model) -> None:
    for name, (schema, good, bad) in {**NUMBERS, **KEYS}.items():
        assert [text for text in good if not allowed_by(Grammar(json_schema=schema), tiny, text)] == [], name
        assert [text for text in bad if allowed_by(Grammar(json_schema=schema), tiny, text)] == [], name
    assert allowed_by(Grammar(regex="[0-9]+"), tiny, "1" * 40)


A, B = ({"type": "object", "properties": {name: {"type": "null"}}, "required": [name]} for name in "ab")
KEYS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "silent": (A, ['{"a":null}'], ['{"a":null,"c":1}', "{}"]),
    "without properties": ({"type": "object"}, ['{"c":1}', "{}"], []),
    "allOf": ({"allOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": B}}, ['{"a":null,"b":null}'],
              ['{"a":null,"b":null,"c":1}', '{"a":null}']),
    "anyOf": ({"anyOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": B}}, ['{"a":null}', '{"b":null}'],
              ['{"a":null,"c":1}', '{"b":null,"c":1}']),
    "recursive": ({"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}, "type": "object"}}},
                  ['{"n":{"n":{}}}'], ['{"n":{"c":1}}']),
}  # fmt: skip


def test_references_without_end_are_refused(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.json_schema._MOST_STEPS", 20_000)
    doubling = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    for schema, words in [
        ({"$defs": doubling, "$ref": "#/$defs/a0"}, "too large"), ({"properties": {"a": {"allOf": 5}}}, "malformed"),
        ({"properties": {"a": {}}, "required": 5}, "malformed"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=words):
            Matcher(Grammar(json_schema=schema), tiny.tokenizer)


FREE = {"type": "string"}
ITEMS = {"type": "array", "items": {"$ref": "#/$defs/items"}}
MAIL = {"anyOf": [{**FREE, "format": "email"}, {**FREE, "format": "date-time"}]}
ENDLESS: dict[str, dict[str, Any]] = {
    "string": {"type": "object", "properties": {"text": FREE}, "required": ["text"]},
    "required behind optional": {
        "type": "object",
        "properties": {"a": FREE, "b": {"type": "array", "items": FREE}, "c": FREE, "d": {"enum": [1, 2]}},
        "required": ["c", "d"],
    },
    "any object": {"type": "object"},
    "deep": {"$ref": "#/$defs/items", "$defs": {"items": ITEMS}},
    "formats": {"type": "array", "items": MAIL, "minItems": 1},
}
LIMITS = [*enumerate([40, 60, 130])]


@pytest.mark.parametrize(("seed", "most"), LIMITS)
@pytest.mark.parametrize("name", ENDLESS)
def test_answer_ends_within_its_limit(session: Session, name: str, seed: int, most: int) -> None:
    """Whatever a random model has written so far is closed, while there is room for that."""
    jsonschema = pytest.importorskip("jsonschema")
    text = answer(session, Grammar(json_schema=ENDLESS[name]), seed, max_tokens=most)
    report = session.report
    jsonschema.validate(json.loads(text), ENDLESS[name])
    assert (report.incomplete, report.stop_reason in ("length", "stop", "eos")) == (None, True)
    assert report.tokens.generated <= most


def test_forced_text_that_is_cut_is_incomplete(session: Session) -> None:
    with pytest.raises(IncompleteError):
        answer(session, Grammar(regex="a{60}"), max_tokens=8)
    report = session.report
    assert (report.incomplete, report.tokens.generated, report.tokens.forced) == ("length", 8, 8)


def test_other_grammars_end_within_their_limit(session: Session) -> None:
    regex = r"(yes|no), [a-z ]{3,}\."
    lark = Grammar(lark='start: "<" /[^>]+/ ">" ("[" start "]")*')
    for grammar, pattern in ((Grammar(regex=regex), regex), (lark, r"(?s)<[^>]+>(\[.*\])*")):
        for seed, most in enumerate([30, 60]):
            assert re.fullmatch(pattern, answer(session, grammar, seed, max_tokens=most))
    with pytest.raises(IncompleteError):
        answer(session, Grammar(json_schema=ENDLESS["string"]), max_tokens=8)


def test_answer_ends_within_its_rows(tiny: Model) -> None:
    """And with log-probabilities, which forced tokens have, too."""
    for options in ({}, {"logprobs": 1}):
        with load(tiny, backend="reference", max_kv_size=64, kv_policy="full") as session:
            json.loads(answer(session, Grammar(json_schema=ENDLESS["string"]), 1, **options))
            assert session.report.stop_reason == "capacity"
