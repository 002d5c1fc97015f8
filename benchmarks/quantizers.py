"""The loss of quality of every quantizer on the same model, on text that none of them has seen.

    python benchmarks/quantizers.py [--methods best-iq4_nl,llama.cpp-iq4_nl] [--tokens 51200] [--calibration 16384]
        [--texts own] [--domains python,french] [--original]
    python benchmarks/quantizers.py --gemma4

The model is SmolLM2's twin (twin.py) in F16; only matrices within layers are rounded, embedding and head stay F16.
With --original it is SmolLM2 itself in Q4_1, whose loss is that of rounding again. Calibrated on the text that comes
with edge (own), documents of one book (book), or both in equal shares; none is measured on. llama.cpp runs all files,
in sequences of 512 tokens. Files are kept in the cache folder and made again with --again.

Mixtures concern whole files, the embedding too: `llama.cpp-q3_k_m` is llama-quantize's; `mixed-q3_k_m` is what
`edge quantize --target-size` makes of at most that size, `best-q3_k_m` what `edge convert` does. The first two are
rounded by importance from the same tokens.

--gemma4: instead, edge's methods on a small Gemma 4 of random weights in F16, calibrated on 4,096 random tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from math import prod
from pathlib import Path
from typing import get_args

import numpy as np
from machine import files_folder
from text import CALIBRATION, HELD_OUT, held_out_texts, long_text
from turn_ends import Ends, answers, ends_of
from twin import write_twin

import edge
from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.backends.reference import ReferenceEngine, read_weights
from edge.cli.terminal.show import table
from edge.converters.calibrate import OWN_TEXT, SEQUENCE, calibration_tokens, collect, column_importance
from edge.converters.gguf.ggml import quantize_with_llamacpp
from edge.converters.gguf.quantize import Method, Settings, mix_types, plan_types, quantize_gguf
from edge.converters.quantizers.ggml_rows import quantize_rows
from edge.converters.quantizers.mixed import AROUND, types_of_gguf
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.likelihood import Compared, compare, divergences, summarize
from edge.model.model import Model, open_model
from edge.model.names.known import KnownModel, outline_model
from edge.model.reader import read_spec
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import AnyArray, FloatArray, IntArray

BODY = {"embedding": "F16", "output": "F16"}
METHODS: dict[str, Settings] = {
    "rtn-q4_0": Settings("Q4_0", "rtn", **BODY),
    "rtn-q4_1": Settings("Q4_1", "rtn", **BODY),
    "rtn-128": Settings("Q4_1", "rtn", group_size=128, **BODY),
    "nf4": Settings("NF4", "rtn", **BODY),
    "hqq-q4_0": Settings("Q4_0", "hqq", **BODY),
    "hqq-q4_1": Settings("Q4_1", "hqq", **BODY),
    "importance-q4_0": Settings("Q4_0", "importance", **BODY),
    "importance-iq4_nl": Settings("IQ4_NL", "importance", **BODY),
    "awq-128": Settings("Q4_1", "awq", group_size=128, **BODY),
    "awq-q4_0": Settings("Q4_0", "awq", **BODY),
    "gptq-128": Settings("Q4_1", "gptq", group_size=128, **BODY),
    "gptq-q4_0": Settings("Q4_0", "gptq", **BODY),
    "best-q4_0": Settings("Q4_0", "best", **BODY),
    "best-iq4_nl": Settings("IQ4_NL", "best", **BODY),
    "best-mixed-5": Settings("IQ4_NL", "best", **BODY),
}
MIXTURES = {f"{maker}-{each.lower()}": each for each in ("Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
            for maker in ("llama.cpp", "mixed", "best")}  # fmt: skip
THEIRS = {"llama.cpp-q4_0": "Q4_0", "llama.cpp-iq4_nl": "IQ4_NL", "llama.cpp-q4_k": "Q4_K"}  # with importance
MIXED_BITS = 5.0


def calibration(model: Model, count: int, texts: str) -> IntArray:
    """At most `count` tokens of these texts: own, book, or both in equal shares."""
    own = np.zeros(0, np.int32)
    if texts != "book":
        own = calibration_tokens(model.tokenizer, [OWN_TEXT], count if texts == "own" else count // 2)
    return own if texts == "own" else np.concatenate([_book(model, count - own.size), own])


def _book(model: Model, count: int) -> IntArray:
    """The same number of tokens of each document, in complete sequences."""
    share = max(1, count // len(CALIBRATION) // SEQUENCE) * SEQUENCE
    texts = [model.encode_prompt(long_text(each).read_text(encoding="utf-8"), raw=True) for each in CALIBRATION]
    return np.concatenate([np.array(text[SEQUENCE : SEQUENCE + share], np.int32) for text in texts])


def held_out(model: Model, domain: str, count: int) -> IntArray:
    """int32 [sequences, SEQUENCE]: from the beginnings of the documents, in equal shares."""
    documents = held_out_texts(domain)[: max(1, count // SEQUENCE)]
    share = max(1, count // len(documents) // SEQUENCE) * SEQUENCE
    texts = [model.encode_prompt(each[: 16 * share], raw=True) for each in documents]
    parts = [np.array(text[:share], np.int32) for text in texts]
    return np.concatenate([part[: part.size // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE) for part in parts])


def make(name: str, source: Path, target: Path, tokens: IntArray) -> None:
    """Write one method's file, and its cost in a file beside it."""
    started, model = time.perf_counter(), open_model(source)
    if name in MIXTURES:
        _mixture(model, name, target, tokens)
    elif name in THEIRS:
        _theirs(model, THEIRS[name], target, tokens)
    else:
        settings = METHODS[name]
        if "mixed" in name:
            types = plan_types(model.file, model.spec, settings)
            infos = model.file.tensors.values()
            fixed = sum(info.nbytes for info in infos if types[info.name] == info.type)
            mixed = sum(prod(info.shape) for info in infos if types[info.name] != info.type)
            size = model.file.data_offset + fixed + int(mixed * MIXED_BITS / 8)
            settings, _ = mix_types(model.file, model.spec, settings, tokens, nbytes=size)
        quantize_gguf(model.file, model.spec, target, settings, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    said = {"seconds": time.perf_counter() - started, "peak_mib": peak}
    target.with_suffix(".json").write_text(json.dumps(said))


def _mixture(model: Model, name: str, target: Path, tokens: IntArray) -> None:
    """llama-quantize's mixture, or edge's of at most the same size."""
    file = model.file
    importance = column_importance(file, model.spec, tokens)
    theirs = name.startswith("llama.cpp")
    with tempfile.TemporaryDirectory() as folder:
        whole = target if theirs else Path(folder) / "theirs.gguf"
        quantize_with_llamacpp(file.path, whole, MIXTURES[name], importance=importance)
        size = whole.stat().st_size
    if not theirs:
        kinds, settings = types_of_gguf(), Settings("IQ4_NL", "best" if name.startswith("best") else "importance")
        settings, _ = mix_types(file, model.spec, settings, tokens, nbytes=size, kinds=kinds, outside=AROUND)
        quantize_gguf(file, model.spec, target, settings, tokens)


def _theirs(model: Model, kind: str, target: Path, tokens: IntArray) -> None:
    """llama.cpp's rounding with an importance matrix from the same tokens. Rows that Q4_K cannot hold become IQ4_NL."""
    file = model.file
    types = plan_types(file, model.spec, Settings("IQ4_NL", "rtn", **BODY))
    for name, info in file.tensors.items():
        if types[name] == "IQ4_NL" and (kind != "Q4_K" or info.shape[0] % 256 == 0):
            types[name] = kind
    sources, known = find_tensors(file, model.spec), collect(file, model.spec, tokens)
    names = {source.tensor: name for name, source in sources.items()}
    planned = [Planned(name, info.shape, types[name]) for name, info in file.tensors.items()]

    def data() -> Iterator[AnyArray]:
        for each in planned:
            name = names[each.name]
            if each.type == file.tensors[each.name].type:
                yield file.tensor_bytes(file.tensors[each.name])
            else:
                yield quantize_rows(read_weights(file, {name: sources[name]})[name], each.type, known[name].square)

    write_gguf(target, fields_of(file), planned, data())


def bits(path: Path, *, whole: bool) -> float:
    """Bits per weight of the matrices within layers, or of the file."""
    if whole:
        return 8 * path.stat().st_size / open_model(path).spec.parameters
    infos = [info for info in open_model(path).file.tensors.values() if "blk." in info.name and len(info.shape) > 1]
    return 8 * sum(info.nbytes for info in infos) / sum(info.elements for info in infos)


@contextmanager
def loaded(source: Path, paths: dict[str, Path], threads: int) -> Iterator[tuple[Engine, dict[str, Engine]]]:
    """All models, side by side."""
    with ExitStack() as stack:

        def load(path: Path) -> Engine:
            model = open_model(path)
            config = EngineConfig(SEQUENCE, SEQUENCE, "f16", threads, logits_rows=SEQUENCE)
            module = find_backend("llamacpp", model.file, model.spec)
            return stack.enter_context(closing(module.load(model.file, model.spec, config)))

        yield load(source), {name: load(path) for name, path in paths.items()}


def measure(source: Path, paths: dict[str, Path], sequences: IntArray, threads: int) -> dict[str, Compared]:
    """All models on the same sequences."""
    parts: dict[str, list[Compared]] = {name: [] for name in paths}
    with loaded(source, paths, threads) as (exact, others):
        for sequence in sequences:
            exact.kv.truncate(0)
            reference = exact.forward_all(sequence)[:-1]
            for name, engine in others.items():
                engine.kv.truncate(0)
                parts[name].append(compare(reference, engine.forward_all(sequence)[:-1], sequence[1:]))
    fields = ("kl", "nll", "reference_nll", "same")
    return {
        name: Compared(*(np.concatenate([getattr(each, field) for each in found]) for field in fields))
        for name, found in parts.items()
    }


def measure_ends(model: Model, source: Path, paths: dict[str, Path], threads: int) -> tuple[int, dict[str, Ends]]:
    """Of how many answers."""
    with loaded(source, paths, threads) as (exact, others):
        texts = answers(model, exact, SEQUENCE)
        return len(texts), ends_of(model, exact, others, texts)


def row(name: str, path: Path, compared: Compared) -> list[str]:
    figures, took = summarize(compared), json.loads(path.with_suffix(".json").read_text())
    return [
        name, f"{bits(path, whole=name in MIXTURES):.2f}", f"{figures.ratio:.3f} ± {figures.ratio_stderr:.3f}",
        f"{figures.kl_mean:.4f} ± {figures.kl_stderr:.4f}", f"{figures.kl_p999:.2f}", f"{figures.top1:.3f}",
        f"{took['seconds']:.0f}", f"{took['peak_mib']}",
    ]  # fmt: skip


GEMMA_4 = KnownModel(
    "wide", "", "", 0, "", "gemma4", {
        "block_count": 6, "embedding_length": 256, "feed_forward_length": [256] * 3 + [512] * 3, "context_length": 512,
        "vocab_size": 272, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 128,
        "attention.value_length": 128, "attention.key_length_swa": 64, "attention.value_length_swa": 64,
        "attention.sliding_window": 20, "attention.shared_kv_layers": 3,
        "attention.sliding_window_pattern": [True, True, False] * 2, "embedding_length_per_layer_input": 64,
        "rope.dimension_count": 128, "rope.dimension_count_swa": 64, "final_logit_softcapping": 5.0,
    }, factors=("rope_freqs",),
)  # fmt: skip


def write_gemma4(path: Path) -> tuple[GGUFFile, ModelSpec]:
    """At random, in F16: layers of several sizes, of which some read the rows of others."""
    file = outline_model(GEMMA_4, "F16", path, loadable=True)
    with path.open("r+b") as out:
        for seed, info in enumerate(file.tensors.values()):
            random, columns = np.random.default_rng(seed), info.shape[0]
            if info.name == "rope_freqs.weight":
                values = np.where(np.arange(columns) < columns // 4, 1, 1e30)
            elif len(info.shape) == 1:
                values = 1 + 0.2 * random.standard_normal(columns)
            else:
                values = 1.2 / np.sqrt(columns) * random.standard_normal((info.rows, columns))
            out.seek(info.offset)
            out.write(values.astype("<f4" if info.type == "F32" else "<f2").tobytes())
    file = read_gguf(path)
    return file, read_spec(file)


def gemma_4() -> None:
    """KL of 1,024 predictions in NumPy; `mixed` is at most as large as the rows above it."""
    random, rows = np.random.default_rng(1), list[list[str]]()
    tokens, texts = random.integers(3, 272, 4096).astype(np.int32), random.integers(3, 272, (2, 512)).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "q.gguf"
        file, spec = write_gemma4(Path(folder) / "model.gguf")

        def logits_of(file: GGUFFile) -> FloatArray:
            config = EngineConfig(512, 512, "f32", 1, logits_rows=512)
            engine = ReferenceEngine(file, spec, config, read_weights(file, find_tensors(file, spec)))
            found = []
            for text in texts:
                engine.kv.truncate(0)
                found.append(engine.forward_all(text))
            return np.concatenate(found)

        exact, sizes = logits_of(file), list[int]()
        for name, layer_table in [*((each, "Q4_0") for each in get_args(Method)), ("best", "Q8_0"), ("mixed", "")]:
            started = time.perf_counter()
            settings = Settings("Q4_0", "best" if name == "mixed" else name, table=layer_table)
            if name == "mixed":
                settings, _ = mix_types(file, spec, settings, tokens, nbytes=min(sizes), outside=AROUND)
            report = quantize_gguf(file, spec, path, settings, tokens)
            sizes.append(path.stat().st_size)
            found, took = logits_of(read_gguf(path)), time.perf_counter() - started
            loss, best = divergences(exact, found), exact.argmax(axis=1) == found.argmax(axis=1)
            figures = [f"{report.bits_per_weight:.2f}", f"{loss.mean():.4f}", f"{best.mean():.3f}", f"{took:.1f}"]
            rows.append([name, layer_table or report.types["per_layer_token_embd.weight"], *figures])
    print(table(["method", "per-layer table", "bits", "KL mean", "top-1", "seconds"], rows, left=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=",".join([*METHODS, *THEIRS, *MIXTURES]), help="some of them, with commas")
    parser.add_argument("--tokens", type=int, default=15360, help="measured on, in equal shares of the domains")
    parser.add_argument("--domains", default=",".join(HELD_OUT), help="some of them, with commas")
    parser.add_argument("--calibration", type=int, default=16384, help="tokens")
    parser.add_argument("--texts", choices=("own", "book", "both"), default="own", help="to calibrate on")
    parser.add_argument("--original", action="store_true", help="the model itself instead of its twin")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="make files again")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache", type=Path, default=files_folder())
    parser.add_argument("--gemma4", action="store_true", help="a small Gemma 4 of random weights instead")
    options = parser.parse_args()
    if options.gemma4:
        gemma_4()
        return
    original = edge.open_model(options.model)
    source = options.cache / f"{original.spec.name or 'model'}.twin.gguf".replace(" ", "-").replace("/", "-")
    if not source.exists() and not options.original:
        write_twin(original, source)
    stem, paths = source.with_suffix(".original" if options.original else ""), {}
    model = original if options.original else open_model(source)
    source = model.file.path
    tokens, fresh = calibration(model, options.calibration, options.texts), multiprocessing.get_context("spawn")
    for name in options.methods.split(","):
        paths[name] = stem.with_name(f"{stem.name}.{name}-{options.texts}-{options.calibration}.gguf")
        if options.again or not paths[name].exists():
            print(f"making {name} ...", flush=True)
            child = fresh.Process(target=make, args=(name, source, paths[name], tokens))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{name} failed")
    heads = ["method", "bits", "perplexity × float", "KL mean", "99.9 %", "top-1", "seconds", "peak MiB"]
    domains = options.domains.split(",")
    for package in domains:
        sequences = held_out(model, package, options.tokens // len(domains))
        found = measure(source, paths, sequences, options.threads)
        print(f"\n## {package}: {sequences.size:,} tokens, {tokens.size:,} to calibrate on ({options.texts})\n")
        print(table(heads, [row(name, paths[name], each) for name, each in found.items()], left=1))
    count, ends = measure_ends(model, source, paths, options.threads)
    print(f"\n## Ends of {count} answers of the exact model\n")
    rows = [[name, f"{each.there}", f"{each.earlier}", f"{each.chance:.3f}"] for name, each in ends.items()]
    print(table(["method", "would end there", "earlier", "chance there × float"], rows, left=1))


if __name__ == "__main__":
    main()
