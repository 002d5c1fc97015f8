"""edge against its peers on this machine: llama.cpp and OpenVINO GenAI, on one GGUF file with as many threads.

    python benchmarks/peers.py [--backend cpu] [--isa avx2] [--small] [--busy] [--json]
    python benchmarks/peers.py --openvino-python DIR    a venv with `pip install openvino-genai`: its columns
    python benchmarks/peers.py --llama-bench PATH [--llama-args "-fa 1 -rtr 1"]    a build of llama.cpp or of a fork
    python benchmarks/peers.py --rows start,memory      only the rows whose names contain one of these words
    python benchmarks/peers.py --tiny --rounds 1        a test that everything runs; its figures mean nothing

The file is all Q4_0: SmolLM2-135M (or --model) through llama.cpp's own quantizer with `pure`. Every engine has a
process of its own that loads once and does one unit of work at a time, interleaved (A B C A B C); before each unit the
parent waits until no worker uses CPU time. Columns:

- edge: the engine of --backend, f16 KV, called as a session calls it. --isa sets EDGE_ISA for it, and for it alone.
- llama.cpp: its C API without edge; flash attention, f16 KV, repacked weights, its own defaults otherwise.
- OpenVINO: GenAI's LLMPipeline on the same file, f16 KV in the rows of speed (faster there than its
  8-bit default); its own defaults otherwise. Times come from its own metrics.
- llama-bench: that of --llama-bench with --llama-args (-rtr is ik_llama.cpp's), in rows of speed; a process for each
  unit, which has loaded and warmed up before it counts.
- edge / peer: ratio of the medians. In rows marked (−) less is better, so that a ratio below 1 is in edge's favour.

Rows, of a 1B model first, then of the small one, which has more of them:

- 1B: a Llama of random weights (hidden 2048, 16 layers, FFN 8192, 32 and 8 heads of 64: a 0.6 GB file).
  --small leaves it out.
- decode at 0-64, at 4096: 64 steps of one token and its argmax, into a cache that holds none or 4,096 rows before.
- weights read: decode speed × the bytes of all tensors that one token needs, and in brackets its share of the memory
  bandwidth measured here with NumPy. Above 100 % means that caches helped.
- prefill: from token ids to the logits after the last of them, in an empty cache.
- memory: the peak resident set of a fresh process that runs a plain script: a context of 2,048 tokens, 32 of them
  generated, with 256 rows to spare. For edge that script is `edge.load`.
- start: from spawning such a process to the first token of a 16-token text on its stdout, with 512 KV rows, files in
  the page cache and the engines' own caches on disk warm.
- tuned peers: llama.cpp reads the file instead of mapping it and reserves one row of logits; OpenVINO loads the folder
  that it saved after its first conversion.
- all cores busy (--busy): decode beside one endless loop per core; in brackets the share of the speed without them,
  measured interleaved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_bench import LlamaBench
from machine import files_folder, machine, memory_bandwidth, say
from model_files import bytes_per_token, large_file, pure_file
from turns import (
    EDGE,
    LLAMA,
    OPENVINO,
    REPLY_S,
    TINY,
    BusyCores,
    Row,
    Setting,
    Sizes,
    Team,
    WorkerError,
    deadline,
    undisturbed,
)

from edge.cli.terminal.show import table
from edge.devices.host import logical_cores
from edge.model.names.catalog import find_model

_BANDWIDTH = "GB/s"
_DISTURBED = 0.05  # share of the machine that others may use during a unit


def run_plain(setting: Setting, engine: str, command: Sequence[str], word: str) -> tuple[float, str]:
    """Run a plain script; seconds from its start to the line that begins with `word`, and that line's rest."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=setting.environment(engine)
    )
    with process, deadline(process, REPLY_S):
        assert process.stdout
        for line in process.stdout:
            if line.startswith(word):
                seconds = time.perf_counter() - started
                process.stdout.read()
                return seconds, line.removeprefix(word).strip()
    raise WorkerError(f"the script ended with status {process.returncode} and without an answer")


