"""A chunk, an eviction and a step of a golden model on the GPU engine, against its logits: MODEL KV-DTYPE."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from conftest import CHUNK, load_engine, open_golden

from edge.backends.tvm.gpu.hosts import choose_adapter

_, name, kv_dtype = sys.argv
golden = open_golden(name)
engine = load_engine(golden.model, "gpu", kv_dtype, capacity=32, observes=True)
for start, stop in ((0, CHUNK), (CHUNK, CHUNK + 1)):
    got = engine.forward(golden.tokens[start:stop])
    assert np.abs(got - golden.logits[stop - 1]).max() < 0.8
engine.kv.keep(np.r_[0:4, 7:9], close_gaps=True)
engine.forward(golden.tokens[:1])
engine.close()
print("ran on", choose_adapter().name)
