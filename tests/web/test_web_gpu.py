"""Exported pages that run a model on WebGPU, in Chromium with its software adapter: the same tokens as the module and
as edge's own engines, with evictions, and the module goes on where a device is missing, too small or lost."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import WEBGPU, Page
from bundles import model_of
from conftest import NEEDS_WASM, chromium, on_gpu
from test_web_package import at, run
from web_site import NAME, ROWS, served, site_of

import edge
from edge.apps.bundle import prepare
from edge.apps.gpu_programs import buffer_bytes
from edge.devices.profiles import find_profile
from edge.errors import UnsupportedError
from edge.options import Options
from edge.plan.plan import Plan
from edge.sampling import SamplingParams

pytestmark = [pytest.mark.slow, NEEDS_WASM]

# Workers whose device the page can lose, and whose browser a test changes.
WATCHED = """
  const PATIENCE = 300000, PAUSE = () => new Promise((done) => setTimeout(done, 200));
  const Real = globalThis.Worker;
  const made = [];
  globalThis.Worker = class {
    constructor(url, options) {
      if (!String(url).endsWith('worker.js')) return new Real(url, options);
      const code = `import ${JSON.stringify(String(url))};
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...all) {
          return (self.device = await request.apply(this, all));
        };
        addEventListener('message', ({ data }) => data === 'lose' && device.destroy());
        ${change}`;
      const engine = new Real(URL.createObjectURL(new Blob([code], { type: 'text/javascript' })), options);
      made.push(engine);
      return engine;
    }
  };
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

TOKENS = 20_000  # of a long answer

HARDWARE = "Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', { value: false });"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser"), WEBGPU) as opened:
        yield opened


def ask(count: int, prompt: str = "abc") -> str:
    return f"await session.ask({prompt!r}, {{ temperature: 0, maxTokens: {count}, ignoreEos: true }})"


def expected(name: str, count: int, prompt: str = "abc", **options: Any) -> str:
    chosen = {"threads": 2, "max_kv_size": ROWS, "backend": "cpu"} | options
    with edge.load(model_of(name), **chosen) as session:
        greedy = SamplingParams(temperature=0)
        return "".join(session.stream(prompt, max_tokens=count, sampling=greedy, ignore_eos=True))


def buffers_of(name: str) -> int:
    """Bytes on the GPU, as the manifest says."""
    manifest = json.loads((site_of(name, "simd", gpu=True) / "manifest.json").read_text())
    return int(manifest["web"]["gpu"]["memory"])


