"""Pictures in edge, beside llama.cpp's mtmd: encoding, peak, and how far their rows differ.

    python benchmarks/peers/make_mtmd.py    # libmtmd, which llama-cpp-python is installed without: two minutes, once
    python benchmarks/eyes.py [--towers siglip-b qwen3.5-0.8b gemma4-e2b] [--types F16 Q8_0] [--quick]
    python benchmarks/eyes.py --plans    # what `edge plan` says of these encoders and their text models on two devices

Both read the same mmproj file, whose weights are random in a real shape, and the same picture, of the size that the
encoder wants, so that neither resizes it in its own way. Each has a process of its own, with equal threads, and they
take turns: A B A B. edge's times have the loading of the encoder in them, since it gives the memory back behind each
picture; llama.cpp keeps it loaded. Ratios compare CPU time, which other work on the machine disturbs less; wall time is
beside it. Rows are compared with those of edge's reference engine in float32 by `--reference` (slow): the root mean
square of the difference over that of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "peers"))
BUILD = Path("build") / "eyes"
LLAMA, EDGE = "llama.cpp mtmd", "edge"


@dataclass(frozen=True)
class Shape:
    """A real encoder's figures, and a picture of the size that it wants."""

    kind: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    patch: int
    side: int
    projected: int
    picture: tuple[int, int]  # width and height
    tokens: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes, the outermost dimension first."""
        h, wide = self.hidden, 4 * self.hidden
        found = {"v.patch_embd.weight": (h, 3, self.patch, self.patch)}
        bias = self.kind != "gemma4v"
        matrices = {"attn_out": (h, h), "ffn_up": (self.ffn, h), "ffn_down": (h, self.ffn)}
        names = ("attn_qkv",) if self.kind == "qwen3vl_merger" else ("attn_q", "attn_k", "attn_v")
        matrices |= {name: (3 * h // len(names), h) for name in names}
        norms = ("ln1", "ln2")
        if not bias:
            matrices["ffn_gate"] = (self.ffn, h)
            norms += ("attn_post_norm", "ffn_post_norm")
        for layer in range(self.layers):
            at = f"v.blk.{layer}."
            for name, shape in matrices.items():
                found |= {f"{at}{name}.weight": shape} | ({f"{at}{name}.bias": shape[:1]} if bias else {})
            for name in norms:
                found |= {f"{at}{name}.weight": (h,)} | ({f"{at}{name}.bias": (h,)} if bias else {})
            if not bias:
                found |= {f"{at}attn_{each}_norm.weight": (h // self.heads,) for each in "qk"}
        if bias:
            found |= {"v.patch_embd.bias": (h,), "v.post_ln.weight": (h,), "v.post_ln.bias": (h,)}
        if self.kind == "gemma4v":
            return found | {"v.position_embd.weight": (2, 10240, h), "mm.input_projection.weight": (self.projected, h)}
        found["v.position_embd.weight"] = ((self.side // self.patch) ** 2, h)
        if self.kind == "idefics3":
            return found | {"mm.model.fc.weight": (self.projected, 16 * h)}
        return found | {
            "v.patch_embd.weight.1": found["v.patch_embd.weight"],
            "mm.0.weight": (wide, wide), "mm.0.bias": (wide,),
            "mm.2.weight": (self.projected, wide), "mm.2.bias": (self.projected,),
        }  # fmt: skip


SHAPES = {
    "siglip-b": Shape("idefics3", 768, 3072, 12, 12, 16, 512, 576, (512, 512), 64),
    "qwen3.5-0.8b": Shape("qwen3vl_merger", 768, 3072, 12, 12, 16, 768, 1024, (512, 512), 256),
    "gemma4-e2b": Shape("gemma4v", 768, 3072, 16, 12, 16, 224, 1536, (960, 672), 280),
}
SMALL = 2  # layers of --quick
TEXT_MODELS = {"siglip-b": "smollm2:135m", "qwen3.5-0.8b": "qwen3.5:0.8b", "gemma4-e2b": "gemma4:e2b"}
DEVICES, SCREEN, MOST_PLANNED = ("pixel-9", "raspberry-pi-5"), "1280x720", 1120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--types", nargs="*", default=["F16", "Q8_0"], choices=["F16", "Q8_0"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mtmd", type=Path, default=Path("build") / "mtmd", help="where make_mtmd.py builds libmtmd")
    parser.add_argument("--reference", action="store_true", help="compare rows with those of the reference engine")
    parser.add_argument("--quick", action="store_true", help=f"encoders of {SMALL} layers, one round: that all runs")
    parser.add_argument("--plans", action="store_true", help=f"plans of a picture of {SCREEN}, by --types, no runs")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plans:
        plan(args.towers, args.types[-1])
    elif args.child:
        serve(*args.child, args.threads)
    else:
        compare(args)


def plan(towers: list[str], kind: str) -> None:
    """Tokens, memory, first token and joules of each size of a picture, on each device."""
    from edge.cli.terminal.show import table
    from edge.lab.prediction.forecast import forecast
    from edge.lab.prediction.looks import predict_looks
    from edge.model.model import open_model
    from edge.options import Options

    BUILD.mkdir(parents=True, exist_ok=True)
    for tower in towers:
        model = planned_model(TEXT_MODELS[tower])
        mmproj = write_mmproj(SHAPES[tower], f"{tower}-tiled", kind, SHAPES[tower].layers, longest=2048)
        for device in DEVICES:
            options = Options(mmproj=mmproj, backend="cpu", max_kv_size=2048)
            looks = predict_looks(forecast(open_model(model), options, device=device), options, device, SCREEN)
            heads, rows = looks.table()
            chosen = [row for row, look in zip(rows, looks.sizes, strict=True) if look.tokens <= MOST_PLANNED]
            print(f"\n{TEXT_MODELS[tower]} in Q4_0, the encoder in {kind}, {device} ({looks.by})")
            print(table(heads, chosen))


def planned_model(name: str) -> Path:
    """A known model's header, with holes in place of weights and of its vocabulary."""
    from edge.formats.gguf_writer import fields_of, planned_as, write_outline
    from edge.model.names.known import known_models, outline_model

    target = BUILD / f"{name.replace(':', '-')}.gguf"
    file = outline_model(known_models()[name], "Q4_0", target)
    (vocab,) = {file.tensors["token_embd.weight"].shape[1]}
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []}
    words |= {"tokenizer.ggml.tokens": [f"word{number}" for number in range(vocab)]}
    write_outline(target, fields_of(file) | words, planned_as(file.tensors.values()))
    return target


