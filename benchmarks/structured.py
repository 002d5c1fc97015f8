"""Structured output: are answers at temperature 1 valid by their schemas, and how long does a mask take?

    make bench-structured
    python benchmarks/structured.py [--model smollm2-135m] [--runs 10]
    python benchmarks/structured.py --maskbench FOLDER [--sample 1000]

Each of 20 schemas of the kinds that programs send is answered with several seeds; the package `jsonschema` judges. A
mask's time is `Matcher.mask`: finding the tokens that are allowed, and writing −∞ over the logits of all others.

Then the valid answers are followed token by token, by llguidance as edge uses it and, if `make bench-structured` has
installed it, by xgrammar: the time until a schema is ready, and that of each mask, on one thread. That is MaskBench's
method with schemas of our own, and texts that edge wrote: its figures are not MaskBench's.

--maskbench takes the folder `maskbench/data` of github.com/guidance-ai/jsonschemabench: a schema a file, with valid and
invalid texts. Each text is followed up to its end or a refused token; a step is a mask and the acceptance of its token.

Times are CPU time of the thread, which other programs of a busy machine hardly change.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import edge
from edge.cli.terminal.show import table
from edge.grammar.matcher import Matcher
from edge.model.model import Model
from edge.types import FloatArray

MOST = 600  # tokens of an answer
ROOT = Path(__file__).parents[1]
XGRAMMAR = ROOT / "build" / "xgrammar" / "bin" / "python"


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def many(items: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def choice(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


WORD, TEXT = {"type": "string", "maxLength": 16}, {"type": "string", "maxLength": 80}
COUNT = {"type": "integer", "minimum": 0, "maximum": 1000}
SHARE = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01}
FLAG = {"type": "boolean"}
POINT = record(x=COUNT, y=COUNT)

SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Describe a person.", record(name=WORD, age=COUNT, tags=many(WORD))),
    "sentiment": ("Judge: I loved it.", record(label=choice("positive", "negative", "neutral"), score=SHARE)),
    "tool call": ("Weather in Paris?", record(name={"const": "weather"},
                                                arguments=record(city=WORD, unit=choice("C", "F")))),
    "calendar": ("A meeting.", record(title=TEXT, date={"type": "string", "format": "date"},
                                      time={"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"})),
    "optional": ("Describe a book.", record(["title"], title=TEXT, author=WORD, year=COUNT, isbn=WORD)),
    "union": ("A value.", {"anyOf": [WORD, COUNT, FLAG, {"type": "null"}]}),
    "discriminated": ("A shape.", {"oneOf": [record(kind={"const": "circle"}, radius=COUNT),
                                             record(kind={"const": "square"}, side=COUNT)]}),
    "nullable": ("A user.", record(name=WORD, email={"anyOf": [{"type": "null"},
                                           {"type": "string", "format": "email", "maxLength": 30}]})),
    "polygon": ("A triangle.", many(POINT, 4, 3)),
    "matrix": ("A matrix.", many(many(COUNT, 3, 3), 3, 3)),
    "map": ("Prices.", {"type": "object", "patternProperties": {"^[a-z]{3,8}$": COUNT}, "maxProperties": 3,
                        "additionalProperties": False}),
    "tuple": ("A pair.", {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2}),
    "tree": ("A tree.", {"$defs": {"leaf": record(["v"], v=COUNT, next={"$ref": "#/$defs/end"}),
                                   "end": record(v=COUNT)},
                         "$ref": "#/$defs/leaf"}),
    "uuid": ("An id.", record(id={"type": "string", "format": "uuid"})),
    "ip": ("A host.", record(host={"type": "string", "format": "ipv4"}, port=COUNT)),
    "steps": ("How to make tea?", record(steps=many(record(explanation=TEXT, output=WORD), 3, 1), answer=WORD)),
    "extraction": ("Acme paid 5 EUR.", record(entities=many(record(text=WORD, type=choice("ORG", "PER", "MONEY"))))),
    "quiz": ("A question.", record(question=TEXT, options=many(WORD, 4, 4),
                                  correct={"type": "integer", "minimum": 0, "maximum": 3})),
    "switches": ("Settings.", record(**{f"s{index}": FLAG for index in range(12)})),
    "merged": ("A pet.", {"allOf": [{"type": "object", "properties": {"name": WORD}, "required": ["name"]},
                                    {"type": "object", "properties": {"legs": COUNT}, "required": ["legs"]}],
                          "additionalProperties": False} | record(name=WORD, legs=COUNT)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=10, help="of each schema")
    parser.add_argument("--maskbench", type=Path, metavar="FOLDER", help="follow the texts of these schemas instead")
    parser.add_argument("--sample", type=int, default=1000, help="of that folder's schemas, drawn by chance")
    chosen = parser.parse_args()
    times: list[float] = []
    first: list[float] = []
    answers: dict[str, list[str]] = {name: [] for name in SCHEMAS}
    mask = Matcher.mask

    def timed(self: Matcher, logits: FloatArray) -> None:
        started = time.thread_time()
        mask(self, logits)
        times.append(time.thread_time() - started)

    model = edge.open_model(chosen.model)
    started = time.thread_time()
    edge.check_grammar(edge.Grammar(regex="a"), model)
    print(f"tables of the vocabulary: {time.thread_time() - started:.2f} s")
    if chosen.maskbench:
        maskbench(model, chosen.maskbench, chosen.sample)
        return
    Matcher.mask = timed  # type: ignore[method-assign]
    valid = invalid = cut = forced = tokens = 0
    with edge.load(model, max_kv_size=1024) as session:
        for name, (prompt, schema) in SCHEMAS.items():
            grammar, good = edge.Grammar(json_schema=schema), 0
            for seed in range(chosen.runs):
                sampling = model.sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
                begun = len(times)
                try:
                    text = session.generate(
                        f"{prompt} Answer in JSON.", grammar=grammar, sampling=sampling, max_tokens=MOST
                    )
                    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
                    good += 1
                    answers[name].append(text)
                except edge.IncompleteError as error:
                    cut += 1
                    print(f"  {name}, seed {seed}: cut: …{error.text[-60:]!r}")
                except (ValueError, jsonschema.ValidationError) as error:
                    invalid += 1
                    print(f"  {name}, seed {seed}: {text!r}: {str(error).splitlines()[0]}")
                first += times[begun : begun + 1]
                if session.report is not None:
                    forced, tokens = forced + session.report.tokens.forced, tokens + session.report.tokens.generated
            valid += good
            print(f"{name:14} {good} of {chosen.runs} valid", flush=True)
    micros = 1e6 * np.array(times)
    print(f"valid {valid} of {valid + invalid + cut} (invalid {invalid}, cut {cut})")
    mean, median, high = micros.mean(), np.median(micros), np.quantile(micros, 0.99)
    print(f"masks {micros.size}: mean {mean:.0f} µs, median {median:.0f}, p99 {high:.0f}")
    print(f"first masks: mean {1e6 * np.mean(first):.0f} µs; forced tokens {forced} of {tokens}")
    Matcher.mask = mask  # type: ignore[method-assign]
    compare(model, answers)


def compare(model: Model, answers: dict[str, list[str]]) -> None:
    """Follow these answers, by edge's masks and by xgrammar's, and print a row for each schema."""
    encode = model.tokenizer.encode
    tokens = {name: [encode(text, start=False).tolist() for text in texts] for name, texts in answers.items()}
    found = {"edge": {name: follow(model, SCHEMAS[name][1], each) for name, each in tokens.items()}}
    if XGRAMMAR.exists():
        vocab = [base64.b64encode(model.tokenizer.piece(each)).decode() for each in range(model.tokenizer.size)]
        asked = {
            "vocab": vocab, "stops": sorted(model.tokenizer.end_ids), "answers": tokens,
            "schemas": {name: schema for name, (_, schema) in SCHEMAS.items()},
        }  # fmt: skip
        done = subprocess.run(
            [XGRAMMAR, ROOT / "benchmarks" / "peers" / "xgrammar_worker.py"], input=json.dumps(asked), check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        said = json.loads(done.stdout)
        found[f"xgrammar {said['version']}"] = said["found"]
    head = ["schema", "tokens"] + [f"{who}: {what}" for who in found for what in ("ready, ms", "mask, µs", "p99, µs")]
    rows = []
    for name in SCHEMAS:
        count = sum(map(len, tokens[name]))
        row = [name, str(count)]
        for results in found.values():
            row += figures(results[name], count)
        rows.append(row)
    last = ["all", str(sum(len(each) for texts in tokens.values() for each in texts))]
    for results in found.values():
        good = [each for each in results.values() if "error" not in each]
        seconds = [one for each in good for one in each["masks"]]
        last += figures({"compile": sum(each["compile"] for each in good), "masks": seconds}, len(seconds))
    print(table(head, [*rows, last]))


def figures(result: dict[str, Any], count: int) -> list[str]:
    """Milliseconds until a schema is ready; mean and 99th percentile of its masks, or why there are none."""
    if "error" in result or not result["masks"]:
        return [result.get("error", "no valid answer")[:24], "", ""]
    micros = 1e6 * np.array(result["masks"])
    refused = "" if result.get("accepted", count) == count else f" (refused at {result['accepted']})"
    return [f"{1e3 * result['compile']:.1f}", f"{micros.mean():.0f}{refused}", f"{np.quantile(micros, 0.99):.0f}"]


def follow(model: Model, schema: dict[str, Any], answers: list[list[int]]) -> dict[str, Any]:
    """Seconds until the schema is ready, and of each mask of these answers."""
    started = time.thread_time()
    grammar = edge.Grammar(json_schema=schema)
    Matcher(grammar, model.tokenizer)
    ready, masks, logits = time.thread_time() - started, list[float](), np.zeros(model.tokenizer.size, np.float32)
    for answer in answers:
        matcher = Matcher(grammar, model.tokenizer)
        for token in answer:
            logits[:] = 0
            started = time.thread_time()
            matcher.mask(logits)
            masks.append(time.thread_time() - started)
            assert logits[token] == 0
            matcher.accept(token)
    return {"compile": ready, "masks": masks}


def maskbench(model: Model, folder: Path, sample: int) -> None:
    """Follow the texts of a folder of MaskBench's, and print what was refused and how long that took."""
    files = sorted(folder.glob("*.json"))
    files = random.Random(0).sample(files, min(sample, len(files)))
    ready, masks, steps, refused, judged = list[float](), list[float](), list[float](), 0, Counter[tuple[bool, bool]]()
    logits = np.zeros(model.tokenizer.size, np.float32)
    for path in files:
        read = json.loads(path.read_text(encoding="utf-8"))
        started = time.thread_time()
        try:
            grammar = edge.Grammar(json_schema=read["schema"])
            Matcher(grammar, model.tokenizer)
        except edge.InputError:
            refused += 1
            continue
        ready.append(time.thread_time() - started)
        for test in read["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            matcher, accepted = Matcher(grammar, model.tokenizer), True
            for token in model.tokenizer.encode(text, start=False).tolist():
                logits[:] = 0
                started = time.thread_time()
                matcher.mask(logits)
                masked = time.thread_time()
                if accepted := bool(logits[token] == 0):
                    matcher.accept(token)
                steps.append(time.thread_time() - started)
                masks.append(masked - started)
                if not accepted:
                    break
            judged[test["valid"], accepted and matcher.complete] += 1
    print(f"{len(files)} schemas, {refused} of them refused; {len(steps)} tokens")
    print(f"texts that are valid: {judged[True, True]} accepted, {judged[True, False]} refused")
    print(f"texts that are not: {judged[False, True]} accepted, {judged[False, False]} refused")
    rows = []
    for name, seconds in (("schema ready", ready), ("mask", masks), ("mask and acceptance", steps)):
        micros = 1e6 * np.array(seconds)
        shares = [f"{each:.0f}" for each in np.quantile(micros, (0.5, 0.75, 0.95, 0.99, 1))]
        rows.append([name, f"{micros.mean():.0f}", *shares])
    print(table(["CPU time, µs", "mean", "p50", "p75", "p95", "p99", "most"], rows))


if __name__ == "__main__":
    main()
