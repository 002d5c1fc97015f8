"""Forever in bounded memory: a 20,000-token prompt and 20,000 generated tokens in 512 KV rows and 256 MiB.

Shows the peak resident set, and whether the last 1,000 tokens come as fast as tokens 1,000 to 2,000. Machines drift
over minutes, so the two are measured at the same time: the old session's last tokens and a fresh session's early ones,
in turns of 100.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from text import long_text

import edge
from edge.budget import format_bytes
from edge.cli.show import table
from edge.devices.memory import memory_use

MODEL, MEMORY, ROWS = "smollm2-135m", "256MiB", 512
TURNS, TURN = 10, 100  # the 1,000 tokens that are compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the prompt, and to generate")
    count = parser.parse_args().tokens
    model = edge.open_model(MODEL)
    prompt = model.encode_prompt(long_text().read_text(encoding="utf-8"))[:count]
    options = {"kv_policy": "streaming", "max_kv_size": ROWS, "expected_tokens": 2 * count}

    old = edge.load(model, memory=MEMORY, **options)
    resident = {}
    stream = old.stream(prompt, max_tokens=count - TURNS * TURN, ignore_eos=True, keep_text=False)
    for pieces, _ in enumerate(stream, start=1):
        if pieces in (500, 1000, 2000) or pieces % 5000 == 0:
            resident[pieces] = memory_use().rss
    report = old.report
    assert report is not None

    old.budget = edge.Budget()  # its peak has been read; a second session now shares the process
    fresh = edge.load(model, **options)
    for _ in fresh.stream(prompt[:1000], max_tokens=TURNS * TURN, ignore_eos=True, keep_text=False):
        pass
    pairs = [(_go_on(old), _go_on(fresh)) for _ in range(TURNS)]
    late, early = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]

    print(f"\n## {report.tokens.prompt} prompt tokens, {count} generated, {ROWS} rows, {MEMORY}\n")
    rows = [
        ["peak resident set (measured)", format_bytes(report.memory.peak_rss)],
        ["predicted peak", format_bytes(report.plan["predicted_peak"])],
        ["prefill", f"{report.timings.prefill_tok_s:.0f} tok/s"],
        [f"decode, first {report.tokens.generated} tokens", f"{report.timings.decode_tok_s:.0f} tok/s"],
        [f"decode, last {TURNS * TURN} tokens", f"{late:.1f} tok/s"],
        ["decode, tokens 1000 to 2000, at the same time", f"{early:.1f} tok/s"],
        ["last / early, turn by turn", f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"],
        ["rows evicted", str(report.kv.evicted)],
        *[[f"resident after {n} pieces", f"{size / 2**20:.2f} MiB"] for n, size in resident.items()],
    ]
    print(table(["what", "figure"], rows))


def _go_on(session: edge.Session) -> float:
    """The next TURN tokens of the same text: tokens per second."""
    for _ in session.stream(np.zeros(0, np.int32), follow_up=True, max_tokens=TURN, ignore_eos=True):
        pass
    assert session.report is not None
    speed = session.report.timings.decode_tok_s
    assert speed is not None
    return speed


if __name__ == "__main__":
    main()
