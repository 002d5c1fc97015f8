"""edge in a web page beside peers: speed, start, memory and size, in one Chromium, and the native engine's speed.

    python benchmarks/web.py             about 8 minutes
    python benchmarks/web.py --quick     a test that everything runs, in about 2
    python benchmarks/web.py --gpu       the tables of WebGPU alone, in about 4

Needs Chromium and npm, from which the peers come: wllama (llama.cpp in WebAssembly) and onnxruntime-web, on the CPU.
All run SmolLM2 in Q4_0; onnxruntime-web, which has no loop of its own, a graph of `edge convert --to onnx`.

- speed: the engines are open in one page and take turns A B C A B C, one alone at a time; medians. Decoding and the
  first token as the page sees them, the prompt's speed from the call to the first token. The native engine, with all
  instruction sets of this CPU and with AVX2, takes turns with them, in processes of their own.
- start and memory: each engine alone in a fresh browser, files from loopback: until it can answer, the first time and
  again after a reload, and then the first token. Resident bytes of the page's process before the reload, beyond those
  of an empty page.
- offline: the site's own page, whose server has ended after the first visit: from the navigation to the first token of
  an answer that is asked for at once.
- a second visit while a GPU is prepared: the same, with a server, of the site of `--gpu`, whose page takes the software
  adapter for a GPU: it loads the weights and compiles the kernels while the module answers. A compiler that uses the
  same cores is the worst case. Only one such visit: SwiftShader goes on compiling for a page that was left.
- endless: one answer in 512 KV rows, with the page's process sampled while it runs.
- GPU: the site of `--gpu` on WebGPU, by Chromium's software adapter, which runs on the CPU: that it works, and what it
  takes. It is no GPU's speed.
- sizes: what a visitor loads besides the weights, compressed by gzip.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine, say
from model_files import WORKERS, pure_file
from text import long_text
from turns import Worker, wait_until_quiet
from web_page import PACKAGES, PLAIN, SOFTWARE_GPU, Tab, install, open_tab, renderer_memory, serve

import edge
from edge.apps.serve import serving
from edge.cli.terminal.show import table
from edge.converters.convert import Conversion, convert

HERE = Path(__file__).parent
EDGE, WLLAMA, ONNX = "edge", "wllama", "onnx"
NATIVE, AVX2 = "native", "native, AVX2"
GPU = "gpu-site"
LABELS = {WLLAMA: f"wllama {PACKAGES['@wllama/wllama']}", ONNX: f"onnxruntime-web {PACKAGES['onnxruntime-web']}"}
ROWS, ENDLESS_ROWS = 1024, 512
SITES = {"site": ROWS, "endless": ENDLESS_ROWS, GPU: ROWS}  # their KV rows
SHORT, LONG = 16, 512  # tokens of prompts
WARM = 8  # tokens of peers' first answers; edge's are as long as all
PAUSE_S = 0.3  # between two turns: threads of some engines spin after their work
GZIP = 9


@dataclass(frozen=True)
class Sizes:
    """Tokens of answers, rounds, and tokens of the endless answer."""

    steps: int = 128
    peer_steps: int = 64  # they are slow
    rounds: int = 3
    fast_rounds: int = 9  # of edge and the native engine
    endless: int = 20_000
    visits: int = 5
    gpu_steps: int = 8  # of some seconds each


QUICK = Sizes(steps=32, peer_steps=8, rounds=1, fast_rounds=2, endless=2_000, visits=2, gpu_steps=2)


@dataclass(frozen=True)
class Setting:
    """The model in the forms that engines take, as paths below `cache`, and how engines open them."""

    cache: Path
    model: edge.Model
    threads: int

    @property
    def peers(self) -> dict[str, dict[str, Any]]:
        spec = self.model.spec
        shape = {"layers": spec.layers, "kvHeads": spec.kv_heads, "head": spec.head_dim, "base": spec.rope_base}
        return {
            WLLAMA: {"model": f"/cache/{self.model.path.name}", "threads": self.threads, "rows": ROWS},
            ONNX: {"model": "/cache/onnx", "threads": self.threads, **shape},
        }

    def edge(self, site: str = "site", **options: Any) -> dict[str, Any]:
        return {"site": f"/cache/{site}/", "threads": self.threads, **options}

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        return {EDGE: self.edge(), **self.peers}


def prepare(cache: Path, source: str, threads: int, sites: dict[str, int]) -> Setting:
    """Write the model in all forms, once. sites: their KV rows; the peers' forms go with `site`."""
    cache.mkdir(parents=True, exist_ok=True)
    model = edge.open_model(pure_file(cache, edge.open_model(source).path.absolute()))
    if "site" in sites:
        install(cache)
        if not (cache / "onnx" / "model.onnx").exists():
            say("converting to ONNX ...")
            convert(model.path, cache / "onnx", Conversion("onnx"), force=True)
    for name, rows in sites.items():
        say(f"exporting {name} ...")
        options: dict[str, Any] = {
            "gpu": name == GPU,
            "max_kv_size": rows,
            "kv_policy": "streaming",
            "kv_dtype": "f16",
            "threads": threads,
        }
        edge.export(model, cache / name, device="web", force=True, expected_tokens=20_000, **options)
    return Setting(cache, model, threads)


