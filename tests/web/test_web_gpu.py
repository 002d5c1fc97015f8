"""Exported pages that run a model on WebGPU, in Chromium with its software adapter: the same tokens as the module and
as edge's own engines, with evictions, and the module goes on where a device is missing, too small or lost."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import WEBGPU, Page
from bundles import model_of
from conftest import NEEDS_WASM, chromium, on_gpu
from lora_files import write_adapter
from quick_code import QUICK
from test_web_package import CHANGED, at, expected, run, visit
from web_site import NAME, ROWS, served, site_of

from edge.apps.bundle import prepare
from edge.apps.gpu_programs import buffer_bytes
from edge.apps.sections.adapter_file import ADAPTER, export_adapter
from edge.devices.profiles import find_profile
from edge.options import Options
from edge.plan.plan import Plan

pytestmark = [pytest.mark.slow, NEEDS_WASM]

# Workers whose device the page can lose, after 40 tokens of the next answer, and whose browser a test changes.
DEVICE = """
  const request = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (...all) {
    return (self.device = await request.apply(this, all));
  };
  let losing = false;
  addEventListener('message', ({ data }) => { losing ||= data === 'lose'; });
  globalThis.postMessage = (said, ...more) => {
    tell(said, ...more);
    if (losing && said.event?.report?.tokens === 40) device.destroy();
  };
"""
WATCHED = f"""
  const PATIENCE = 300000, PAUSE = () => new Promise((done) => setTimeout(done, 200));
  {CHANGED.replace("${change}", DEVICE + "${change}")}
"""

# In a worker: the buffers that its device holds. The page asks by `buffers()`.
COUNTED = """
  const told = new BroadcastChannel('buffers'), live = new Map();
  const { createBuffer } = GPUDevice.prototype, { destroy } = GPUBuffer.prototype;
  GPUDevice.prototype.createBuffer = function (all) {
    const buffer = createBuffer.call(this, all);
    live.set(buffer, all.size);
    return buffer;
  };
  GPUBuffer.prototype.destroy = function () {
    live.delete(this);
    destroy.call(this);
  };
  addEventListener('message', ({ data }) => data === 'buffers'
    && told.postMessage([live.size, [...live.values()].reduce((sum, size) => sum + size, 0)]));
"""
BUFFERS = """
  const told = new BroadcastChannel('buffers');
  const buffers = () => new Promise((done) => {
    told.onmessage = ({ data }) => done(data);
    made[0].postMessage('buffers');
  });
