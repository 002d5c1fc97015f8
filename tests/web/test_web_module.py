"""Modules for web pages in Node: the same answers as edge itself, within their memory."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from bundles import model_of
from conftest import GOLDEN, NEEDS_WASM, exhaustive
from ctypes_bundle import MODEL
from hf_folders import FOLDERS
from lora_files import write_adapter
from runtime_library import C_FILES, RUNTIME, WARNINGS
from small_models import Small, write_small
from test_tool_grammar import MODELS
from web_module import NodeModule, modules_of, opened, web_pair

from edge.apps.enums import Finish, Role
from edge.apps.library import compile_sources
from edge.apps.module import NATIVE, PAGE, find_zig, initial_pages
from edge.apps.sections.adapter_file import export_adapter
from edge.backends.tvm.targets import choose_target
from edge.converters.huggingface.reader import convert_folder
from edge.errors import BudgetError, BusyError, InputError, ModelFormatError, UnsupportedError

pytestmark = [
    pytest.mark.slow,
    NEEDS_WASM,
    pytest.mark.skipif(shutil.which("node") is None, reason="no Node"),
]

ISAS = ("relaxed16", "simd")
NAME = "llama-gqa-tied"
OPTIONS: dict[str, Any] = {
    "kv_policy": "streaming", "max_kv_size": 48, "prefill_step_size": 16, "kv_dtype": "f16", "threads": 2,
}  # fmt: skip
LONG = "The sky is blue, because light of short waves is scattered by the air more than light of long waves. " * 3


def folder_of(name: str = NAME, **options: Any) -> Path:
    return modules_of(name, *ISAS, **(OPTIONS | options))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_answers_are_those_of_edge(isa: str, threads: int) -> None:
    with web_pair(folder_of(), NAME, isa, threads, **OPTIONS) as pair:
        check_conversation(pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "dtype"), list(product(("full", "streaming", "window", "h2o"), ("f32", "f16", "int8", "int4")))
)
@pytest.mark.parametrize("name", [NAME, "gemma3", "qwen3", "phi3-longrope"])
def test_policies_and_dtypes(name: str, policy: str, dtype: str) -> None:
    options = OPTIONS | {"kv_policy": policy, "kv_dtype": dtype, "max_kv_size": 320 if policy == "full" else 48}
    folder = modules_of(name, "relaxed", *ISAS, **options)
    for isa, threads in product(("relaxed", *ISAS), (1, 2)):
        with web_pair(folder, name, isa, threads, **options) as pair:
            check_conversation(pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("qwen35", "simd"),
        *(
            exhaustive(*each)
            for each in (
                ("qwen35", "relaxed16"),
                *product(("lfm2", "gpt-oss", "gemma4", "deepseek2", "lfm2moe", "qwen3moe", "qwen35moe"), ISAS),
            )
        ),
    ],
)  # fmt: skip
def test_models_of_several_forms_answer_as_edge_does(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fixed state is saved and loaded, and comes back when the last turn is taken back."""
    if choose_target().pair_rows:
        monkeypatch.setenv("EDGE_ISA", "avx512vnni")  # attention in float32, as a page's
    with web_pair(modules_of(name, isa, **OPTIONS), name, isa, 2, **OPTIONS) as pair:
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ["simd", exhaustive("relaxed16")])
def test_answers_with_adapters_are_those_of_edge(isa: str, tmp_path: Path) -> None:
    folder, model = modules_of(NAME, isa, lora_rank=8, **OPTIONS), model_of(NAME)
    first, other = (write_adapter(tmp_path / f"{seed}.gguf", model, 8, seed=seed) for seed in (1, 2))
    for path in (first, other):
        export_adapter(model, path, folder, path.with_suffix(".edge"))
    with web_pair(folder, NAME, isa, 2, **(OPTIONS | {"lora": str(first)})) as pair:
        assert pair.exported.info()["loraRank"] == 16
        for lora, scale in ((first, 1), (other, 0.5), (None, 1), (first, 1)):
            pair.python.set_lora(f"{lora}:{scale}" if lora else None)
            pair.exported.set_adapter(lora.with_suffix(".edge").read_bytes() if lora else None, scale)
            pair.begun = False
            check_conversation(pair)
            pair.forget()
        before = pair.exported.call("memory_bytes")
        data = first.with_suffix(".edge").read_bytes()
        for damaged in (data[:-1], data[:1000], b"", data[:-1] + bytes([data[-1] ^ 1])):
            with pytest.raises(ModelFormatError, match=r"damaged or cut short|not an adapter"):
                pair.exported.set_adapter(damaged)
        assert pair.exported.call("memory_bytes") == before
        pair.python.set_lora(None)
        check_conversation(pair)


