"""Modules for web pages in Node: the same answers as edge itself, within their memory."""

from __future__ import annotations

import json
import shutil
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from bundles import attend_in_floats, refused
from conftest import GOLDEN, NEEDS_WASM, exhaustive
from ctypes_bundle import MODEL
from hf_folders import FOLDERS
from small_models import Small, write_small
from test_tool_grammar import MODELS
from web_module import NodeModule, modules_of, opened, web_pair

from edge.apps.enums import Finish, Role
from edge.apps.module import PAGE, initial_pages
from edge.apps.sections.model_file import ENTRY, HEADER
from edge.converters.huggingface.reader import convert_folder
from edge.errors import BudgetError, BusyError, EngineError, InputError, ModelFormatError, UnsupportedError

pytestmark = [pytest.mark.slow, NEEDS_WASM, pytest.mark.skipif(shutil.which("node") is None, reason="no Node")]

ISAS = ("relaxed16", "simd")
NAME = "llama-gqa-tied"
TYPES = {
    "": "Q4_K", "token_embd": "Q3_K", "output": "Q6_K", "attn_v": "Q8_0", "attn_q": "IQ4_NL", "attn_output": "Q5_0",
    "ffn_gate": "Q2_K", "ffn_down": "Q5_K",
}  # fmt: skip
MIXED = Small(layers=2, hidden=256, heads=16, kv_heads=8, ffn=512, context=1024, tied=False, types=TYPES)
OPTIONS: dict[str, Any] = {
    "kv_policy": "streaming", "max_kv_size": 48, "prefill_step_size": 16, "kv_dtype": "f16", "threads": 2,
}  # fmt: skip
LONG = "The sky is blue, because light of short waves is scattered by the air more than light of long waves. " * 3


def folder_of(name: str = NAME, **options: Any) -> Path:
    return modules_of(name, *ISAS, **(OPTIONS | options))


@pytest.mark.parametrize(
    ("isa", "threads"), [(ISAS[0], 2), (ISAS[1], 1), exhaustive(ISAS[0], 1), exhaustive(ISAS[1], 2)]
)
def test_answers_are_those_of_edge(isa: str, threads: int) -> None:
    with web_pair(folder_of(), NAME, isa, threads, **OPTIONS) as pair:
        check_conversation(pair)


