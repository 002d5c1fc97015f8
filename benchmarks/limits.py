"""Tests that memory budgets are kept, or refused by BudgetError: random runs, each in a process with hard limits.

    python benchmarks/limits.py --runs 200 --seed 1 --workers 2
    python benchmarks/limits.py --runs 60 --first
    python benchmarks/limits.py --runs 100 --engine gpu
    python benchmarks/limits.py --runs 1000 --features --model smollm2-135m

Each run is `edge run` in a process of its own, which limits itself before it loads anything:

- RLIMIT_DATA: its current size (VmData) and the rest of the budget (budget − VmRSS), so that it cannot allocate one
  private page more than the budget allows. The limit counts reserved address space even if it is never touched:
  therefore stacks of threads are 1 MiB each, NumPy has multiplied once, for which OpenBLAS reserves tens of MiB, and
  ONNX Runtime gets 64 MiB on top. The cgroup counts only pages that are written to, and has no such allowance.
- a cgroup with memory.max (version 2) or memory.limit_in_bytes (1) of the budget, where one can be made.

Runs of the engine `gpu` are drawn from all software adapters, since their buffers and their compilers are in the
process. They have no RLIMIT_DATA, since drivers reserve much more than they touch: the peak is that of the process and
its children together, as with --first. Half of them find empty caches: the driver has compiled nothing, and edge has
kept the kernels' sources alone.

One prompt in six has 1 to 20 MB, more than any run can finish: --time ends it.

An outcome is `ok` (exit 0, peak resident set as the kernel counts it within the budget), `cut` (exit 3 because --time
was over within the prompt, the peak within the budget), `refused` (exit 3, the one line of a BudgetError), or a
failure: anything else. Before that, every engine has run every model once without limits, so that its compiled and
converted files exist.

With --near, budgets are those that are nearly met: from 1.00 to 1.15 × the need that `edge plan` names for the same
options, and prompts are long. RLIMIT_DATA is left out: the peak is that of the process, as the kernel counts it.

With --features, the native engine runs one model with whatever takes memory beside it: prompts up to the context, KV
dtypes, grammars, drafts, adapters, several sequences (`Session.batch`), in budgets between the smallest that edge names
without these features and twice the weights more. The peak is the larger of the report's and the kernel's. An answer
that memory ended is a failure, too (`memory`).

With --pictures, a model with eyes is shown 1 to 20 pictures of up to 60 million pixels. With --sounds, one with ears
hears 1 to 3 sounds of up to 20 minutes, in any rate, mono or stereo.

With --first, nothing is there before: each run has an empty cache folder, and compiles, packs and tries models as a
first run does. Its peak is that of the process and its children together, sampled every few milliseconds: the resident
set of the process now, and the peak so far of each child. A forked child shares its parent's pages, so only its private
ones count, and none while it has its parent's memory (vfork). RLIMIT_DATA would hold for each process on its own, and
is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import wave
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from limited import KEPT, MIB, Case, Outcome, cgroup, environment_of, run, run_in, surroundings
from machine import files_folder, machine

from edge.backends.tvm.gpu.hosts import all_adapters
from edge.lab.report.document import table
from edge.model.model import open_model

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
MODELS = ("smollm2-135m", *(str(GOLDEN / f"{name}.gguf") for name in ("llama-gqa-untied", "qwen2")))
DTYPES = {
    "cpu": ("f16", "int8", "int4", "f32"),
    "llamacpp": ("f16", "q8_0", "q4_0", "f32"),
    "onnx": ("f16", "int8", "f32"),
    "reference": ("f32",),
    "gpu": ("f16", "int8", "int4", "f32"),
}
PLAIN, BY_KEYS = ("streaming", "window", "auto"), ("keydiff", "knorm")
ATTENTIVE, UNEVEN = ("h2o", "tova", "snapkv", "scissorhands"), ("pyramidkv", "adakv", "fastgen")
POLICIES = {
    "cpu": PLAIN + BY_KEYS + ATTENTIVE + UNEVEN,
    "llamacpp": PLAIN + ATTENTIVE,
    "onnx": PLAIN + BY_KEYS + ATTENTIVE,
    "reference": PLAIN,
    "gpu": PLAIN + BY_KEYS + ATTENTIVE,
}
TRIED = tuple(str(GOLDEN / f"{name}.gguf") for name in ("qwen3moe", "gpt-oss"))  # by llama.cpp, in a child

GRAMMARS = ("", "", "regex", "json_schema")
PICTURES = (
    (0.3, "PNG"), (2, "WEBP"), (2, "BMP"), (12, "JPEG"), (12, "PNG"), (20, "JPEG progressive"), (50, "JPEG"),
    (50, "JPEG"), (60, "PNG"),
)  # fmt: skip
"""Millions of pixels, and formats."""
SOUNDS = ((5, 16_000, 1), (30, 44_100, 2), (60, 8_000, 1), (60, 48_000, 2), (300, 44_100, 2), (1_200, 16_000, 1))
"""Seconds, rates and channels."""
RANKS = (0, 0, 4, 16)  # of adapters; 0: none
CHARACTERS = 2  # of the prompt for each token of the context, about


def random_case(chance: random.Random, engines: list[str], models: tuple[str, ...]) -> Case:
    """A combination that the engine supports; whether the memory suffices is left to chance."""
    model, engine = chance.choice(models), chance.choice(engines)
    policy, kv_dtype = chance.choice(POLICIES[engine]), chance.choice(DTYPES[engine])
    if policy in ATTENTIVE + UNEVEN and engine == "llamacpp":
        kv_dtype = chance.choice(("f16", "f32"))
    if model not in MODELS[:1] and kv_dtype in ("int4", "q8_0", "q4_0"):
        kv_dtype = DTYPES[engine][0]  # small heads do not divide into their blocks
    small = model != MODELS[0]
    slow = engine == "reference" and not small
    adapter = chance.choice(software_adapters()) if engine == "gpu" else ""
    rows = chance.choice((None, None, 64, 200, 300, 512)) if small else chance.choice((None, None, 256, 512, 1024))
    prompt, seconds = chance.choice((1, 30, 500, 2000, 400 if slow else 6000)), None
    if chance.random() < 1 / 6:
        prompt, seconds = chance.randrange(1_000_000, 20_000_000), chance.choice((4, 10))
    low, high = (75 if small else 150), (130 if small else 1000 if slow else 300)
    if adapter:  # between what a driver takes to show its adapters, and what a first run takes
        low, high = (140, 480) if small else (200, 700)
        if not (small or seconds):
            prompt = min(prompt, 200)  # a software adapter runs ten tokens a second, on a busy machine one
    return Case(
        model=model,
        engine=engine,
        policy=policy,
        kv_dtype=kv_dtype,
        budget=chance.randrange(low * MIB, high * MIB),
        prompt=prompt,
        tokens=chance.choice((1, 8, 40)),
        rows=rows,
        chunk=chance.choice((None, None, None, 1, 24)),
        seconds=seconds,
        adapter=adapter,
        uncompiled=bool(adapter) and chance.random() < 1 / 2,
    )


def first_case(chance: random.Random, engines: list[str], models: tuple[str, ...] = MODELS) -> Case:
    """A first run, with a budget around what compiling takes."""
    case = random_case(chance, engines, models)
    if case.engine == "llamacpp" and chance.random() < 0.5:
        case = replace(case, model=chance.choice(TRIED), policy="auto", kv_dtype="f16", rows=None, chunk=None)
    low, high = (75, 330) if case.model != MODELS[0] else (150, 520)
    if case.adapter:
        low, high = (250, 600) if case.model != MODELS[0] else (350, 800)
    return replace(case, budget=chance.randrange(low * MIB, high * MIB), prompt=min(case.prompt, 500), first=True)


def near_case(chance: random.Random, engines: list[str]) -> Case:
    """Its budget is a little more than what `edge plan` names: `plan_near` puts that in the place of a share."""
    case = random_case(chance, engines, MODELS[1:])
    prompt, tokens = chance.choice((500, 2000, 6000)), chance.choice((8, 40, 200))
    return replace(case, prompt=prompt, tokens=tokens, seconds=None, near=True)


def features_case(chance: random.Random, model: str) -> Case:
    """A run of the native engine with features that take memory. Its budget is stated as a share (`with_budget`)."""
    sequences = chance.choice((1, 1, 1, 3))
    case = Case(
        model=model,
        engine="cpu",
        policy=chance.choice(("streaming", "auto", *POLICIES["cpu"])),
        kv_dtype=chance.choice(DTYPES["cpu"][:2] if model in MODELS[1:] else DTYPES["cpu"]),
        budget=MIB,
        prompt=max(1, int(CHARACTERS * open_model(model).spec.context * chance.random() ** 2)),
        tokens=chance.choice((1, 8, 40, 100)),
        rows=None,
        chunk=None,
        features=True,
        grammar=chance.choice(GRAMMARS),
        rank=chance.choice(RANKS),
        speculate="off" if sequences > 1 else chance.choice(("auto", "off")),
        sequences=sequences,
    )
    return replace(case, share=chance.random())


def pictures_case(chance: random.Random, engines: list[str]) -> Case:
    """Pictures of any sizes, which take much more than the model."""
    case = media_case(chance, engines, "eyes/smolvlm.gguf", (75, 400))
    shown = (picture_file(*chance.choice(PICTURES), chance.randrange(8)) for _ in range(chance.choice((1, 3, 20))))
    return replace(case, pictures=tuple(map(str, shown)))


def media_case(chance: random.Random, engines: list[str], model: str, budgets: tuple[int, int]) -> Case:
    """A case without its pictures or sounds. budgets: from, to, in MiB."""
    engine = chance.choice([each for each in engines if each in ("cpu", "reference")])
    return Case(
        model=str(GOLDEN / model),
        engine=engine,
        policy="streaming",
        kv_dtype=DTYPES[engine][0],
        budget=chance.randrange(budgets[0] * MIB, budgets[1] * MIB),
        prompt=chance.choice((5, 300)),
        tokens=chance.choice((1, 8)),
        rows=None,
        chunk=None,
    )


@cache
def picture_file(millions: float, form: str, number: int) -> Path:
    """A picture of about so many million pixels, of one colour. number: tells it from others, behind its end."""
    from PIL import Image  # here: others need no Pillow

    kind, _, how = form.partition(" ")
    path = files_folder() / f"limits-{millions}-{form.replace(' ', '-')}-{number}.{kind.lower()}"
    if not path.exists():
        whole = path.with_name(f"limits-{millions}-{form.replace(' ', '-')}.{kind.lower()}")
        if not whole.exists():
            side = int((millions * 1e6 / 0.78) ** 0.5)
            Image.new("RGB", (side, int(0.78 * side)), "teal").save(whole, kind, progressive=how == "progressive")
        path.write_bytes(whole.read_bytes() + bytes([number]))
    return path


def sounds_case(chance: random.Random, engines: list[str]) -> Case:
    """Sounds of any lengths, whose spectrograms take much more than the model."""
    case = media_case(chance, engines, "heard/qwen2.gguf", (55, 300))
    sounds = SOUNDS if case.engine == "cpu" else SOUNDS[:4]
    played = (sound_file(*chance.choice(sounds), number) for number in range(chance.choice((1, 1, 3))))
    return replace(case, sounds=tuple(map(str, played)), mmproj="qwen2audio.gguf")


@cache
def sound_file(seconds: int, rate: int, channels: int, number: int) -> Path:
    """Noise. number: tells it from others."""
    path = files_folder() / f"limits-{seconds}-{rate}-{channels}-{number}.wav"
    if not path.exists():
        chance = np.random.default_rng(number)
        with wave.open(str(path), "wb") as out:
            out.setparams((channels, 2, rate, 0, "NONE", ""))
            for _ in range(seconds):
                out.writeframes(chance.integers(-9000, 9000, rate * channels).astype("<i2").tobytes())
    return path


@cache
def smallest(case: Case) -> int:
    """The smallest budget that edge names for a case."""
    said = re.search(r"(?:--memory |memory=\")([0-9]+)MiB", run(replace(case, budget=MIB), None).said)
    assert said is not None, case
    return int(said[1]) * MIB


def with_budget(case: Case) -> Case:
    """The case with a budget: the smallest, and `share` of twice the weights more."""
    alike = replace(case, policy="streaming", prompt=1, tokens=1, grammar="", rank=0, speculate="auto", share=0.0)
    return replace(case, budget=int(smallest(alike) + case.share * 2 * open_model(case.model).spec.weight_bytes))


def plan_near(case: Case, share: float) -> Case:
    """The case with `share` × the need of its plan as its budget."""
    _, model, _raw, _ignore_eos, *flags = case.arguments
    pairs = zip(flags[::2], flags[1::2], strict=True)
    given = [each for pair in pairs if pair[0] not in ("--memory", "-n") for each in pair]
    command = [sys.executable, "-m", "edge", "plan", model, *given, "--json"]
    with surroundings(case) as environment:
        planned = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
    found = json.loads(planned.stdout)
    need = max(found["predicted_peak"] + found["bytes"]["reserve"], found["first_run"])
    return replace(case, budget=int(share * need))


def available(engine: str) -> bool:
    package = {"cpu": "tvm", "gpu": "tvm", "llamacpp": "llama_cpp", "onnx": "onnxruntime"}.get(engine)
    return (package is None or find_spec(package) is not None) and (engine != "gpu" or bool(software_adapters()))


@cache
def software_adapters() -> list[str]:
    """Places of GPUs that are this CPU, such as wgpu:0."""
    return [adapter.place for adapter in all_adapters() if adapter.kind == "cpu"]


def warm_up(cases: list[Case]) -> None:
    """Compile and convert what the cases need, without limits."""
    needed = {
        (case.model, case.engine, case.adapter, case.kv_dtype, case.policy in ATTENTIVE + UNEVEN): case
        for case in cases
        if not case.features
    }
    designs = {(case.kv_dtype, case.rank > 0, case.speculate, case.sequences): case for case in cases if case.features}
    for number, case in enumerate(designs.values(), 1):
        print(f"compiled {number} of {len(designs)}", file=sys.stderr, flush=True)
        outcome = run(replace(case, policy="streaming", budget=0, prompt=1, tokens=1, rows=256, grammar=""), None)
        assert outcome.said == "" or "edge:" not in outcome.said, outcome.said
    for case in needed.values():
        if case.pictures:
            run(replace(case, budget=0, pictures=(str(picture_file(*PICTURES[0], 0)),)), None)
        elif case.sounds:
            run(replace(case, budget=0, sounds=(str(sound_file(*SOUNDS[0], 0)),)), None)
        elif case.engine != "reference":
            arguments = ["run", case.model, "--raw", "-p", "a", "-n", "1", "--backend", case.engine, "--max-kv-size"]
            arguments += ["256", "--kv-dtype", case.kv_dtype, "--kv-policy", case.policy]
            if case.chunk:
                arguments += ["--prefill-step-size", str(case.chunk)]
            subprocess.run(
                [sys.executable, "-m", "edge", *arguments], capture_output=True, check=False, cwd="/",
                env=environment_of(case),
            )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=1, help="runs at once")
    options.add_argument("--first", action="store_true", help="first runs, with an empty cache folder each")
    options.add_argument("--near", action="store_true", help="budgets that are nearly met")
    options.add_argument("--features", action="store_true", help="grammars, drafts, adapters, sequences, long prompts")
    options.add_argument("--pictures", action="store_true", help="pictures for a model with eyes")
    options.add_argument("--sounds", action="store_true", help="sounds for a model with ears")
    options.add_argument("--model", default=MODELS[0], help="of --features")
    options.add_argument("--engine", choices=tuple(DTYPES), action="append", help="those alone")
    options.add_argument("--warm", action="store_true", help="compiled and converted files exist already")
    options.add_argument("--json", type=Path, help="write every case and its outcome here")
    chosen = options.parse_args()
    chance, engines = random.Random(chosen.seed), chosen.engine or [each for each in DTYPES if available(each)]
    draw = first_case if chosen.first else near_case if chosen.near else partial(random_case, models=MODELS)
    draw = pictures_case if chosen.pictures else sounds_case if chosen.sounds else draw
    model = str(Path(chosen.model).absolute()) if Path(chosen.model).exists() else chosen.model
    cases = [features_case(chance, model) if chosen.features else draw(chance, engines) for _ in range(chosen.runs)]
    if not (chosen.warm or chosen.first):
        warm_up(cases)
    if chosen.near:
        cases = [plan_near(case, chance.uniform(1.0, 1.15)) for case in cases]
    if chosen.features:
        cases = [with_budget(case) for case in cases]
    with ExitStack() as stack, ThreadPoolExecutor(chosen.workers) as workers:
        groups = [stack.enter_context(cgroup(number)) for number in range(chosen.workers)]
        held = "the peak of the process"
        if not (chosen.near or chosen.features):
            held = "the sampled peak of processes together" if chosen.first else "RLIMIT_DATA, or the peak of a gpu run"
        print(f"limits: {held}{' and a cgroup' if groups[0] else ' (no cgroup can be made here)'}", flush=True)
        outcomes: list[Outcome] = []
        for outcome in workers.map(lambda case: run_in(groups, case), cases):
            outcomes.append(outcome)
            if len(outcomes) % 5 == 0:
                print(f"{len(outcomes)} of {len(cases)} runs", file=sys.stderr, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print(summary(outcomes))
    over, ended, refused = (
        sum(kind == each.kind for each in outcomes) for kind in ("beyond the budget", "memory", "refused")
    )
    count = len(outcomes)
    print(
        f"over budget: {over} of {count}, ended for memory by their own plan: {ended} of {count}, "
        f"refused: {refused} of {count}\n{machine()['cpu']}, {machine()['cores']} cores, {' '.join(machine()['isa'])}"
    )


def summary(outcomes: list[Outcome]) -> str:
    rows = []
    for engine in dict.fromkeys(_name(each.case) for each in outcomes):
        own = [each for each in outcomes if _name(each.case) == engine]
        kinds = Counter(each.kind for each in own)
        closest = max((each.peak / each.case.budget for each in own if each.kind in ("ok", "cut")), default=0.0)
        failed = len(own) - sum(kinds[each] for each in KEPT)
        rows.append([engine, *map(str, (len(own), *(kinds[each] for each in KEPT), failed)), f"{closest:.1%}"])
    return table(["engine", "runs", *KEPT, "failed", "highest peak / budget"], rows)


def _name(case: Case) -> str:
    return f"{case.engine}@{case.adapter}" if case.adapter else case.engine


if __name__ == "__main__":
    main()
