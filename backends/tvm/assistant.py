"""The layers of Gemma 4's assistants by compiled code: steps over the rows of a model's engine, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge.backends.rope import CacheRope
from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.kv.memory import RING
from edge.backends.tvm.memory import aligned_zeros
from edge.backends.tvm.passes import Passes
from edge.backends.tvm.sequence import NativeKV
from edge.formats.gguf import GGUFFile
from edge.types import AnyArray, FloatArray

_ROWS = ("keys", "values", "key_scales", "value_scales", "positions")


class AssistantLayers:
    """See AssistingLayers. A step adds no row: it sees those that are there."""

    def __init__(
        self, file: GGUFFile, make: Callable[[Mapping[str, AnyArray]], Passes], main: Passes, kv: NativeKV
    ) -> None:
        """file: as of `edge.model.drafters.assistant.layers_of`. make: makes the passes over these arrays. main, kv:
        the model's."""
        heads = main.layout.shape.layers * main.layout.shape.kv_heads
        self._starts, self._lengths = (aligned_zeros(heads, "int32") for _ in range(2))
        shared = {name: array for name, array in main.arrays.items() if name.removeprefix(RING) in _ROWS}
        self._passes = passes = make(shared | {"starts": self._starts, "lengths": self._lengths})
        normals = main.normals[: len(passes.normals)]
        passes.normals[: len(normals)] = normals
        self._file, self._kv, layout = file, kv, passes.layout
        self._rope = CacheRope(file, layout.network, 1, halves=False, head=layout.shape.padded_head)

    def run(self, x: FloatArray) -> FloatArray | None:
        """See AssistingLayers."""
        kv, passes = self._kv, self._passes
        if not kv.alike:
            return None
        for store, count in ((each, int(each.lengths[0])) for each in kv.stores):
            # A step reads the row that it adds, too: here, the last one is that.
            self._starts[store.heads], self._lengths[store.heads] = store.regions.starts, count - 1
        passes.give(np.zeros((0, x.size), np.float32), x[None])
        passes.begin(np.zeros(1, np.int32), 0)
        angle = passes.chunk_angles.row(self._rope.rotation, kv.next_rope_position, 1)
        passes.run(1, kv.next_position, kind=Job.STEP, angle=angle, wanted=0, observed=0, votes=0, sequence=0, drafts=0)
        return np.asarray(passes.normed_states(1)[0])

    def close(self) -> None:
        """Free everything but the model's rows; safe to call twice."""
        self._passes.close(self._file)