"""

HARDWARE = "Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', { value: false });"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser"), WEBGPU) as opened:
        yield opened


def ask(count: int, prompt: str = "abc") -> str:
    return f"await session.ask({prompt!r}, {{ temperature: 0, maxTokens: {count}, ignoreEos: true }})"


def buffers_of(name: str) -> int:
    """Bytes on the GPU, as the manifest says."""
    manifest = json.loads((site_of(name, "simd", gpu=True) / "manifest.json").read_text())
    return int(manifest["web"]["gpu"]["memory"])


def test_answers_are_those_of_the_module(page: Page) -> None:
    """Answers cross evictions, have a second turn and follow a loaded state, and make no new buffer."""
    found = visit(page, site_of(NAME, "simd", gpu=True), f"""
      const change = {COUNTED!r}; {WATCHED} {BUFFERS}
      const answers = [], reports = [], held = [];
      for (const engine of ['gpu', 'cpu']) {{
        const session = await Edge.open('./', {{ engine }});
        held.push(await buffers());
        const first = {ask(150)};
        reports.push(session.report);
        const state = await session.save();
        const next = {ask(20, "def")};
        await session.rewind();
        await session.load(state);
        const drawn = {{ temperature: 1, topK: 8, seed: 3, maxTokens: 10, ignoreEos: true }};
        answers.push([first, next, {ask(20, "def")}, await session.ask('ghi', drawn)]);
        held.push(await buffers());
        await session.close();
        made.pop();
      }}
      return {{ answers, reports, held }};
    """)  # fmt: skip
    ours, modules = found["answers"]
    assert ours == modules
    assert ours[0] == expected("abc", 150)
    assert ours[1] == ours[2]
    assert [(each["engine"], each["engineReason"]) for each in found["reports"]] == [("gpu", None), ("cpu", None)]
    assert found["reports"][0]["evicted"] == found["reports"][1]["evicted"] > ROWS
    assert found["reports"][0]["drafted"] == 0 < found["reports"][1]["drafted"]
    before, after, *none = found["held"]
    assert before == after
    assert none == [[0, 0]] * 2
    assert 0.9 * buffers_of(NAME) < before[1] <= buffers_of(NAME)


def test_adapters_on_the_gpu_are_those_of_edge(page: Page, tmp_path: Path) -> None:
    """One after the other, with evictions; a scale, none, and a file without a part for the GPU. The device is lost
    within an answer, which the module ends with the same adapter, and with drafts; the next one is its own."""
    folder, loras = adapted_site(tmp_path)
    found = visit(page, folder, f"""
      const change = ''; {WATCHED}
      const session = await Edge.open('./', {{ engine: 'gpu' }});
      const answers = [], engines = [], errors = [];
      const refused = ({{ code, message }}) => errors.push([code, message]);
      for (const [file, scale] of [['0', 1], ['1', 0.5], ['of_cpu', 1], ['0', 1e6], ['0', 1]]) {{
        await session.setAdapter(`${{file}}.edge`, {{ scale }}).catch(refused);
        answers.push({ask(80)});
        engines.push(session.report.engine);
      }}
      await session.rewind();
      made[0].postMessage('lose');
      answers.push({ask(80)});
      const report = session.report;
      await session.rewind();
      answers.push({ask(80)});
      engines.push(report.engine, session.report.engine);
      await session.setAdapter('of_cpu.edge').catch(refused);
      return {{ answers, engines, errors, report }};
    """)  # fmt: skip
    adapted, scaled, plain = (expected("abc", 80, lora=each) for each in (loras[0], f"{loras[1]}:0.5", None))
    assert len({adapted, scaled, plain}) == 3
    assert found["answers"] == [adapted, scaled, plain, plain, adapted, adapted, adapted]
    assert found["engines"] == ["gpu"] * 5 + ["both", "cpu"]
    assert found["report"]["drafted"] > 0  # by the module: the GPU takes no drafts
    assert found["report"]["engineReason"].startswith("the GPU is lost: ")
    unfit = "the adapter is not for the GPU of this bundle: make it for the bundle by edge export-adapter"
    too_large = "the adapter's values are too large with this scale: lower it"
    assert found["errors"] == [["unsupported", unfit], ["bad-argument", too_large], ["unsupported", unfit]]


def adapted_site(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A site with a GPU, with the adapters 0.edge, 1.edge and of_cpu.edge; the adapters in GGUF."""
    folder, loras = tmp_path / "site", list[Path]()
    shutil.copytree(site_of(NAME, "simd", gpu=True, lora_rank=8), folder)
    for seed, rank in enumerate((8, 5)):
        loras.append(write_adapter(tmp_path / f"{seed}.gguf", model_of(NAME), rank, seed=seed))
        export_adapter(model_of(NAME), loras[-1], folder, folder / f"{seed}.edge")
    data = np.fromfile(folder / "0.edge", np.uint8)[:-32]
    header = data[: ADAPTER.itemsize].view(ADAPTER)[0]
    data, header["gpu_bytes"] = data[: -int(header["gpu_bytes"])], 0
    (folder / "of_cpu.edge").write_bytes(data.tobytes() + hashlib.sha256(data.tobytes()).digest())
    return folder, loras


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen35", "int8"), (NAME, "int4")])
def test_fixed_state_goes_with_turns_and_to_the_module(page: Page, name: str, kv_dtype: str) -> None:
    """The module changes the state between turns. The device is lost in an answer, before evictions. Rows in 8 bits, or
    4, go to the module and come back, as those in 16 of other tests."""
    drawn = "{ temperature: 1, seed: 7, maxTokens: 8, ignoreEos: true }"
    lost = """
      let left = 0;
      addEventListener('message', ({ data }) => { if (data === 'soon') left = 10; });
      const { mapAsync } = GPUBuffer.prototype;
      GPUBuffer.prototype.mapAsync = function (...all) {
        if (--left === 0) device.destroy();
        return mapAsync.apply(this, all);
      };
    """
    found = visit(page, site_of(name, "simd", gpu=True, kv_dtype=kv_dtype), f"""
      const change = {lost!r}; {WATCHED}
      const answers = [], reports = [];
      for (const engine of ['gpu', 'cpu']) {{
        const session = await Edge.open('./', {{ engine }});
        const turns = [await session.ask('abc', {drawn}), await session.ask('def', {drawn})];
        const state = await session.save();
        await session.rewind(1);
        turns.push(await session.ask('def', {drawn}));
        await session.rewind();
        turns.push(await session.ask('abc', {drawn}));
        await session.load(state);
        if (engine === 'gpu') made[0].postMessage('soon');
        answers.push([...turns, await session.ask('ghi'.repeat(10), {{ ...{drawn}, maxTokens: 20 }})]);
        reports.push([session.report.engine, session.report.evicted > 0]);
        await session.close();
      }}
      return {{ answers, reports }};
    """)  # fmt: skip
    ours, modules = found["answers"]
    assert ours == modules
    assert ours[1] == ours[2] != ours[0] == ours[3]
    assert found["reports"] == [["both", True], ["cpu", True]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("change", "reason"), [
    ("GPU.prototype.requestAdapter = async () => null;", "the browser has no GPU here"),
    ("delete WorkerNavigator.prototype.gpu;", "this browser has no WebGPU"),
    ("delete WebAssembly.Suspending;", "this browser's WebAssembly cannot wait for a GPU"),
    ("", "the only GPU is a software adapter, which runs on the CPU"),
    (HARDWARE + "Object.defineProperty(GPUAdapter.prototype, 'limits', "
     "{ value: { maxBufferSize: 4096, maxStorageBufferBindingSize: 1e9 } });",
     "the GPU's maxBufferSize is 4096: the model needs "),
    (HARDWARE + "GPUDevice.prototype.createShaderModule = () => { throw new Error('a driver says no'); };",
     "a driver says no"),
    (HARDWARE + "GPUDevice.prototype.createComputePipelineAsync = async () => "
     "{ device.destroy(); throw new Error('gone'); };", ("gone", "the GPU is lost: ")),
    (HARDWARE + "GPUDevice.prototype.popErrorScope = async () => ({ message: 'it is too long' });",
     "the browser refuses a program: it is too long"),
    # In a pass, not before it: the GPU is opened, and the module goes on.
    (HARDWARE + "GPUBuffer.prototype.mapAsync = async () => { throw new Error('no reading'); };", "no reading"),
    (HARDWARE + "GPUBuffer.prototype.mapAsync = () => new Promise(() => {}); const set = setTimeout; "
     "self.setTimeout = (work, time) => set(work, time === 30000 ? 100 : time);", "the GPU did not answer for 30 s"),
    (HARDWARE + "const { getMappedRange: get } = GPUBuffer.prototype; GPUBuffer.prototype.getMappedRange = "
     "function (...all) { const found = get.apply(this, all); new Uint8Array(found).fill(255); return found; };",
     "the GPU computed no number (NaN)"),
])  # fmt: skip
def test_without_a_gpu_the_module_answers(page: Page, change: str, reason: str | tuple[str, ...]) -> None:
    found = visit(page, site_of(NAME, "simd", gpu=True), f"""
      const change = {change!r}; {WATCHED}
      const insisting = await Edge.open('./', {{ engine: 'gpu' }}).then(() => null, (error) => error.message);
      const session = await Edge.open('./');
      for (const end = performance.now() + PATIENCE; performance.now() < end; await PAUSE()) {{
        {ask(24)};
        await session.rewind();
        if (session.report.engineReason !== 'the GPU is being prepared') break;
      }}
      return {{ insisting, answer: {ask(24)}, report: session.report }};
    """)  # fmt: skip
    assert found["answer"] == expected("abc", 24)
    if found["insisting"]:
        assert found["insisting"].startswith(reason)
    assert found["report"]["engine"] == "cpu"
    assert found["report"]["engineReason"].startswith(reason)


