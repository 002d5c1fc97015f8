"""A model's GPU programs as data, for hosts in pages and apps, which have neither edge nor TVM.

gpu.json    kernels with their sources, the buffers, and the dispatches of each pass: see `_content`
model.gpu   the weights as these kernels read them
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.tvm.gpu import KV_DTYPES
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import PICKS, RING, RING_MOVE, Design, RowForm, State
from edge.backends.tvm.gpu.export import any_gpu, places_of, write_weights
from edge.backends.tvm.gpu.program import Kernel, Program, Slice
from edge.backends.tvm.kv.regions import allocated_rows
from edge.errors import UnsupportedError
from edge.model.layers import Attention
from edge.model.model import Model
from edge.model.tensors import find_network
from edge.types import Progress

PROGRAMS, WEIGHTS = "gpu.json", "model.gpu"
_PASSES = ("step", "chunk", "last")


@dataclass(frozen=True)
class GPUPrograms:
    """Everything for one language, before it is written."""

    model: Model
    config: EngineConfig
    design: Design

    @classmethod
    def of(cls, model: Model, config: EngineConfig, language: str) -> GPUPrograms:
        """For a bundle with this plan. Raises UnsupportedError for what their hosts do not run yet."""
        network = find_network(model.spec)
        lacking = {
            "KV policies that look at attention (--kv-policy streaming)": config.observes,
            f"KV rows of {config.kv_dtype} (--kv-dtype {KV_DTYPES[0]})": config.kv_dtype not in KV_DTYPES,
            "LoRA adapters (--lora-rank 0)": config.lora_rank > 0,
            "recurrent layers": sum(network.fixed_values) > 0,
            "embeddings for each layer": network.layer_inputs > 0,
            "layers that share KV rows": any(each and each.rows_of is not None for each in network.attention),
        }
        if found := next((what for what, lacks in lacking.items() if lacks), None):
            raise UnsupportedError(f"an exported model has no {found} on a GPU yet: leave --gpu out")
        config = replace(config, logits_rows=1, tuning={})
        return cls(model, config, Design.of(model.file, model.spec, config, any_gpu(language)))

    @property
    def memory(self) -> int:
        """Bytes of all buffers, but for staging."""
        rows: int = sum(arena["rows"] * (8 * arena["words"] + 8 * arena["scaled"]) for arena in self._arenas())
        return sum(self.design.buffers(positions=0).values()) + rows

    def write(self, programs: Path, weights: Path, progress: Progress | None = None) -> None:
        """Raises EngineError if TVM's compiler fails, and MissingExtraError without it."""
        program = program_of(self.design, progress)
        programs.write_text(json.dumps(self._content(program), separators=(",", ":")), encoding="utf-8")
        places = places_of(self.design.weights.buffers)
        with open(weights, "wb") as out:
            write_weights(out, 0, self.model.file, self.model.spec, self.design, places)

    def _content(self, program: Program) -> dict[str, Any]:
        """kernels: name, source, and whether each of its buffers is written. passes: for each dispatch the numbers of
        its kernel and of its slices, its scalars, workgroups in x and y, and tokens of one in y, or 0."""
        used = {each.kernel for name in _PASSES for each in program.passes[name]}
        used |= {arena["mover"] for arena in self._arenas()}
        kernels = {name: number for number, name in enumerate(sorted(used))}
        slices = dict[Slice, int]()
        passes = {
            name: [
                [
                    kernels[each.kernel], [slices.setdefault(part, len(slices)) for part in each.slices],
                    each.scalars, *each.groups, each.per,
                ]
                for each in program.dispatches(name)
            ]
            for name in _PASSES
        }  # fmt: skip
        design, buffers = self.design, self.design.buffers(positions=0)
        del buffers["found"]
        buffers["tokens"] -= 4 * PICKS
        places = places_of(design.weights.buffers)
        return {
            "kernels": [_kernel(program.kernels[name]) for name in kernels],
            "slices": [[part.buffer, part.offset, part.size] for part in slices],
            "passes": passes,
            "buffers": {name: size for name, size in buffers.items() if name not in places},
            "weights": {name: [*place] for name, place in places.items()},
            "arenas": list(self._arenas()),
            "tables": asdict(design.tables),
            "kinds": max(design.kinds, default=0) + 1,
            "windowed": design.shape.windowed,
            "state": {name.lower(): getattr(State, name) for name in ("COUNT", "POSITION", "WANTED")},
            "vocab": design.shape.vocab,
            "head": design.shape.padded_head,
            "heads": design.shape.layers * design.shape.kv_heads,
            "chunk": design.chunk,
        }  # fmt: skip

    def _arenas(self) -> Iterable[dict[str, Any]]:
        """Of KV rows. heads: those that have rows there, among those of all layers. interleaved: values of a key whose
        halves are apart on the GPU, and neighbours in the module."""
        design, network = self.design, find_network(self.model.spec)
        shape, kinds = design.shape, LayerKinds.of(network.windows, network.rowless)
        parts: list[tuple[str, str, Attention, tuple[int, ...]]]
        if shape.apart:
            parts = [("", "edge_move", shape.attention, kinds.whole), (RING, RING_MOVE, shape.ringed, kinds.ringed)]
        else:
            parts = [("", "edge_move", shape.attention, tuple(sorted((*kinds.whole, *kinds.ringed))))]
        for prefix, mover, core, layers in parts:
            form = RowForm.of(core, design.kv_dtype)
            rings = kinds.ring_rows(self.config.capacity, self.config.chunk)
            each = [rings if layer in kinds.ringed else self.config.capacity for layer in layers]
            rows = core.kv_heads * sum(allocated_rows(count, uneven=False) for count in each)
            yield {
                "prefix": prefix, "mover": mover, "rows": rows, "head": form.head, "words": form.words,
                "scaled": form.scaled,
                "interleaved": 2 * min(design.pairs, core.head_dim // 2) if design.halves else 0,
                "heads": [layer * shape.kv_heads + head for layer in layers for head in range(core.kv_heads)],
            }  # fmt: skip


def _kernel(kernel: Kernel) -> list[Any]:
    lines = (line for line in kernel.source.splitlines() if line.strip() and not line.lstrip().startswith("//"))
    return [kernel.name, "\n".join(lines), [name in kernel.written for name in kernel.buffers]]