def check_conversation(pair: Any) -> None:
    pair.ask("The sky is blue, because", temperature=0, max_tokens=40, ignore_eos=True)
    pair.ask("And the sea?", temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    pair.forget()
    pair.ask(LONG, raw=True, temperature=0.5, top_k=20, seed=2**63 + 5, max_tokens=20, stop=["e"])


@pytest.fixture(scope="module")
def module() -> Iterator[NodeModule]:
    with opened(folder_of(), "simd", workers=1, temperature=0, max_tokens=12, ignore_eos=1, threads=2) as module:
        yield module


class TestSession:
    @pytest.fixture(autouse=True)
    def _afresh(self, module: NodeModule) -> None:
        module.set(temperature=0, max_tokens=12, ignore_eos=1)
        module.rewind()

    def test_says_what_it_is(self, module: NodeModule) -> None:
        info = module.info()
        expected = {"name": NAME, "isa": "simd", "policy": "streaming", "kvDtype": "f16", "capacity": 48, "threads": 2}
        assert expected.items() <= info.items()
        use = module.use()
        assert use["threads"] == 2
        assert not use["measured"]

    def test_budgets_end_answers(self, module: NodeModule) -> None:
        module.set(temperature=0, ignore_eos=1, time=0.2)
        started = time.monotonic()
        *_, finish = module.answer("The sky", Role.RAW)
        assert finish is Finish.TIME
        assert 0.1 < module.use()["seconds"] < time.monotonic() - started
        module.set(temperature=0, ignore_eos=1, energy=module.use()["joules"] / 2)
        *_, finish = module.answer("The sea", Role.RAW)
        assert finish is Finish.ENERGY

    def test_is_cancelled_by_another_thread(self, module: NodeModule) -> None:
        module.set(temperature=0, ignore_eos=1)
        module.append(Role.RAW, "The sky")
        module.cancel(0.1)
        pieces = module.pieces()
        assert pieces[-1].finish is Finish.INTERRUPTED
        module.set(temperature=0, ignore_eos=1, max_tokens=3)
        assert module.answer("And", Role.RAW)[2] is Finish.LENGTH

    def test_saves_and_loads_a_conversation(self, module: NodeModule) -> None:
        module.answer("The sky is blue")
        state, memory = module.save(), module.call("memory_bytes")
        expected = module.answer("And the sea?")
        module.rewind()
        module.load(state)
        assert module.answer("And the sea?") == expected
        assert module.call("memory_bytes") == memory  # states need none
        with pytest.raises(ModelFormatError, match="damaged"):
            module.load(state[:-1] + bytes([state[-1] ^ 1]))
        with pytest.raises(ModelFormatError):
            module.load(state[: len(state) // 2])
        module.load(state)
        assert module.answer("And the sea?") == expected

    def test_takes_turns_back(self, module: NodeModule) -> None:
        first = module.answer("The sky", Role.RAW)
        second = module.answer(" and", Role.RAW)
        module.rewind(1)
        assert module.answer(" and", Role.RAW) == second
        module.rewind()
        assert module.answer("The sky", Role.RAW) == first

    def test_refuses_what_is_wrong(self, module: NodeModule) -> None:
        with pytest.raises(InputError, match="text is empty"):
            module.append(Role.USER, "")
        with pytest.raises(InputError, match="is not a token"):
            module.append(Role.IDS, [10**6])
        for wrong in ({"temperature": 101}, {"threads": 3}, {"max_tokens": -1, "time": -1}, {"stop": ["x" * 200]}):
            with pytest.raises(InputError):
                module.set(**wrong)
        with pytest.raises(BusyError):
            module.call("begin", {})
        with pytest.raises(BusyError):
            module.call("close")
        assert module.answer("The sky", Role.RAW)[2] is Finish.LENGTH

    def test_texts_are_cut_as_by_edge(self, module: NodeModule) -> None:
        tokenizer = model_of(NAME).tokenizer
        for text in ("The sky is blue.", "naïve \U0001f600\t\n  x", LONG):
            assert module.tokenize(text) == list(tokenizer.encode(text))


def test_answers_match_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["age"],
    }
    with opened(folder_of(), "simd", temperature=2.0, max_tokens=30) as module:
        module.constrain({"jsonSchema": schema})
        jsonschema.validate(json.loads(module.answer("A person", Role.RAW)[1]), schema)
        module.constrain({"regex": "(yes|no)[.]"})
        module.rewind()
        assert module.answer("Is it?", Role.RAW)[1:] in (("yes.", Finish.EOS), ("no.", Finish.EOS))
        with pytest.raises(UnsupportedError, match="cannot be enforced: not"):
            module.constrain({"jsonSchema": '{"not": {}}'})
        module.constrain(None)
        module.call("bias", {"5": 100.0})
        with pytest.raises(InputError, match="a bias is of token 99999"):
            module.call("bias", {"99999": 1.0})
        for token in ("4294967301", "", "five", "-1", "5.5"):  # none becomes another token
            with pytest.raises(InputError, match="keys are the numbers of tokens"):
                module.call("bias", {token: 1.0})
        with pytest.raises(InputError, match="must be an object"):
            module.call("bias", [1.0])
        module.rewind()
        assert set(module.answer("Is it?", Role.RAW)[0]) == {5}
        module.call("bias", {})
        module.rewind()
        assert len(module.answer("Is it?", Role.RAW)[0]) > 4


def test_answers_call_tools(tmp_path: Path) -> None:
    path = write_small(tmp_path / "tools.gguf", Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"])
    parameters = {"type": "object", "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 600}},
                  "required": ["minutes"]}  # fmt: skip
    timer = {"type": "function", "function": {"name": "set_timer", "parameters": parameters}}
    folder = modules_of(str(path), "simd", max_kv_size=1500)
    with opened(folder, "simd", temperature=2.0, max_tokens=60) as module:
        module.tools([timer])
        module.choose("set_timer")
        assert module.answer("é", Role.USER)[1:] == ("", Finish.TOOL_CALLS)
        (call,) = module.calls()
        assert (call["name"], call["id"]) == ("set_timer", "call00001")
        jsonschema.validate(json.loads(call["arguments"]), parameters)
        assert module.answer("done", Role.RESULT)[1:] == ("", Finish.TOOL_CALLS)
        assert module.calls()[0]["id"] == "call00002"
        with pytest.raises(InputError, match="the name of a tool, not nobody"):
            module.choose("nobody")
        module.rewind()
        module.tools(None)
        assert module.calls() == []


def test_answers_with_an_assistant_are_those_of_edge(tmp_path: Path) -> None:
    """Within the memory of the plan."""
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
        assert module.info()["dimensions"] == expected.size
        first, other = module.embed(["The sky is blue.", "\U0001f600 \0"], normalize=False)
        np.testing.assert_allclose(first, expected, atol=1e-4)
        assert np.abs(other - first).max() > 0.1
        short = module.embed(["The sky is blue."], dimensions=8)[0]
        np.testing.assert_allclose(short, expected[:8] / np.linalg.norm(expected[:8]), atol=1e-4)
        with pytest.raises(InputError, match="has no prompt query"):
            module.embed(["x"], prompt="query")
        with pytest.raises(InputError, match="text 1 has 6002 tokens, and at most 96 fit"):
            module.embed(["sky " * 2000])
        assert module.embed(["sky " * 2000], truncate=True).shape == (1, expected.size)
        with pytest.raises(UnsupportedError, match="answers no prompts: call edge_embed"):
            module.append(Role.RAW, "x")


def test_memory_stays_where_it_is() -> None:
    """Over long answers, sessions that begin and end, and another number of threads."""
    with opened(folder_of(), "simd", workers=1, threads=2, temperature=0, ignore_eos=1, max_tokens=1500) as module:
        module.answer("The sky", Role.RAW)
        memory = module.call("memory_bytes")
        module.answer("The sky", Role.RAW)
        assert module.use()["evicted"] > 2000
        for count in range(100):
            module.call("end")
            module.begin(threads=1 + count % 2, temperature=0, ignore_eos=1, max_tokens=2)
            assert module.answer("The sky", Role.RAW)[2] is Finish.LENGTH
        assert module.call("memory_bytes") == memory
        module.call("end")
        module.call("close")
        module.open(folder_of() / MODEL)
        module.begin(threads=1)
        assert module.call("memory_bytes") == memory


def test_keeps_within_its_memory() -> None:
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


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    """model.edge with one byte changed, cut off, or of another library."""
    right, random = (folder_of() / MODEL).read_bytes(), np.random.default_rng(0)
    changed = tmp_path / MODEL
    with NodeModule(folder_of() / "edge-simd.wasm") as module:
        for at in (0, 8, 12, 16, *random.integers(24, 4096, 20)):
            changed.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
            try:
                module.open(changed)
            except ModelFormatError:
                continue
            module.call("close")  # the byte is of no meaning: a hash, a gap between two sections
        for size in (0, 1, 40, 4096, len(right) - 1):
            changed.write_bytes(right[:size])
            with pytest.raises(ModelFormatError):
                module.open(changed)
        with pytest.raises(InputError):
            module.begin()
        module.open(folder_of() / MODEL)
        module.begin(temperature=0, max_tokens=2)


def test_what_a_visitor_fetches_is_small() -> None:
    for isa in ISAS:
        assert len(gzip.compress((folder_of() / f"edge-{isa}.wasm").read_bytes(), 9)) < 102_000


@pytest.mark.exhaustive
def test_runtime_compiles_for_32_bits_without_warnings(tmp_path: Path) -> None:
    web = RUNTIME.parent / "web" / "c"
    sources = [each for each in C_FILES if each.name not in NATIVE]
    target = ("-target", "wasm32-wasi", "-mcpu=generic+simd128+atomics+bulk_memory", "-std=c11", *WARNINGS)
    compile_sources(find_zig(), target, [*sources, *web.glob("*.c")], tmp_path)  # a warning is an error


def test_imports_nothing_else() -> None:
    script = (
        "const m = new WebAssembly.Module(require('fs').readFileSync(process.argv[1]));"
        "console.log(WebAssembly.Module.imports(m).map((each) => `${each.module}.${each.name}`).sort().join(' '))"
    )
    for isa in ISAS:
        command = ["node", "--experimental-wasm-relaxed-simd", "-e", script, str(folder_of() / f"edge-{isa}.wasm")]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert found == ["env.memory", "env.now", "env.random", "env.read", "env.write"]
