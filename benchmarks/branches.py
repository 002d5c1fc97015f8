"""Branches side by side: their speed on shapes of 1 to 4 billion parameters, and their answers on real small models.

    python benchmarks/branches.py [NAME …] [--layers 2,5] [--rounds 5]   # passes of 1, 3 and 8 branches, extrapolated
    python benchmarks/branches.py --answers smollm2-135m                 # votes and outlines, with real weights

NAME: of edge's table of current models (default: 1.0, 1.7 and 4.0 billion parameters). A file has random weights in
Q4_0, the model's head, and few of its layers; seconds of a pass are a line through two numbers of layers, read off at
the model's own: extrapolated, not measured. Seconds are CPU seconds of one thread, the least of the rounds.

- apart, beside: N answers of ANSWER tokens to one prompt of PROMPT, one after the other with the prompt run each time,
  and side by side behind one run of it. vote: the former by the latter.
- outline: a plain answer of N · ANSWER tokens by the outline's: OUTLINE tokens a point in sequence, the prompts of the
  points, and the points of ANSWER tokens side by side.

--answers: 30 questions of yes or no (below), greedily and by vote; and ten questions whose outlines
and routes are printed, for a person to judge.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, cast

import numpy as np
from hybrids import first_layers, make_file

import edge
from edge.backends import engine_named
from edge.backends.base import BatchedEngine, EngineConfig
from edge.formats.gguf import read_gguf
from edge.grammar.grammar import Grammar
from edge.model.names.known import known_models
from edge.model.reader import read_spec

NAMES = ("llama3.2:1b", "qwen3:1.7b", "qwen3:4b")
BRANCHES, PASSES = (1, 3, 8), 8
PROMPT, ANSWER, OUTLINE, POINT = 256, 48, 8, 24  # tokens; of a point's own prompt the last
FACTS = {
    "Is the sun hotter than the moon?": "yes",
    "Is ice warmer than steam?": "no",
    "Is Paris in France?": "yes",
    "Is Berlin in Italy?": "no",
    "Do fish live in water?": "yes",
    "Do cats lay eggs?": "no",
    "Is seven an odd number?": "yes",
    "Is nine an even number?": "no",
    "Is gold a metal?": "yes",
    "Is wood a metal?": "no",
    "Do birds have feathers?": "yes",
    "Do snakes have legs?": "no",
    "Is Africa a continent?": "yes",
    "Is London a continent?": "no",
    "Is milk white?": "yes",
    "Is grass usually red?": "no",
    "Is an elephant larger than a mouse?": "yes",
    "Is a flea larger than a dog?": "no",
    "Does the earth orbit the sun?": "yes",
    "Does the sun orbit the moon?": "no",
    "Is winter colder than summer?": "yes",
    "Is a minute longer than an hour?": "no",
    "Is Linux an operating system?": "yes",
    "Is Python a kind of fruit?": "no",
    "Can humans breathe air?": "yes",
    "Can stones swim?": "no",
    "Is bread made of flour?": "yes",
    "Is glass made of wood?": "no",
    "Are there twelve months in a year?": "yes",
    "Are there ten days in a week?": "no",
}
OPEN = (
    "What are the benefits of regular exercise?", "How can I save electricity at home?",
    "What should I pack for a hike?",
    "What makes a good teacher?", "How do I prepare for a job interview?", "What is 17 times 3?", "Who wrote Hamlet?",
    "Write a function that adds two numbers.", "Tell me a short story about a cat.", "Why is the sky blue?",
)  # fmt: skip


def passes_of(name: str, layers: int, rounds: int) -> dict[str, float]:
    """CPU seconds of one thread: of the prompt, of the prompts of points, and of a pass of each number of branches."""
    file, random = read_gguf(make_file(f"{name}@{layers}", "Q4_0")), np.random.default_rng(0)
    spec, rows = read_spec(file), PROMPT + (max(BRANCHES) + 1) * POINT + PASSES * (rounds + 1) * 2
    config = EngineConfig(rows, PROMPT, "f16", 1, sequences=max(BRANCHES))
    engine = cast(BatchedEngine, engine_named("cpu").load(file, spec, config))
    each = [engine.sequence(number) for number in range(max(BRANCHES))]
    found: dict[str, float] = {}

    def least(key: str, work: Any) -> None:
        started = time.process_time()
        work()
        took = time.process_time() - started
        found[key] = min(found.get(key, took), took)

    def draw(count: int) -> Any:
        return random.integers(3, spec.vocab, count).astype(np.int32)

    for _ in range(rounds + 1):
        for sequence in each:
            sequence.kv.truncate(0)
        least("prompt", lambda: each[0].forward(draw(PROMPT)))
        saved = each[0].kv.save()
        for sequence in each[1:]:
            sequence.kv.append(saved)
        least("point", lambda: each[0].forward(draw(POINT)))
        for count in BRANCHES:

            def run(count: int = count) -> None:
                for _ in range(PASSES):
                    if count == 1:
                        each[0].forward(draw(1))
                    else:
                        engine.forward_batch(draw(count), range(count))

            least(f"{count}", run)
    engine.close()
    return {key: took / PASSES if key.isdigit() else took for key, took in found.items()}


def measure_speed(names: list[str], layers: list[int], rounds: int) -> None:
    print("| shape | branches | a pass, ms | apart / beside, s | vote | outline |\n|---|---:|---:|---:|---:|---:|")
    for name in names:
        few, more = (passes_of(name, count, rounds) for count in layers)
        whole = int(known_models()[name].figures["block_count"])
        took = {key: few[key] + (more[key] - few[key]) * (whole - layers[0]) / (layers[1] - layers[0]) for key in few}
        for count in BRANCHES:
            one, beside = took["1"], took["prompt"] + ANSWER * took[f"{count}"]
            apart = count * (took["prompt"] + ANSWER * one)
            plain = took["prompt"] + count * ANSWER * one
            outlined = beside + count * (OUTLINE * one + took["point"])
            seconds, gains = f"{apart:.1f} / {beside:.1f}", f"{apart / beside:.2f} | {plain / outlined:.2f}"
            print(f"| {name} | {count} | {1e3 * took[f'{count}']:.0f} | {seconds} | {gains} |", flush=True)


def measure_answers(model: str) -> None:
    form = Grammar(regex="yes|no")
    with edge.load(model, sequences=8, max_kv_size=1024) as session:
        raw = session.model.template is None
        for votes in (None, 5, 15):
            right, began = 0, time.process_time()
            for number, (question, wanted) in enumerate(FACTS.items()):
                drawn = edge.SamplingParams(temperature=0.7, seed=number) if votes else None
                asked = f"Question: {question}\nAnswer (yes or no): " if raw else f"{question} Answer yes or no."
                right += session.generate(asked, raw=raw, grammar=form, sampling=drawn, vote=votes) == wanted
            print(f"{model}, {f'vote {votes}' if votes else 'greedy'}: {right}/{len(FACTS)} right, "
                  f"{(time.process_time() - began) / len(FACTS):.2f} CPU s each", flush=True)  # fmt: skip
        for question in OPEN if not raw else ():
            began = time.process_time()
            text = session.generate(question, outline=True, max_tokens=300)
            assert session.report is not None
            assert session.report.branched is not None
            route, took = session.report.branched.route, time.process_time() - began
            print(f"\n## {question} (route: {route}, {took:.1f} CPU s)\n{text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--layers", default="2,5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", nargs="+", default=[])
    chosen = parser.parse_args()
    for model in chosen.answers:
        measure_answers(model)
    if not chosen.answers:
        for name in chosen.names:
            first_layers(name)  # refuses a name that the table lacks, before anything runs
        measure_speed([*chosen.names], [int(each) for each in chosen.layers.split(",")], chosen.rounds)


if __name__ == "__main__":
    main()
