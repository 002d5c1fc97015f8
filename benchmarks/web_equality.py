"""Greedy texts of WebAssembly modules against the x86 engine: 256 tokens of five prompts, in Node and in Chromium.

    python benchmarks/web_equality.py [--tokens 256] [--prompts 5] [--isas relaxed,relaxed16,simd] [--threads 1,2]

The oracle is the engine with EDGE_ISA=generic and as many threads: it rounds every product and every sum, as
WebAssembly does. With fused operations (AVX2) the last bits differ, and texts part where two tokens are about equally
likely; the last column tells after how many characters. Ends with an error unless all texts equal the oracle's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from machine import machine, say
from model_files import pure_file
from web_page import open_tab, serve

import edge
from edge.apps.enums import Role
from edge.cli.terminal.show import table

from web_module import NodeModule  # isort: skip  (a module of the tests, which web_page finds)

HERE = Path(__file__).parent
PROMPTS = (
    "The sea was calm that morning, and the old boat lay quiet on the sand",
    "def fibonacci(n):\n",
    "Question: Why is the sky blue?\nAnswer:",
    "Once upon a time, in a village at the end of the world,",
    "Der Zug nach Wien fährt um",
)
ORACLE, FUSED = "generic", "avx2"
ISAS, ROWS = ("relaxed", "relaxed16", "simd"), 512
NODE_OF_RELAXED = 22  # V8's relaxed dot product with sums in 32 bits is wrong in earlier ones

Texts = Sequence[str]


def make_site(cache: Path, source: str) -> Path:
    """A site of the model in Q4_0, with memory for every number of threads; model.gguf beside it."""
    cache.mkdir(parents=True, exist_ok=True)
    model = edge.open_model(pure_file(cache, edge.open_model(source).path.absolute()))
    say("exporting ...")
    edge.export(model, cache / "equality", device="web", force=True, max_kv_size=ROWS, kv_dtype="f16")
    return cache / "equality"


def native(model: Path, plan: dict[str, Any], isa: str, threads: int, prompts: Texts, tokens: int) -> Texts:
    """Of edge's engine with this instruction set, under the plan of the site."""
    alike = {name: plan[name] for name in ("kv_policy", "kv_dtype", "prefill_step_size")}
    greedy = edge.SamplingParams(temperature=0)
    os.environ["EDGE_ISA"] = isa
    with edge.load(model, backend="cpu", threads=threads, max_kv_size=plan["kv_size"], **alike) as session:
        return [
            "".join(session.stream(prompt, raw=True, max_tokens=tokens, sampling=greedy, ignore_eos=True))
            for prompt in prompts
        ]


def in_node(site: Path, isa: str, threads: int, prompts: Texts, tokens: int) -> Texts:
    web, texts = json.loads((site / "manifest.json").read_text(encoding="utf-8"))["web"], []
    maximum = web["memory"]["maximum"] << 16
    with NodeModule(site / web["modules"][isa], workers=threads - 1, maximum=maximum) as module:
        module.open(site / web["model"])
        module.begin(threads=threads, temperature=0, max_tokens=tokens, ignore_eos=1)
        for prompt in prompts:
            module.rewind()
            texts.append(module.answer(prompt, Role.RAW)[1])
    return texts


def in_chromium(site: Path, isa: str, threads: int, prompts: Texts, tokens: int) -> Texts:
    with serve({"bench": HERE / "web", "site": site}) as address, open_tab(address) as tab:
        tab.open("edge", {"site": "/site/", "isa": isa, "threads": threads})
        return [tab.run("edge", {"text": prompt}, tokens)["text"] for prompt in prompts]


WHERE: dict[str, Callable[[Path, str, int, Texts, int], Texts]] = {"Node": in_node, "Chromium": in_chromium}


def alike(texts: Texts, others: Texts) -> list[int | None]:
    """Of each pair: the characters before the first difference; None if they are equal."""
    return [
        None if a == b else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        for a, b in zip(texts, others, strict=True)
    ]


def runs(where: str, isa: str) -> bool:
    if where != "Node" or isa != "relaxed":
        return True
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    return int((re.findall(r"\d+", version) or ["0"])[0]) >= NODE_OF_RELAXED


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--isas", default=",".join(ISAS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "web")
    asked = parser.parse_args()
    site, prompts = make_site(asked.cache.absolute(), asked.model), PROMPTS[: asked.prompts]
    model = pure_file(asked.cache.absolute(), edge.open_model(asked.model).path.absolute())
    plan = json.loads((site / "manifest.json").read_text(encoding="utf-8"))["plan"]
    lines, equal = [], True
    for threads in map(int, asked.threads.split(",")):
        oracle, fused = (native(model, plan, isa, threads, prompts, asked.tokens) for isa in (ORACLE, FUSED))
        for isa, where in [(isa, where) for isa in asked.isas.split(",") for where in WHERE if runs(where, isa)]:
            say(f"{isa} in {where}, {threads} threads ...")
            texts = WHERE[where](site, isa, threads, prompts, asked.tokens)
            parted = alike(oracle, texts)
            equal = equal and not any(at is not None for at in parted)
            shown = [", ".join("=" if at is None else str(at) for at in each) for each in (parted, alike(fused, texts))]
            lines.append([isa, where, str(threads), *shown])
    print(f"\n## {asked.model} in Q4_0, {asked.tokens} tokens of {len(prompts)} prompts\n")
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + ".\n")
    print(table(["module", "in", "threads", f"x86, {ORACLE}", f"x86, {FUSED}"], lines, left=2))
    if not equal:
        sys.exit("the texts differ")


if __name__ == "__main__":
    main()
