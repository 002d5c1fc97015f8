"""A chunk, a step that splits rows, an eviction and a step that does not, on the GPU engine, against the reference
engine: MODEL KV-DTYPE DRAFTS [ADAPTER]. With drafts also a pass that verifies them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from conftest import CHUNK, GOLDEN, load_engine

from edge.backends.tvm.gpu import compiled
from edge.backends.tvm.gpu.hosts import choose_adapter
from edge.model.adapters.lora import open_lora
from edge.model.adapters.lora_file import parse_lora
from edge.model.model import open_model

compiled.COMPILER_BYTES += 64 << 20  # the interpreter lies in the child's memory, too
name, kv_dtype, most, *adapter = sys.argv[1:]
drafts = int(most)
model = open_model(GOLDEN / f"{name}.gguf")
tokens = np.arange(3, 3 + CHUNK + 2, dtype=np.int32)
lora = open_lora(parse_lora(adapter[0]), model.file, model.spec) if adapter else None
reference = load_engine(model, "reference", "f32", lora=lora)
tuning = {"row_splits": 2, "split_from": CHUNK}
options = {"capacity": 32, "observes": not drafts, "lora": lora, "tuning": tuning, "drafts": drafts}
engine = load_engine(model, "gpu", kv_dtype, **options)
expected = reference.forward_all(tokens)
for start, stop in ((0, CHUNK), (CHUNK, CHUNK + 1)):
    assert np.abs(engine.forward(tokens[start:stop]) - expected[stop - 1]).max() < 0.8
if drafts:
    engine.kv.truncate(CHUNK - drafts)
    for found, row in zip(engine.verify(tokens[CHUNK - drafts : CHUNK + 1]), expected[CHUNK - drafts :], strict=False):
        assert np.abs(found - row).max() < 0.8
engine.kv.keep(np.r_[0:4, 7:9], close_gaps=True)
engine.forward(tokens[-1:])
engine.close()
print("ran on", choose_adapter().name)
