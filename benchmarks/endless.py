"""Forever in bounded memory: a 20,000-token prompt and 20,000 generated tokens in 512 KV rows and 256 MiB.

Shows the peak resident set and whether the last tokens come as fast as the first ones. `--tokens 2000` is a quick look.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from text import long_text

import edge
from edge.budget import format_bytes
from edge.cli.show import table
from edge.devices.memory import memory_use

MODEL, MEMORY, ROWS = "smollm2-135m", "256MiB", 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the prompt, and to generate")
    count = parser.parse_args().tokens
    model = edge.open_model(MODEL)
    prompt = model.encode_prompt(long_text().read_text(encoding="utf-8"))[:count]
    with edge.load(model, memory=MEMORY, kv_policy="streaming", max_kv_size=ROWS, expected_tokens=2 * count) as session:
        ticks, resident = [], {}
        for _ in session.stream(prompt, max_tokens=count, ignore_eos=True, keep_text=False):
            ticks.append(time.perf_counter())
            if len(ticks) in (500, 1000, 2000) or len(ticks) % 5000 == 0:
                resident[len(ticks)] = memory_use().rss
    report = session.report
    assert report is not None
    span = min(1000, len(ticks) // 3)
    early, late = ticks[span : 2 * span], ticks[-span:]
    print(f"\n## {report.tokens.prompt} prompt tokens, {report.tokens.generated} generated, {ROWS} rows, {MEMORY}\n")
    rows = [
        ["peak resident set (measured)", format_bytes(report.memory.peak_rss)],
        ["predicted peak", format_bytes(report.plan["predicted_peak"])],
        ["prefill", f"{report.timings.prefill_tok_s:.0f} tok/s"],
        [f"decode, pieces {span} to {2 * span}, mean (median)", f"{_mean(early):.1f} ({_median(early):.1f}) /s"],
        [f"decode, last {span} pieces, mean (median)", f"{_mean(late):.1f} ({_median(late):.1f}) /s"],
        ["last / early, mean (median)", f"{_mean(late) / _mean(early):.3f} ({_median(late) / _median(early):.3f})"],
        ["rows evicted", str(report.kv.evicted)],
        *[[f"resident after {n} pieces", f"{size / 2**20:.2f} MiB"] for n, size in resident.items()],
    ]
    print(table(["what", "figure"], rows))


def _mean(ticks: list[float]) -> float:
    """Pieces per second."""
    return (len(ticks) - 1) / (ticks[-1] - ticks[0])


def _median(ticks: list[float]) -> float:
    """Pieces per second by the median wait: blind to what else the machine did for a moment."""
    return 1 / statistics.median(b - a for a, b in itertools.pairwise(ticks))


if __name__ == "__main__":
    main()
