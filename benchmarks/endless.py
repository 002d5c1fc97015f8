"""Endless generation in bounded memory: a long prompt and tens of thousands of generated tokens in 512 KV rows.

Shows whether memory and speed stay constant, and the text stays English. A machine's speed drifts over minutes, so the
old session's last tokens and a fresh session's early ones are timed interleaved, 100 at a time. The text, drawn at
temperature 0.8, is judged slice by slice by the same model with all rows in its cache, in float32; so is a text written
by people, for comparison. Text that repeats itself has a low perplexity and few different tokens; noise has a high one.

    nice -n 19 python benchmarks/endless.py --tokens 1000000 --prompt 2000 --threads 1 --memory-only

With --memory-only nothing is compared or judged, which takes longer than a million tokens themselves; each slice is a
line on stderr.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO

import numpy as np
from text import long_text

import edge
from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.devices.memory import memory_use
from edge.types import IntArray

MODEL, MEMORY, ROWS = "smollm2-135m", "256MiB", 512
TURNS, TURN = 10, 100  # the 1,000 tokens whose speed is compared
SLICE = 1000  # tokens
WARM = 2  # slices after which memory should have settled
SAMPLING = edge.SamplingParams(temperature=0.8, seed=1)
JUDGES_STEP = 64  # rows of logits at once


@dataclass(frozen=True)
class Slice:
    """About SLICE tokens: their text begins at `start` in the file; resident bytes and tok/s at their end."""

    start: int
    resident: int
    speed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="to generate; 100000 takes minutes")
    parser.add_argument("--prompt", type=int, default=20_000, help="tokens of the prompt")
    parser.add_argument("--policy", default="streaming", help="as in --kv-policy; auto is one")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory-only", action="store_true", help="neither compare speeds nor judge the text")
    asked = parser.parse_args()
    compared = 0 if asked.memory_only else TURNS * TURN
    least = (WARM + 1) * SLICE + compared
    if asked.tokens < least:
        parser.error(f"--tokens must be at least {least}")
    model = edge.open_model(asked.model)
    written = model.encode_prompt(long_text().read_text(encoding="utf-8"), raw=True)
    options = {
        "backend": asked.backend, "kv_policy": asked.policy, "max_kv_size": ROWS, "threads": asked.threads,
        "expected_tokens": asked.prompt + asked.tokens,
    }  # fmt: skip

    old = edge.load(model, memory=MEMORY, **options)
    with tempfile.TemporaryFile() as text:  # not in memory, which is measured
        slices = generate(old, written[: asked.prompt], asked.tokens - compared, text)
        report = old.report
        assert report is not None
        if asked.memory_only:
            old.close()
            print(f"\n## {model.name}: {asked.policy}, {ROWS} rows, {report.stop_reason}\n")
            print(table(["what", "figure"], about_memory(report, slices)))
            return
        old.options = edge.Options()  # its peak has been read; a second session now shares the process
        late, early, ratios = compare(old, edge.load(model, **options), written[:SLICE])
        old.close()
        text.seek(0)
        whole = text.read()
    ends = [*(each.start for each in slices[1:]), len(whole)]
    parts = [whole[each.start : end].decode("utf-8", "replace") for each, end in zip(slices, ends, strict=True)]
    generated = [model.encode_prompt(part, raw=True) for part in parts]
    people = np.split(written[: SLICE * len(parts)], range(SLICE, min(written.size, SLICE * len(parts)), SLICE))
    judged, beside = judge(model, generated), judge(model, people)

    print(f"\n## {asked.policy}: {report.tokens.prompt} prompt tokens, {asked.tokens} generated, {ROWS} rows\n")
    rows = [
        *about_memory(report, slices),
        ["prefill", f"{report.timings.prefill_tok_s:.0f} tok/s"],
        [f"decode, last {TURNS * TURN} tokens", f"{late:.1f} tok/s"],
        ["decode, a fresh session's tokens, at the same time", f"{early:.1f} tok/s"],
        ["last / fresh, interleaved", f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"],
        ["perplexity of slices: least, median, most", figures(judged)],
        ["the same, of a text that people wrote", figures(beside)],
    ]
    print(table(["what", "figure"], rows), end="\n\n")
    kinds = [f"{np.unique(part).size / part.size:.2f}" for part in generated]
    lines = [
        [str(number), f"{perplexity:.1f}", kind, f"{each.resident / 2**20:.2f} MiB", f"{each.speed:.0f}"]
        for number, (each, perplexity, kind) in enumerate(zip(slices, judged, kinds, strict=True), start=1)
    ]
    print(table(["slice", "perplexity", "different tokens", "resident", "tok/s"], lines))


def about_memory(report: edge.RunReport, slices: list[Slice]) -> list[list[str]]:
    """Rows of the table that need no second session."""
    resident = [each.resident for each in slices[WARM:]]
    return [
        ["tokens: prompt, generated", f"{report.tokens.prompt:,}, {report.tokens.generated:,}"],
        ["KV policy, rows", f"{report.kv.policy}, {report.kv.capacity} {report.kv.dtype}"],
        ["rows evicted", str(report.kv.evicted)],
        ["peak resident set (measured)", format_bytes(report.memory.peak_rss)],
        ["predicted peak", format_bytes(report.plan["predicted_peak"])],
        [f"resident after {WARM + 1} slices, at most, at the end", spread([resident[0], max(resident), resident[-1]])],
        [f"decode, first {report.tokens.generated} tokens", f"{report.timings.decode_tok_s:.0f} tok/s"],
    ]


def generate(session: edge.Session, prompt: IntArray, count: int, text: IO[bytes]) -> list[Slice]:
    """Write the answer to `text`, and record where every slice begins and what it cost."""
    slices, start, size, began = [], 0, 0, time.perf_counter()
    stream = session.stream(prompt, max_tokens=count, sampling=SAMPLING, ignore_eos=True, keep_text=False)
    for pieces, piece in enumerate(stream):
        if pieces == 0:
            began = time.perf_counter()  # after prefill
        size += text.write(piece.encode())
        if pieces % SLICE == SLICE - 1:
            now = time.perf_counter()
            slices.append(last := Slice(start, memory_use().rss, SLICE / (now - began)))
            print(f"{pieces + 1:,} tokens, {spread([last.resident])}, {last.speed:.0f} tok/s", file=sys.stderr)
            start, began = size, now
    text.truncate(start)  # an incomplete last slice
    return slices


def compare(old: edge.Session, fresh: edge.Session, prompt: IntArray) -> tuple[float, float, list[float]]:
    """Median tok/s of both, interleaved, and the ratio of every pair."""
    with fresh:
        for _ in fresh.stream(prompt, max_tokens=TURNS * TURN, sampling=SAMPLING, ignore_eos=True, keep_text=False):
            pass
        pairs = [(_go_on(old), _go_on(fresh)) for _ in range(TURNS)]
    late, early = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    return late, early, [a / b for a, b in pairs]


def _go_on(session: edge.Session) -> float:
    """The next TURN tokens of the same text: tokens per second."""
    nothing = np.zeros(0, np.int32)
    for _ in session.stream(nothing, follow_up=True, max_tokens=TURN, sampling=SAMPLING, ignore_eos=True):
        pass
    assert session.report is not None
    speed = session.report.timings.decode_tok_s
    assert speed is not None
    return speed


def judge(model: edge.Model, texts: list[IntArray]) -> list[float]:
    """Perplexity of each text by itself, with all of its rows in the cache."""
    longest = max(text.size for text in texts)
    options = {"kv_policy": "full", "kv_dtype": "f32", "max_kv_size": longest, "expected_tokens": longest}
    with edge.load(model, logits_rows=JUDGES_STEP, prefill_step_size=JUDGES_STEP, **options) as session:
        return [edge.perplexity(session, text).perplexity for text in texts]


def figures(perplexities: list[float]) -> str:
    return f"{min(perplexities):.1f}, {statistics.median(perplexities):.1f}, {max(perplexities):.1f}"


def spread(sizes: list[int]) -> str:
    return ", ".join(f"{size / 2**20:.2f} MiB" for size in sizes)


if __name__ == "__main__":
    main()
