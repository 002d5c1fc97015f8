"""What edge accepts must not crash llama.cpp, which asserts, divides and indexes by what a header says.

Mutants of a golden model, made from fixed seeds, are opened; those that edge accepts are loaded and run in a child
process, many in one child. Where a child dies of a signal, the mutant that killed it is named; run it alone with
`python tests/program.py fuzz_engine INDEX 1`, and thousands of others with
`python tests/program.py fuzz_engine 1000 5000`.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from conftest import exhaustive, require
from fallbacks import FALLBACKS
from test_gguf_file import ARRAY, BOOL, F32, F64, GGUF, GOLDEN, I32, STRING, U8, U32, U64, Value

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.kv_cache import CapacityError
from edge.backends.llamacpp import ENGINE as LLAMACPP
from edge.backends.llamacpp.trial_child import try_file
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import open_weights
from edge.errors import EdgeError, UnsupportedError
from edge.formats.blocks import BLOCK_TYPES
from edge.model.model import open_model

MUTANTS = 60  # in one test
LONG = 60  # as many tests in make test-all

BLOCKS = [0, *(exhaustive(block) for block in range(1, LONG))]


def quantized(kind: gguf.GGMLQuantizationType) -> GGUF:
    """The golden model with quantized matrices."""
    file = GGUF.read()
    for name, (shape, _, data) in list(file.tensors.items()):
        if len(shape) == 2:
            weights = np.frombuffer(data, np.float32).reshape(shape[::-1])
            file.tensors[name] = (shape, int(kind), gguf.quants.quantize(weights, kind).tobytes())
    return file


BASES = [
    *(GGUF.read(GOLDEN / f"{name}.gguf") for name in ("llama-gqa-tied", "llama-rope-scaled", "spm")),
    quantized(gguf.GGMLQuantizationType.Q4_0),
]

_OWN = "gemma2 gemma3 gpt2 granite llama-yarn mistral3 phi3-longrope qwen3 smollm3 stablelm"


@cache
def families() -> list[GGUF]:
    return [GGUF.read(GOLDEN / f"{name}.gguf") for name in _OWN.split()]


def fallbacks() -> list[GGUF]:
    return [GGUF.read(GOLDEN / f"{name}.gguf") for name in FALLBACKS]


COUNTS = (0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 64, 96, 128, 256, 272, 512, 1024, (1 << 31) - 1, (1 << 32) - 1)
FLOATS = (0.0, -1.0, 1.0, 1e-30, 1e30, 1e5, float("nan"), float("inf"))
TEXTS = ("", "x", "none", "linear", "yarn", "longrope", "default", "llama", "gpt2", "bert", "t5", "no_vocab", "phi-3")
KEYS = (
    "attention.causal", "attention.clamp_kqv", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.key_length_swa", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.max_alibi_bias", "attention.scale", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.value_length", "block_count", "classifier.output_labels",
    "context_length", "embedding_length", "embedding_length_out", "expert_count", "expert_feed_forward_length",
    "expert_gating_func", "expert_group_count", "expert_used_count", "feed_forward_length", "full_attention_interval",
    "leading_dense_block_count", "logit_scale", "nextn_predict_layers", "pooling_type", "rope.dimension_count",
    "rope.dimension_sections", "rope.freq_base", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.type", "shortconv.l_cache", "ssm.conv_kernel",
    "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "vocab_size",
)  # fmt: skip
ARCHITECTURES = ("bert", "dream", "gemma", "gemma2", "gemma3", "granite", "mamba", "minicpm", "olmo2", "phi3", "qwen2",
                 "qwen3", "smallthinker", "smollm3", "stablelm", "t5", "exaone", "refact", "xverse")  # fmt: skip
TENSORS = (
    "blk.0.attn_k.bias", "blk.0.attn_output.bias", "blk.0.attn_q.bias", "blk.0.attn_q.scale", "blk.0.attn_qkv.weight",
    "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up.bias", "blk.2.attn_q.weight", "output.scale",
    "output.weight", "output_norm.bias", "rope_factors_long.weight", "rope_freqs.weight", "token_embd_norm.weight",
)  # fmt: skip
EMPTY_OR_ODD = (
    "", "\0", "a\0b", "x" * 2000, b"\xff\xfe", b"\xe2\x96", " ", "<s>", "\u2581", "\n", "<0x41>", "<0x", "a b",
)  # fmt: skip

Random = random.Random


def any_value(rnd: Random) -> Value:
    numbers = [rnd.choice(COUNTS) for _ in range(rnd.choice((0, 1, 2, 3, 600)))]
    values: tuple[Value, ...] = (
        (U32, rnd.choice(COUNTS)), (U32, rnd.choice(COUNTS)), (F32, rnd.choice(FLOATS)), (STRING, rnd.choice(TEXTS)),
        (BOOL, rnd.random() < 0.5), (I32, -1), (U64, 1 << 40), (U8, 3), (F64, 1.0), (ARRAY, (U32, numbers)),
        (ARRAY, (F32, [1.0] * 4)), (ARRAY, (STRING, ["a", "b"])),
    )  # fmt: skip
    return rnd.choice(values)


def set_hyperparameter(rnd: Random, file: GGUF) -> None:
    _, name = file.metadata.get("general.architecture", (STRING, "llama"))
    file.metadata[f"{name}.{rnd.choice(KEYS)}"] = any_value(rnd)


def change_value(rnd: Random, file: GGUF) -> None:
    """Another value of the type that the key has."""
    choices = {U32: COUNTS, F32: FLOATS, STRING: TEXTS, BOOL: (False, True)}
    key = rnd.choice([key for key, (kind, _) in file.metadata.items() if kind in choices])
    kind, _ = file.metadata[key]
    file.metadata[key] = (kind, rnd.choice(choices[kind]))


def drop_key(rnd: Random, file: GGUF) -> None:
    del file.metadata[rnd.choice(list(file.metadata))]


def rename_architecture(rnd: Random, file: GGUF) -> None:
    name = rnd.choice(ARCHITECTURES)
    file.metadata = {str(key).replace("llama.", f"{name}.", 1): value for key, value in file.metadata.items()}
    file.metadata["general.architecture"] = (STRING, name)
    file.metadata[f"{name}.attention.layer_norm_epsilon"] = (F32, 1e-5)


def change_list(rnd: Random, file: GGUF) -> None:
    key = rnd.choice([key for key, (kind, _) in file.metadata.items() if kind == ARRAY])
    kind, items = file.metadata[key][1]
    items = list(items)
    at = rnd.randrange(max(1, len(items)))
    match rnd.randrange(5) if items else 5:
        case 0:
            del items[at:]
        case 1:
            items += items[: rnd.randrange(1, 5)]
        case 2:
            items[at] = items[rnd.randrange(len(items))]
        case 3:
            odd = {STRING: EMPTY_OR_ODD, F32: FLOATS, I32: (-1, *range(8))}.get(kind, range(8))
            for _ in range(rnd.randrange(1, 30)):
                items[rnd.randrange(len(items))] = rnd.choice(odd)
        case _:
            kind, items = (U32, [1] * len(items)) if kind == STRING else (STRING, ["a"] * len(items))
    file.metadata[key] = (ARRAY, (kind, items))


def some_data(rnd: Random, shape: tuple[int, ...], kind: int) -> bytes:
    _, block, size, _ = BLOCK_TYPES[kind]
    count = int(np.prod(shape)) // block * size
    return (rnd.randbytes(64) * (count // 64 + 1))[:count] if rnd.random() < 0.5 else bytes(count)


def change_tensor(rnd: Random, file: GGUF) -> None:
    """Another type, or another shape."""
    name = rnd.choice(list(file.tensors))
    shape, kind, _ = file.tensors[name]
    if rnd.random() < 0.5:
        kind = rnd.choice([kind for kind, each in BLOCK_TYPES.items() if shape[0] % each.values == 0])
    else:
        kind, at = 0, rnd.randrange(len(shape))
        extent = rnd.choice((1, 2, 8, 16, 17, 32, 48, 64, 65, 96, 128, 272, shape[at] + 32))
        other = (*shape[:at], extent, *shape[at + 1 :])
        shape = rnd.choice((other, shape[::-1], shape[:1], (*shape, 1), (*shape, 2), (1, *shape)))
    file.tensors[name] = (shape, kind, some_data(rnd, shape, kind))


def add_tensor(rnd: Random, file: GGUF) -> None:
    kind = rnd.choice((0, 0, 1, 8, 26, 28))
    shape = rnd.choice([(1,), (4,), (8,), (16,), (32,), (64,), (96,), (64, 272), (64, 128), (64, 96)])
    if shape[0] % BLOCK_TYPES[kind].values == 0:
        file.tensors[rnd.choice(TENSORS)] = (shape, kind, some_data(rnd, shape, kind))


def drop_tensor(rnd: Random, file: GGUF) -> None:
    if len(file.tensors) > 1:
        del file.tensors[rnd.choice(list(file.tensors))]


def swap_tensors(rnd: Random, file: GGUF) -> None:
    one, other = rnd.choice(list(file.tensors)), rnd.choice(list(file.tensors))
    file.tensors = {{one: other, other: one}.get(name, name): tensor for name, tensor in file.tensors.items()}


EDITS: tuple[Callable[[Random, GGUF], None], ...] = (
    set_hyperparameter, set_hyperparameter, set_hyperparameter, change_value, drop_key, rename_architecture,
    change_list, change_list, change_tensor, add_tensor, drop_tensor, swap_tensors,
)  # fmt: skip


def damage_bytes(rnd: Random, data: bytes) -> bytes:
    """A few wrong bits or numbers in the first part of the header."""
    whole = bytearray(data)
    for _ in range(rnd.randrange(1, 4)):
        at = rnd.randrange(24, 6000) if rnd.random() < 0.5 else rnd.randrange(24, 800)
        if rnd.random() < 0.7:
            whole[at] ^= 1 << rnd.randrange(8)
        else:
            whole[at : at + 4] = struct.pack("<I", rnd.choice(COUNTS))
    return bytes(whole)


def mutant(index: int, bases: Sequence[GGUF] = BASES) -> bytes:
    rnd = Random(index)
    base = rnd.choice(bases)
    file = GGUF(dict(base.metadata), dict(base.tensors))
    if index % 4 == 0:
        return damage_bytes(rnd, file.to_bytes())
    for _ in range(rnd.choice((1, 1, 1, 2, 3))):
        rnd.choice(EDITS)(rnd, file)
    return file.to_bytes()


def run_mutant(path: Path, kv_dtype: str = "f16") -> str:
    """Open, try, load, and run a prompt, a token, an eviction and a token; which of them was refused, or `ran`.

    What edge tries in a process of its own, this one tries itself: it is that process.
    """
    step = "opened"
    try:
        model = open_model(path)
        if not model.spec.proven:
            print("try", flush=True)
            step = "tried"
            try_file(str(path))
            print("tried", flush=True)
        step = "loaded"
        if model.spec.proven:  # else the trial was that of `check_supported`
            LLAMACPP.check_supported(model.file, model.spec)
        config = EngineConfig(capacity=256, chunk=8, kv_dtype=kv_dtype, threads=1)
        engine = LLAMACPP.load(model.file, model.spec, config)
        step = "run"
        try:
            engine.forward(np.arange(4, dtype=np.int32) % model.spec.vocab)
            engine.forward(np.zeros(1, np.int32))
            if model.spec.recurrent:
                engine.kv.truncate(0)
            else:
                engine.kv.keep(np.array([0, 1, 4], np.int32), close_gaps=True)
            engine.forward(np.zeros(1, np.int32))
        finally:
            engine.close()
    except EdgeError:
        return f"not {step}"
    return "ran"


def main(first: int, count: int, fallback: bool = False) -> None:
    """The child: one line when a mutant starts, one when it ends."""
    bases = fallbacks() if fallback else BASES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.gguf"
        for index in range(first, first + count):
            path.write_bytes(mutant(index, bases))
            print("start", index, flush=True)
            print("end", run_mutant(path), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("which", "refused"), [((), "not loaded"), (("fallback",), "not tried")])
def test_accepted_mutants_do_not_crash_llama_cpp(block: int, which: tuple[str, ...], refused: str) -> None:
    """Of the architectures whose headers edge does not check in full (fallback), also those accepted in the trial."""
    require("llamacpp")
    outcomes = run_mutants(block * MUTANTS, MUTANTS, *which)
    assert min(outcomes["not opened"], outcomes[refused], outcomes["ran"]) > MUTANTS // 20, outcomes


def run_mutants(first: int, count: int, *which: str) -> Counter[str]:
    """Count the mutants by outcome; none may have ended its process, except in a trial."""
    outcomes: Counter[str] = Counter()
    deaths: list[tuple[int, int]] = []
    end = first + count
    while first < end:
        child = subprocess.run(
            [sys.executable, __file__, str(first), str(end - first), *which],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        lines = [line.partition(" ") for line in child.stdout.splitlines()]
        outcomes.update(rest for word, _, rest in lines if word == "end")
        if child.returncode == 0:
            break
        assert child.returncode < 0, child.stderr  # a Python error is none of llama.cpp's
        first = int(next(rest.split()[-1] for word, _, rest in reversed(lines) if word == "start"))
        if lines[-1][0] == "try":
            outcomes["not tried"] += 1
        else:
            deaths.append((first, -child.returncode))
        first += 1
    assert not deaths, f"mutants and the signals that they died of: {deaths}"
    assert sum(outcomes.values()) == count
    return outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("block", BLOCKS)
def test_mutants_accepted_by_own_engines_run_and_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    outcomes: Counter[str] = Counter()
    for index in range(block * MUTANTS, (block + 1) * MUTANTS):
        path = tmp_path / "mutant.gguf"
        path.write_bytes(mutant(index, families()))
        try:
            outcomes[run_on_our_engines(path)] += 1
        except Exception as error:
            raise AssertionError(f"mutant {index}") from error
    assert min(outcomes[each] for each in ("not opened", "not loaded", "ran")) > MUTANTS // 100, outcomes


def run_on_our_engines(path: Path) -> str:
    try:
        model = open_model(path)
    except EdgeError:
        return "not opened"
    try:
        engine = find_backend("reference", model.file, model.spec).load(
            model.file, model.spec, EngineConfig(capacity=32, chunk=8, kv_dtype="f32", threads=1)
        )
    except EdgeError:
        return "not loaded"
    try:
        engine.forward(np.arange(12, dtype=np.int32) % model.spec.vocab)
        engine.kv.keep(np.array([0, 1, 11], np.int32), close_gaps=True)
        engine.forward(np.zeros(1, np.int32))
    except CapacityError:  # of 12 tokens, some are beyond the positions that were learned
        return "short"
    try:
        open_weights(model.file, make_layout(model.file, model.spec))
    except UnsupportedError:
        return "not packed"
    return "ran"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), fallback=len(sys.argv) > 3)