def fresh_rows(setting: Setting, model: Path) -> Iterator[Row]:
    """Memory and start, as a user has them and with tuned peers."""
    saved = save_openvino(setting, model) if setting.openvino else None
    for tuned in (False, True):
        suffix = ", tuned peers" if tuned else ""
        models = {EDGE: model, LLAMA: model, OPENVINO: (saved or model) if tuned else model}
        rest = {EDGE: [], LLAMA: [int(tuned)], OPENVINO: []}
        count = setting.sizes.memory

        def peak(
            engine: str, models: dict[str, Path] = models, rest: dict[str, list[int]] = rest, count: int = count
        ) -> float:
            command = setting.command(engine, "memory", models[engine], count + 256, *rest[engine], count)
            return int(run_plain(setting, engine, command, "PEAK")[1]) / 2**20

        def start(engine: str, models: dict[str, Path] = models, rest: dict[str, list[int]] = rest) -> float:
            command = setting.command(engine, "start", models[engine], 512, *rest[engine])
            return run_plain(setting, engine, command, "TOKEN")[0] * 1e3

        yield from _fresh(setting, f"memory, {count} tokens{suffix} (−)", "MiB", peak, min(2, setting.starts))
        yield from _fresh(setting, f"start to first token{suffix} (−)", "ms", start, setting.starts)


def _fresh(setting: Setting, name: str, unit: str, measure: Callable[[str], float], repetitions: int) -> Iterator[Row]:
    """One row, the engines interleaved; the first round warms caches up and does not count."""
    if not setting.wants(name):
        return
    say(f"measuring {name} ...")
    row, engines = Row(name, unit, {}, less_is_better=True), setting.engines()
    for number in range(repetitions + 1):
        for engine in list(engines):
            try:
                value = measure(engine)
            except WorkerError as error:
                setting.skip(engine, name, error)
                engines.remove(engine)
                continue
            if number:
                row.runs.setdefault(engine, []).append(value)
    yield row


def save_openvino(setting: Setting, model: Path) -> Path | None:
    """A folder with the model in OpenVINO's own format, written once; None if that failed."""
    folder = model.with_suffix(".openvino")
    link = folder / model.name
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(model)  # it writes next to the file it reads
        command = setting.command(OPENVINO, "save", link, 0)
        if subprocess.run(command, capture_output=True, timeout=REPLY_S).returncode != 0:
            return None
        (folder / "done").touch()
    return folder


def find_openvino(given: str | None) -> tuple[Path | None, str]:
    """The interpreter that has OpenVINO GenAI, or None and why."""
    if given is None:
        return None, "no --openvino-python (a venv with `pip install openvino-genai`)"
    path = Path(given)
    candidates = (path, path / "bin/python", path / "venv/bin/python")
    python = next((candidate for candidate in candidates if candidate.is_file()), None)
    if python is None:
        return None, f"no Python interpreter in {path}"
    done = subprocess.run([python, "-c", "import openvino_genai"], capture_output=True, timeout=60)
    return (python, "") if done.returncode == 0 else (None, f"{python} has no openvino_genai")


def model_rows(setting: Setting, model: Path, prefix: str, full: bool, busy: bool) -> Iterator[Row]:
    """Speeds on one model; `full` adds what is measured only on the small one."""
    sizes = setting.sizes
    decode = f"{prefix}decode at 0-{sizes.steps}"
    depths = {decode: 0} | ({f"{prefix}decode at {sizes.deep}": sizes.deep} if full else {})
    prefills = {f"{prefix}prefill {n}": n for n in (sizes.prefills if full else sizes.prefills[:1])}
    crowded = f"{prefix}decode, all cores busy"
    busy = busy and setting.wants(crowded)
    if not busy and not any(map(setting.wants, [*depths, *prefills])):
        return
    with Team(setting, model, model.stem) as team:
        for name, depth in depths.items():
            if setting.wants(name):
                row = team.speeds(name, sizes.steps, op="decode", depth=depth)
                yield row
                if depth == 0:
                    yield _weights_read(row, model)
        for name, n in prefills.items():
            if setting.wants(name):
                yield team.speeds(name, n, op="prefill")
        if busy:
            yield from _busy_rows(team, crowded, sizes.steps)


def _weights_read(decode: Row, model: Path) -> Row:
    weights = bytes_per_token(model) / 1e9
    runs = {engine: [speed * weights for speed in speeds] for engine, speeds in decode.runs.items()}
    return Row(f"{decode.name}: weights read", _BANDWIDTH, runs, compare=False)


def _busy_rows(team: Team, name: str, steps: int) -> Iterator[Row]:
    """Decode on the idle machine and with a busy loop on every core, interleaved."""
    with BusyCores() as busy:
        free, crowded = team.speeds_both(name, steps, [undisturbed, busy], only=OPENVINO, op="decode", depth=0)
    crowded.share_of = {engine: median for engine in crowded.runs if (median := free.median(engine))}
    yield crowded