@pytest.mark.exhaustive
def test_later_visit_uses_an_earlier_race(page: Page, tmp_path: Path) -> None:
    """Where the CPU was faster, the GPU's weights are not loaded again; another adapter is raced. What was measured
    with a LoRA adapter says nothing of later visits."""
    slow = HARDWARE + (
        "const map = GPUBuffer.prototype.mapAsync; GPUBuffer.prototype.mapAsync = async function (...all) "
        "{ await new Promise((done) => setTimeout(done, 300)); return map.apply(this, all); };"
    )
    other = "Object.defineProperty(GPUAdapterInfo.prototype, 'vendor', { value: 'another' });"
    with served(adapted_site(tmp_path)[0]) as (url, sent):
        at(page, url)
        found = []
        for change, file in ((slow, "'0.edge'"), (slow, "null"), (slow, "null"), (slow + other, "null")):
            before = len(sent.paths)
            reason = run(page, f"""
              const change = {change!r}; {WATCHED}
              const session = await Edge.open('./');
              await session.setAdapter({file});
              for (const end = performance.now() + PATIENCE; performance.now() < end; await PAUSE()) {{
                {ask(24)};
                await session.rewind();
                if (/is faster/.test(session.report.engineReason)) break;
              }}
              const {{ engineReason }} = session.report;
              await session.close();
              const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle('edge');
              const {{ files }} = await (await fetch('manifest.json')).json();
              const weights = Object.keys(files).find((name) => name.endsWith('model.gpu'));
              for await (const name of folder.keys()) {{
                if (name.endsWith(files[weights].sha256)) await folder.removeEntry(name);
              }}
              return engineReason;
            """)  # fmt: skip
            found.append((reason, any(path.endswith("model.gpu") for path in sent.paths[before:])))
    (adapted, _), (first, loaded), (second, again), (third, anew) = found
    assert re.fullmatch(r"the CPU is faster: [\d.]+ ms a token, the GPU [\d.]+ \(measured\)", first)
    assert second == first.replace("measured", "measured on an earlier visit")
    assert third.endswith(" (measured)")
    assert adapted.endswith(" (measured)")
    assert (loaded, again, anew) == (True, False, True)