def test_answers_are_those_of_the_module(page: Page) -> None:
    """Through several evictions, in a second turn, and after a state is loaded. No buffer is made for them."""
    with served(site_of(NAME, "simd", gpu=True)) as (url, _):
        at(page, url)
        found = run(page, f"""
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
    assert ours[0] == expected(NAME, 150)
    assert ours[1] == ours[2]
    assert [(each["engine"], each["engineReason"]) for each in found["reports"]] == [("gpu", None), ("cpu", None)]
    assert found["reports"][0]["evicted"] == found["reports"][1]["evicted"] > ROWS
    assert found["reports"][0]["drafted"] == 0 < found["reports"][1]["drafted"]
    before, after, *none = found["held"]
    assert before == after
    assert none == [[0, 0]] * 2
    assert 0.9 * buffers_of(NAME) < before[1] <= buffers_of(NAME)


@pytest.mark.exhaustive
def test_memory_is_flat_over_twenty_thousand_tokens(page: Page) -> None:
    """Of JavaScript's heaps, the module and the GPU's buffers, with an eviction every few tokens. The answer is the
    module's."""
    found = []
    with served(site_of(NAME, "simd", gpu=True)) as (url, _):
        for engine in ("gpu", "cpu"):
            at(page, url)
            run(page, f"""
              const change = {COUNTED!r}; {WATCHED} {BUFFERS}
              const session = await Edge.open('./', {{ engine: {engine!r} }});
              globalThis.answer = '';
              globalThis.look = async () => {{
                answer.charCodeAt(0); // makes one string of its pieces
                return {{ buffers: await buffers(), ...session.report }};
              }};
              (async () => {{
                const greedy = {{ temperature: 0, maxTokens: {TOKENS}, ignoreEos: true }};
                for await (const piece of session.stream('abc', greedy)) answer += piece;
              }})().catch((error) => {{ globalThis.failed = String(error); }});
            """)  # fmt: skip
            found.append(watch_answer(page))
    (answer, *samples), (same, *others) = found
    assert answer == same
    for engine, all_of_them in (("gpu", samples), ("cpu", others)):
        first, last = all_of_them
        assert (first["engine"], last["engine"]) == (engine, engine)
        assert last["evicted"] > 0.9 * TOKENS
        assert last["memory"] == first["memory"]
        assert last["buffers"] == first["buffers"]
        assert last["heap"] - first["heap"] < 256 << 10  # 14 bytes of a token


def watch_answer(page: Page) -> tuple[Any, ...]:
    """It, and what a page's `look` says when a tenth of it has been given, and at its end, with JavaScript's `heap`."""
    samples = []
    for part in (0.1, 1):
        while (now := page.value("look()")).get("finish") is None and now.get("tokens", 0) < part * TOKENS:
            assert not page.value("globalThis.failed")
            time.sleep(0.1)
        samples.append(now | {"heap": page.heap()})
        print({name: samples[-1].get(name) for name in ("engine", "tokens", "seconds", "memory", "buffers", "heap")})
    return page.value("answer"), *samples


@pytest.mark.exhaustive
def test_lost_device_changes_no_token(page: Page) -> None:
    """In the middle of an answer, after evictions; and the module answers from then on, with drafts."""
    with served(site_of(NAME, "simd", gpu=True)) as (url, _):
        at(page, url)
        found = run(page, f"""
          const change = ''; {WATCHED}
          const session = await Edge.open('./', {{ engine: 'gpu' }});
          let answer = '';
          for await (const piece of session.stream('abc', {{ temperature: 0, maxTokens: 150, ignoreEos: true }})) {{
            answer += piece;
            if (session.report.tokens === 90) made[0].postMessage('lose');
          }}
          const report = session.report;
          await session.rewind();
          return {{ answer, report, again: {ask(20)}, after: session.report.engine }};
        """)  # fmt: skip
    assert found["answer"] == expected(NAME, 150)
    assert found["report"]["engine"] == "both"
    assert found["report"]["drafted"] > 0
    assert found["report"]["engineReason"].startswith("the GPU is lost: ")
    assert (found["again"], found["after"]) == (expected(NAME, 20), "cpu")


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
])  # fmt: skip
def test_without_a_gpu_the_module_answers(page: Page, change: str, reason: str | tuple[str, ...]) -> None:
    with served(site_of(NAME, "simd", gpu=True)) as (url, _):
        at(page, url)
        found = run(page, f"""
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
    assert found["answer"] == expected(NAME, 24)
    if found["insisting"]:
        assert found["insisting"].startswith(reason)
    assert found["report"]["engine"] == "cpu"
    assert found["report"]["engineReason"].startswith(reason)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("change", "reason"), [
    ("GPUBuffer.prototype.mapAsync = async () => { throw new Error('no reading'); };", "no reading"),
    ("GPUBuffer.prototype.mapAsync = () => new Promise(() => {}); const set = setTimeout; "
     "self.setTimeout = (work, time) => set(work, time === 30000 ? 100 : time);", "the GPU did not answer for 30 s"),
    ("const { getMappedRange } = GPUBuffer.prototype; GPUBuffer.prototype.getMappedRange = function (...all) "
     "{ const found = getMappedRange.apply(this, all); new Uint8Array(found).fill(255); return found; };",
     "the GPU computed no number (NaN)"),
])  # fmt: skip
def test_module_runs_the_pass_that_a_gpu_fails(page: Page, change: str, reason: str) -> None:
    with served(site_of(NAME, "simd", gpu=True)) as (url, _):
        at(page, url)
        found = run(page, f"""
          const change = {change!r}; {WATCHED}
          const session = await Edge.open('./', {{ engine: 'gpu' }});
          return {{ answer: {ask(24)}, report: session.report }};
        """)  # fmt: skip
    assert found.get("answer") == expected(NAME, 24), found
    assert (found["report"]["engine"], found["report"]["engineReason"]) == ("cpu", reason)


@pytest.mark.exhaustive
def test_later_visit_uses_an_earlier_race(page: Page) -> None:
    """Where the CPU was faster, the GPU's weights are not loaded again; another adapter is raced."""
    slow = HARDWARE + (
        "const map = GPUBuffer.prototype.mapAsync; GPUBuffer.prototype.mapAsync = async function (...all) "
        "{ await new Promise((done) => setTimeout(done, 300)); return map.apply(this, all); };"
    )
    other = "Object.defineProperty(GPUAdapterInfo.prototype, 'vendor', { value: 'another' });"
    with served(site_of(NAME, "simd", gpu=True)) as (url, sent):
        at(page, url)
        found = []
        for change in (slow, slow, slow + other):
            before = len(sent.paths)
            reason = run(page, f"""
              const change = {change!r}; {WATCHED}
              const session = await Edge.open('./');
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
    (first, loaded), (second, again), (third, anew) = found
    assert re.fullmatch(r"the CPU is faster: [\d.]+ ms a token, the GPU [\d.]+ \(measured\)", first)
    assert second == first.replace("measured", "measured on an earlier visit")
    assert third.endswith(" (measured)")
    assert (loaded, again, anew) == (True, False, True)


@pytest.mark.parametrize(("name", "options", "words"), [
    (NAME, {"kv_policy": "h2o"}, "no KV policies that look at attention: choose --kv-policy streaming, window or full"),
    ("lfm2", {}, "no layers with a recurrent state: export without --gpu"),
])  # fmt: skip
def test_models_that_have_no_programs_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        prepare(model_of(name), find_profile("web"), Options().updated(**options), ["simd"], gpu=True)


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
    """With gzip, as a visitor loads them."""
    folder = site_of(NAME, "simd", gpu=True) / "edge"
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9)) for path in folder.iterdir() if path.suffix != ".ts"}
    assert sum(sizes.values()) < 180_000, sizes


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
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options"), [
    *MODELS.items(), *((NAME, {"kv_dtype": dtype}) for dtype in ("int8", "int4", "f32")),
    (NAME, {"kv_policy": "window"}),
    (NAME, {"kv_policy": "full", "max_kv_size": 128}),
])  # fmt: skip
def test_models_answer_as_on_the_gpu_engine(page: Page, name: str, options: dict[str, Any]) -> None:
    """And as the module, but for a mixture whose experts are almost equally likely after 70 tokens."""
    with on_gpu("wgpu:0"):
        answer = expected(name, 100, backend="gpu", **options)
    with served(site_of(name, "simd", gpu=True, **options)) as (url, _):
        at(page, url)
        found = run(page, f"""
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
