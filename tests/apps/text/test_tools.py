"""Tools in apps, as a whole: a random model that must call makes calls that match, and goes on behind their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bundles import bundle_of, refused
from ctypes_bundle import BundleSession, Piece, open_bundle
from small_models import Small, write_small
from test_runtime_tools import prompt_of
from test_tool_grammar import MODELS, SCHEMAS, TOOLS, fits

from edge.apps.enums import Finish, Form, Role
from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tools") / "tools.gguf"
    return open_model(write_small(path, Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"]))


@pytest.fixture
def session(model: Model) -> Iterator[BundleSession]:
    with open_bundle(bundle_of(str(model.file.path), max_kv_size=3000, threads=2)) as bundle, bundle.session() as made:
        yield made


def first_token(session: BundleSession) -> Piece:
    """The first piece behind the prompt, which runs chunk by chunk."""
    return next(piece for piece in session.pieces() if piece.token is not None)


def test_calls_that_are_required_are_made(session: BundleSession, model: Model) -> None:
    """Their rows are those of the prompt that Python makes, with results as well."""
    before = session.use()["scratch"]
    session.tools(TOOLS)
    session.choose("required")
    assert session.use()["scratch"] > before
    for seed in range(3):
        session.set(temperature=1.0, seed=seed, max_tokens=900)
        session.rewind()
        ran = session.use()["tokens"]
        session.append(Role.USER, "Hi")
        first = first_token(session)
        assert session.use()["tokens"] - ran == len(prompt_of(model, [USER], TOOLS))
        pieces = [first, *session.pieces()]
        calls, text = session.calls(), "".join(each.text for each in pieces)
        assert (text, pieces[-1].finish) == ("", Finish.TOOL_CALLS)
        for number, (identifier, name, arguments) in enumerate(calls, 1):
            assert fits(json.loads(arguments), SCHEMAS[name]), arguments
            assert identifier[:4] == "call"
            assert int(identifier[4:]) >= number
        refused(InputError, r"calls have their result|nothing to answer", session.next)
        for at in range(len(calls)):
            session.append(Role.RESULT, f"result {at}")
        refused(InputError, "no call waits for a result", session.append, Role.RESULT, "another")
        refused(InputError, "the results wait for their answer", session.append, Role.USER, "And?")
        assert list(session.pieces())[-1].finish == Finish.TOOL_CALLS


def test_choice_decides_which_tool_is_called(session: BundleSession, model: Model) -> None:
    session.tools(TOOLS)
    session.set(temperature=1.0, seed=4, max_tokens=900)
    session.choose("nothing", parallel=False)
    assert session.answer("Hi")[1:] == ("", Finish.TOOL_CALLS)
    assert [(name, arguments) for _, name, arguments in session.calls()] == [("nothing", "{}")]
    session.append(Role.RESULT, "")  # an empty one
    session.choose("none")
    session.set(temperature=1.0, seed=4, max_tokens=20)
    assert list(session.pieces())[-1].finish in (Finish.LENGTH, Finish.EOS)
    assert session.calls() == []
    session.choose("auto")
    session.answer("And?")
    session.choose("mix")
    session.set(temperature=1.0, seed=2, max_tokens=150)
    text, finish = session.answer("And?")[1:]
    assert (text, finish) in (("", Finish.TOOL_CALLS), ("", Finish.LENGTH))
    assert [name for _, name, _ in session.calls()] == ["mix"]  # which is closed within its limit
    session.rewind()
    session.append(Role.SYSTEM, "Be brief.")
    session.choose("required")
    ran = session.use()["tokens"]
    session.append(Role.USER, "Hi")
    first_token(session)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert session.use()["tokens"] - ran == len(prompt_of(model, messages, TOOLS))


def test_calls_of_strict_tools_match(session: BundleSession) -> None:
    """Under auto, where text stays free; after choices that hold more or less, too."""
    strict = [TOOLS[0], {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": True}}]
    found = {False: 0, True: 0}
    for is_strict in (True, False):
        session.tools(strict if is_strict else TOOLS)
        for choice in ("required", "none", "auto"):
            session.choose(choice)
        for seed in range(12):
            session.set(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=600)
            text, calls = session.answer("Hi")[1], session.calls()
            assert text or calls
            found[is_strict] += len(calls)
            assert all(fits(json.loads(arguments), SCHEMAS[name]) for _, name, arguments in calls)
            session.rewind()
    assert found[True] > 5 > found[False]  # a random model writes hardly any by itself
    session.tools(strict)
    refused(InputError, "none if tools are strict", session.constrain, Form.REGEX, "a")
    session.choose("none")
    session.constrain(Form.REGEX, "a+")
    for state in (lambda: session.choose("auto"), lambda: session.tools(strict)):
        refused(InputError, "the form of edge_constrain", state)
    session.constrain(Form.FREE)
    unsound: Any = [{"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}]
    refused(UnsupportedError, "cannot be enforced: not", session.tools, unsound)
    session.choose("mix")  # the tools before


NOTHING = [each for each in TOOLS if each.get("function", each)["name"] == "nothing"]
CALL = r'<tool_call>\{"name": "nothing", "arguments": \{\}\}</tool_call>'


def say(session: BundleSession, form: str, prompt: str = "Hi", **options: Any) -> tuple[str, Finish]:
    """An answer of this form, behind which answers are free again."""
    session.constrain(Form.REGEX, form)
    session.set(temperature=0, max_tokens=2600, **options)
    _, text, finish = session.answer(prompt)
    session.constrain(Form.FREE)
    return text, finish


def test_calls_that_are_cut_in_their_closing_are_whole(session: BundleSession) -> None:
    """As in Python: the limit leaves the beginning of the closing mark, none of it, or a call without its end."""
    session.tools(NOTHING)
    unclosed = CALL.removesuffix("</tool_call>")
    session.set(temperature=0, ignore_eos=1)
    session.constrain(Form.REGEX, unclosed)
    length = len(session.answer("Hi")[0])
    session.constrain(Form.REGEX, f"{unclosed}(</tool_call>)?")
    for more, finish in ((1, Finish.TOOL_CALLS), (0, Finish.TOOL_CALLS), (-1, Finish.LENGTH)):
        session.rewind()
        session.set(temperature=0, ignore_eos=1, max_tokens=length + more)
        assert session.answer("Hi")[2] == finish


def test_cancelled_results_leave_calls_and_rewound_turns_none(session: BundleSession, model: Model) -> None:
    """A cancelled prompt leaves the calls before it, which wait for results; a rewound turn leaves none."""
    session.tools(NOTHING)
    assert say(session, CALL + CALL) == ("", Finish.TOOL_CALLS)
    rows = session.use()["rows"]
    for role in (Role.USER, Role.RESULT):
        for text in ("one", "two")[: 1 + (role == Role.RESULT)]:
            session.append(role, text)
        session.cancel()
        assert session.next().finish == Finish.INTERRUPTED
        assert session.use()["rows"] <= rows
        assert [name for _, name, _ in session.calls()] == ["nothing"] * 2
    session.append(Role.RESULT, "one")
    refused(InputError, "results wait for their answer: call edge_next", session.save)
    session.rewind()
    assert session.calls() == []
    ran = session.use()["tokens"]
    session.append(Role.USER, "Hi")
    refused(InputError, "no call waits for a result", session.append, Role.RESULT, "two")
    first_token(session)
    assert session.use()["tokens"] - ran == len(prompt_of(model, [USER], NOTHING))


def test_text_behind_a_stop_string_is_not_shown(session: BundleSession) -> None:
    """It was held as a call until that was none, and as the beginning of another from there on."""
    session.tools(NOTHING)
    assert say(session, r'<tool_call>\{"x": "aEND", <', stop=["END"]) == ('<tool_call>{"x": "a', Finish.STOP)


def test_invalid_tools_and_choices_are_refused(session: BundleSession) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for tools, said in (
        ([], "a JSON array of one or more"), ({"a": 1}, "a JSON array of one or more"),
        ([5], "tool 1: it must be an object"), ([{"type": "x"}], "tool 1: its type is not"),
        ([named, {"function": {"name": "a b"}}], "tool 2: the name of its function"),
        ([named, named], "tool 2: another tool has its name"),
        ([{"function": {"name": "f", "parameters": 5}}], "tool 1: its parameters must be"),
    ):  # fmt: skip
        refused(InputError, said, session.tools, tools)
    with pytest.raises(UnsupportedError, match="no properties of their own"):
        session.tools([{"function": {"name": "f", "parameters": {"allOf": []}}}])
    refused(InputError, "there are no tools: call edge_tools first", session.choose, "auto")
    session.constrain(Form.REGEX, "a+")
    session.tools([named])
    refused(InputError, "the form of edge_constrain", session.choose, "required")
    session.constrain(Form.FREE)
    refused(InputError, "auto, none, required, or the name of a tool, not g", session.choose, "g")
    session.choose("f")
    refused(InputError, "calls have a form: choose auto first", session.constrain, Form.REGEX, "a")
    refused(InputError, "no call waits for a result", session.append, Role.RESULT, "x")
    session.append(Role.USER, "Hi")
    refused(InputError, "rewind all turns first", session.tools, None)
    session.rewind()
    session.tools(None)
    unsound: Any = [{"function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]
    session.tools(unsound)
    refused(UnsupportedError, "cannot be enforced: not", session.choose, "required")
    session.set(temperature=0, max_tokens=2)
    assert len(session.answer("Hi")[0]) <= 2  # which is free