@pytest.mark.parametrize("isa", [*ISAS, exhaustive("relaxed")])
def test_block_types_answer_as_edge(isa: str, tmp_path: Path) -> None:
    path = str(write_small(tmp_path / "mixed.gguf", MIXED))
    with web_pair(modules_of(path, isa, **OPTIONS), path, isa, 2, **OPTIONS) as pair:
        pair.ask(LONG, raw=True, temperature=0, max_tokens=30, ignore_eos=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "policy", "dtype"), [
    *((NAME, policy, "f16") for policy in ("full", "window", "h2o", "kvzap")),
    *((NAME, "streaming", dtype) for dtype in ("f32", "int8", "int4")),
    *((name, "streaming", "f16") for name in (
        "gemma3", "phi3-longrope", "qwen35", "lfm2", "gpt-oss", "gemma4", "deepseek2", "lfm2moe", "qwen3moe",
        "qwen35moe",
    )),
])  # fmt: skip
def test_policies_row_dtypes_and_models_answer_as_edge(
    name: str, policy: str, dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed states are saved and loaded, and come back when the last turn is taken back."""
    attend_in_floats(monkeypatch)  # as a page's: h2o and kvzap keep other rows after attention in BF16
    options = OPTIONS | {"kv_policy": policy, "kv_dtype": dtype, "max_kv_size": 320 if policy == "full" else 48}
    with web_pair(modules_of(name, isa, **options), name, isa, 2, **options) as pair:
        check_conversation(pair)
        pair.forget()
        pair.ask("The sky", raw=True, temperature=0, max_tokens=5, ignore_eos=True)
        state, ids = pair.exported.save(), list(range(50, 60))
        expected = pair.ask(ids, temperature=0, max_tokens=5, ignore_eos=True)
        pair.exported.rewind(1)
        assert pair.exported.answer(ids, Role.IDS) == expected
        pair.exported.rewind()
        pair.exported.load(state)
        assert pair.exported.answer(ids, Role.IDS) == expected


def check_conversation(pair: Any) -> None:
    pair.ask("The sky is blue, because", temperature=0, max_tokens=40, ignore_eos=True)
    pair.ask("And the sea?", temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    pair.forget()
    pair.ask(LONG, raw=True, temperature=0.5, top_k=20, seed=2**63 + 5, max_tokens=20, stop=["e"])


def test_budgets_end_answers_and_wrong_calls_are_refused() -> None:
    with opened(folder_of(), "simd", workers=1, temperature=0, max_tokens=12, ignore_eos=1, threads=2) as module:
        module.set(temperature=0, ignore_eos=1, time=0.2)
        assert module.answer("The sky", Role.RAW)[2] is Finish.TIME
        module.set(temperature=0, ignore_eos=1, energy=module.use()["joules"] / 2)
        assert module.answer("The sea", Role.RAW)[2] is Finish.ENERGY
        refused(InputError, "text is empty", module.append, Role.USER, "")
        refused(InputError, "is not a token", module.append, Role.IDS, [10**6])
        for wrong in ({"temperature": 101}, {"threads": 3}, {"max_tokens": -1, "time": -1}, {"stop": ["x" * 200]}):
            with pytest.raises(InputError):
                module.set(**wrong)
        for call in (("begin", {}), ("close",)):
            with pytest.raises(BusyError):
                module.call(*call)


def test_answers_match_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["age"],
    }
    with opened(folder_of(), "simd", temperature=2.0, max_tokens=30) as module:
        module.call("constrain", {"jsonSchema": schema})
        jsonschema.validate(json.loads(module.answer("A person", Role.RAW)[1]), schema)
        module.call("constrain", {"regex": "(yes|no)[.]"})
        module.rewind()
        assert module.answer("Is it?", Role.RAW)[1:] in (("yes.", Finish.EOS), ("no.", Finish.EOS))
        refused(UnsupportedError, "cannot be enforced: not", module.call, "constrain", {"jsonSchema": '{"not": {}}'})
        module.call("constrain", None)
        module.call("bias", {"5": 100.0})
        refused(InputError, "a bias is of token 99999", module.call, "bias", {"99999": 1.0})
        for token in ("4294967301", "", "five", "-1", "5.5"):  # none becomes another token
            refused(InputError, "keys are the numbers of tokens", module.call, "bias", {token: 1.0})
        refused(InputError, "must be an object", module.call, "bias", [1.0])
        module.rewind()
        assert set(module.answer("Is it?", Role.RAW)[0]) == {5}
        module.call("bias", {})
        module.rewind()
        assert set(module.answer("Is it?", Role.RAW)[0]) != {5}


def test_answers_call_tools(tmp_path: Path) -> None:
    path = write_small(tmp_path / "tools.gguf", Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"])
    parameters = {"type": "object", "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 600}},
                  "required": ["minutes"]}  # fmt: skip
    timer = {"type": "function", "function": {"name": "set_timer", "parameters": parameters}}
    folder = modules_of(str(path), "simd", max_kv_size=1500)
    with opened(folder, "simd", temperature=2.0, max_tokens=60) as module:
        module.call("tools", [timer])
        module.call("choose", "set_timer", True)
        assert module.answer("é", Role.USER)[1:] == ("", Finish.TOOL_CALLS)
        (call,) = module.call("calls")
        assert (call["name"], call["id"]) == ("set_timer", "call00001")
        jsonschema.validate(json.loads(call["arguments"]), parameters)
        assert module.answer("done", Role.RESULT)[1:] == ("", Finish.TOOL_CALLS)
        assert module.call("calls")[0]["id"] == "call00002"
        refused(InputError, "the name of a tool, not nobody", module.call, "choose", "nobody", True)
        module.rewind()
        module.call("tools", None)
        assert module.call("calls") == []


def test_answers_with_an_assistant_are_those_of_edge(tmp_path: Path) -> None:
    """The module keeps within the memory of the plan."""
    rows = {"max_kv_size": 128, "prefill_step_size": 16, "kv_policy": "streaming", "threads": 1}
    model, draft = (str(tmp_path / f"{name}.gguf") for name in ("gemma4_text", "gemma4_assistant"))
    for path in (model, draft):
        convert_folder(FOLDERS / Path(path).stem, Path(path))
    folder = modules_of(model, "simd", draft=draft, **rows)
    with web_pair(folder, model, "simd", 1, **rows) as both:
        both.ask(list(range(5, 60)), max_tokens=60, temperature=0, ignore_eos=1)
        both.ask([7, 9, 8], max_tokens=60, seed=3, temperature=0.8, ignore_eos=1)
        assert both.exported.use()["drafted"] > 0


def test_module_embeds_texts() -> None:
    """Vectors of transformers; an encoder answers nothing."""
    path = str(GOLDEN / "encoders" / "bert.gguf")
    with np.load(GOLDEN / "encoders" / "bert.npz") as golden:
        expected = golden["mean"][0]
    with opened(modules_of(path, "simd", kv_dtype="f32"), "simd") as module:
        assert module.call("info")["dimensions"] == expected.size
        first, other = module.embed(["The sky is blue.", "\U0001f600 \0"], normalize=False)
        np.testing.assert_allclose(first, expected, atol=1e-4)
        assert np.abs(other - first).max() > 0.1
        short = module.embed(["The sky is blue."], dimensions=8)[0]
        np.testing.assert_allclose(short, expected[:8] / np.linalg.norm(expected[:8]), atol=1e-4)
        refused(InputError, "has no prompt query", module.embed, ["x"], prompt="query")
        refused(InputError, "text 1 has 6002 tokens, and at most 96 fit", module.embed, ["sky " * 2000])
        assert module.embed(["sky " * 2000], truncate=True).shape == (1, expected.size)
        refused(UnsupportedError, "answers no prompts: call edge_embed", module.append, Role.RAW, "x")


def test_memory_does_not_grow_over_answers_and_sessions() -> None:
    """Over long answers, sessions that begin and end, and another number of threads."""
    with opened(folder_of(), "simd", workers=1, threads=2, temperature=0, ignore_eos=1, max_tokens=400) as module:
        module.answer("The sky", Role.RAW)
        memory = module.call("memory_bytes")
        module.answer("The sky", Role.RAW)
        assert module.use()["evicted"] > 600
        for count in range(40):
            module.call("end")
            module.begin(threads=1 + count % 2, temperature=0, ignore_eos=1, max_tokens=2)
            assert module.answer("The sky", Role.RAW)[2] is Finish.LENGTH
        assert module.call("memory_bytes") == memory
        module.call("end")
        module.call("close")
        module.open(folder_of() / MODEL)
        module.begin(threads=1)
        assert module.call("memory_bytes") == memory


def test_damaged_models_are_refused_in_32_bits(tmp_path: Path) -> None:
    """In the module's 32 bits, whose arithmetic the fuzzer of files does not have. What opens can be used."""
    right, changed = (folder_of() / MODEL).read_bytes(), tmp_path / MODEL
    refused, damages = [right[:size] for size in (0, 1, 40, 4096, len(right) - 1)], list[bytes]()

    def put(at: int, value: int, size: int, data: bytes = right) -> bytes:
        return data[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]

    places = {name: place for name, (_, place, *_) in (HEADER.fields or {}).items()}
    inside = {name: place for name, (_, place, *_) in (ENTRY.fields or {}).items()}
    refused += [put(places["sections"], 1 << 31, 4), put(places["resident"], len(right) + (1 << 32), 8)]
    for number in range(int.from_bytes(right[places["sections"] :][:4], "little")):
        at = HEADER.itemsize + number * ENTRY.itemsize
        _, crc, offset, size = np.frombuffer(right, ENTRY, 1, at)[0].tolist()
        for name, value in (("size", size), ("offset", offset)):
            refused += [put(at + inside[name], wrong, 8) for wrong in (value + (1 << 32), (1 << 32) - 64, -64)]
        for word, wrong in product(range(0, min(size, 32), 4), (1 << 30 | 1, -1)):
            data = put(offset + word, wrong, 4)
            damages.append(put(at + inside["crc"], zlib.crc32(data[offset : offset + size]) if crc else 0, 4, data))
    opens, said = 0, list[str]()
    with NodeModule(folder_of() / "edge-simd.wasm") as module:
        for number, each in enumerate(refused + damages):
            changed.write_bytes(each)
            try:
                module.open(changed)
            except ModelFormatError:
                continue
            assert number >= len(refused)
            opens += 1
            module.begin(temperature=0, max_tokens=2, ignore_eos=1)
            try:
                module.answer("The sky", Role.RAW)
            except EngineError as error:
                said.append(str(error))
            module.call("end")
            module.call("close")
        assert 0 < opens < len(damages) / 2
        assert {each.partition(": ")[2] for each in said} <= {"its file may be damaged"}
        module.open(folder_of() / MODEL)
        module.begin(temperature=0, max_tokens=2, ignore_eos=1)
        assert module.answer("The sky", Role.RAW)[2] is Finish.LENGTH


def test_module_keeps_within_its_memory() -> None:
    """Whatever the bound is, there is an answer or an error, and never more memory."""
    path = folder_of() / "edge-simd.wasm"
    first = initial_pages(path.read_bytes())
    with opened(folder_of(), "simd") as module:
        needed = module.call("memory_bytes") // PAGE
    answered = []
    for pages in (first, first + 1, first + 2, (first + needed) // 2, needed - 1, needed):
        with NodeModule(path, maximum=pages * PAGE) as module:
            try:
                module.open(folder_of() / MODEL)
                module.begin(temperature=0, max_tokens=2, ignore_eos=1)
                answered.append(module.answer("The sky", Role.RAW)[2] is Finish.LENGTH)
            except BudgetError:
                answered.append(False)
            assert module.call("memory_bytes") <= pages * PAGE
    assert answered == [False] * 5 + [True]