def test_memory_counts_the_buffers_of_the_gpu() -> None:
    """The limit holds for both together; planned buffers are the real ones, or a little more."""

    def planned(gpu: bool, **options: Any) -> Plan:
        return prepare(model_of(NAME), find_profile("web"), Options(**options), ["simd"], gpu=gpu).plan

    alone = planned(False, memory=40 << 20, kv_policy="streaming")
    spec = model_of(NAME).spec
    limit = alone.predicted_peak + alone.bytes.reserve + buffer_bytes("web", spec, alone.config)
    same, less = (planned(True, memory=each, kv_policy="streaming") for each in (limit, limit - 1))
    assert (same.config, same.bytes) == (alone.config, alone.bytes)
    assert less.config != alone.config == planned(False, memory=limit - 1, kv_policy="streaming").config
    assert less.predicted_peak + less.bytes.reserve + buffer_bytes("web", spec, less.config) < limit
    buffers = buffer_bytes("web", spec, planned(True, memory=64 << 20, max_kv_size=ROWS).config)
    assert 0.95 * buffers < buffers_of(NAME) <= buffers


def test_module_scripts_and_programs_are_small() -> None:
    """The limit holds for what a visitor loads, which gzip has compressed."""
    folder = site_of(NAME, "simd", gpu=True) / "edge"
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9)) for path in folder.iterdir() if path.suffix != ".ts"}
    most = 180_000 if os.environ[QUICK] == "0" else 220_000  # without the C compiler's optimizations
    assert sum(sizes.values()) < most, sizes


MODELS = {
    "qwen3": {},  # RoPE that pairs halves
    "gemma3": {"max_kv_size": 256},  # rings
    "gemma2": {"max_kv_size": 256},
    "gemma4": {"max_kv_size": 256},  # rings in an arena of their own, a table, shared rows
    "gpt2": {},  # learned positions
    "phi3-longrope": {"max_kv_size": 256},  # keys that are rotated anew
    "qwen3moe": {},
    "mistral3": {},  # temperatures of queries
    "gpt-oss": {},
    "llama-window": {},
    "qwen35": {},  # fixed states
    "lfm2": {},
    "granitehybrid": {},
    "jamba": {},
    "falcon-mamba": {},  # which has no rows
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options"), [
    *MODELS.items(), *((NAME, {"kv_dtype": dtype}) for dtype in ("int8", "int4", "f32")),
    (NAME, {"kv_policy": "window"}),
    (NAME, {"kv_policy": "full", "max_kv_size": 128}),
])  # fmt: skip
def test_models_answer_as_on_the_gpu_engine(page: Page, name: str, options: dict[str, Any]) -> None:
    """The module answers equally, but for a mixture whose experts are almost equally likely after 70 tokens."""
    with on_gpu("wgpu:0"):
        answer = expected("abc", 100, name, backend="gpu", **options)
    found = visit(page, site_of(name, "simd", gpu=True, **options), f"""
      const answers = [];
      for (const engine of ['gpu', 'cpu']) {{
        const session = await Edge.open('./', {{ engine }});
        answers.push([{ask(100)}, session.report.engine, session.report.evicted]);
        await session.close();
      }}
      return answers;
    """)  # fmt: skip
    ours, modules = found
    assert ours[:2] == [answer, "gpu"]
    assert modules[2] == ours[2]
    same = 50 if name == "gpt-oss" else len(answer)
    assert modules[0][:same] == answer[:same]


@pytest.mark.exhaustive
def test_table_of_embeddings_stays_in_storage(page: Page) -> None:
    """Two sessions read it there at once. Without storage, there is an error."""
    options = MODELS["gemma4"]
    folder = site_of("gemma4", "simd", gpu=True, **options)
    found = visit(page, folder, f"""
      const sessions = [await Edge.open('./', {{ engine: 'cpu' }}), await Edge.open('./', {{ engine: 'cpu' }})];
      return Promise.all(sessions.map(async (session) => {ask(8)}));
    """)  # fmt: skip
    assert found == [expected("abc", 8, "gemma4", **options)] * 2
    change = "navigator.storage.getDirectory = () => Promise.reject(new Error('none'));"
    refused = visit(page, folder, f"const change = {change!r}; {WATCHED} await Edge.open('./');")
    assert refused["code"] == "no-memory"
    assert "no room to store the model" in refused["message"]
