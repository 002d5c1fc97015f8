"""Prompts with tools in apps: the C runtime writes tools and results as the model's chat template does."""

from __future__ import annotations

import ctypes
import json
import random
from contextlib import suppress
from ctypes import byref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctypes_bundle import ERRORS, _Error
from runtime_library import load_runtime
from runtime_tokens import HARNESS, SOURCES, CTokenizer, aligned, pointer
from small_models import Small, Special, write_small
from test_chat import CHATML
from test_tool_grammar import MODELS
from tool_templates import SMOLLM3, TOOLS, call

from edge.apps.sections.chat import exported_think
from edge.apps.sections.tools_file import PARTS, tools_section
from edge.errors import EngineError, ModelFormatError, UnsupportedError
from edge.model.model import Model, open_model

MORE: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "a.b", "description": "\"'é\n\\ \t\x01 <|im_end|> \U0001f600", "strict": True},
    },
    {
        "name": "flat",
        "parameters": {"required": [], "type": "object", "properties": {"x": {"enum": [1, 2.5, None, {}, [], [True]]}}},
    },
    {"type": "function", "function": {"parameters": {"additionalProperties": {"type": "integer"}}, "name": "open"}},
]
LISTS = {"two": TOOLS, "one": TOOLS[:1], "others": MORE}
TEMPLATES = {
    name: special for name, special in MODELS.items() if name not in ("gemma4", "gemma4, marks in text", "harmony")
}
TEMPLATES |= {"smollm3": Special(template=SMOLLM3, control=("<|im_start|>", "<|im_end|>"))}
TEMPLATES |= {"plain": Special(template=CHATML, control=("<|im_start|>", "<|im_end|>"))}
SYSTEM, USER, RESULT = 'Be "brief".', "Weather?", '{"é": "18 °C\n"}'


class Prompts:
    """A model's tokenizer and section TOOLS in C."""

    def __init__(self, model: Model) -> None:
        self._library = load_runtime(
            *(each for each in SOURCES if each != HARNESS), HARNESS,
            Path(__file__).parents[1] / "runtime/prompt_harness.c",
            "tool_prompt.c", "tools_describe.c", "tool_list.c", "json.c",
        )  # fmt: skip
        self._library.tokens_open.restype = ctypes.c_void_p
        self._library.prompt_part.restype = ctypes.c_int64
        self.section = tools_section(model)
        self._kept = [aligned(each) for each in CTokenizer(model.tokenizer).sections]
        places = [part for each in self._kept for part in (pointer(each), ctypes.c_uint64(each.size))]
        self._handle = ctypes.c_void_p(
            self._library.tokens_open(*places, model.tokenizer.size, ctypes.c_size_t(0), None)
        )

    def part(self, part: str, tools: Any, *texts: str, section: bytes | None = None) -> list[int]:
        """texts: system, result, name, identifier."""
        data = aligned(self.section if section is None else section)
        given = [each.encode() for each in (*texts, "", "", "", "")[:4]]
        ids, error = np.zeros(1 << 15, np.int32), _Error()
        count = self._library.prompt_part(
            self._handle, pointer(data), ctypes.c_uint64(data.size), json.dumps(tools).encode(), PARTS.index(part),
            (ctypes.c_char_p * 4)(*given), pointer(ids), ctypes.c_int64(ids.size), byref(error),
        )  # fmt: skip
        if count < 0:
            raise ERRORS.get(count, EngineError)(error.message.decode())
        return ids[:count].tolist()


def opened(tmp_path: Path, special: Special) -> Model:
    return open_model(write_small(tmp_path / "m.gguf", Small(context=4096, vocab=280), special=special))


def prompt_of(model: Model, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    assert model.template is not None
    ids: list[int] = model.chat_prompt(messages, tools=tools, think=exported_think(model.template)).first(None).tolist()
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_the_template(tmp_path: Path, name: str) -> None:
    model = opened(tmp_path, TEMPLATES[name])
    c, user = Prompts(model), {"role": "user", "content": USER}
    said = model.tokenizer.encode(USER, start=False).tolist()
    for tools in LISTS.values():
        opening, bos = c.part("opening", tools), [model.tokenizer.bos_id] if model.tokenizer.add_bos else []
        for part, system in (("first", []), ("system", [{"role": "system", "content": SYSTEM}])):
            ids = c.part(part, tools, SYSTEM)
            ids = ids if ids[:1] == bos else bos + ids
            assert ids + said + opening == prompt_of(model, [*system, user], tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_are_those_of_the_template(tmp_path: Path, name: str) -> None:
    """Results stand behind one call or, if the template writes several, two; some are only blanks."""
    model = opened(tmp_path, TEMPLATES[name])
    c, tools, names = Prompts(model), LISTS["two"], ("get_weather", "time")
    single = c.part("more", tools, "", RESULT) == []
    for count in (1,) if single else (1, 2):
        for result in (RESULT, "", " \n", " x "):
            calls = [call(each, '{"zone": "x"}', f"call0000{at}") for at, each in enumerate(names[:count], 1)]
            results = [{"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls]
            messages = [
                {"role": "user", "content": USER},
                {"role": "assistant", "content": "", "tool_calls": calls},
                *results,
            ]
            expected, ids = prompt_of(model, messages, tools), []
            for at, each in enumerate(calls):
                ids += c.part("more" if at else "result", tools, "", result, each["function"]["name"], each["id"])
            ids += c.part("answer", tools)
            assert ids == expected[-len(ids) :]
            assert model.tokenizer.decode(expected[: -len(ids)]).endswith(
                ("</tool_call>", "}", "]", ")]", "</function>\n")
            )
    if name != "plain":
        return
    exchange = [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "So?"},
    ]
    tail = c.part("next", tools) + model.tokenizer.encode("So?", start=False).tolist() + c.part("opening", tools)
    assert tail == prompt_of(model, exchange, tools)[-len(tail) :]


@pytest.mark.parametrize("name", ["gemma4", "harmony"])
def test_templates_with_other_notations_are_refused(tmp_path: Path, name: str) -> None:
    model = opened(tmp_path, MODELS[name])
    with pytest.raises(UnsupportedError, match="a notation of its own, which apps lack"):
        Prompts(model).part("first", TOOLS)


def test_damaged_sections_raise_one_error(tmp_path: Path) -> None:
    c, chance = Prompts(opened(tmp_path, MODELS["hermes"])), random.Random(5)
    for _ in range(400):
        section = bytearray(c.section)
        for _ in range(chance.randint(1, 4)):
            section[chance.randrange(len(section) if chance.random() < 0.2 else 200)] = chance.choice(
                (0, 1, 3, 127, 255)
            )
        with suppress(ModelFormatError):
            c.part(chance.choice(PARTS), TOOLS, SYSTEM, RESULT, section=bytes(section[: chance.choice((2000, 150))]))
    with pytest.raises(ModelFormatError, match=r"^model.edge is damaged \(its tools\): export it again$"):
        c.part("first", TOOLS, section=c.section[:-1])