def prompts(model: edge.Model, count: int, length: int) -> list[dict[str, Any]]:
    """Different texts of exactly so many tokens, with their ids."""
    ids, start, found = model.encode_prompt(long_text("secI8.html").read_text(encoding="utf-8"), raw=True), 0, []
    while len(found) < count:
        part = ids[start : start + length].tolist()
        assert len(part) == length
        text = model.tokenizer.decode(part)
        start += 1
        if model.encode_prompt(text, raw=True).tolist() == part:
            found.append({"text": text, "ids": part})
            start += length
    return found


@contextmanager
def native_workers(setting: Setting) -> Iterator[list[Worker]]:
    """The native engine with what this CPU has, and with AVX2 if that is less."""
    program, path = WORKERS / "edge_worker.py", setting.model.path
    command = [sys.executable, program, "serve", path, "cpu:f16", setting.threads, ROWS]
    workers, plain = list[Worker](), {"EDGE_ISA": "avx2"} if platform.machine() == "x86_64" else {}
    try:
        for name, isa in ((NATIVE, {}), (AVX2, plain))[: 2 if plain else 1]:
            workers.append(Worker(name, [str(word) for word in command], {**os.environ, **isa, "EDGE_HISTORY": "0"}))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def speeds(tab: Tab, setting: Setting, sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Figures of every engine: its runs of decode (tok/s), prefill (tok/s) and first (seconds of a short prompt)."""
    versions = {name: tab.open(name, settings)["version"] for name, settings in setting.engines.items()}
    say(f"versions: {versions}")
    short, long = (prompts(setting.model, sizes.fast_rounds + 1, length) for length in (SHORT, LONG))
    figures: dict[str, dict[str, list[float]]] = {}
    with native_workers(setting) as workers:
        for number in range(sizes.fast_rounds + 1):
            say(f"round {number} of {sizes.fast_rounds} ...")
            for name in setting.engines if number <= sizes.rounds else [EDGE]:
                steps = sizes.steps if name == EDGE else sizes.peer_steps if number else WARM
                wait_until_quiet(workers)
                time.sleep(PAUSE_S)
                answer = tab.run(name, short[number], steps)
                assert answer["tokens"] == steps
                found = {"decode": answer["decode"], "first": answer["first"]}
                if number or name == EDGE:  # edge's first long prompt warms it up, peers' would take half a minute
                    time.sleep(PAUSE_S)
                    found["prefill"] = LONG / tab.run(name, long[number], 1)["first"]
                keep(figures, name, found, number)
            for worker in workers:
                wait_until_quiet(workers)
                decode = sizes.steps / worker.seconds(op="decode", depth=SHORT, n=sizes.steps, seed=number)
                prefill = LONG / worker.seconds(op="prefill", n=LONG, seed=number)
                keep(figures, worker.engine, {"decode": decode, "prefill": prefill}, number)
    for name in setting.engines:
        tab.close(name)
    return figures


def keep(figures: dict[str, dict[str, list[float]]], name: str, found: dict[str, float], number: int) -> None:
    """Add a round's figures, unless it was the one that warms up."""
    for what, figure in found.items() if number else ():
        figures.setdefault(name, {}).setdefault(what, []).append(figure)


def speed_lines(figures: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Medians, the best run, and how much faster edge's median is."""
    lines = []
    for name, runs in figures.items():
        line = [LABELS.get(name, name)]
        for what in ("decode", "prefill"):
            middle = statistics.median(runs[what])
            ratio = statistics.median(figures[EDGE][what]) / middle
            line += [f"{middle:,.1f}", f"{max(runs[what]):,.1f}", f"{ratio:.2f}"]
        first = runs.get("first")
        lines.append([*line, f"{statistics.median(first) * 1e3:,.0f}" if first else "–"])
    return lines


def starts(address: str, setting: Setting, name: str, prompt: dict[str, Any]) -> list[str]:
    """A line of the table of start and memory: seconds, and MiB."""
    say(f"start of {name} ...")
    with open_tab(address) as tab:
        empty = renderer_memory()[0]
        settings = setting.engines[name]
        first = tab.open(name, settings)["seconds"]
        answer = tab.run(name, prompt, WARM)["first"]
        now, most = renderer_memory()
        tab.load()
        again = tab.open(name, settings)["seconds"]
        answer_again = tab.run(name, prompt, WARM)["first"]
    seconds = [f"{each:.2f}" for each in (first, answer, again, answer_again)]
    return [LABELS.get(name, name), *seconds, *(f"{(each - empty) / 2**20:,.0f}" for each in (now, most))]


# In the page before its own scripts: asks at once, notes when the first token of the answer is there, and stops then.
_ASK = """
addEventListener("DOMContentLoaded", () => {
  const first = () => {
    const answer = document.querySelector('.theirs[aria-busy="true"]');
    if (!answer?.textContent || globalThis.edgeFirst) return;
    globalThis.edgeFirst = performance.now() / 1e3;
    document.getElementById("send").click();
  };
  new MutationObserver(first).observe(document.getElementById("turns"), { childList: true, subtree: true });
  document.getElementById("text").value = "Why is the sky blue?";
  const ask = () => { // again until the page listens: its scripts are checked first
    const event = new SubmitEvent("submit", { bubbles: true, cancelable: true });
    if (document.getElementById("ask").dispatchEvent(event)) setTimeout(ask, 5);
  };
  ask();
});
"""
_ANSWERED = """new Promise((done, failed) => {
  const end = performance.now() + 60_000;
  const look = () => {
    if (globalThis.edgeFirst && !document.querySelector('[aria-busy="true"]')) done(globalThis.edgeFirst);
    else if (performance.now() > end) failed(new Error(document.body.innerText.slice(-300)));
    else setTimeout(look, 50);
  };
  look();
})"""


_ANEW = """new Promise((done) => {
  document.getElementById("new").click();
  const look = () => (document.querySelector("#turns li") ? setTimeout(look, 50) : done(0));
  look();
})"""  # the same question again may have no answer


# In the page before its own scripts: the engine's worker takes a software adapter for a GPU.
_TAKES_SOFTWARE = """
globalThis.Worker = class extends Worker {
  constructor(url, options) {
    const code = `import ${JSON.stringify(String(url))};
      Object.defineProperty(GPUAdapterInfo.prototype, "isFallbackAdapter", { value: false });`;
    super(URL.createObjectURL(new Blob([code], { type: "text/javascript" })), options);
  }
};
"""


def visit(setting: Setting, visits: int, site: str = "site") -> list[str]:
    """A line: seconds of the first visit, then of the fastest one, and of all; offline, unless a GPU is prepared."""
    say(f"visits of {site} ...")
    with serving(setting.cache / site, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, flags = f"http://127.0.0.1:{server.server_address[1]}", SOFTWARE_GPU if site == GPU else PLAIN
        with open_tab(address, "/", flags) as tab:
            tab.page.ask("Page.addScriptToEvaluateOnNewDocument", source=_ASK)
            tab.load("/")
            first = float(tab.page.value(_ANSWERED))
            tab.page.value(_ANEW)
            if site == GPU:  # a worker of ours, which needs a server
                tab.page.ask("Page.addScriptToEvaluateOnNewDocument", source=_TAKES_SOFTWARE)
            else:
                server.shutdown()
                server.server_close()
            times = []
            for _ in range(visits):
                tab.load("/")
                times.append(float(tab.page.value(_ANSWERED)))
                tab.page.value(_ANEW)
    return [f"{each:.2f}" for each in (first, min(times), statistics.median(times), max(times))]


def endless(address: str, setting: Setting, tokens: int) -> list[list[str]]:
    """One long answer in few rows: memory and speed at its beginning and at its end."""
    say(f"{tokens} tokens in {ENDLESS_ROWS} rows ...")
    slice_ = tokens // 10
    with open_tab(address) as tab:
        tab.open(EDGE, setting.edge("endless"))
        tab.run(EDGE, prompts(setting.model, 1, LONG)[0], ENDLESS_ROWS)  # touches all rows
        before = settled(tab)
        prompt = json.dumps(prompts(setting.model, 1, SHORT)[0])
        tab.page.value(f"void (globalThis.answer = bench.run('{EDGE}', {prompt}, {tokens}))")
        samples: list[tuple[int, int]] = []  # pieces, resident bytes
        while (pieces := int(tab.page.value("bench.progress()"))) < 0.98 * tokens:
            samples.append((pieces, renderer_memory()[0]))
            done = tab.page.value("Promise.race([answer, new Promise(done => setTimeout(done, 1000, null))])")
            if done is not None:
                break
        answer = tab.page.value("answer")
        after = settled(tab)
        pieces = int(tab.page.value("bench.progress()"))
        parts = [(slice_, 2 * slice_), (pieces - slice_, pieces)]
        early, late = (float(tab.page.value(f"bench.speed({first}, {end})")) for first, end in parts)
    resident = [size / 2**20 for at, size in samples if at > slice_ // 2]
    report = answer["report"]
    assert report["tokens"] == tokens
    return [
        ["tokens, KV rows, rows evicted", f"{tokens:,}, {report['rows']}, {report['evicted']:,}"],
        ["engine's memory and its bound, MiB", " of ".join(mib(report["memory"][key]) for key in ("bytes", "bound"))],
        [f"page's process, MiB, {len(resident)} samples: first, least, most, last",
         ", ".join(f"{each:,.1f}" for each in (resident[0], min(resident), max(resident), resident[-1]))],
        ["the same before and after, without garbage", f"{mib(before)}, {mib(after)}"],
        ["tok/s, second tenth and last", f"{early:.0f}, {late:.0f}"],
    ]  # fmt: skip


def on_gpu(address: str, setting: Setting, steps: int, prompt: dict[str, Any]) -> list[str]:
    """A line: seconds until the GPU can answer, and to the first token; tok/s; MiB of the module's memory and of the
    buffers; kB with gzip that a visitor loads besides the weights, for both engines."""
    say("WebGPU on the software adapter ...")
    folder = setting.cache / GPU
    files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["web"]["gpu"]
    with open_tab(address, flags=SOFTWARE_GPU) as tab:
        opened = tab.open(EDGE, setting.edge(GPU, engine="gpu"))["seconds"]
        answer = tab.run(EDGE, prompt, steps)
        assert answer["report"]["engine"] == "gpu"
    module = max((folder / "edge").glob("*.wasm"), key=lambda path: path.stat().st_size)
    loaded = [*(folder / "edge").glob("*.js"), module, folder / files["programs"]]
    memory = (mib(answer["report"]["memory"]["bytes"]), mib(files["memory"]), f"{zipped(loaded) / 1e3:,.0f}")
    figures = (f"{opened:.1f}", f"{answer['first']:.1f}", f"{answer['decode']:.2f}", *memory)
    return ["edge, WebGPU on SwiftShader (software, on the CPU)", *figures]


def settled(tab: Tab) -> int:
    """Resident bytes of the page's process, once JavaScript's garbage has been collected."""
    tab.page.everywhere("HeapProfiler.collectGarbage")
    time.sleep(1)  # V8 returns pages to the system a little later
    return renderer_memory()[0]


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f}"


def zipped(paths: Sequence[Path]) -> int:
    return sum(len(gzip.compress(path.read_bytes(), GZIP)) for path in paths)


def sizes_lines(cache: Path) -> list[list[str]]:
    """What a visitor loads besides weights: scripts and one module."""
    npm, package = cache / "node_modules", cache / "site" / "edge"
    scripts = sorted(package.glob("*.js"))
    onnx = npm / "onnxruntime-web" / "dist"
    loaded: dict[str, Sequence[Path]] = {
        **{f"edge, {module.stem}": [*scripts, module] for module in sorted(package.glob("*.wasm"))},
        LABELS[WLLAMA]: [npm / "@wllama/wllama/esm/index.min.js", npm / "@wllama/wllama/esm/wasm/wllama.wasm"],
        LABELS[ONNX]: [onnx / f"{name}" for name in (
            "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")],
    }  # fmt: skip
    return [
        [name, *(f"{total / 1e3:,.0f}" for total in (sum(path.stat().st_size for path in paths), zipped(paths)))]
        for name, paths in loaded.items()
    ]  # fmt: skip


_VISITS = ["navigation to first token, s", "first visit", "again: least", "median", "most"]


def tables_of_cpu(address: str, setting: Setting, sizes: Sizes) -> list[str]:
    with open_tab(address) as tab:
        figures = speeds(tab, setting, sizes)
    (prompt,) = prompts(setting.model, 1, SHORT)
    speed = ["", "decode tok/s", "best", "edge ×", f"prefill {LONG} tok/s", "best", "edge ×", f"first of {SHORT}, ms"]
    start = ["start, s", "open", "first token", "open again", "first token", "page, MiB", "peak"]
    return [
        table(speed, speed_lines(figures)),
        table(start, [starts(address, setting, name, prompt) for name in setting.engines]),
        table(_VISITS, [["edge's page, offline", *visit(setting, sizes.visits)]]),
        table(["endless", ""], endless(address, setting, sizes.endless)),
        table(["a visitor loads, kB", "size", "gzip"], sizes_lines(setting.cache)),
    ]


def tables_of_gpu(address: str, setting: Setting, sizes: Sizes) -> list[str]:
    (prompt,) = prompts(setting.model, 1, SHORT)
    head = ["no GPU's speed", "open, s", "first token, s", "tok/s", "module, MiB", "buffers, MiB", "loaded, kB gzip"]
    meanwhile = "edge's page, while SwiftShader compiles"
    return [
        table(_VISITS, [[meanwhile, *visit(setting, 1, GPU)]]),
        table(head, [on_gpu(address, setting, sizes.gpu_steps, prompt)]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds")
    parser.add_argument("--gpu", action="store_true", help="the tables of WebGPU alone")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "web")
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else Sizes()
    sites = {GPU: ROWS} if asked.gpu else SITES
    setting = prepare(asked.cache.absolute(), asked.model, asked.threads, sites)
    places = {"bench": HERE / "web", "npm": setting.cache / "node_modules", "cache": setting.cache}
    with serve(places) as address:
        with open_tab(address) as tab:
            browser = tab.page.value("navigator.userAgent").rpartition("Chrome/")[2].split()[0]
        tables = [] if asked.gpu else tables_of_cpu(address, setting, sizes)
        tables += tables_of_gpu(address, setting, sizes)
    cpu = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    name = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("Model name")), "?")
    print(f"\n## {asked.model} in Q4_0 in Chromium {browser}, {asked.threads} threads; lscpu: {name}\n")
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + ".\n")
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
