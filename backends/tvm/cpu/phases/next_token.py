"""The input of a layer for multi-token prediction (`edge.model.cores.NextToken`): embedding and given state are
normalised side by side, and projected to the hidden states. The engine has put the states into `given`."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import NORMS
from edge.backends.tvm.cpu.kernels.vectors import Value, let
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import project


def join(b: PassBuilder, layer: Value) -> None:
    shape, width = b.shape, b.block.core.width
    with b.phase("join", layer), b.shared_out(b.count) as token:
        for half, (name, source) in enumerate((("nextn.enorm", "x"), ("nextn.hnorm", "given"))):
            NORMS[shape.norm](
                b.floats, let(b.at(source) + token * shape.padded_hidden),
                b.weights.floats, let(b.layer_at(layer, name)), None,
                shape.hidden, shape.padded_hidden, shape.norm_eps,
                b.floats, let(b.at("joined") + token * width + half * shape.hidden),
            )  # fmt: skip


def next_token(b: PassBuilder, layer: Value) -> None:
    project(b, layer, "joined", b.block.core.width, "next_token")


UNITS: dict[str, Unit] = {"join": join, "next_token": next_token}
