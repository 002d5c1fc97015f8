"""A twin of a Llama or Gemma model: the same function with other weights, for a fair test of quantizers.

    python benchmarks/twin.py twin.gguf [--model smollm2-135m]

The demo model's weights lie on the grid of Q4_1 already, so rounding them again would show nothing. Channels of the
hidden states, of each head's values and of the feed-forward are permuted, which breaks every block, and gains of
norms are folded into the matrices behind them. Floats become F16, embedding and head too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import edge
from edge.backends.reference import read_weights
from edge.converters.quantizers.rtn import quantize
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.model.model import Model
from edge.model.tensors import Source, find_tensors
from edge.types import AnyArray, FloatArray

_BEHIND = {"attn_q": "attn_norm", "attn_k": "attn_norm", "attn_v": "attn_norm", "ffn_gate": "ffn_norm",
           "ffn_up": "ffn_norm"}  # fmt: skip
Edit = Callable[[FloatArray], FloatArray]


def write_twin(model: Model, target: Path, seed: int = 0) -> None:
    """Write the twin of a Llama or Gemma model without biases. Raises InputError if it cannot be written."""
    file, sources = model.file, find_tensors(model.file, model.spec)
    planned = [
        Planned(info.name, info.shape, "F16" if len(info.shape) > 1 else "F32") for info in file.tensors.values()
    ]
    names = {source.tensor: name for name, source in sources.items()}
    write_gguf(target, fields_of(file), planned, _tensors(model, planned, names, sources, seed))


def _tensors(
    model: Model, planned: list[Planned], names: dict[str, str], sources: dict[str, Source], seed: int
) -> Iterator[AnyArray]:
    twist = _Twist(model, sources, seed)
    for each in planned:
        yield quantize(np.atleast_2d(twist.tensor(names[each.name])), each.type)


class _Twist:
    def __init__(self, model: Model, sources: dict[str, Source], seed: int) -> None:
        self._file, self._sources, self._spec = model.file, sources, model.spec
        spec, random = model.spec, np.random.default_rng(seed)
        self._hidden = random.permutation(spec.hidden)
        self._ffn = [random.permutation(spec.ffn) for _ in range(spec.layers)]
        self._head = [random.permutation(spec.head_dim) for _ in range(spec.layers)]

    def tensor(self, name: str) -> FloatArray:
        weight, stem = self._read(name), name.rpartition(".")[2]
        if stem in ("attn_norm", "ffn_norm"):
            return np.ones_like(weight)
        if stem in ("attn_q_norm", "attn_k_norm"):
            return weight
        if stem == "token_embd":
            return weight[:, self._hidden]
        if stem in ("output", "output_norm", "post_attention_norm", "post_ffw_norm"):
            return weight[..., self._hidden]
        layer = int(name.split(".")[1])
        if stem in _BEHIND:
            weight = (weight * self._read(f"blk.{layer}.{_BEHIND[stem]}"))[:, self._hidden]
        ffn, values = self._ffn[layer], self._within_heads(layer)
        rows = {"attn_v": values[: len(weight)], "ffn_gate": ffn, "ffn_up": ffn}
        columns = {"attn_output": values, "ffn_down": ffn}
        weight = weight[rows[stem]] if stem in rows else weight
        return weight[self._hidden][:, columns[stem]] if stem in columns else weight

    def _within_heads(self, layer: int) -> AnyArray:
        size = self._spec.head_dim
        return np.concatenate([head * size + self._head[layer] for head in range(self._spec.heads)])

    def _read(self, name: str) -> FloatArray:
        return read_weights(self._file, {name: self._sources[name]})[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    write_twin(edge.open_model(options.model), options.target)


if __name__ == "__main__":
    main()