def cells(row: Row, engines: Sequence[str]) -> list[str]:
    """A line of the table."""
    figures = []
    for engine in engines:
        median = row.median(engine)
        share = f" ({median / row.share_of[engine]:.0%})" if median and engine in row.share_of else ""
        figures.append("–" if median is None else f"{median:,.{1 if median < 100 else 0}f}{share}")
    ratios = [row.ratio(peer) for peer in engines if peer != EDGE]
    return [row.name, row.unit, *figures, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def print_report(setting: Setting, about: dict[str, Any], bandwidth: float, rows: Sequence[Row]) -> None:
    engines = setting.columns()
    isa = ", ".join(about["isa"])
    print(f"\n## edge ({setting.backend}{f', EDGE_ISA={setting.isa}' if setting.isa else ''}) against its peers\n")
    print(f"{about['cpu']} (family {about['family']}; {isa}), {about['cores']} cores, {about['memory_gib']} GiB,")
    print(f"{about['system']}; load average at the start {about['load_average']:.2f}.")
    print(f"{setting.threads} threads; memory bandwidth {bandwidth / 1e9:.0f} GB/s (read, NumPy).")
    print("; ".join(f"{engine}: {version}" for engine, version in setting.versions.items()) + ".")
    print(f"Medians of {setting.rounds} rounds ({setting.starts} starts).")
    disturbed = sum(share > _DISTURBED for share in setting.foreign)
    if disturbed:
        print(f"**Not a quiet machine**: others used more than {_DISTURBED:.0%} of it in {disturbed} "
              f"of {len(setting.foreign)} units (most: {max(setting.foreign):.0%}).")  # fmt: skip
    print()
    peers = [f"{EDGE} / {engine}" for engine in engines if engine != EDGE]
    print(table(["", "unit", *engines, *peers], [cells(row, engines) for row in rows], left=2))
    for what, why in setting.skipped.items():
        print(f"\nNot measured: {what}: {why}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu", help="edge's engine")
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or installed name, made all Q4_0")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--isa", help="EDGE_ISA for edge's workers, such as avx2")
    parser.add_argument("--openvino-python", metavar="DIR", help="venv (or interpreter) with openvino-genai")
    parser.add_argument("--llama-bench", type=Path, help="measure this llama-bench, too")
    parser.add_argument("--llama-args", default="-fa 1", help="more of its arguments")
    parser.add_argument("--cache", type=Path, default=files_folder())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--starts", type=int, default=7, help="fresh processes per engine for the start row")
    parser.add_argument("--rows", default="", help="only rows whose names contain one of these words, with commas")
    parser.add_argument("--small", action="store_true", help="without the random 1B Llama (a 0.6 GB file)")
    parser.add_argument("--busy", action="store_true", help="also decode with every core occupied")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    openvino, reason = find_openvino(options.openvino_python)
    bench_arguments = ("-t", str(options.threads), *options.llama_args.split())
    setting = Setting(
        backend=options.backend,
        isa=options.isa,
        threads=options.threads,
        openvino=openvino,
        cache=options.cache.absolute(),
        sizes=TINY if options.tiny else Sizes(),
        rounds=options.rounds,
        starts=options.starts,
        wanted=tuple(filter(None, options.rows.split(","))),
        llama_bench=LlamaBench(options.llama_bench, bench_arguments) if options.llama_bench else None,
    )
    if reason:
        setting.skip(OPENVINO, "all rows", reason)
    about, bandwidth = machine(), memory_bandwidth(options.threads)
    source = find_model(options.model).absolute()
    model = pure_file(setting.cache, source)
    rows = list[Row]()
    if not options.small:
        rows += model_rows(setting, large_file(setting.cache, source, setting.sizes.large), "1B: ", False, False)
    rows += model_rows(setting, model, "", True, options.busy)
    rows += fresh_rows(setting, model)
    bandwidth = max(bandwidth, memory_bandwidth(options.threads))  # at its best, as the engines are
    for row in rows:
        if row.unit == _BANDWIDTH:
            row.share_of = dict.fromkeys(row.runs, bandwidth / 1e9)
    if options.json:
        shown = {"backend": setting.backend, "isa": setting.isa, "threads": setting.threads, "rounds": setting.rounds}
        print(json.dumps({
            "machine": about, "settings": shown, "versions": setting.versions, "bandwidth_bytes_s": bandwidth,
            "rows": [row.to_dict() for row in rows], "skipped": setting.skipped, "foreign_cpu": setting.foreign,
        }, ensure_ascii=False))  # fmt: skip
    else:
        print_report(setting, about, bandwidth, rows)


if __name__ == "__main__":
    main()