def compare(args: argparse.Namespace) -> None:
    from make_mtmd import make_mtmd

    BUILD.mkdir(parents=True, exist_ok=True)
    library, rounds = make_mtmd(args.mtmd), 1 if args.quick else args.rounds
    print(f"{cpu_name()}; {args.threads} threads, {rounds} rounds\n")
    head = ["encoder", "file", "", "CPU", "wall", "peak", "CPU of mtmd / edge"]
    head += ["rows unlike"] + (["unlike the reference"] if args.reference else [])
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for tower in args.towers:
        for kind in args.types:
            for line in measure(tower, kind, library, rounds, args):
                print(f"| {' | '.join(line)} |", flush=True)


def measure(tower: str, kind: str, library: Path, rounds: int, args: argparse.Namespace) -> list[list[str]]:
    """A line of the table for each engine."""
    shape = SHAPES[tower]
    mmproj = write_mmproj(shape, tower, kind, SMALL if args.quick else shape.layers)
    model, picture = text_model(shape.projected), BUILD / f"{tower}.npy"
    np.save(picture, draw(*shape.picture))
    commands = {
        EDGE: [__file__, "--threads", str(args.threads), "--child"],
        LLAMA: [str(Path(__file__).parent / "peers" / "mtmd_worker.py")],
    }
    rows = {name: BUILD / f"rows-{number}.npy" for number, name in enumerate(commands)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    workers = {}
    for name, command in commands.items():
        rest = [model, mmproj, picture, *([] if name == EDGE else [args.threads]), rows[name]]
        workers[name] = subprocess.Popen(
            [sys.executable, *command, *map(str, rest)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"MTMD_CPP_LIB": str(library)},
        )  # fmt: skip
    try:
        for worker in workers.values():
            answer(worker)
        for number in range(rounds + 1):
            for name, worker in workers.items():
                found = json.loads(ask(worker, "encode"))
                if number:  # the first one warms up: edge compiles and packs, both map their files
                    runs[name].append(found)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    found_rows = {name: np.load(path) for name, path in rows.items()}
    count = len(found_rows[LLAMA])  # of several tiles, llama.cpp also encodes a single one twice: as the whole
    ours = found_rows[EDGE]
    tiles = count // len(ours)
    lines, judge = [], reference(mmproj, picture) if args.reference else None
    cpu = {name: statistics.median(each["cpu"] for each in runs[name]) for name in commands}
    cpu[LLAMA] /= tiles
    for name in commands:
        share = 1 if name == EDGE else tiles
        wall = statistics.median(each["wall"] for each in runs[name]) / share
        own = found_rows[name][: len(ours)]
        line = [
            tower, kind, name, f"{cpu[name]:.2f} s", f"{wall:.2f} s",
            f"{max(each['peak'] for each in runs[name]) / 2**20:.0f} MiB",
            f"**{cpu[LLAMA] / cpu[EDGE]:.2f}**" if name == EDGE else "",
        ]  # fmt: skip
        line.append(f"{100 * unlike(ours, found_rows[LLAMA][: len(ours)]):.2f} %" if name == EDGE else "")
        if judge is not None:
            line.append(f"{100 * unlike(judge, own):.2f} %")
        lines.append(line)
    return lines


def unlike(wanted: Any, found: Any) -> float:
    """The root mean square of the difference, over that of the wanted rows."""
    return float(np.sqrt(np.mean(np.square(wanted - found)) / np.mean(np.square(wanted))))


def serve(model: str, mmproj: str, picture: str, rows: str, threads: int) -> None:
    """edge's part, as mtmd_worker.py."""

    from edge.backends import engine_named
    from edge.devices.memory import memory_use
    from edge.formats.gguf import read_gguf
    from edge.model.towers import read_tower
    from edge.run.senses.sight import Encoder

    pixels, tower = np.load(picture), read_tower(read_gguf(Path(mmproj)))
    layout = tower.layout(pixels.shape[1], pixels.shape[0])
    encoder = Encoder(tower, engine_named("cpu"), threads)
    print("ready", flush=True)
    for _ in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        found = np.concatenate(encoder.encode(pixels, layout))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        np.save(rows, found)
        print(json.dumps({"wall": wall, "cpu": cpu, "peak": memory_use().peak}), flush=True)


def reference(mmproj: Path, picture: Path) -> Any:
    from edge.backends import engine_named
    from edge.formats.gguf import read_gguf
    from edge.model.towers import read_tower
    from edge.run.senses.sight import Encoder

    pixels, tower = np.load(picture), read_tower(read_gguf(mmproj))
    layout = tower.layout(pixels.shape[1], pixels.shape[0])
    return np.concatenate(Encoder(tower, engine_named("reference"), 1, "f32").encode(pixels, layout))


def ask(worker: subprocess.Popen[str], word: str) -> str:
    assert worker.stdin
    print(word, file=worker.stdin, flush=True)
    return answer(worker)


def answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout
    for line in worker.stdout:
        if line.startswith(("{", "ready")):  # mtmd prints its own lines, too
            return line
    raise SystemExit("a worker ended without an answer")


def draw(width: int, height: int) -> Any:
    """Colours that change smoothly, with noise and bars."""
    random = np.random.default_rng(7)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([x * 255 / width, y * 255 / height, 255 - (x + y) * 127 / width], axis=-1)
    smooth += random.normal(0, 20, smooth.shape)
    smooth[::37] = 250
    return np.clip(smooth, 0, 255).astype(np.uint8)


def write_mmproj(shape: Shape, name: str, kind: str, layers: int, longest: int = 512) -> Path:
    """An encoder with random weights, as llama.cpp's converter writes it. longest: side of a tiled picture, in
    pixels."""
    from edge.formats.gguf_writer import Planned, write_gguf
    from edge.model.whisper.writing import plain_blocks

    target = BUILD / f"{name}-{layers}-{kind}.gguf"
    if target.exists():
        return target
    prefix = "clip.vision."
    plain = 0.0 if shape.kind == "gemma4v" else 0.5
    fields: dict[str, Any] = {
        "general.architecture": "clip", "general.type": "mmproj", "general.name": name,
        "clip.has_vision_encoder": True, "clip.projector_type": shape.kind, "clip.use_gelu": True,
        f"{prefix}projection_dim": np.uint32(shape.projected), f"{prefix}embedding_length": np.uint32(shape.hidden),
        f"{prefix}feed_forward_length": np.uint32(shape.ffn), f"{prefix}block_count": np.uint32(layers),
        f"{prefix}attention.head_count": np.uint32(shape.heads), f"{prefix}image_size": np.uint32(shape.side),
        f"{prefix}attention.layer_norm_epsilon": np.float32(1e-6), f"{prefix}patch_size": np.uint32(shape.patch),
        f"{prefix}image_mean": np.full(3, plain, np.float32),
        f"{prefix}image_std": np.full(3, plain or 1.0, np.float32),
    }  # fmt: skip
    if shape.kind == "idefics3":
        fields |= {f"{prefix}projector.scale_factor": np.uint32(4), f"{prefix}preproc_image_size": np.uint32(longest)}
    if shape.kind == "qwen3vl_merger":
        fields[f"{prefix}spatial_merge_size"] = np.uint32(2)
    found = Shape(**(vars(shape) | {"layers": layers})).tensors()
    planned = [
        Planned(each, dims[::-1], kind if len(dims) == 2 and "position" not in each else "F16" if len(dims) > 2
                and "position" not in each else "F32") for each, dims in found.items()
    ]  # fmt: skip
    random = np.random.default_rng(1)

    def data() -> Any:
        for plan, (each, dims) in zip(planned, found.items(), strict=True):
            values = random.standard_normal(dims, np.float32)
            if each.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
                values = 64**-0.25 * (1 + 0.1 * values)  # scores of usual size, as trained norms give them
            elif len(dims) == 1:
                values = 1 + 0.1 * values if "norm" in each or ".ln" in each or "post_ln" in each else 0.1 * values
                values = values.astype(np.float32)
            elif "position" not in each:
                values /= np.float32(np.sqrt(np.prod(dims[1:])))
            values = values.astype(np.float32)
            yield plain_blocks(values.reshape(dims[0], -1), plan.type)

    write_gguf(target, fields, planned, data())
    return target


def text_model(hidden: int) -> Path:
    """A text model that takes such rows: SmolLM2's tokens, and a layer of zeros."""
    from edge.formats.gguf import read_gguf
    from edge.formats.gguf_writer import Planned, fields_of, write_outline
    from edge.model.names.catalog import find_model

    source, target = find_model("smollm2-135m"), BUILD / f"text-{hidden}.gguf"
    if hidden == 576:
        return source
    file = read_gguf(source)
    numbers = {
        "embedding_length": hidden, "block_count": 1, "feed_forward_length": 64, "attention.head_count": hidden // 64,
        "attention.head_count_kv": 1, "rope.dimension_count": 64, "attention.key_length": 64,
        "attention.value_length": 64,
    }  # fmt: skip
    fields = fields_of(file) | {f"llama.{key}": np.uint32(value) for key, value in numbers.items()}
    (vocab,) = {file.tensors["token_embd.weight"].shape[1]}
    shapes = {
        "token_embd": (hidden, vocab), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden), "blk.0.attn_k": (hidden, 64), "blk.0.attn_v": (hidden, 64),
        "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_norm": (hidden,), "blk.0.ffn_gate": (hidden, 64),
        "blk.0.ffn_up": (hidden, 64), "blk.0.ffn_down": (64, hidden),
    }  # fmt: skip
    write_outline(target, fields, [
        Planned(f"{name}.weight", dims, "F16" if len(dims) > 1 else "F32") for name, dims in shapes.items()
    ])  # fmt: skip
    return target


def cpu_name() -> str:
    try:
        shown = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in shown.splitlines() if line.startswith("Model name")), "CPU")


if __name__ == "__main__":
    main()
