"""The cost of eviction: decoding in a full KV cache under each policy, against the same steps without any eviction.

Both run in one session with the same numbers of rows, interleaved, as many tokens at a time as one eviction frees. A
decodes them under the policy, observing what it needs and evicting once; B decodes as many and then truncates the
cache, which is free. Every other A B pair begins with B. The cost is the median of A / B − 1.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import edge
from edge.backends.kv_cache import end_of
from edge.cli.terminal.show import table
from edge.kv import POLICY_NAMES, make_policy

MODEL, ROWS = "smollm2-135m", 512


def measure(model: edge.Model, backend: str, policy: str, dtype: str | None, pairs: int) -> list[str]:
    """Tokens per second without eviction, and the cost: median and the middle 80 % of pairs."""
    options = {"kv_policy": policy, "max_kv_size": ROWS, "kv_dtype": dtype}
    with edge.load(model, backend=backend, **options) as session:
        kv, turn = session.engine.kv, session.plan.evict_step
        token = np.array([model.tokenizer.encode("the", special=False)[-1]], np.int32)

        def decode(count: int, *, evicting: bool) -> float:
            started = time.perf_counter()
            for _ in range(count):
                if evicting:
                    session.make_room(1)
                    session.forward(token, upcoming=1)
                else:
                    session.engine.forward(token)
            return time.perf_counter() - started

        def plain() -> float:
            if make_policy(policy).needs.looks:
                session.engine.observe(0)
            rows, end = kv.length, end_of(kv)
            seconds = decode(turn, evicting=False)
            kv.truncate(rows, end)
            return seconds

        decode(2 * ROWS, evicting=True)
        decode(kv.free, evicting=True)
        _evict(session)
        ratios, speeds = [], []
        for pair in range(pairs):
            first = plain() if pair % 2 else 0.0
            a = decode(turn, evicting=True) + _evict(session)
            b = first or plain()
            ratios.append(a / b)
            speeds.append(turn / b)
    cost = [100 * (each - 1) for each in ratios]
    spread = f"{np.percentile(cost, 10):.1f} to {np.percentile(cost, 90):.1f}"
    return [
        backend,
        policy,
        dtype or "f16",
        f"{statistics.median(speeds):.0f}",
        f"{statistics.median(cost):.1f} %",
        spread,
    ]


def _evict(session: edge.Session) -> float:
    started = time.perf_counter()
    session.make_room(1)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default="cpu")
    parser.add_argument("--policies", default=",".join(name for name in POLICY_NAMES if make_policy(name).evicts))
    parser.add_argument("--kv-dtype")
    parser.add_argument("--pairs", type=int, default=21)
    options = parser.parse_args()
    model, lines = edge.open_model(MODEL), []
    for backend in options.backends.split(","):
        for policy in options.policies.split(","):
            try:
                lines.append(measure(model, backend, policy, options.kv_dtype, options.pairs))
                print(" ".join(lines[-1]), flush=True)
            except edge.UnsupportedError as error:
                print(error, flush=True)
    print(f"\n## What evicting costs in decode, {ROWS} rows\n")
    print(table(["engine", "policy", "KV", "tok/s without", "cost, median", "10–90 %"], lines, left=3))


if __name__ == "__main__":
    main()
